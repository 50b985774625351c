"""What holds for the input files of every preparation: each is named once, and none lies inside the output."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distembed.errors import UserError


@dataclass(frozen=True)
class InputFiles:
    """The kind of files that a preparation reads.

    Attributes:
        can_be_named: What a user can name as input, in words, for errors.
        is_readable: Whether a file is of the kind, by its name; others that lie in a named folder are left out.
        none_in_folder: What a folder without such files lacks and what to do, in words, for errors.
        order: Key by which the files of a folder are sorted.
    """

    can_be_named: str
    is_readable: Callable[[Path], bool]
    none_in_folder: str
    order: Callable[[Path], Any]

    def list_files(self, inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """Returns the files to read; a folder stands for the files of the kind in it that are not hidden.

        Raises:
            UserError: Nothing was named, a path does not exist, a folder has no such file, or a file is named twice.
        """
        if not inputs:
            raise UserError(f"no input was named: give one or more {self.can_be_named}.")
        return _require_distinct([file for path in inputs for file in self._files(Path(path))])

    def _files(self, path: Path) -> list[Path]:
        """Returns a file that is named, or those of the kind in a folder that is."""
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise UserError(f"{path} does not exist; name {self.can_be_named}.")
        files = [file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
        readable = [file for file in files if self.is_readable(file)]
        if not readable:
            raise UserError(f"the folder {path} has no {self.none_in_folder}.")
        return sorted(readable, key=self.order)


def _require_distinct(files: list[Path]) -> list[Path]:
    """Returns the same files, if each is there once.

    Raises:
        UserError: A file is there twice, under whatever name.
    """
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise UserError(f"{file} is named twice: its rows would be counted twice; name it once")
        seen.add(file.resolve())
    return files


def require_outside(files: Sequence[Path], output: Path) -> None:
    """Makes sure that no input lies inside the output, which would be overwritten or taken for input.

    Raises:
        UserError: An input lies inside the output.
    """
    for file in files:
        if file.resolve().is_relative_to(output.resolve()):
            raise UserError(f"the input {file} lies inside the output {output}: name another output")


def names_in_common_folder(files: Sequence[Path]) -> list[str]:
    """Returns the files' names relative to the folder that they have in common: the same wherever it lies."""
    absolute = [file.absolute() for file in files]
    common = os.path.commonpath([file.parent for file in absolute])
    return [file.relative_to(common).as_posix() for file in absolute]
