"""The inputs of tables: files, folders, patterns, URLs and pipes, and how each is read, by its name or first bytes."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from distembed.data.prepare.blocks import RawInput
from distembed.data.prepare.input_bytes import compression_of
from distembed.data.prepare.inputs import (
    InputFiles,
    input_names,
    is_pipe,
    natural_order,
    note_order_of_letters,
    open_input,
    require_distinct,
)
from distembed.data.prepare.progress import NoteCallback, ignore
from distembed.data.prepare.staging import require_text_name
from distembed.data.remote import RemoteFile, is_url, list_remote, open_remote
from distembed.errors import UserError

TEXT, JSON_LINES, PARQUET = "text", "json_lines", "parquet"
"""Formats of files; text is CSV, TSV and the like."""

_FORMATS = {
    ".csv": TEXT,
    ".tsv": TEXT,
    ".txt": TEXT,
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": PARQUET,
    ".pq": PARQUET,
}
_RECBOLE = (".inter", ".user", ".item", ".kg", ".link")
"""Ends of RecBole's files: interactions, users and items, knowledge graphs."""
_FORMATS |= dict.fromkeys(_RECBOLE, TEXT)
_COMPRESSIONS = (".gz", ".zst")
_SEPARATORS = {".csv": ",", **dict.fromkeys((".tsv", *_RECBOLE), "\t")}
_PARQUET_MAGIC = b"PAR1"
_FIRST_BYTES = 16


@dataclass(frozen=True)
class TableInput:
    """One input of a table.

    Attributes:
        raw: Its name, place and size.
        format: How its rows are read; None for a pipe whose name does not say, of which the first bytes do.
        separator: What separates fields, as its name says; None where it does not.
        compression: How it is compressed; None where it is not, or is a pipe.
        is_pipe: Whether it can be read only once, from its beginning.
    """

    raw: RawInput
    format: str | None
    separator: str | None = None
    compression: str | None = None
    is_pipe: bool = False

    @property
    def place(self) -> str:
        """Path or URL of the input."""
        return self.raw.place

    @property
    def can_be_cut(self) -> bool:
        """Whether a range of its bytes can be read by itself: web servers promise it no more than pipes do."""
        is_web = self.place.startswith(("http://", "https://"))
        return not (self.is_pipe or is_web or self.compression is not None or self.raw.num_bytes is None)


def find_inputs(
    named: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore, kind: InputFiles | None = None
) -> list[TableInput]:
    """Returns the inputs that are named, in their order; a folder or a pattern stands for files, in natural order.

    That has ``day_2`` before ``day_10``.

    Args:
        named: Files, folders, patterns such as ``day_*.csv``, URLs and pipes; ``-`` is standard input.
        note: Function that is told what else lies in a folder, which is not read, and that files may be out of order.
        kind: Which files of a folder are read; all files of tables unless given.

    Raises:
        UserError: Nothing was named, there is nothing where a name leads, or one file is named twice.
    """
    kind = kind or _FILES
    if not named:
        raise UserError(f"no input was named: give one or more {kind.can_be_named}.")
    local: list[Path] = []
    found: list[Path | TableInput] = []
    for each in named:
        if is_url(each):
            found += map(_remote_input, sorted(list_remote(str(each)), key=lambda file: natural_order(file.url)))
        else:
            files = kind.list_files(_matching(str(each)), note)
            local += files
            found += files
    require_distinct(local)
    note_order_of_letters(local, note)
    urls = [each.place for each in found if isinstance(each, TableInput)]
    if repeated := sorted({url for url in urls if urls.count(url) > 1}):
        raise UserError(f"{repeated[0]} is named twice: its rows would be counted twice; name it once")
    names = dict(zip(local, input_names(local), strict=True))
    return [each if isinstance(each, TableInput) else _local_input(each, names[each]) for each in found]


def _matching(pattern: str) -> Sequence[str]:
    """Returns the files that a pattern matches, in natural order; what is no pattern, or is a file itself, as it is."""
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True), key=natural_order)
    if not found:
        raise UserError(f"no file matches {pattern!r}; name {_FILES.can_be_named}.")
    return found


def _local_input(path: Path, name: str) -> TableInput:
    if _by_name(path.name)[0] == PARQUET:
        require_text_name(path)
    if is_pipe(path):
        return TableInput(RawInput(name, str(path), None), *_by_name(path.name), is_pipe=True)
    try:
        with open_input(path) as file:
            first = file.read(_FIRST_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name {_FILES.can_be_named}.") from error
    return _described(name, str(path), path.stat().st_size, first)


def _remote_input(found: RemoteFile) -> TableInput:
    with open_remote(found.url) as file:
        first = file.read(_FIRST_BYTES)
    return _described(_public_name(found.url), found.url, found.num_bytes, first, found.version)


def _public_name(url: str) -> str:
    """Returns a URL without what lets its bearer read it: a signature in its query, a password before its server.

    Object stores take a question mark for a letter of a file's name, web servers do not.
    """
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _described(name: str, place: str, num_bytes: int | None, first: bytes, version: str = "") -> TableInput:
    """Returns an input whose first bytes are known."""
    compression = compression_of(first)
    format, separator = _by_name(name)
    if first.startswith(_PARQUET_MAGIC):
        format = PARQUET
    elif format == PARQUET:
        raise UserError(f"{place} is named as a Parquet file and is none; write it again, or name it by what it is.")
    is_compressed = compression is not None or format == PARQUET
    return TableInput(RawInput(name, place, num_bytes, is_compressed, version), format or TEXT, separator, compression)


def _by_name(name: str) -> tuple[str | None, str | None]:
    """Returns the format and the separator that the end of a name stands for."""
    lower = name.lower()
    for suffix in _COMPRESSIONS:
        lower = lower.removesuffix(suffix)
    end = os.path.splitext(lower)[1]
    return _FORMATS.get(end), _SEPARATORS.get(end)


def _is_table(path: Path) -> bool:
    """Returns whether a file of a folder is read: by its end, or if it has none but perhaps that of a compression.

    Files such as Spark's ``_SUCCESS`` are none.
    """
    format, _ = _by_name(path.name)
    return format is not None or (path.suffix.lower() in ("", *_COMPRESSIONS) and not path.name.startswith("_"))


_FILES = InputFiles(
    can_be_named="CSV, TSV, JSON lines or Parquet files, folders, patterns, URLs or pipes",
    is_readable=_is_table,
    none_in_folder=f"file that ends in {', '.join(_FORMATS)}, perhaps with {' or '.join(_COMPRESSIONS)}; name files "
    "that do not",
    order=natural_order,
)
