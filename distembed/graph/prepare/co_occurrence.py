"""Makes edges of ids that occur together in a dataset's training split, and in no other.

In a dataset of ratings or sequences the items of a user are neighbours of each other, and so are the users of an item;
users with more than ``max_shared`` items are left out, which say the least and cost the most. In sequences, items may
also be neighbours only where they are a few steps apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.prepare.progress import ProgressCallback, ProgressUpdate
from distembed.errors import UserError
from distembed.graph.edges import stored_edges
from distembed.graph.prepare.dropped import DroppedCounts
from distembed.graph.prepare.options import GraphOptions
from distembed.graph.prepare.shared_attributes import (
    PAIR_TYPES,
    AttributeEdges,
    add_shared_edges,
    new_id_counts,
)
from distembed.graph.prepare.sorted_runs import SortedRuns, new_runs
from distembed.names import one_of

_SPLIT = "train"


class CoOccurrenceReader:
    """Reads a dataset's training split once, into sorted runs of edges.

    Args:
        dataset: Folder of the dataset.
        table: Name of the feature whose ids are the nodes.
        options: How ids that occur together become edges.
        scratch: Empty folder for what does not fit in memory.
        memory_bytes: Memory to use.
        report: Function that is called with the progress.

    Attributes:
        num_nodes: Number of ids of the graph.
        options: How ids that occur together become edges.
        report: Function that is called with the progress.
        dropped: Counts of what was left out so far.
        id_counts: How often each id occurs, where that matters.

    Raises:
        UserError: There is no such dataset or table, or it has no users and items, or no sequences where they matter.
    """

    def __init__(
        self,
        dataset: Path,
        table: str,
        options: GraphOptions,
        scratch: Path,
        memory_bytes: int,
        report: ProgressCallback,
    ) -> None:
        self._manifest = Manifest.load(dataset)
        features = {feature.name: feature for feature in self._manifest.schema.categorical}
        one_of("table", table, features)
        self._other = ITEM if table == USER else USER
        if self._other not in features:
            raise UserError(
                f"{dataset} has no column {self._other!r}: co_occurrence reads what `distembed prepare ratings` or "
                "`prepare sequences` made"
            )
        if options.within is not None and not features[table].multi_hot:
            raise UserError(
                f"within counts steps, and a row of {dataset} has a single {table}: give a dataset of `distembed "
                "prepare sequences`, or leave within out"
            )
        self.num_nodes = features[table].num_embeddings
        self.options, self.report = options, report
        self.dropped = DroppedCounts()
        self.id_counts = new_id_counts(self.num_nodes, options)
        self._dataset, self._table = dataset, table
        self._scratch, self._memory_bytes = scratch, memory_bytes

    @property
    def num_rows(self) -> int:
        """Number of rows of the training split."""
        return self._manifest.split(_SPLIT).num_rows

    def edges(self) -> SortedRuns:
        """Returns all edges that are stored, with those that are given several times.

        Raises:
            UserError: The dataset is not as it was written.
        """
        runs = new_runs(self._scratch / "edges", (np.int64,), self._memory_bytes // 4)
        if self.options.within is not None:
            for lists in self._columns(self._table):
                if self.id_counts is not None:
                    np.add.at(self.id_counts, lists[0].flatten().to_numpy(), 1)
                for keys in _neighboring(lists[0], self.options.within, self.num_nodes):
                    runs.add(keys)
            return runs
        pairs = new_runs(self._scratch / "pairs", PAIR_TYPES, self._memory_bytes // 4)
        for ids, others in map(_expanded, self._columns(self._table, self._other)):
            pairs.add(others, np.zeros_like(others), ids)
        shared = AttributeEdges(self.num_nodes, self.options.max_shared, self.id_counts)
        add_shared_edges(runs, pairs, shared)
        self.dropped.take(shared)
        return runs

    def _columns(self, *names: str) -> Iterator[list[pa.Array]]:
        """Yields columns of the training split, a row group at a time."""
        num_rows = 0
        for group in list_row_groups(self._dataset, self._manifest, _SPLIT):
            table = group.read(names)
            yield [table[name].combine_chunks() for name in names]
            num_rows += group.num_rows
            self.report(ProgressUpdate("read", num_rows, self.num_rows, num_rows))


def _expanded(columns: list[pa.Array]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ids of two columns, a single one of which may be of lists: each entry is beside the other's id."""
    lists = next((column for column in columns if pa.types.is_list(column.type)), None)
    if lists is None:
        ids, others = columns
    else:
        rows = pc.list_parent_indices(lists)
        ids, others = (column.flatten() if column is lists else column.take(rows) for column in columns)
    return ids.to_numpy().astype(np.int64), others.to_numpy().astype(np.int64)


def _neighboring(lists: pa.Array, within: int, num_nodes: int) -> Iterator[NDArray[np.int64]]:
    """Yields the keys of edges, both ways, between entries of a list that are at most ``within`` steps apart."""
    values = lists.flatten().to_numpy().astype(np.int64)
    rows = pc.list_parent_indices(lists).to_numpy()
    longest = int(pc.max(pc.list_value_length(lists)).as_py() or 0)
    for step in range(1, min(within + 1, longest)):
        same = rows[step:] == rows[:-step]
        yield stored_edges(num_nodes, values[:-step][same], values[step:][same], None, directed=False).keys
