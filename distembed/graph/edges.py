"""Edges as sorted numbers, on their way to compressed sparse rows.

The edge from s to t of a graph with n nodes is the key ``s * n + t``. Sorted keys are the rows one after the other,
each with its neighbours in ascending order, and edges given more than once are next to each other. Trade-off: n is at
most 3,037,000,499, so that keys fit 63 bits; a graph of so many nodes takes 24 GB for the starts of its rows alone.

Weights are summed in the order in which the edges were given, so the sums do not depend on how the input was cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import UserError

MAX_NODES = math.isqrt(2**63 - 1)


@dataclass(frozen=True)
class Edges:
    """Edges of a graph, in any order."""

    keys: NDArray[np.int64]  # key ``source * num_nodes + target`` of each edge
    weights: NDArray[np.float64] | None  # weight of each edge; None for a graph without weights

    def __len__(self) -> int:
        return len(self.keys)


def require_num_nodes(field: str, num_nodes: Any) -> int:
    """Returns the number of nodes, if a graph can have so many.

    Args:
        field: Name of the setting, for the error.
        num_nodes: What was given.
    """
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int | np.integer) or not 1 <= num_nodes <= MAX_NODES:
        raise UserError(
            f"{field} is {num_nodes!r}; a graph has 1 to {MAX_NODES:,} nodes, one for each id of its table."
        )
    return int(num_nodes)


def stored_edges(
    num_nodes: int,
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    weights: NDArray[np.float64] | None,
    directed: bool,
) -> Edges:
    """Returns the edges as they are stored, in the order given: without self-loops, both ways unless ``directed``."""
    others = sources != targets
    if not others.all():
        sources, targets = sources[others], targets[others]
        weights = None if weights is None else weights[others]
    forward = sources * num_nodes + targets
    if directed:
        return Edges(forward, weights)
    # An edge's two ways stay side by side: both rows then sum the weights of repeated edges in the same order.
    keys = np.stack([forward, targets * num_nodes + sources], axis=1).reshape(-1)
    return Edges(keys, None if weights is None else np.repeat(weights, 2))


def sort_edges(edges: Edges) -> Edges:
    """Returns the edges sorted by key; equal keys stay in the order given."""
    if edges.weights is None:
        return Edges(np.sort(edges.keys), None)
    order = np.argsort(edges.keys, kind="stable")
    return Edges(edges.keys[order], edges.weights[order])


def merge_equal(edges: Edges) -> Edges:
    """Returns each of the sorted edges once, with the sum of its weights."""
    first = np.ones(len(edges), bool)
    np.not_equal(edges.keys[1:], edges.keys[:-1], out=first[1:])
    if first.all():
        return edges
    if edges.weights is None:
        return Edges(edges.keys[first], None)
    with np.errstate(over="ignore"):
        sums = np.add.reduceat(edges.weights, np.flatnonzero(first))
    if not np.isfinite(sums).all():
        raise UserError("the weights of an edge that is given several times add up to infinity; give smaller weights.")
    return Edges(edges.keys[first], sums)
