"""One row of a dataset for each id of a feature: the features of each item, or of each user of a split.

::

    rows       item genre            keep="last"     item genre
    0          7    drama                            3    comedy
    1          3    comedy                           7    crime        the last row of item 7
    2          7    crime
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.records import Jagged, RecordBlock, RecordLayout
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import Schema
from distembed.data.reader.batch import Batch, BatchAssembler
from distembed.data.reader.decode import Decoder
from distembed.data.reader.order import Segment

_LEAST_PENDING = 1 << 20
"""Least rows of row groups that are kept before repeated ids are dropped."""


def columns_of(schema: Schema, names: Sequence[str], label: str | None = None) -> Schema:
    """Returns the schema of some features alone, each as if it had a table of its own, maybe with the label."""
    categorical = [replace(feature, table=None) for feature in schema.categorical if feature.name in names]
    dense = tuple(name for name in schema.dense if name in names)
    return Schema(label, dense, tuple(categorical), label_kind=schema.label_kind, missing_dense=schema.missing_dense)


@dataclass(frozen=True, eq=False)
class KeyedRows:
    """Some features of a dataset, one row for each id.

    Attributes:
        ids: The ids, ascending.
        rows: The row of each id.
        schema: The columns of the rows.
    """

    ids: NDArray[np.int64]
    rows: RecordBlock
    schema: Schema

    @classmethod
    def of_splits(
        cls, dataset: str, splits: Sequence[str], schema: Schema, key: str, keep: Literal["first", "last"]
    ) -> KeyedRows:
        """Reads the first or the last row of each id in some splits, in the order given.

        Memory holds the rows of the result about three times.

        Args:
            dataset: The dataset's folder.
            splits: Names of the splits.
            schema: The columns to read, as of :func:`columns_of`; with a label, rows whose label is 0 are left out.
            key: The feature, one id a row, whose ids name the rows.
            keep: Which row of an id is kept.

        Raises:
            UserError: The dataset lacks a split, or its files are damaged.
        """
        layout = RecordLayout.from_schema(schema)
        key_column = [feature.name for feature in layout.single].index(key)
        pending, num_pending = [_no_rows(schema)], 0
        for block in _blocks(dataset, splits, schema):
            distinct = _distinct(block, key_column, keep)
            pending.append(distinct)
            num_pending += len(distinct.records)
            if num_pending > max(_LEAST_PENDING, 2 * len(pending[0].records)):
                pending, num_pending = [_distinct(RecordBlock.concatenate(pending), key_column, keep)], 0
        rows = _distinct(RecordBlock.concatenate(pending), key_column, keep)
        return cls(rows.records[:, key_column].astype(np.int64), rows, schema)

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, ids: Sequence[int]) -> KeyedRows:
        """Returns the rows of all other ids."""
        kept = np.flatnonzero(~np.isin(self.ids, ids))
        return KeyedRows(self.ids[kept], self.rows.gather(kept), self.schema)

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each given id; every id must have a row."""
        return np.searchsorted(self.ids, ids)

    def batch(self, positions: NDArray[np.int64]) -> Batch:
        """Returns some rows as a batch of the schema's fields."""
        chosen = self.rows.gather(positions)
        (batch,) = BatchAssembler(self.schema).assemble([chosen] if len(positions) else [], [max(1, len(positions))])
        return batch


def _no_rows(schema: Schema) -> RecordBlock:
    layout = RecordLayout.from_schema(schema)
    none, lists = np.zeros(0, np.int64), [feature.name for feature in schema.categorical if feature.multi_hot]
    return RecordBlock(np.empty((0, layout.width), layout.dtype), dict.fromkeys(lists, Jagged.from_lengths(none, none)))


def _blocks(dataset: str, splits: Sequence[str], schema: Schema) -> Iterator[RecordBlock]:
    """Yields the rows of each row group, without rows whose label is 0."""
    manifest, layout = Manifest.load(dataset), RecordLayout.from_schema(schema)
    for split in splits:
        groups = list_row_groups(dataset_folder(dataset), manifest, split)
        decoder = Decoder(schema, groups)
        for index, group in enumerate(groups):
            block = decoder.decode([Segment(index, 0, group.num_rows)])
            if schema.label is not None:
                column = layout.first_float + layout.numbers.index(schema.label)
                block = block.gather(np.flatnonzero(block.records.view(np.float32)[:, column] != 0))
            yield block


def _distinct(block: RecordBlock, key_column: int, keep: Literal["first", "last"]) -> RecordBlock:
    """Returns one row of each id, in the order of the ids."""
    ids = block.records[:, key_column]
    _, rows = np.unique(ids if keep == "first" else ids[::-1], return_index=True)
    return block.gather(rows if keep == "first" else len(ids) - 1 - rows)
