"""Sorts edges that rows name, and makes the edges of ids that share a value.

Named edges that fit in memory are sorted there, which is faster; all others are sorted and joined by SQL. A group
of g ids with the same value has g (g - 1) edges. Trade-off: the largest groups, of values like "unknown", cost the most
and say the least; so groups of more than ``max_shared`` ids are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa

from distembed.data.prepare.count import Database
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.graph.prepare.options import COSINE, GraphOptions
from distembed.graph.rows import Edges, merge_equal, sort_edges

_BATCH_ROWS = 2**20


@dataclass(frozen=True)
class EdgeTables:
    """A database that edges are made in."""

    database: Database
    num_nodes: int  # number of ids of the graph
    options: GraphOptions
    memory_bytes: int  # of the edges that are sorted in memory
    report: ProgressCallback
    dropped: Counter[str] = field(default_factory=Counter)  # counts of rows, values and edges left out

    def add_named(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.Table | None:
        """Returns all batches as one table if they fit in ``memory_bytes``; else stores them in SQL, returns None."""
        in_memory, num_bytes = [], 0
        for batch in batches:
            in_memory.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > self.memory_bytes:
                self.database.add("edges", chain(in_memory, batches), schema)
                return None
        return pa.Table.from_batches(in_memory, schema)

    def named(self, in_memory: pa.Table | None) -> Iterator[Edges]:
        """Yields distinct edges in ascending order from the result of :meth:`add_named`; counts the duplicates."""
        if in_memory is not None:
            num_edges, chunks = len(in_memory), iter([sort_edges(_edges(in_memory))])
            self.report(ProgressUpdate("write", num_edges * 8, num_edges * 8, num_edges))
        else:
            columns, order = ("key, weight", "key, place") if self.options.weighted else ("key", "key")
            (num_edges,) = self.database.row("select count(*) from edges")
            chunks = self._whole_rows(f"select {columns} from edges order by {order}", num_edges)
        num_distinct = 0
        for edges in chunks:
            merged = merge_equal(edges)
            num_distinct += len(merged)
            yield merged
        # An undirected edge is stored twice, so its duplicates are too.
        self.dropped["duplicates"] = (num_edges - num_distinct) // (1 if self.options.directed else 2)

    def value_edges(self) -> Iterator[Edges]:
        """Yields edges, both ways, between ids that share a value in the SQL table ``pairs`` (value, id), but hubs."""
        database, most = self.database, self.options.max_shared
        database.run("create table once as select value, id, count(*) as num_rows from pairs group by value, id")
        database.run("create table sizes as select value, count(*) as num_ids from once group by value")
        (self.dropped["duplicates"],) = database.row("select coalesce(sum(num_rows) - count(*), 0)::bigint from once")
        hubs = "select count(*), coalesce(max(num_ids), 0) from sizes where num_ids > ?"
        self.dropped["hubs"], self.dropped["largest_hub"] = database.row(hubs, most)
        small_values = "select value, id from once join sizes using (value) where num_ids <= ?"
        database.run(f"create table entries as {small_values}", most)
        yield from self._shared("from entries one join entries other using (value)")

    def step_edges(self, within: int) -> Iterator[Edges]:
        """Yields edges of ids at most ``within`` positions apart in a list of ``entries`` (list, place, id)."""
        # Each entry is repeated for every step from -steps to steps, and joined to the entry at place + step: an
        # equality join, which SQL does by hash. Steps beyond the longest list would join nothing.
        (longest,) = self.database.row("select coalesce(max(place), 0) from entries")
        steps = min(within, longest)
        yield from self._shared(
            f"""from (select *, unnest(range({-steps}, {steps + 1})) as step from entries) as one
            join entries as other on one.list = other.list and one.place + one.step = other.place"""
        )

    def _shared(self, join: str) -> Iterator[Edges]:
        """Counts the rows of a SQL join for each pair of ids ``one`` and ``other``, and yields the pairs as edges.

        An edge weighs its count, or with COSINE count(s, t) / sqrt(n(s) n(t)), where n(s) is the number of rows of id s
        in ``entries``. Drops and counts edges below ``min_shared``, and edges of a source beyond ``max_neighbors``.
        """
        options, num_nodes = self.options, self.num_nodes
        join = f"select one.id * {num_nodes} + other.id as key {join} where one.id <> other.id"
        num_values = np.ones(num_nodes if options.measure == COSINE else 0)
        if options.measure == COSINE:
            for batch in self.database.batches("select id, count(*) as num_values from entries group by id"):
                num_values[batch["id"].to_numpy()] = batch["num_values"].to_numpy()
        self.database.run(f"create table edges as {join}")
        (num_edges,) = self.database.row("select count(*) from edges")
        for edges in self._whole_rows("select key from edges order by key", num_edges):
            keys, counts = np.unique(edges.keys, return_counts=True)
            is_frequent = counts >= options.min_shared
            self.dropped["rare"] += int(np.count_nonzero(~is_frequent))
            keys, weights = keys[is_frequent], counts[is_frequent].astype(np.float64)
            sources = keys // num_nodes
            if options.measure == COSINE:
                weights /= np.sqrt(num_values[sources] * num_values[keys % num_nodes])
            if options.max_neighbors is not None:
                # Sorts by source, then by falling weight; the sort is stable, so equal weights stay in target order.
                # Position minus the source's first position is the rank of an edge among the edges of its source.
                order = np.lexsort((-weights, sources))
                begins = np.searchsorted(sources, sources)
                nearest = np.sort(order[np.arange(len(order)) - begins < options.max_neighbors])
                self.dropped["beyond"] += len(keys) - len(nearest)
                keys, weights = keys[nearest], weights[nearest]
            yield Edges(keys, weights)

    def _whole_rows(self, query: str, num_edges: int) -> Iterator[Edges]:
        """Yields the query's ascending edges in parts that never split a source, and reports progress."""
        # The last source of a batch may continue in the next batch, so its edges wait.
        waiting, edges_done = list[pa.RecordBatch](), 0
        for batch in self.database.batches(query, rows=_BATCH_ROWS):
            table = pa.Table.from_batches([*waiting, batch]).combine_chunks()
            keys = table["key"].to_numpy()
            last_source = int(np.searchsorted(keys, keys[-1] // self.num_nodes * self.num_nodes))
            yield _edges(table.slice(0, last_source))
            waiting = table.slice(last_source).to_batches()
            edges_done += len(batch)
            self.report(ProgressUpdate("write", edges_done * 8, num_edges * 8, edges_done))
        if waiting:
            yield _edges(pa.Table.from_batches(waiting))


def _edges(table: pa.Table) -> Edges:
    return Edges(table["key"].to_numpy(), table["weight"].to_numpy() if "weight" in table.column_names else None)
