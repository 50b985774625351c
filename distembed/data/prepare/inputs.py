"""What holds for the input files of every preparation: each is named once, and none lies inside the output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from distembed.errors import UserError


def require_distinct_files(files: list[Path]) -> list[Path]:
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
