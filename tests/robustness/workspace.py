"""A folder in which commands are given that must not change it, and that is made as it was where they did."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.robustness.commands import Commands


def everything(folder: Path) -> dict[Path, str]:
    """What a folder holds: the sum of each file, by its path; but for locks, which are empty when nobody has them."""
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "other"
        for path in folder.rglob("*")
        if path.name != ".lock" and (path.is_symlink() or not path.is_dir())
    }


@dataclass(frozen=True)
class Workspace:
    """The folder in which commands are given, a copy of it as it was, and what both hold."""

    folder: Path
    copy: Path
    contents: dict[Path, str]
    commands: Commands

    def changes(self) -> list[str]:
        """What is other than it was in the beginning; it is made as it was."""
        now = everything(self.folder)
        if now == self.contents:
            return []
        self.restore()
        return sorted(str(path) for path in now.keys() | self.contents if now.get(path) != self.contents.get(path))

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.copy, self.folder, symlinks=True)


@contextmanager
def made_workspace(
    tmp_path_factory: pytest.TempPathFactory, write: Callable[[Path, Commands], None]
) -> Iterator[Workspace]:
    """Within the block there is a folder that holds what ``write`` has put there, in part by commands."""
    folder = tmp_path_factory.mktemp("workspace")
    commands = Commands(folder, tmp_path_factory.mktemp("printed"))
    try:
        write(folder, commands)
        copy = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, copy, symlinks=True)
        yield Workspace(folder, copy, everything(folder), commands)
    finally:
        commands.close()
