"""SSE-Graph's draw of a neighbour, in constant time and without a look at the other ids.

With odds rho of a neighbour against another id, ``p(j, k)`` is ``rho c`` for the d neighbours k of j and ``c`` for the
others (equation 3). That is a mixture: with probability ``(rho - 1) d / ((rho - 1) d + n)`` a neighbour, else any of
the n other ids, neighbours among them, all alike. So nobody has to ask whether an id is a neighbour.
"""

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from distembed.sse.graph import Graph
from distembed.sse.rule import Walk

_WORD_BITS, _UNIT_BITS = 63, 53
_WORDS_A_STEP = 3  # whether to stop, which slot, whether the slot's own edge


class NeighborDraw:
    """Draws neighbours in one graph.

    Args:
        graph: neighbours of each id; on a GPU it is copied there.
        rho: odds of a neighbour against another id.
        walk: how neighbours are found; None for one step.
        device: of the ids.
    """

    def __init__(self, graph: Graph, rho: float, walk: Walk | None, device: torch.device) -> None:
        self._starts = torch.from_numpy(graph.starts).to(device)
        self._neighbors = torch.from_numpy(graph.neighbors).to(device)
        self._keep, self._alias = (
            None if table is None else torch.from_numpy(table).to(device) for table in (graph.keep, graph.alias)
        )
        self._excess = torch.tensor(rho - 1.0, dtype=torch.float64, device=device)
        self._restart, self._max_steps = (1.0, 1) if walk is None else (walk.restart, walk.max_steps)

    @property
    def num_words(self) -> int:
        """Random words that an id needs."""
        return _WORDS_A_STEP * self._max_steps

    def __call__(
        self, ids: Int64[Tensor, " ids"], num_others: Int64[Tensor, " ids"], words: Int64[Tensor, "words ids"]
    ) -> tuple[Bool[Tensor, " ids"], Int64[Tensor, " ids"]]:
        """Whether each id is replaced by a neighbour, and by which one where it is.

        Args:
            ids: nodes of the graph.
            num_others: ids that could be drawn in the place of each.
            words: random integers below 2^63, ``num_words`` for each id.
        """
        # both sides divided by rho - 1, so that none overflows
        degrees = self._degrees(ids).double()
        chosen = _unit(words[0]) * (degrees + num_others.double() / self._excess) < degrees
        previous, node = ids, self._neighbor(ids, words[1], words[2])
        walking = chosen
        for step in range(1, self._max_steps):
            stop, slot, own = words[_WORDS_A_STEP * step : _WORDS_A_STEP * (step + 1)]
            walking = walking & (_unit(stop) >= self._restart) & (self._degrees(node) > 0)
            previous = torch.where(walking, node, previous)
            node = torch.where(walking, self._neighbor(node, slot, own), node)
        return chosen, torch.where(node == ids, previous, node)

    def _degrees(self, ids: Int64[Tensor, " ids"]) -> Int64[Tensor, " ids"]:
        return self._starts.index_select(0, ids + 1) - self._starts.index_select(0, ids)

    def _neighbor(
        self, ids: Int64[Tensor, " ids"], slot_words: Int64[Tensor, " ids"], own_words: Int64[Tensor, " ids"]
    ) -> Int64[Tensor, " ids"]:
        """A neighbour of each id in proportion to its weight; anything for ids without.

        Walker's alias method: each of d slots holds its own edge and at most one other.
        """
        degrees = self._degrees(ids).clamp(min=1)
        starts = self._starts.index_select(0, ids).clamp(max=len(self._neighbors) - 1)
        # below 2^63, the remainder favours small slots by less than d / 2^63
        edges = starts + slot_words % degrees
        if self._keep is not None and self._alias is not None:
            aliases = starts + self._alias.index_select(0, edges)
            edges = torch.where(_unit(own_words) < self._keep.index_select(0, edges), edges, aliases)
        return self._neighbors.index_select(0, edges).long()


def _unit(words: Int[Tensor, " words"]) -> Float64[Tensor, " words"]:
    """Numbers in [0, 1) of the upper 53 of 63 bits."""
    return (words >> (_WORD_BITS - _UNIT_BITS)).double() * 2.0**-_UNIT_BITS
