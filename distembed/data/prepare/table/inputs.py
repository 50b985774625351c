"""The inputs of tables: files, folders, patterns, URLs and pipes, and how each is read, by its name or first bytes."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.data.prepare.input_bytes import STANDARD_INPUT, compression_of, open_input
from distembed.data.prepare.options import NoteCallback, ignore
from distembed.data.prepare.row_source import RawInput
from distembed.data.prepare.staging import require_text_name
from distembed.data.remote import RemoteFile, is_url, list_remote

TEXT, JSON_LINES, PARQUET = "text", "json_lines", "parquet"
"""Formats of files; text is CSV, TSV and the like."""

_FORMATS = {".parquet": PARQUET, ".pq": PARQUET} | dict.fromkeys((".jsonl", ".ndjson", ".json"), JSON_LINES)
_RECBOLE = (".inter", ".user", ".item", ".kg", ".link")
"""Ends of RecBole's files: interactions, users and items, knowledge graphs."""
_FORMATS |= dict.fromkeys((".csv", ".tsv", ".txt", *_RECBOLE), TEXT)
_COMPRESSIONS = (".gz", ".zst")
_SEPARATORS = {".csv": ",", **dict.fromkeys((".tsv", *_RECBOLE), "\t")}
_CAN_BE_NAMED = "CSV, TSV, JSON lines or Parquet files, folders, patterns, URLs or pipes"
_PARQUET_MAGIC = b"PAR1"
_FIRST_BYTES = 16


@dataclass(frozen=True)
class TableInput:
    """One input of a table."""

    raw: RawInput  # its name, place and size
    format: str | None  # None for a pipe whose name does not say it: its first bytes do
    separator: str | None = None  # of fields, as the name says; None where it does not
    compression: str | None = None  # None where it is not compressed, or is a pipe
    is_pipe: bool = False  # whether it can be read only once, from its beginning

    @property
    def place(self) -> str:
        return self.raw.place

    @property
    def can_be_cut(self) -> bool:
        """Whether a range of its bytes can be read by itself: web servers promise it no more than pipes do."""
        is_web = self.place.startswith(("http://", "https://"))
        return not (self.is_pipe or is_web or self.compression is not None or self.raw.num_bytes is None)


def find_inputs(
    named: Sequence[str | os.PathLike[str]],
    note: NoteCallback = ignore,
    is_readable: Callable[[Path], bool] | None = None,
) -> list[TableInput]:
    """Returns the named inputs in their order; a folder or a pattern stands for files, in natural order.

    Args:
        named: Files, folders, patterns like ``day_*.csv``, URLs and pipes; ``-`` is standard input.
        note: Function that is told which files of a folder are not read, and that files may be out of order.
        is_readable: Which files of a folder are read; None for all files of tables.
    """
    if not named:
        raise UserError(f"no input was named: give one or more {_CAN_BE_NAMED}.")
    found: list[Path | RemoteFile] = []
    for each in named:
        if is_url(each):
            remote = sorted(list_remote(str(each)), key=lambda file: natural_order(file.url))
            found += remote
        else:
            found += [file for path in _matching(str(each)) for file in _files(path, is_readable or _is_table, note)]
    _require_distinct(found)
    local = [each for each in found if isinstance(each, Path)]
    _note_order_of_letters(local, note)
    names = dict(zip(local, input_names(local), strict=True))
    return [_remote_input(each) if isinstance(each, RemoteFile) else _local_input(each, names[each]) for each in found]


def _matching(pattern: str) -> list[Path]:
    """Returns the files that a pattern matches, in natural order; a path that is no pattern or exists, as it is."""
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return [Path(STANDARD_INPUT if pattern == "-" else pattern)]
    found = sorted(glob.glob(pattern, recursive=True), key=natural_order)
    if not found:
        raise UserError(f"no file matches {pattern!r}; name {_CAN_BE_NAMED}.")
    return list(map(Path, found))


def _files(path: Path, is_readable: Callable[[Path], bool], note: NoteCallback) -> list[Path]:
    """Returns a file or pipe, or the readable files of a folder that are not hidden, in natural order."""
    if not stat.S_ISDIR(_mode(path)):
        return [path]
    try:
        found = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"the folder {path} cannot be read: {error.strerror}; name one that can.") from error
    files = [entry for entry in found if entry.is_file() and is_readable(entry)]
    if not files:
        raise UserError(f"the folder {path} has no files of rows, by their names: name the files themselves.")
    if others := [entry.name for entry in found if entry not in files]:
        note(f"of the folder {path} not read: {enumerate_names(others)}; name what else is to be read")
    return sorted(files, key=natural_order)


def _mode(path: Path) -> int:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if str(path) == STANDARD_INPUT:
            raise UserError("standard input is closed: pipe rows into the command, or name a file.") from None
        raise UserError(f"{os.path.realpath(path)} does not exist; name {_CAN_BE_NAMED}.") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UserError(f"{str(path)!r} cannot be read: {error}; name {_CAN_BE_NAMED}.") from error
    if str(path) == STANDARD_INPUT and os.isatty(0):
        raise UserError("standard input is a terminal: pipe rows into the command, or name a file.")
    return mode


def natural_order(place: str | Path) -> list[list[tuple[int, int, str]]]:
    """Returns a key that sorts paths and URLs, folder by folder, with ``day_2`` before ``day_10``."""
    names = [re.split(r"(\d+)", name) for name in str(place).split("/")]
    return [[(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] for parts in names]


def _note_order_of_letters(files: Sequence[Path], note: NoteCallback) -> None:
    """Notes that files are named in a shell's order, ``day_10`` before ``day_2``: rows are to be in that of time."""
    places = [str(file) for file in files]
    moved = [pair for pair in zip(places, sorted(places, key=natural_order), strict=True) if pair[0] != pair[1]]
    if moved and places == sorted(places):
        first, second = moved[0]
        note(
            f"{first} is read before {second}, as a shell lists them, though rows are taken to be in the order of "
            "time: name their folder, or each in its place, for the order of their numbers"
        )


def _require_distinct(found: Sequence[Path | RemoteFile]) -> None:
    """Makes sure that no file is named twice, under any name."""
    seen: set[object] = set()
    for each in found:
        place = each.url if isinstance(each, RemoteFile) else str(each)
        key: object = place if isinstance(each, RemoteFile) else os.stat(place)[1:3]  # its inode and device
        if key in seen:
            raise UserError(f"{place} is named twice: its rows would be counted twice; name it once")
        seen.add(key)


def _is_pipe(file: Path) -> bool:
    return str(file) == STANDARD_INPUT or (file.exists() and not file.is_file())


def input_names(files: Sequence[Path]) -> list[str]:
    """Returns each file's name relative to their common folder; a pipe is ``stdin`` or, as second input, ``pipe-2``."""
    pipes = {file: f"pipe-{number}" for number, file in enumerate(files, start=1) if _is_pipe(file)}
    pipes |= {Path(STANDARD_INPUT): "stdin"}
    parents = [file.absolute().parent for file in files if file not in pipes]
    common = os.path.commonpath(parents) if parents else ""
    return [pipes.get(file) or file.absolute().relative_to(common).as_posix() for file in files]


def _local_input(path: Path, name: str) -> TableInput:
    if _by_name(path.name)[0] == PARQUET:
        require_text_name(path)
    if _is_pipe(path):
        return TableInput(RawInput(name, str(path), None), *_by_name(path.name), is_pipe=True)
    try:
        with open_input(str(path)) as file:
            return _described(RawInput(name, str(path), path.stat().st_size), file.read(_FIRST_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name {_CAN_BE_NAMED}.") from error


def _remote_input(found: RemoteFile) -> TableInput:
    with open_input(found.url) as file:
        first = file.read(_FIRST_BYTES)
    # without what lets the URL's bearer read it: a signature in its query, a password before its server; object
    # stores take a question mark for a letter of a file's name
    name = re.sub(r"^(https?://)([^/?#]*@)?([^?#]*).*", r"\1\3", found.url)
    return _described(RawInput(name, found.url, found.num_bytes, version=found.version), first)


def _described(raw: RawInput, first: bytes) -> TableInput:
    """Returns an input whose first bytes are known; an empty one is text, but for the name of a Parquet file."""
    compression = compression_of(first)
    format, separator = _by_name(raw.name)
    if first.startswith(_PARQUET_MAGIC):
        format = PARQUET
    elif format == PARQUET:
        raise UserError(f"{raw.place} is named as a Parquet file and is none; write it again, or rename it.")
    is_compressed = compression is not None or format == PARQUET
    format = format if first else TEXT
    return TableInput(replace(raw, is_compressed=is_compressed), format or TEXT, separator, compression)


def _by_name(name: str) -> tuple[str | None, str | None]:
    lower = name.lower()
    for suffix in _COMPRESSIONS:
        lower = lower.removesuffix(suffix)
    end = os.path.splitext(lower)[1]
    return _FORMATS.get(end), _SEPARATORS.get(end)


def _is_table(path: Path) -> bool:
    """Returns whether a file of a folder is read: by its end, or with none unless it begins with _ (Spark's own)."""
    format, _ = _by_name(path.name)
    return format is not None or (path.suffix.lower() in ("", *_COMPRESSIONS) and not path.name.startswith("_"))
