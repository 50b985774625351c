"""Reads rows of files as edges between ids: which values are ids, which rows are left out, what is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.prepare.column_batches import ColumnBatch, WantedColumns, read_columns, reported
from distembed.data.prepare.column_numbers import positive_numbers
from distembed.data.prepare.progress import ProgressCallback
from distembed.data.table.raw_columns import INTEGER, LIST, NUMBER, TEXT
from distembed.errors import UserError
from distembed.graph.edges import stored_edges
from distembed.graph.prepare.dropped import DroppedCounts
from distembed.graph.prepare.options import GraphOptions
from distembed.graph.prepare.shared_attributes import (
    PAIR_TYPES,
    AttributeEdges,
    add_shared_edges,
    new_id_counts,
    value_numbers,
)
from distembed.graph.prepare.sorted_runs import SortedRuns, new_runs
from distembed.graph.prepare.value_ids import ValueMap

_MOST_READ_BYTES = 128 << 20


class EdgeReader:
    """Reads the input once, into sorted runs of edges.

    Args:
        contents: Files to read, and where the content of each lies.
        options: How rows become edges.
        values: How values become ids.
        scratch: Empty folder for what does not fit in memory.
        memory_bytes: Memory to use.
        report: Function that is called with the progress.

    Attributes:
        options: How rows become edges.
        report: Function that is called with the progress.
        dropped: Counts of what was left out so far.
        id_counts: Number of values of each id so far, where that matters.
        rows_by_file: Number of rows read so far, by file.
    """

    def __init__(
        self,
        contents: Mapping[Path, Path],
        options: GraphOptions,
        values: ValueMap,
        scratch: Path,
        memory_bytes: int,
        report: ProgressCallback,
    ) -> None:
        self.options, self.report = options, report
        self.dropped = DroppedCounts()
        self.id_counts = new_id_counts(values.num_nodes, options)
        self.rows_by_file: dict[Path, int] = dict.fromkeys(contents, 0)
        self._contents = contents
        self._values = values
        self._scratch, self._memory_bytes = scratch, memory_bytes
        self._first_unknown = ""

    @property
    def num_nodes(self) -> int:
        """Number of ids of the graph."""
        return self._values.num_nodes

    @property
    def num_rows(self) -> int:
        """Number of rows read so far."""
        return sum(self.rows_by_file.values())

    def edges(self) -> SortedRuns:
        """Returns all edges that are stored, with those that are given several times.

        Raises:
            UserError: A row is malformed, or has a value without an id where that is an error.
        """
        return self._named_edges() if self.options.attribute is None else self._shared_edges()

    def _named_edges(self) -> SortedRuns:
        """Reads rows that name both ends of an edge."""
        weighted, directed = self.options.weighted, self.options.directed
        dtypes = (np.int64, np.float64) if weighted else (np.int64,)
        runs = new_runs(self._scratch / "edges", dtypes, self._memory_bytes // 2)
        for batch in self._batches((*self._values.kinds,), (*self._values.kinds,), (INTEGER, NUMBER)):
            sources, source_known = self._ids(batch, 0)
            targets, target_known = self._ids(batch, 1)
            known = self._known(source_known & target_known)
            weights = self._weights(batch)[known] if weighted else None
            sources, targets = sources[known], targets[known]
            stored = stored_edges(self._values.num_nodes, sources, targets, weights, directed)
            self.dropped.self_loops += int(np.count_nonzero(sources == targets))
            runs.add(stored.keys, *(() if stored.weights is None else (stored.weights,)))
        self._require_known()
        return runs

    def _shared_edges(self) -> SortedRuns:
        """Reads rows of ids and attributes, and makes edges of ids that share one."""
        pairs = new_runs(self._scratch / "pairs", PAIR_TYPES, self._memory_bytes // 4)
        for batch in self._batches((*self._values.kinds,), (INTEGER, TEXT, LIST)):
            ids, known = self._ids(batch, 0)
            lengths, values = _entries(batch.columns[1])
            self.dropped.missing += int(np.count_nonzero(lengths == 0))
            known = self._known(known | (lengths == 0))
            ids, known = np.repeat(ids, lengths), np.repeat(known, lengths)
            pairs.add(*value_numbers(values.filter(pa.array(known))), ids[known])
        self._require_known()
        runs = new_runs(self._scratch / "edges", (np.int64,), self._memory_bytes // 4)
        shared = AttributeEdges(self.num_nodes, self.options.max_shared, self.id_counts)
        add_shared_edges(runs, pairs, shared)
        self.dropped.take(shared)
        return runs

    def _batches(self, *kinds: Sequence[str]) -> Iterator[ColumnBatch]:
        """Yields all rows, and counts and reports them.

        Args:
            *kinds: Kinds of values that each of the columns may hold.
        """
        wanted = WantedColumns(dict(zip(self.options.columns, kinds, strict=False)))
        batches = read_columns(self._contents, wanted, min(_MOST_READ_BYTES, self._memory_bytes // 8))
        for batch in reported(batches, self._contents, self.report):
            self.rows_by_file[batch.path] += batch.num_rows
            yield batch

    def _ids(self, batch: ColumnBatch, column: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the ids of a column, and which values have one.

        Raises:
            UserError: A value is malformed.
        """
        found = self._values.find(batch.columns[column])
        self._require_well_formed(batch, column, found.malformed, self._values.allowed)
        if not self._first_unknown and found.unknown.any():
            place = _place(batch, column, int(found.unknown.argmax()), self.options)
            self._first_unknown = f"{place}, which {self._values.unknown_means}"
        return found.ids, ~found.unknown

    def _weights(self, batch: ColumnBatch) -> NDArray[np.float64]:
        weights, malformed = positive_numbers(batch.columns[2])
        self._require_well_formed(batch, 2, malformed, "a finite number above 0")
        return weights

    def _require_well_formed(self, batch: ColumnBatch, column: int, malformed: NDArray[np.bool_], allowed: str) -> None:
        if malformed.any():
            raise UserError(f"{_place(batch, column, int(malformed.argmax()), self.options)}; it must be {allowed}")

    def _known(self, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns the mask itself, and counts the rows whose values are not known."""
        self.dropped.unknown += int(np.count_nonzero(~known))
        return known

    def _require_known(self) -> None:
        if self.dropped.unknown and self.options.unknown == "error":
            raise UserError(
                f"{self._first_unknown}. {self.dropped.unknown:,} of {self.num_rows:,} rows have such a "
                "value: mend them, or leave these rows out (unknown=drop, on the command line --unknown drop)"
            )


def _entries(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Returns how many values each row of a column of values or of lists has, and the values without missing ones."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), column.drop_null()
    values = column.flatten()
    rows = pc.list_parent_indices(column).filter(values.is_valid())
    return np.bincount(rows.to_numpy(), minlength=len(column)), values.drop_null()


def _place(batch: ColumnBatch, column: int, row: int, options: GraphOptions) -> str:
    """Returns such as ``edges.csv, row 3: source is 'x'``, for an error."""
    value = batch.columns[column][row].as_py()
    shown = "nothing" if value is None else repr(value)
    return f"{batch.path}, row {batch.first_row + row}: {options.columns[column]} is {shown}"
