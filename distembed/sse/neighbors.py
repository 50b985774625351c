"""SSE-Graph's draw of a neighbour, in constant time and without a look at the other ids.

With odds rho of a neighbour against another id, ``p(j, k)`` is ``rho c`` for the d neighbours k of j and ``c`` for the
others (equation 3). That is a mixture: with probability ``(rho - 1) d / ((rho - 1) d + n)`` a neighbour, else any of
the n other ids, neighbours among them, all alike. So nobody has to ask whether an id is a neighbour.
"""

import copy
from collections.abc import Sequence

import torch

from distembed.graph import Graph
from distembed.sse.arrays import Array, as_float64, as_int64, on_device, where
from distembed.sse.rule import Walk

_WORD_BITS, _UNIT_BITS = 63, 53


class NeighborDraw:
    """Draws neighbours in one graph.

    Args:
        graph: neighbours of each id; on a GPU it is copied there.
        walk: how neighbours are found; None for one step.
        device: of the ids.
    """

    def __init__(self, graph: Graph, walk: Walk | None, device: torch.device) -> None:
        self._starts, self._neighbors = (on_device(array, device) for array in (graph.starts, graph.neighbors))
        self._alias_tables = (
            None
            if graph.keep is None or graph.alias is None
            else (on_device(graph.keep, device), on_device(graph.alias, device))
        )
        self._set_walk(walk)

    def with_walk(self, walk: Walk | None) -> "NeighborDraw":
        """Draws by another walk in the same arrays."""
        other = copy.copy(self)
        other._set_walk(walk)
        return other

    def _set_walk(self, walk: Walk | None) -> None:
        self._restart, self._max_steps = (1.0, 1) if walk is None else (walk.restart, walk.max_steps)

    @property
    def num_words(self) -> int:
        """Random words that an id needs: for each step whether to take it, which slot, and which end of the slot."""
        return (2 if self._alias_tables is None else 3) * self._max_steps

    def __call__(self, ids: Array, num_others: Array, excess: Array, words: Sequence[Array]) -> tuple[Array, Array]:
        """Whether each id is replaced by a neighbour, and by which one where it is.

        Args:
            ids: nodes of the graph.
            num_others: ids that could be drawn in the place of each.
            excess: rho - 1 of each, above 0.
            words: random integers below 2^63 of each, ``num_words`` times.
        """
        of_step = len(words) // self._max_steps
        # both sides divided by rho - 1, so that none overflows
        degrees = as_float64(self._degrees(ids))
        chosen = _unit(words[0]) * (degrees + as_float64(num_others) / excess) < degrees
        previous, node = ids, self._neighbor(ids, words[1:of_step])
        walking = chosen
        for step in range(1, self._max_steps):
            stop, *slot = words[of_step * step : of_step * (step + 1)]
            walking = walking & (_unit(stop) >= self._restart) & (self._degrees(node) > 0)
            previous = where(walking, node, previous)
            node = where(walking, self._neighbor(node, slot), node)
        return chosen, where(node == ids, previous, node)

    def _degrees(self, ids: Array) -> Array:
        return self._starts.take(ids + 1) - self._starts.take(ids)

    def _neighbor(self, ids: Array, words: Sequence[Array]) -> Array:
        """A neighbour of each id in proportion to its weight; anything for ids without.

        Walker's alias method: each of d slots holds its own edge and at most one other.
        """
        starts = self._starts.take(ids)
        degrees = (self._starts.take(ids + 1) - starts).clip(1)
        starts = starts.clip(0, len(self._neighbors) - 1)
        # below 2^63, the remainder favours small slots by less than d / 2^63
        edges = starts + words[0] % degrees
        if self._alias_tables is not None:
            keep, alias = self._alias_tables
            edges = where(_unit(words[1]) < keep.take(edges), edges, starts + alias.take(edges))
        return as_int64(self._neighbors.take(edges))


def _unit(words: Array) -> Array:
    """Numbers in [0, 1) of the upper 53 of 63 bits."""
    return as_float64(words >> (_WORD_BITS - _UNIT_BITS)) * 2.0**-_UNIT_BITS
