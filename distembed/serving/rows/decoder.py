"""Common parts of all decoders of raw rows: interface, parts of a decoding, and batches of decoded rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import Jagged, RecordBlock
from distembed.data.dataset.schema import Schema
from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.reader import Batch
from distembed.data.reader.batch import BatchAssembler
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.encoder import RowEncoder
from distembed.data.table.parser import TableParser
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import TableSchema
from distembed.data.table.vocabulary import MISSING_ID


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """Decoded rows of a table.

    Attributes:
        is_good: Whether each row of the table is well-formed.
        block: The well-formed rows alone, in order, as columns of the dataset.
        rejected: The malformed rows, each with its number in the table.
    """

    is_good: NDArray[np.bool_]
    block: RecordBlock
    rejected: tuple[RejectedRow, ...]


class RowDecoder(Protocol):
    """Turns raw rows into the dataset's columns; any number of threads may use it.

    ``schema`` describes the columns of raw tables, and ``columns`` has the types that each may have.
    """

    schema: TableSchema
    columns: TableColumns

    def decode(self, table: pa.Table) -> DecodedRows:
        """Decodes a table; malformed rows are in the result, a missing or mistyped column is a :class:`UserError`."""

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature; None is a missing value."""


class Decoder:
    """Parses tables by a schema and encodes them by the vocabularies of a dataset, or of the copy that a run keeps."""

    def __init__(self, folder: Path, manifest: Manifest, schema: TableSchema) -> None:
        self.schema = schema
        self._parser = TableParser(schema)
        self.columns = self._parser.columns
        self._encoder = RowEncoder(folder, manifest, self._parser.layout)

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        return self._encoder.ids_of(feature, values)


def with_all_lists(schema: Schema, block: RecordBlock, lengths: NDArray[np.int64]) -> RecordBlock:
    """Adds the lists that a block lacks: missing ids, ``lengths`` in each row, and a missing number beside each id."""
    lists = dict(block.jagged)
    for feature in schema.categorical:
        if feature.multi_hot and feature.name not in lists:
            lists[feature.name] = Jagged.from_lengths(np.full(lengths.sum(), MISSING_ID, np.int64), lengths)
    for name in schema.dense_sequences:
        if name not in lists:
            beside = lists[schema.lists_beside(name)[0]].lengths
            lists[name] = Jagged.from_lengths(np.full(beside.sum(), np.nan, np.float32), beside)
    return RecordBlock(block.records, lists)


def kept_entries(lists: Jagged, is_kept: NDArray[np.bool_]) -> Jagged:
    """Returns lists without some of their entries, end to end."""
    rows = np.repeat(np.arange(len(lists.lengths)), lists.lengths)[is_kept]
    return Jagged.from_lengths(lists.values[is_kept], np.bincount(rows, minlength=len(lists.lengths)))


def unknown_rows(
    texts: pa.ChunkedArray, is_unknown: NDArray[np.bool_], reason: str, feature: str
) -> tuple[RejectedRow, ...]:
    """Describes the rows whose users, or items, the dataset does not have."""
    rows = np.flatnonzero(is_unknown).tolist()
    return tuple(RejectedRow(row, reason, str(texts[row].as_py()).encode(), feature) for row in rows)


def decode_rows(decode: Callable[[pa.Table], DecodedRows], raw: RawRows) -> DecodedRows:
    """Decodes rows by :meth:`RowDecoder.decode`, and numbers them as the lines of ``raw`` in place of its table's rows.

    The table lacks the lines in ``raw.bad``, which are malformed in the result too; rejected lines are in order.
    """
    decoded = decode(raw.table)
    is_good = np.zeros(raw.num_lines, bool)
    is_good[raw.lines[decoded.is_good]] = True
    rejected = [dataclasses.replace(row, line=int(raw.lines[row.line])) for row in decoded.rejected]
    return DecodedRows(is_good, decoded.block, tuple(sorted([*raw.bad, *rejected], key=lambda row: row.line)))


def batches_of(schema: Schema, block: RecordBlock, batch_size: int) -> Iterator[Batch]:
    """Yields decoded rows as batches of ``batch_size`` rows, in order; the last one may have fewer rows."""
    assembler = BatchAssembler(schema)
    num_rows = len(block.records)
    for start in range(0, num_rows, batch_size):
        rows = block.between(start, start + batch_size)
        yield from assembler.assemble([rows], [len(rows.records)])
