"""Laws of the wheel, built as pip builds it but without a network: its files, its packages and its entry points."""

import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"distembed": "distembed", "distembed/configs": "configs", "distembed_launch": "launch"}
"""Folder of the wheel -> its folder in the repository."""


def copied(folder: Path) -> Path:
    """Copies the files that a wheel is made of, because a build writes next to them."""
    for name in FOLDERS.values():
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("distembed_launch", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, copied(folder / "source")], check=True)
    (wheel,) = folder.glob("distembed-*.whl")
    shutil.unpack_archive(wheel, folder / "site-packages", "zip")
    return folder / "site-packages"


def test_the_wheel_has_the_modules_and_data_of_its_two_packages_and_nothing_else(installed: Path) -> None:
    expected = {
        Path(installed_folder) / file.relative_to(ROOT / folder)
        for installed_folder, folder in FOLDERS.items()
        for pattern in ("*.py", "*.yaml", "py.typed")
        for file in (ROOT / folder).rglob(pattern)
    }
    files = {file.relative_to(installed) for file in installed.rglob("*") if file.is_file()}
    assert {file for file in files if not file.parts[0].endswith(".dist-info")} == expected


def test_each_entry_point_is_in_the_wheel_or_torchxs_own(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    points = Distribution.at(metadata).entry_points
    assert {point.group for point in points} == {
        "console_scripts",
        "torchx.components",
        "torchx.schedulers",
        "torchx.named_resources",
    }
    for point in points:
        package = point.module.partition(".")[0]
        assert package in {*FOLDERS, "torchx"}, point
        assert package == "torchx" or (installed / point.module.replace(".", "/")).with_suffix(".py").is_file(), point
