"""Leaves out edges between ids that share little, and all but the strongest of each id.

Edges come sorted and merged, some at a time; the last id's may go on in the next part, so they wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distembed.graph.edges import Edges
from distembed.graph.prepare.dropped import DroppedCounts
from distembed.graph.prepare.options import GraphOptions


class NodeCounts(Protocol):
    """What is known of a graph's ids."""

    id_counts: NDArray[np.int64] | None
    dropped: DroppedCounts

    @property
    def num_nodes(self) -> int:
        """Number of ids."""


def strongest_edges(parts: Iterable[Edges], options: GraphOptions, nodes: NodeCounts) -> Iterator[Edges]:
    """Yields the edges that are kept, in the same order; without weights where only the choice needed them.

    Args:
        parts: Edges in ascending order, each once, with weights where these matter.
        options: What is left out.
        nodes: What is known of the ids, and takes what is left out.
    """
    kept = (_measured(_heavy(part, options, nodes.dropped), nodes) for part in parts)
    if options.max_neighbors is not None:
        most = options.max_neighbors
        kept = (_nearest(part, most, nodes) for part in _whole_rows(kept, nodes.num_nodes))
    for edges in kept:
        yield edges if options.weighted else Edges(edges.keys, None)


def _measured(edges: Edges, nodes: NodeCounts) -> Edges:
    """Returns the edges with their weights over the geometric mean of what their ends have, where that is counted."""
    if nodes.id_counts is None or edges.weights is None:
        return edges
    sources = edges.keys // nodes.num_nodes
    counts = nodes.id_counts[sources].astype(np.float64) * nodes.id_counts[edges.keys - sources * nodes.num_nodes]
    return Edges(edges.keys, edges.weights / np.sqrt(counts))


def _whole_rows(parts: Iterable[Edges], num_nodes: int) -> Iterator[Edges]:
    """Yields the same edges in parts in which every id that is there is with all its edges."""
    waiting: list[Edges] = []
    for part in parts:
        begin = int(np.searchsorted(part.keys, part.keys[-1] // num_nodes * num_nodes)) if len(part) else 0
        if begin:
            yield _joined([*waiting, _between(part, 0, begin)])
            waiting = []
        waiting.append(_between(part, begin, len(part)))
    if waiting:
        yield _joined(waiting)


def _heavy(edges: Edges, options: GraphOptions, dropped: DroppedCounts) -> Edges:
    """Returns the edges that weigh enough."""
    if edges.weights is None or options.min_shared == 1:
        return edges
    kept = edges.weights >= options.min_shared
    dropped.rare += int(len(edges) - np.count_nonzero(kept))
    return Edges(edges.keys[kept], edges.weights[kept])


def _nearest(edges: Edges, max_neighbors: int, nodes: NodeCounts) -> Edges:
    """Returns each id's heaviest edges; among equal ones those to the lower ids."""
    assert edges.weights is not None, "a choice by weight has weights"
    sources = edges.keys // nodes.num_nodes
    order = np.lexsort((-edges.weights, sources))  # stable: neighbours of a row are ascending
    begins = np.flatnonzero(np.diff(sources, prepend=-1))
    place_in_row = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    kept = np.sort(order[place_in_row < max_neighbors])
    nodes.dropped.beyond += len(edges) - len(kept)
    return Edges(edges.keys[kept], edges.weights[kept])


def _between(edges: Edges, start: int, stop: int) -> Edges:
    return Edges(edges.keys[start:stop], None if edges.weights is None else edges.weights[start:stop])


def _joined(parts: list[Edges]) -> Edges:
    weights = [part.weights for part in parts if part.weights is not None]
    return Edges(np.concatenate([part.keys for part in parts]), np.concatenate(weights) if weights else None)
