"""Draws SSE-Graph's neighbours in constant time, whatever the number of other ids.

With odds rho of a neighbour against another id, ``p(j, k)`` is ``rho c`` for the d neighbours k of j and ``c`` for the
others (equation 3). That is a mixture: with probability ``(rho - 1) d / ((rho - 1) d + n)`` a neighbour is drawn, else
any of the n other ids with equal probability, neighbours among them. So no id has to be looked up among the neighbours.
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
        graph: Neighbours of each id; its arrays are copied to a GPU.
        walk: Random walk at whose end a neighbour is drawn; None for one step.
        device: Device of the ids.
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
        """Returns a draw by another walk that shares this one's arrays."""
        other = copy.copy(self)
        other._set_walk(walk)
        return other

    def _set_walk(self, walk: Walk | None) -> None:
        self._restart, self._max_steps = (1.0, 1) if walk is None else (walk.restart, walk.max_steps)

    @property
    def num_words(self) -> int:
        """Number of random words that an id needs.

        Each step takes one for whether it is taken, one for the slot, and in weighted graphs one for the slot's edge.
        """
        return (2 if self._alias_tables is None else 3) * self._max_steps

    def __call__(self, ids: Array, num_others: Array, excess: Array, words: Sequence[Array]) -> tuple[Array, Array]:
        """Returns whether each id is replaced by a neighbour, and by which one where it is.

        Args:
            ids: Nodes of the graph.
            num_others: Number of ids that could be drawn in the place of each.
            excess: rho - 1 for each id, above 0.
            words: Random integers below 2^63 for each id, ``num_words`` arrays of them.
        """
        words_per_step = len(words) // self._max_steps
        # both sides divided by rho - 1, so that none overflows
        degrees = as_float64(self._degrees(ids))
        chosen = _unit(words[0]) * (degrees + as_float64(num_others) / excess) < degrees
        previous, node = ids, self._neighbor(ids, words[1:words_per_step])
        walking = chosen
        for step in range(1, self._max_steps):
            stop, *slot = words[words_per_step * step : words_per_step * (step + 1)]
            walking = walking & (_unit(stop) >= self._restart) & (self._degrees(node) > 0)
            previous = where(walking, node, previous)
            node = where(walking, self._neighbor(node, slot), node)
        return chosen, where(node == ids, previous, node)

    def _degrees(self, ids: Array) -> Array:
        return self._starts.take(ids + 1) - self._starts.take(ids)

    def _neighbor(self, ids: Array, words: Sequence[Array]) -> Array:
        """Draws a neighbour of each id in proportion to its weight, by Walker's alias method (Walker 1977).

        What it returns for ids without neighbours has no meaning.
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
    """Turns integers of 63 bits into numbers in [0, 1), by their upper 53 bits."""
    return as_float64(words >> (_WORD_BITS - _UNIT_BITS)) * 2.0**-_UNIT_BITS
