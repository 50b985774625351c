"""Makes edges of ids that share an attribute: a group of g ids with the same value has g (g - 1) of them.

Records (value, id) are sorted by value. Trade-off: the edges are quadratic in the size of a group, and the largest
groups, such as "unknown", say the least; so groups of more than ``max_shared`` ids are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.graph.prepare.options import COSINE, GraphOptions
from distembed.graph.prepare.sorted_runs import SortedRuns

PAIR_TYPES = (np.int64, np.int64, np.int64)
"""Types of a record's columns: the two halves of a value's number, and the id."""

_INTEGER = "^(0|-?[1-9][0-9]{0,17})$"
_EDGES_AT_A_TIME = 2**19


def add_shared_edges(runs: SortedRuns, pairs: SortedRuns, shared: AttributeEdges) -> None:
    """Adds the edges of ids that share a value.

    Args:
        runs: Runs of edges, one for each value that two ids share.
        pairs: Records of a value and an id.
        shared: Makes edges of them, and counts what is left out.
    """
    for records in pairs.merged():
        for keys in shared.edges(*records):
            runs.add(keys)


def new_id_counts(num_nodes: int, options: GraphOptions) -> NDArray[np.int64] | None:
    """Returns zeros to count in how many values each id has, ``[num_nodes]``; None where that does not matter."""
    return np.zeros(num_nodes, np.int64) if options.measure == COSINE else None


def value_numbers(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the two halves of a number of 128 bits for each value.

    An integer and its decimal text have the same number, other texts a BLAKE2b hash.
    """
    if pa.types.is_integer(values.type):
        numbers = values.to_numpy(zero_copy_only=False).astype(np.int64)
        return numbers, np.zeros(len(numbers), np.int64)
    encoded = values.dictionary_encode()
    texts, codes = encoded.dictionary, encoded.indices.to_numpy()
    is_integer = pc.match_substring_regex(texts, _INTEGER)
    first = pc.cast(pc.if_else(is_integer, texts, "0"), pa.int64()).to_numpy().copy()
    second = np.zeros(len(first), np.int64)
    hashed = np.flatnonzero(~is_integer.to_numpy(zero_copy_only=False))
    digests = b"".join(map(_digest, texts.take(pa.array(hashed)).to_pylist()))
    first[hashed], second[hashed] = np.frombuffer(digests, "<i8").reshape(-1, 2).T
    return first[codes], second[codes]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class AttributeEdges:
    """Turns records (value, id), sorted by value, into edges, and counts what it leaves out.

    Attributes:
        num_nodes: Number of nodes of the graph.
        max_shared: Most ids that a group may have.
        id_counts: Where the values of each id are counted, ``[num_nodes]``, but for those left out; None for nowhere.
        num_values: Number of distinct values so far.
        num_repeated: Number of pairs of an attribute and an id that were there already.
        num_hubs: Number of groups left out.
        largest_hub: Number of ids in the largest of these.
    """

    num_nodes: int
    max_shared: int
    id_counts: NDArray[np.int64] | None = None
    num_values: int = field(default=0, init=False)
    num_repeated: int = field(default=0, init=False)
    num_hubs: int = field(default=0, init=False)
    largest_hub: int = field(default=0, init=False)

    def edges(
        self, first: NDArray[np.int64], second: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        """Yields keys ``source * num_nodes + target`` of edges both ways, some at a time.

        Args:
            first: First half of each value's number, ascending; all records of a value come in one call.
            second: Second half of each value's number.
            ids: Id of each record.
        """
        order = np.lexsort((ids, second, first))
        first, second, ids = first[order], second[order], ids[order]
        new_value = _changes(first) | _changes(second)
        new_record = new_value | _changes(ids)
        self.num_repeated += int(len(ids) - np.count_nonzero(new_record))
        ids, begins = ids[new_record], np.flatnonzero(new_value[new_record])
        sizes = np.diff(begins, append=len(ids))
        hubs = sizes > self.max_shared
        self.num_values += len(sizes)
        self.num_hubs += int(np.count_nonzero(hubs))
        self.largest_hub = max(self.largest_hub, int(sizes[hubs].max(initial=0)))
        if self.id_counts is not None:
            np.add.at(self.id_counts, ids[np.repeat(~hubs, sizes)], 1)
        taken = ~hubs & (sizes > 1)
        yield from self._expanded(ids, begins[taken], sizes[taken])

    def _expanded(
        self, ids: NDArray[np.int64], begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        """Yields the keys of the groups that begin at these places and have these sizes."""
        members = np.repeat(begins - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        group_begins, group_sizes = np.repeat(begins, sizes), np.repeat(sizes, sizes)
        ends = np.cumsum(group_sizes)
        start = 0
        while start < len(members):
            done = ends[start] - group_sizes[start]
            stop = max(start + 1, int(np.searchsorted(ends, done + _EDGES_AT_A_TIME, side="right")))
            some = slice(start, stop)
            yield self._keys(ids, members[some], group_begins[some], group_sizes[some])
            start = stop

    def _keys(
        self,
        ids: NDArray[np.int64],
        members: NDArray[np.int64],
        group_begins: NDArray[np.int64],
        group_sizes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Returns the keys of edges from every member to every other member of its group."""
        sources = np.repeat(members, group_sizes)
        shift = group_begins - np.cumsum(group_sizes) + group_sizes
        targets = np.arange(len(sources)) + np.repeat(shift, group_sizes)
        others = sources != targets
        return ids[sources[others]] * self.num_nodes + ids[targets[others]]


def _changes(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns where a value differs from the one before; the first one does."""
    result = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=result[1:])
    return result
