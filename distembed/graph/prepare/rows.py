"""Rows of files as edges between ids: which values are ids, which rows are left out, what is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.prepare.criteo import ProgressUpdate
from distembed.data.prepare.sorted_runs import SortedRuns
from distembed.errors import UserError
from distembed.graph.edges import stored_edges
from distembed.graph.prepare.attributes import PAIR_TYPES, SharedValues, value_numbers
from distembed.graph.prepare.ids import ValueMap
from distembed.graph.prepare.input import INTEGER, NUMBER, TEXT, Batch, read_columns
from distembed.graph.prepare.values import positive_numbers
from distembed.names import one_of

_MOST_READ_BYTES = 128 << 20

Report = Callable[[ProgressUpdate], None]


@dataclass(frozen=True)
class GraphOptions:
    """What the graph depends on besides the input; kept in ``graph.json``."""

    source: str
    target: str
    weight: str | None
    directed: bool
    attribute: str | None
    max_shared: int
    count_shared: bool
    unknown: str

    def __post_init__(self) -> None:
        one_of("unknown", self.unknown, ("error", "drop"))
        if self.max_shared < 2:
            raise UserError(f"max_shared is {self.max_shared}: it must be 2 or more, since an edge has two ends")
        if self.attribute is None and self.count_shared:
            raise UserError("count_shared counts the attributes that ids share: name the column of them (attribute)")
        if self.attribute is not None and (self.weight is not None or self.directed):
            raise UserError(
                "ids that share an attribute are neighbours of each other, without a weight: leave out weight and "
                "directed, or ask for the number of shared attributes as the weight (count_shared)"
            )
        columns = list(self.columns)
        if len(set(columns)) < len(columns):
            raise UserError(f"the columns are {', '.join(map(repr, columns))}: each has one role, name different ones")

    @property
    def weighted(self) -> bool:
        """Whether edges have weights."""
        return self.weight is not None or self.count_shared

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        if self.attribute is not None:
            return (self.source, self.attribute)
        return (self.source, self.target) if self.weight is None else (self.source, self.target, self.weight)

    def described(self) -> dict[str, Any]:
        """Those that matter for this kind of input."""
        unused = (
            ("attribute", "max_shared", "count_shared") if self.attribute is None else ("target", "weight", "directed")
        )
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass
class Dropped:
    """What was left out: rows, but for hubs, which are attribute values."""

    duplicates: int = 0
    self_loops: int = 0
    unknown: int = 0
    missing: int = 0
    hubs: int = 0
    largest_hub: int = 0

    def described(self, options: GraphOptions) -> dict[str, int]:
        """What can be left out of this kind of input."""
        unused = ("missing", "hubs", "largest_hub") if options.attribute is None else ("self_loops",)
        return {name: count for name, count in asdict(self).items() if name not in unused}


class GraphInput:
    """Reads the input once, into sorted runs of edges."""

    def __init__(
        self,
        files: Sequence[Path],
        options: GraphOptions,
        values: ValueMap,
        scratch: Path,
        memory_bytes: int,
        report: Report,
    ) -> None:
        self.dropped = Dropped()
        self.num_rows: dict[Path, int] = dict.fromkeys(files, 0)
        self._options, self._values, self._report = options, values, report
        self._scratch, self._memory_bytes = scratch, memory_bytes
        self._first_unknown = ""

    def edges(self) -> SortedRuns:
        """Edges of rows with two ends."""
        weighted, directed = self._options.weighted, self._options.directed
        runs = self._runs("edges", (np.int64, np.float64) if weighted else (np.int64,), 2)
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

    def shared(self) -> SortedRuns:
        """Edges of ids that share an attribute."""
        options = self._options
        pairs = self._runs("pairs", PAIR_TYPES, 4)
        for batch in self._batches((*self._values.kinds,), (INTEGER, TEXT)):
            ids, known = self._ids(batch, 0)
            present = batch.columns[1].is_valid().to_numpy(zero_copy_only=False)
            self.dropped.missing += int(np.count_nonzero(~present))
            known = self._known(known | ~present) & present
            values = batch.columns[1].filter(pa.array(known))
            pairs.add(*value_numbers(values), ids[known])
        self._require_known()
        runs = self._runs("edges", (np.int64, np.float64) if options.count_shared else (np.int64,), 4)
        shared = SharedValues(self._values.num_nodes, options.max_shared)
        for records in pairs.merged():
            for keys in shared.edges(*records):
                runs.add(keys, *((np.ones(len(keys)),) if options.count_shared else ()))
        self.dropped.duplicates = shared.num_repeated
        self.dropped.hubs, self.dropped.largest_hub = shared.num_hubs, shared.largest_hub
        return runs

    def _runs(self, name: str, dtypes: Sequence[Any], share: int) -> SortedRuns:
        folder = self._scratch / name
        folder.mkdir()
        return SortedRuns(folder, dtypes, self._memory_bytes // share)

    def _batches(self, *kinds: Sequence[str]) -> Iterator[Batch]:
        columns = dict(zip(self._options.columns, kinds, strict=False))
        total, before, current = sum(file.stat().st_size for file in self.num_rows), 0, next(iter(self.num_rows))
        for batch in read_columns(list(self.num_rows), columns, min(_MOST_READ_BYTES, self._memory_bytes // 8)):
            yield batch
            if batch.path != current:
                before, current = before + current.stat().st_size, batch.path
            self.num_rows[batch.path] += batch.num_rows
            rows = sum(self.num_rows.values())
            self._report(ProgressUpdate("read", before + batch.bytes_read, total, rows))

    def _ids(self, batch: Batch, column: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The ids of a column, and which values have one."""
        found = self._values.find(batch.columns[column])
        self._require_well_formed(batch, column, found.malformed, self._values.allowed)
        if not self._first_unknown and found.unknown.any():
            place = _place(batch, column, int(found.unknown.argmax()), self._options)
            self._first_unknown = f"{place}, which {self._values.unknown_means}"
        return found.ids, ~found.unknown

    def _weights(self, batch: Batch) -> NDArray[np.float64]:
        weights, malformed = positive_numbers(batch.columns[2])
        self._require_well_formed(batch, 2, malformed, "a finite number above 0")
        return weights

    def _require_well_formed(self, batch: Batch, column: int, malformed: NDArray[np.bool_], allowed: str) -> None:
        if malformed.any():
            raise UserError(f"{_place(batch, column, int(malformed.argmax()), self._options)}; it must be {allowed}")

    def _known(self, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        self.dropped.unknown += int(np.count_nonzero(~known))
        return known

    def _require_known(self) -> None:
        if self.dropped.unknown and self._options.unknown == "error":
            raise UserError(
                f"{self._first_unknown}. {self.dropped.unknown:,} of {sum(self.num_rows.values()):,} rows have such a "
                "value: mend them, or leave these rows out (unknown=drop, on the command line --unknown drop)"
            )


def _place(batch: Batch, column: int, row: int, options: GraphOptions) -> str:
    value = batch.columns[column][row].as_py()
    shown = "nothing" if value is None else repr(value)
    return f"{batch.path}, row {batch.first_row + row}: {options.columns[column]} is {shown}"
