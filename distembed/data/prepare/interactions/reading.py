"""Reads files of interactions into memory, column by column, and sets the malformed rows aside.

A row is malformed, for the first of these reasons that holds:

- ``columns``: a line has another number of fields than others;
- ``user``, ``item``: there is none;
- ``rating``, ``time``: it is missing, or no finite number;
- ``attribute``: a number beside them is there, and is not finite;
- ``items``: a line of a user and items has no item.

Users, items and other values are kept as texts, an integer as its decimal digits. Trade-off: all interactions are in
memory, so that users can be put in the order of time; 130 bytes each, and 20 more for each attribute (measured).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Rejected, SourceFile
from distembed.data.prepare.column_batches import ColumnBatch, WantedColumns, read_columns, read_lines, reported
from distembed.data.prepare.column_numbers import finite_numbers
from distembed.data.prepare.inputs import input_names
from distembed.data.prepare.interactions.interactions import Interactions, KeyColumn
from distembed.data.prepare.interactions.options import InteractionColumns
from distembed.data.prepare.progress import ProgressCallback
from distembed.data.prepare.rejected_rows import RejectedRows
from distembed.data.table.raw_columns import INTEGER, NUMBER, TEXT, TIME
from distembed.errors import UserError
from distembed.units import format_bytes

REASONS = ("columns", "user", "item", "rating", "time", "attribute", "items")

_ROW_BYTES, _ATTRIBUTE_BYTES = 130, 20
_MOST_READ_BYTES = 64 << 20
_WHOLE_NUMBER = "^-?[0-9]{1,18}$"
_MOST_KEYS = 2**31 - 1
# What would begin another field or line of rejected.tsv.
_ESCAPED = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}


@dataclass(frozen=True)
class InteractionInput:
    """The files to read.

    Attributes:
        contents: Where the content of each file lies.
        parts: Number of the split that each file is for, where files say it.
        columns: Columns to read; None for lines of a user and items.
        memory_bytes: Memory that all interactions may take.
        max_rejected: Largest share of malformed rows that is no error.
    """

    contents: Mapping[Path, Path]
    parts: Mapping[Path, int]
    columns: InteractionColumns | None
    memory_bytes: int
    max_rejected: float


@dataclass(frozen=True)
class InteractionsRead:
    """What was read.

    Attributes:
        interactions: The well-formed rows, in the order of the input.
        sources: The files, with checksums.
        rejected: Counts of malformed rows.
    """

    interactions: Interactions
    sources: tuple[SourceFile, ...]
    rejected: Rejected


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows of one batch: texts as arrays with a dictionary, numbers as arrays."""

    texts: tuple[pa.Array, ...]
    numbers: tuple[NDArray[np.generic], ...]
    split: int


def read_interactions(given: InteractionInput, folder: Path, report: ProgressCallback) -> InteractionsRead:
    """Reads all interactions.

    Args:
        given: Files and columns to read.
        folder: Folder that gets ``rejected.tsv`` if there are malformed rows.
        report: Function that is called with the progress.

    Raises:
        UserError: A file cannot be read, no row is well-formed, too many are malformed, or they do not fit in memory.
    """
    files = list(given.contents)
    names = input_names(files)
    wanted = _wanted(given.columns)
    rejected = RejectedRows(folder, files, names, REASONS, max_rejected=given.max_rejected, wanted=wanted)
    num_rows = dict.fromkeys(files, 0)
    num_kept, parts = 0, []
    try:
        for batch in reported(_batches(given), given.contents, report):
            part = _part(batch, given, rejected, files.index(batch.path))
            num_rows[batch.path] += batch.num_rows + len(batch.bad_rows)
            num_kept += len(part.texts[0])
            parts.append(part)
            rejected.require_hope(sum(num_rows.values()))
            _require_memory(num_kept, given)
    finally:
        rejected.close()
    rejected.require_few(sum(num_rows.values()))
    counts = zip(files, names, rejected.by_source, strict=True)
    sources = tuple(_source(name, given.contents[file], num_rows[file], number) for file, name, number in counts)
    return InteractionsRead(_joined(parts, given.columns), sources, rejected.counts())


def _wanted(columns: InteractionColumns | None) -> str:
    if columns is None:
        return "A line is a user and one or more items, separated by blanks."
    named = {"rating": columns.rating, "time": columns.time}
    numbers = [f"a number for the {role} ({name})" for role, name in named.items() if name is not None]
    return (
        f"A row is a user ({columns.user_column}), an item ({columns.item_column}){''.join(f', {n}' for n in numbers)}."
    )


def _batches(given: InteractionInput) -> Iterator[ColumnBatch]:
    memory_bytes = min(_MOST_READ_BYTES, given.memory_bytes // 8)
    if given.columns is None:
        return read_lines(given.contents, memory_bytes)
    columns = given.columns
    kinds: dict[str, Sequence[str]] = dict.fromkeys(columns.names, (INTEGER, TEXT))
    kinds |= dict.fromkeys(columns.dense, (INTEGER, NUMBER))
    kinds |= {columns.rating: (INTEGER, NUMBER)} if columns.rating is not None else {}
    kinds |= {columns.time: (INTEGER, NUMBER, TIME)} if columns.time is not None else {}
    return read_columns(given.contents, WantedColumns(kinds, columns.has_header, sets_aside=True), memory_bytes)


def _part(batch: ColumnBatch, given: InteractionInput, rejected: RejectedRows, source: int) -> _Part:
    """Returns the well-formed rows of a batch, and lists the others."""
    split = given.parts.get(batch.path, 0)
    if given.columns is None:
        users, items, reasons = _listed(batch.columns[0])
        part = _Part((users.dictionary_encode(), items.dictionary_encode()), (), split)
    else:
        part, reasons = _columns_part(batch, given.columns, split)
    lines = batch.first_row + np.arange(batch.num_rows) if batch.lines is None else batch.lines
    found = [(row.line, "columns", row.text) for row in batch.bad_rows]
    for row in np.flatnonzero(reasons).tolist():
        values = (column[row].as_py() for column in batch.columns)
        text = "\t".join("" if value is None else str(value).translate(_ESCAPED) for value in values)
        found.append((int(lines[row]), REASONS[reasons[row] - 1], text))
    for line, reason, text in sorted(found):
        rejected.add(source, line, reason, text.encode(errors="backslashreplace"))
    return part


def _listed(lines: pa.Array) -> tuple[pa.Array, pa.Array, NDArray[np.uint8]]:
    """Returns users and items of lines of a user and items, and why each line is malformed."""
    words = pc.ascii_split_whitespace(pc.utf8_trim_whitespace(pc.fill_null(lines, "")))
    lengths = pc.list_value_length(words).to_numpy()
    texts, line_of_text = words.flatten(), np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    is_user = np.zeros(len(texts), bool)
    is_user[starts[lengths > 0]] = True
    good = lengths > 1
    items = texts.filter(pa.array(~is_user & good[line_of_text]))
    users = texts.take(pa.array(np.repeat(starts[good], lengths[good] - 1)))
    has_user = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(pc.fill_null(lines, "")), ""), False)
    no_user = ~has_user.to_numpy(zero_copy_only=False)
    return users, items, _first_reason({"user": no_user, "items": ~good})


def _columns_part(batch: ColumnBatch, columns: InteractionColumns, split: int) -> tuple[_Part, NDArray[np.uint8]]:
    """Returns the well-formed rows of a batch of columns, and why each row is malformed, in terms of ``REASONS``."""
    values = dict(zip(columns.names, batch.columns, strict=True))
    texts = {name: _text(values[name]) for name in (columns.user_column, columns.item_column, *columns.categorical)}
    wrong = {
        "user": _is_null(texts[columns.user_column]),
        "item": _is_null(texts[columns.item_column]),
    }
    numbers: list[NDArray[np.generic]] = []
    if columns.rating is not None:
        ratings, wrong["rating"] = finite_numbers(values[columns.rating])
        numbers.append(ratings.astype(np.float32))
        wrong["rating"] |= ~np.isfinite(numbers[-1])
    if columns.time is not None:
        times, wrong["time"] = _times(values[columns.time])
        numbers.append(times)
    wrong["attribute"] = np.zeros(batch.num_rows, bool)
    for name in columns.dense:
        found, malformed = finite_numbers(values[name])
        numbers.append(found.astype(np.float32))
        wrong["attribute"] |= malformed & ~_is_null(_text(values[name])) | np.isinf(numbers[-1])
    reasons = _first_reason(wrong)
    good = reasons == 0
    chosen = pa.array(good)
    encoded = tuple(column.filter(chosen).dictionary_encode() for column in texts.values())
    return _Part(encoded, tuple(column[good] for column in numbers), split), reasons


def _text(column: pa.Array) -> pa.Array:
    """Returns a column as texts; an empty text counts as missing."""
    texts = column.cast(pa.string())
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def _is_null(column: pa.Array) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return result


def _times(column: pa.Array) -> tuple[NDArray[np.int64] | NDArray[np.float64], NDArray[np.bool_]]:
    """Returns times as numbers, whole ones exactly, and which are none."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    elif pa.types.is_string(column.type):
        whole = pc.match_substring_regex(column, _WHOLE_NUMBER)
        if pc.all(whole, skip_nulls=True).as_py() is not False:
            column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        return column.fill_null(0).to_numpy().astype(np.int64), _is_null(column)
    return finite_numbers(column)


def _first_reason(wrong: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.uint8]:
    """Returns 0 for a well-formed row, else 1 and the place in ``REASONS`` of what is wrong first."""
    reasons = np.zeros(len(next(iter(wrong.values()))), np.uint8)
    for reason in reversed(list(wrong)):
        reasons[wrong[reason]] = REASONS.index(reason) + 1
    return reasons


def _require_memory(num_rows: int, given: InteractionInput) -> None:
    """Makes sure that the interactions fit in memory.

    Raises:
        UserError: They do not.
    """
    num_attributes = 0 if given.columns is None else len(given.columns.categorical) + len(given.columns.dense)
    needed = num_rows * (_ROW_BYTES + _ATTRIBUTE_BYTES * num_attributes)
    if needed > given.memory_bytes:
        raise UserError(
            f"the first {num_rows:,} interactions take about {format_bytes(needed)}, and the memory limit is "
            f"{format_bytes(given.memory_bytes)}: all of them must fit, so allow more (--memory-limit)"
        )


def _source(name: str, content: Path, num_rows: int, num_rejected: int) -> SourceFile:
    with open(content, "rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    return SourceFile(name, content.stat().st_size, checksum, num_rows, num_rejected)


def _joined(parts: Sequence[_Part], columns: InteractionColumns | None) -> Interactions:
    """Returns the rows of all batches, each distinct text stored once."""
    columns = columns or InteractionColumns()
    texts = [_key_column([part.texts[index] for part in parts]) for index in range(len(parts[0].texts))]
    numbers = [np.concatenate([part.numbers[index] for part in parts]) for index in range(len(parts[0].numbers))]
    splits = [np.full(len(part.texts[0]), part.split, np.uint8) for part in parts]
    rest = iter(numbers)
    return Interactions(
        users=texts[0],
        items=texts[1],
        parts=np.concatenate(splits),
        ratings=next(rest) if columns.rating is not None else None,
        times=next(rest) if columns.time is not None else None,
        categorical=dict(zip(columns.categorical, texts[2:], strict=True)),
        dense=dict(zip(columns.dense, rest, strict=True)),
    )


def _key_column(chunks: Sequence[pa.Array]) -> KeyColumn:
    """Returns a column whose chunks have dictionaries of their own.

    Raises:
        UserError: It has more distinct values than there may be.
    """
    unified = pa.chunked_array(chunks).unify_dictionaries()
    keys = unified.chunk(0).dictionary
    if len(keys) > _MOST_KEYS:
        raise UserError(f"a column has {len(keys):,} distinct values: at most {_MOST_KEYS:,} are possible")
    codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in unified.chunks]
    return KeyColumn(np.concatenate(codes).astype(np.int32), keys)
