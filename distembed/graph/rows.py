"""From edges to compressed sparse rows: sorted edges, and the alias tables that draw weighted neighbours.

The edge from s to t of a graph with n nodes is the key ``s * n + t``. Sorted keys are the rows one after the other,
each with its neighbours in ascending order; repeated edges are adjacent, and their weights are summed in the order
given. Trade-off: n is at most 3,037,000,499, so that keys fit 63 bits.

Walker's alias method draws a neighbour in proportion to its weight by two random numbers. A row of d edges has d slots
of equal size. Slot i belongs to edge i up to ``keep[i]`` and to edge ``alias[i]`` beyond: draw a slot and a number u in
[0, 1), take the slot's own edge if ``u < keep`` and its alias otherwise (Walker, "An efficient method for generating
discrete random variables with general distributions", ACM TOMS 1977).

All rows are filled at once, by prefix sums in place of the usual stacks. Weights are first rounded to integers that sum
to d slots of T units. Light edges (below T) leave a deficit, heavy ones an excess; laid end to end, in the row's order,
both cover the same stretch::

    deficits of light edges   |--- a ---|-- b --|---- c ----|
    excesses of heavy edges   |------ A ------|---- B ------|
                                              ^^ b's slot takes more from A than A has:
                                                 A's own slot makes it good from B

A light edge's alias is the heavy edge in whose excess its deficit begins; a heavy edge keeps T less its overshoot and
leaves the rest to the next heavy edge. Integers make the sums exact, and a row's tables independent of its neighbours.

Trade-off: probabilities are rounded to multiples of 2^-40 / d (a row of more than 2^22 edges: 2^-31 / d at 2^30).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import UserError

BLOCK_EDGES = 2**20
"""Number of edges whose tables are made at once; a longer row is a block of its own."""

_SLOT_BITS = 40
_SUM_BITS = 62


def row_blocks(starts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yields consecutive ranges of rows ``[first, last)``: up to BLOCK_EDGES rows and edges each, or one longer row."""
    start, num_rows = 0, len(starts) - 1
    while start < num_rows:
        # the last row end that is at most BLOCK_EDGES edges after the range's first edge
        window = starts[start : start + BLOCK_EDGES + 1]
        stop = start + max(1, int(np.searchsorted(window, window[0] + BLOCK_EDGES, side="right")) - 1)
        yield start, stop
        start = stop


def alias_tables(
    starts: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Computes ``keep`` and ``alias`` of every edge of a block of rows.

    Args:
        starts: First edge of each row, counted from the block's first edge, then the number of edges, ``[rows + 1]``.
        weights: Weight of each edge, finite and above 0, ``[edges]``.

    Returns:
        ``keep`` in ``(0, 1]`` and ``alias``, the position of the other edge within the row, each ``[edges]``.
    """
    degrees = np.diff(starts)
    begins, degrees = starts[:-1][degrees > 0], degrees[degrees > 0]
    row = np.repeat(np.arange(len(degrees)), degrees)
    slot_units = _slot_units(degrees)
    edge_units = _units(weights, begins, degrees, row, slot_units)
    edge_slot = slot_units[row]
    keep, alias = edge_units.copy(), np.arange(len(weights))
    light_edges, heavy_edges = np.flatnonzero(edge_units < edge_slot), np.flatnonzero(edge_units > edge_slot)
    if len(light_edges):
        # Ends of the intervals in the module's drawing. In each row deficits and excesses have the same sum, so one
        # cumulative sum over the block serves all rows: no interval crosses from one row into the next.
        deficits = np.concatenate([np.zeros(1, np.int64), np.cumsum(edge_slot[light_edges] - edge_units[light_edges])])
        excesses = np.cumsum(edge_units[heavy_edges] - edge_slot[heavy_edges])
        alias[light_edges] = heavy_edges[np.searchsorted(excesses, deficits[:-1], side="right")]
        # distance from the end of each excess to the end of the deficit that spans it; 0 if a deficit ends there
        overshoot = deficits[np.searchsorted(deficits, excesses, side="left")] - excesses
        keep[heavy_edges] = edge_slot[heavy_edges] - overshoot
        # only heavy edges with an overshoot; the last heavy edge of a row never has one
        over = np.flatnonzero(overshoot)
        alias[heavy_edges[over]] = heavy_edges[over + 1]
    return keep / edge_slot, (alias - begins[row]).astype(np.int32)


def _slot_units(degrees: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the units T of a slot of each row: 2^40, or fewer in long rows, so that sums over a block fit int64."""
    # degree < 2^bits, so degree * T < 2^62
    bits = np.frexp(degrees.astype(np.float64))[1]
    return np.left_shift(np.int64(1), np.minimum(_SLOT_BITS, _SUM_BITS - bits).astype(np.int64))


def _units(
    weights: NDArray[np.float64],
    begins: NDArray[np.int64],
    degrees: NDArray[np.int64],
    row: NDArray[np.int64],
    slot_units: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Returns weights as integers of at least 1 that sum to ``degree * T`` in each row; no row may be empty."""
    if not len(weights):
        return np.zeros(0, np.int64)
    shares = weights / np.maximum.reduceat(weights, begins)[row]  # at most 1: their sum cannot overflow
    scale = degrees * slot_units / np.add.reduceat(shares, begins)
    units = np.maximum(np.rint(shares * scale[row]).astype(np.int64), 1)
    # The row's first edge of the largest weight, which has T units or more, takes the rounding error.
    largest = np.flatnonzero(shares == 1.0)
    first = largest[np.searchsorted(largest, begins)]
    units[first] += degrees * slot_units - np.add.reduceat(units, begins)
    return units


MAX_NODES = math.isqrt(2**63 - 1)


@dataclass(frozen=True)
class Edges:
    """Edges of a graph, in any order."""

    keys: NDArray[np.int64]  # key ``source * num_nodes + target`` of each edge
    weights: NDArray[np.float64] | None  # weight of each edge; None for a graph without weights

    def __len__(self) -> int:
        return len(self.keys)


def require_num_nodes(field: str, num_nodes: Any) -> int:
    """Returns ``num_nodes`` as an int; a UserError that names ``field`` unless it is an integer in [1, MAX_NODES]."""
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
    """Makes keys of edges in the given order; drops self-loops, and adds each edge's reverse unless ``directed``."""
    is_no_loop = sources != targets
    if not is_no_loop.all():
        sources, targets = sources[is_no_loop], targets[is_no_loop]
        weights = None if weights is None else weights[is_no_loop]
    forward = sources * num_nodes + targets
    if directed:
        return Edges(forward, weights)
    # An edge and its reverse are adjacent: both directions of a repeated edge then sum its weights in one order, and
    # floating-point rounding gives both the same sum.
    keys = np.stack([forward, targets * num_nodes + sources], axis=1).reshape(-1)
    return Edges(keys, None if weights is None else np.repeat(weights, 2))


def sort_edges(edges: Edges) -> Edges:
    """Returns the edges sorted by key; equal keys stay in the order given."""
    if edges.weights is None:
        return Edges(np.sort(edges.keys), None)
    order = np.argsort(edges.keys, kind="stable")
    return Edges(edges.keys[order], edges.weights[order])


def merge_equal(edges: Edges) -> Edges:
    """Merges repeated edges of a sorted list and adds their weights; a UserError if a sum overflows."""
    # True at the first edge of each run of equal keys
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
