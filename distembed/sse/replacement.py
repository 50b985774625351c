"""Replaces ids of a batch: a pure function of the ids, the step and the rank.

Which ids are replaced, and all random integers, come from the CPU (:mod:`distembed.sse.random_words`); what depends on
the ids themselves happens where they are, without a copy back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from distembed.errors import UserError
from distembed.sse.neighbors import NeighborDraw
from distembed.sse.positions import Drawn, draw_positions
from distembed.sse.random_words import below, place_key, stream_key, word
from distembed.sse.reserved import ReservedIds
from distembed.sse.rule import SSE

# what the words of an id's generator are used for; 0 is the gap before it
_ANOTHER, _NEIGHBOR = 1, 2


@dataclass(frozen=True)
class IdStream:
    """The ids of one feature, with random numbers of their own.

    Attributes:
        table: that the feature is looked up in.
        feature: its name.
        num_embeddings: ids lie in ``[0, num_embeddings)``.
        sse: how they are replaced.
        seed: of the random numbers, with both names.
    """

    table: str
    feature: str
    num_embeddings: int
    sse: SSE
    seed: int

    def __post_init__(self) -> None:
        self.sse.require_fit(self.num_embeddings, f"table {self.table!r}: sse")

    @property
    def num_drawable(self) -> int:
        """Ids that may be drawn: all but the reserved ones."""
        return self.num_embeddings - len(self.sse.reserved)

    def rate(self, step: int) -> float:
        """Probability that an id is drawn anew at this step: 0 where there is no other id to draw."""
        return self.sse.rate(step) if self.num_drawable > 1 else 0.0


@dataclass(frozen=True)
class Replaced:
    """A batch after replacement.

    Attributes:
        ids: the tensor that came in where none was drawn, else a copy.
        num_drawn: how many ids of each stream were drawn anew.
        num_kept: of these, how many stayed as they were because they are reserved, on the ids' device; None where none
            could.
    """

    ids: Int[Tensor, "*shape"]
    num_drawn: NDArray[np.int64]
    num_kept: Int64[Tensor, " streams"] | None = None


class Replacer:
    """Replaces the ids of these streams.

    Args:
        streams: of the features whose ids are replaced.
        device: of the ids.
        dtype: of the ids.

    Raises:
        UserError: for a type that does not hold all ids.
    """

    def __init__(self, streams: Sequence[IdStream], device: torch.device, dtype: torch.dtype) -> None:
        _require_room(streams, dtype)
        self._streams = list(streams)
        self._stream_numbers = np.arange(len(streams) + 1)
        self._is_scheduled = any(s.sse.schedule for s in streams)
        self._first_rates = self._rates(0)
        self.device, self.dtype = device, dtype
        self._keys = np.array([stream_key(s.seed, s.table, s.feature) for s in streams])
        self._num_drawable = np.array([max(2, s.num_drawable) for s in streams], dtype=np.uint64)
        self._reserved = ReservedIds.of([s.sse.reserved for s in streams], device)
        keeps = [s.sse.keep_reserved for s in streams]
        self._keeps = torch.tensor(keeps, device=device) if any(keeps) and self._reserved is not None else None
        self._neighbors = {
            i: NeighborDraw(s.sse.graph, s.sse.rho, s.sse.walk, device)
            for i, s in enumerate(streams)
            if s.sse.graph is not None
        }

    def __call__(
        self, ids: Int[Tensor, "*shape"], counts: tuple[int, ...], starts: Sequence[int], step: int, rank: int
    ) -> Replaced:
        """Replaces ids by the numbers of this step and rank.

        Args:
            ids: of all features; those of each lie side by side, and in its table.
            counts: ids of each stream.
            starts: where those of each stream begin.
            step: of the run, over all epochs.
            rank: of this process.
        """
        rates = self._rates(step) if self._is_scheduled else self._first_rates
        if not any(rates):
            return Replaced(ids, np.zeros(len(rates), np.int64))
        drawn = draw_positions(counts, rates, self._keys ^ place_key(step, rank))
        bounds = np.searchsorted(drawn.features, self._stream_numbers)
        if not len(drawn.features):
            return Replaced(ids, np.diff(bounds))
        places = self._on_device(drawn.positions + np.array(starts).take(drawn.features))
        replaced = ids.reshape(-1).clone()
        old = replaced.index_select(0, places).long()
        new, kept = self._draw(old, drawn, bounds)
        return Replaced(replaced.scatter_(0, places, new.to(ids.dtype)).view(ids.shape), np.diff(bounds), kept)

    def _rates(self, step: int) -> tuple[float, ...]:
        return tuple(stream.rate(step) for stream in self._streams)

    def _draw(
        self, old: Int64[Tensor, " drawn"], drawn: Drawn, bounds: NDArray[np.int64]
    ) -> tuple[Int64[Tensor, " drawn"], Int64[Tensor, " streams"] | None]:
        """The ids in the place of the old ones, and for each stream how many were kept."""
        num_drawable = self._num_drawable.take(drawn.features)
        words = word(drawn.states, _ANOTHER)
        among_others = self._on_device(below(words, num_drawable - np.uint64(1)))
        if self._reserved is None:
            return self._with_neighbors(among_others + (among_others >= old), old, drawn, bounds, None), None
        # an id takes one of the two numbers, so that they may come of one word
        among_all = self._on_device(below(words, num_drawable))
        features = self._on_device(drawn.features)
        new, is_reserved = self._reserved.another(old, features, among_others, among_all)
        new = self._with_neighbors(new, old, drawn, bounds, is_reserved)
        if self._keeps is None:
            return new, None
        stays = is_reserved & self._keeps.index_select(0, features)
        kept = torch.zeros(len(self._streams), dtype=torch.long, device=old.device)
        return torch.where(stays, old, new), kept.index_add_(0, features, stays.long())

    def _with_neighbors(
        self,
        new: Int64[Tensor, " drawn"],
        old: Int64[Tensor, " drawn"],
        drawn: Drawn,
        bounds: NDArray[np.int64],
        is_reserved: Bool[Tensor, " drawn"] | None,
    ) -> Int64[Tensor, " drawn"]:
        """The new ids, with neighbours of the old ones in the place of some, where a feature has a graph."""
        for feature, draw in self._neighbors.items():
            own = slice(bounds[feature], bounds[feature + 1])
            words = [word(drawn.states[own], _NEIGHBOR + i) >> np.uint64(1) for i in range(draw.num_words)]
            num_others = torch.full_like(old[own], int(self._num_drawable[feature]) - 1)
            if is_reserved is not None:
                num_others += is_reserved[own]
            chosen, neighbors = draw(old[own], num_others, self._on_device(np.stack(words).view(np.int64)))
            new[own] = torch.where(chosen, neighbors, new[own])
        return new

    def _on_device(self, values: NDArray[np.int64]) -> Int64[Tensor, "..."]:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def _require_room(streams: Sequence[IdStream], dtype: torch.dtype) -> None:
    for stream in streams:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise UserError(f"table {stream.table!r}: ids are of {dtype}, but must be integers; give int64 or int32.")
        if torch.iinfo(dtype).max < stream.num_embeddings - 1:
            raise UserError(
                f"table {stream.table!r}: ids are of {dtype}, which does not hold those that may be drawn, up to "
                f"{stream.num_embeddings - 1}; give int64."
            )
