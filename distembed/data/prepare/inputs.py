"""The inputs of every preparation: files, folders and pipes, each named once, none inside the output, in order.

A pipe can be read once only, and says neither how long it is nor where it lies: its name in a dataset is ``stdin``, or
``pipe-2`` for the second input.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from distembed.data.prepare.progress import NoteCallback, ignore
from distembed.errors import UserError
from distembed.units import enumerate_names

STANDARD_INPUT = Path("/dev/stdin")


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

    def list_files(self, inputs: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore) -> list[Path]:
        """Returns the files to read; a folder stands for the files of the kind in it that are not hidden.

        Args:
            inputs: Files, folders and pipes; ``-`` is standard input.
            note: Function that is told what else lies in a folder, which is not read.

        Raises:
            UserError: Nothing was named, a path does not exist, a folder has no such file, or a file is named twice.
        """
        if not inputs:
            raise UserError(f"no input was named: give one or more {self.can_be_named}.")
        return require_distinct([file for path in inputs for file in self._files(Path(path), note)])

    def _files(self, path: Path, note: NoteCallback) -> list[Path]:
        """Returns a file or pipe that is named, or the files of the kind in a folder that is."""
        path = STANDARD_INPUT if path == Path("-") else path
        if not stat.S_ISDIR(self._mode(path)):
            return [path]
        try:
            found = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        except OSError as error:
            raise UserError(f"the folder {path} cannot be read: {error.strerror}; name one that can.") from error
        files = [entry for entry in found if entry.is_file() and self.is_readable(entry)]
        if not files:
            raise UserError(f"the folder {path} has no {self.none_in_folder}.")
        if others := [entry.name for entry in found if entry not in files]:
            note(f"of the folder {path} not read: {enumerate_names(others)}; name what else is to be read")
        return sorted(files, key=self.order)

    def _mode(self, path: Path) -> int:
        """Returns what a path leads to, as ``stat`` says it.

        Raises:
            UserError: It leads to nothing that can be read.
        """
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            if path == STANDARD_INPUT:
                raise UserError("standard input is closed: pipe rows into the command, or name a file.") from None
            if os.path.islink(path):
                raise UserError(f"{path} is a link to {os.readlink(path)}, which does not exist.") from None
            raise UserError(f"{path} does not exist; name {self.can_be_named}.") from None
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise UserError(f"{str(path)!r} cannot be read: {error}; name {self.can_be_named}.") from error
        if path == STANDARD_INPUT and os.isatty(0):
            raise UserError("standard input is a terminal: pipe rows into the command, or name a file.")
        return mode


def natural_order(place: str | Path) -> list[list[tuple[int, int, str]]]:
    """Returns a key that sorts paths and URLs, folder by folder, with ``day_2`` before ``day_10``."""
    names = [re.split(r"(\d+)", name) for name in str(place).split("/")]
    return [[(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] for parts in names]


def note_order_of_letters(files: Sequence[Path], note: NoteCallback) -> None:
    """Notes that files, which are to be in the order of time, are in that of a shell: ``day_10`` before ``day_2``."""
    places = [str(file) for file in files]
    by_number = sorted(places, key=natural_order)
    if places != sorted(places) or places == by_number:
        return
    first, second = next((one, other) for one, other in zip(places, by_number, strict=True) if one != other)
    note(
        f"{first} is read before {second}, as a shell lists them, though rows are taken to be in the order of time: "
        "name their folder, or each in its place, for the order of their numbers"
    )


def require_distinct(files: list[Path]) -> list[Path]:
    """Returns the same files, if each is there once.

    Raises:
        UserError: A file is there twice, under whatever name.
    """
    seen: set[tuple[int, int]] = set()
    for file in files:
        found = os.stat(file)
        if (found.st_dev, found.st_ino) in seen:
            raise UserError(f"{file} is named twice: its rows would be counted twice; name it once")
        seen.add((found.st_dev, found.st_ino))
    return files


def is_pipe(file: Path) -> bool:
    """Returns whether a path is standard input, a pipe, or anything else that can be read once only."""
    return file == STANDARD_INPUT or (file.exists() and not file.is_file())


def open_input(file: Path) -> BinaryIO:
    """Opens a file or a pipe for reading bytes, without a buffer.

    Raises:
        OSError: It cannot be read.
    """
    if file == STANDARD_INPUT:  # from where it stands; a socket, moreover, cannot be opened by its name
        return open(0, "rb", buffering=0, closefd=False)
    return open(file, "rb", buffering=0)


def input_names(files: Sequence[Path]) -> list[str]:
    """Returns names for the files in what is prepared: the same wherever they lie.

    They are relative to the folder that the files have in common.
    """
    regular = [file.absolute() for file in files if not is_pipe(file)]
    common = os.path.commonpath([file.parent for file in regular]) if regular else ""
    pipes = {file: f"pipe-{number}" for number, file in enumerate(files, start=1) if is_pipe(file)}
    pipes |= {STANDARD_INPUT: "stdin"}
    return [pipes[file] if file in pipes else file.absolute().relative_to(common).as_posix() for file in files]
