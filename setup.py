"""Builds distembed, of which pyproject.toml says all else: refuses a copy without links, and uses no earlier build."""

import sys
import tempfile
from pathlib import Path

from setuptools import setup

for folder in ("configs", "launch"):
    if not Path("distembed", folder).is_dir():
        sys.exit(
            f"distembed/{folder} is no folder: this copy of the sources has lost its symbolic links. Unpack it with "
            f"a program that keeps links, clone it with core.symlinks=true, or run: "
            f"ln -sfn ../{folder} distembed/{folder}"
        )
# A build/ of an earlier version may hold modules that have been removed or moved since; all of it would be packed.
with tempfile.TemporaryDirectory() as build_base:
    setup(options={"build": {"build_base": build_base}})
