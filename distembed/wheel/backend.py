"""setuptools' build backend, which refuses a copy without links, and takes nothing from an earlier build."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # all other hooks are setuptools' own


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel; modules of an earlier version that lie in ``build/`` would be packed with it."""
    _require_links()
    with tempfile.TemporaryDirectory() as build_base:
        options = {**(config_settings or {}), "--global-option": ["build", f"--build-base={build_base}"]}
        return build_meta.build_wheel(wheel_directory, options, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Mapping[str, Any] | None = None) -> str:
    """Builds an archive of the sources."""
    _require_links()
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel that leads to this checkout."""
    _require_links()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _require_links() -> None:
    for folder in ("configs", "launch"):
        if not Path("distembed", folder).is_dir():
            raise SystemExit(
                f"distembed/{folder} is no folder: this copy of the sources has lost its symbolic links. Unpack it "
                f"with a program that keeps links, clone it with core.symlinks=true, or run: "
                f"ln -sfn ../{folder} distembed/{folder}"
            )
