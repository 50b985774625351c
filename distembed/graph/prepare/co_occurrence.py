"""Makes edges of ids that occur together in a dataset's training split, and in no other.

In a dataset of ratings or sequences the items of a user are neighbours of each other, and so are the users of an item;
users with more than ``max_shared`` items are left out, which say the least and cost the most. In sequences, items may
also be neighbours only where they are a few steps apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.graph.edges import Edges
from distembed.graph.prepare.counted_edges import EdgeTables

_SPLIT = "train"
_PAIRS = pa.schema({"value": pa.int64(), "id": pa.int64()})
_ENTRIES = pa.schema({"list": pa.int64(), "place": pa.int64(), "id": pa.int64()})


class CoOccurrenceReader:
    """Reads a dataset's training split once.

    Args:
        dataset: Folder of the dataset.
        table: Name of the feature whose ids are the nodes.
        within: Most steps between neighbours in a sequence; None where all items of a user are neighbours.
    """

    def __init__(self, dataset: Path, table: str, within: int | None) -> None:
        self._manifest = Manifest.load(dataset)
        features = {feature.name: feature for feature in self._manifest.schema.categorical}
        one_of("table", table, features)
        self._other = ITEM if table == USER else USER
        if self._other not in features:
            raise UserError(
                f"{dataset} has no column {self._other!r}: co_occurrence reads what `distembed prepare ratings` or "
                "`prepare sequences` made"
            )
        if within is not None and not features[table].multi_hot:
            raise UserError(
                f"within counts steps, and a row of {dataset} has a single {table}: give a dataset of `distembed "
                "prepare sequences`, or leave within out"
            )
        self.num_rows = self._manifest.split(_SPLIT).num_rows
        self._dataset, self._table, self._within = dataset, table, within

    def sources(self) -> list[dict[str, Any]]:
        """Returns no files."""
        return []

    def edges(self, tables: EdgeTables) -> Iterator[Edges]:
        """Yields all edges in ascending order, each once."""
        if self._within is not None:
            tables.database.add("entries", _entries(self._columns(tables.report, self._table)), _ENTRIES)
            return tables.of_steps(self._within)
        columns = self._columns(tables.report, self._other, self._table)
        tables.database.add("pairs", map(_pairs, columns), _PAIRS)
        return tables.of_values()

    def _columns(self, report: ProgressCallback, *names: str) -> Iterator[list[pa.Array]]:
        """Yields columns of the training split, a row group at a time."""
        num_rows = 0
        for group in list_row_groups(self._dataset, self._manifest, _SPLIT):
            table = group.read(names)
            yield [table[name].combine_chunks() for name in names]
            num_rows += group.num_rows
            report(ProgressUpdate("read", num_rows, self.num_rows, num_rows))


def _entries(columns: Iterator[list[pa.Array]]) -> Iterator[pa.RecordBatch]:
    """Yields the entries of lists."""
    num_lists = 0
    for (lists,) in columns:
        rows, ids = pc.list_parent_indices(lists).to_numpy(), lists.flatten()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        places = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
        yield pa.record_batch([rows + num_lists, places, _integers(ids)], schema=_ENTRIES)
        num_lists += len(lists)


def _pairs(columns: list[pa.Array]) -> pa.RecordBatch:
    """Returns the values of two columns, a single one of which may be of lists: each entry is beside the other's."""
    lists = next((column for column in columns if pa.types.is_list(column.type)), None)
    if lists is not None:
        rows = pc.list_parent_indices(lists)
        columns = [column.flatten() if column is lists else column.take(rows) for column in columns]
    return pa.record_batch(list(map(_integers, columns)), schema=_PAIRS)


def _integers(column: pa.Array) -> NDArray[np.int64]:
    return column.to_numpy().astype(np.int64)
