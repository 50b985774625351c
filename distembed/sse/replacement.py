"""Replaces ids of a batch, as a pure function of the ids, the step and the rank.

Which ids are replaced, and all random integers, come from the CPU (:mod:`distembed.sse.draws`), for a GPU a step ahead
(:mod:`distembed.sse.ahead`); what depends on the ids themselves is computed on their device, without a copy back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from distembed.base.errors import UserError
from distembed.sse.ahead import DrawAhead
from distembed.sse.arrays import Array, as_array, as_int64, assign, count_each, on_device, sent_to_device, where
from distembed.sse.draws import FIRST_NEIGHBOR_WORD, Drawer, StepDraws
from distembed.sse.neighbors import NeighborDraw
from distembed.sse.random_words import word
from distembed.sse.rule import SSE
from distembed.sse.stream import IdStream

_NO_ID = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ReplacedIds:
    """The ids of a batch after replacement.

    Attributes:
        ids: The tensor that came in where none was drawn, else one with other ids.
        num_drawn: Number of ids of each stream that were drawn to be replaced, ``[streams]``.
        num_unchanged: Number of these that stayed as they were, ``[streams]`` on the ids' device; None where none can.
    """

    ids: Int[Tensor, "*shape"]
    num_drawn: NDArray[np.int64]
    num_unchanged: Array | None = None


class Replacer:
    """Replaces the ids of a list of streams.

    Args:
        streams: Features whose ids are replaced.
        device: Device of the ids.
        dtype: Type of the ids.
        may_be_outside: Whether ids may lie outside of their tables, as a label's -100 does; these stay.
    """

    def __init__(
        self, streams: Sequence[IdStream], device: torch.device, dtype: torch.dtype, may_be_outside: bool
    ) -> None:
        _require_room(streams, dtype)
        self.device, self.dtype = device, dtype
        self._num_streams = len(streams)
        drawer = Drawer(streams)
        self._draw = drawer if device.type == "cpu" else DrawAhead(drawer)
        self._has_reserved = any(s.sse.reserved for s in streams)
        self._num_first = self._per_stream([s.num_first_reserved for s in streams])
        self._other_reserved = [self._per_stream(row) for row in _other_reserved(streams)]
        self._num_drawable = self._per_stream([s.num_drawable for s in streams])
        self._num_embeddings = self._per_stream([s.num_embeddings for s in streams]) if may_be_outside else None
        keep_reserved = [s.sse.keep_reserved and bool(s.sse.reserved) for s in streams]
        self._keep_reserved = self._per_stream(keep_reserved) if any(keep_reserved) else None
        self._graphs = list(_graphs(streams, device))

    def _per_stream(self, values: Sequence[int]) -> Array:
        """Returns one number a stream as an array on the ids' device."""
        return on_device(np.array(values), self.device)

    def __call__(
        self,
        ids: Int[Tensor, "*shape"],
        counts: tuple[int, ...],
        starts: tuple[int, ...],
        step: int,
        rank: int,
        in_place: bool = False,
    ) -> ReplacedIds:
        """Replaces ids by the numbers of this step and rank.

        Args:
            ids: Ids of all features; those of each lie side by side.
            counts: Number of ids of each stream.
            starts: Place of each stream's first id.
            step: Step of the run, over all epochs.
            rank: Rank of this process.
            in_place: Whether ids may be written to, if they are contiguous; else a copy is.
        """
        draws = self._draw(counts, starts, step, rank)
        num_drawn = np.diff(draws.bounds)
        if not len(draws.places):
            return ReplacedIds(ids, num_drawn)
        # a view where that is possible; never of what must not be written to
        replaced = ids.detach().reshape(-1) if in_place else ids.detach().reshape(-1).clone()
        array, places = as_array(replaced), sent_to_device(draws.places, self.device)
        old, streams = as_int64(array.take(places)), sent_to_device(draws.streams, self.device)
        outside = self._outside(old, streams)
        new, is_reserved = self._another(old, streams, draws)
        for graph in self._graphs:
            inside = old if outside is None else where(outside, self._num_first.take(streams), old)
            graph.put_neighbors(new, inside, is_reserved, self._num_drawable.take(streams), draws)
        unchanged = outside
        if self._keep_reserved is not None:
            stays = is_reserved & self._keep_reserved.take(streams)
            unchanged = stays if unchanged is None else unchanged | stays
        assign(array, places, new if unchanged is None else where(unchanged, old, new))
        num_unchanged = None if unchanged is None else count_each(streams, unchanged, self._num_streams)
        return ReplacedIds(replaced.view(ids.shape), num_drawn, num_unchanged)

    def _outside(self, old: Array, streams: Array) -> Array | None:
        """Returns which ids lie outside of their tables; None where none may."""
        if self._num_embeddings is None:
            return None
        return (old < 0) | (old >= self._num_embeddings.take(streams))

    def _another(self, old: Array, streams: Array, draws: StepDraws) -> tuple[Array, Array | None]:
        """Returns for each id another one that is not reserved, and whether the id itself is; None where none can be.

        The reserved ids from 0 on are passed over by a shift, which the drawn numbers contain, each other one by a
        comparison.
        """
        among_others = sent_to_device(draws.among_others, self.device)
        if not self._has_reserved:
            return among_others + (among_others >= old), None
        is_reserved = old < sent_to_device(draws.num_first, self.device)
        position = old  # of the id among those that may be drawn, shifted likewise
        others = [row.take(streams) for row in self._other_reserved]
        for other in others:
            is_reserved = is_reserved | (old == other)
            position = position + (old > other) * -1
        new = among_others + (among_others >= position)
        if isinstance(is_reserved, Tensor):  # which ids they are is not known on the CPU
            new = where(is_reserved, sent_to_device(draws.among_all(slice(None)), self.device), new)
        else:
            reserved = np.flatnonzero(is_reserved)
            new[reserved] = draws.among_all(reserved)
        for other in others:
            new = new + (new >= other)
        return new, is_reserved


class _GraphDraw:
    """Draws neighbours for the streams that share a graph and a walk."""

    def __init__(self, neighbors: NeighborDraw, excess: NDArray[np.float64], device: torch.device) -> None:
        self._neighbors = neighbors
        self._has_graph = excess > 0
        self._excess = on_device(excess, device)
        self._device = device

    def put_neighbors(
        self, new: Array, old: Array, is_reserved: Array | None, num_drawable: Array, draws: StepDraws
    ) -> None:
        """Replaces some of the new ids by neighbours of the old ones.

        Args:
            new: New id of each drawn id, which is written to.
            old: The drawn ids as they were.
            is_reserved: Whether each of these is reserved; None where none can be.
            num_drawable: Number of ids that may be drawn in each one's table.
            draws: Random numbers of the step.
        """
        chosen = np.flatnonzero(self._has_graph.take(draws.streams))
        states = draws.states.take(chosen)
        numbers = range(FIRST_NEIGHBOR_WORD, FIRST_NEIGHBOR_WORD + self._neighbors.num_words)
        words = [sent_to_device((word(states, n) >> np.uint64(1)).view(np.int64), self._device) for n in numbers]
        own, streams = (sent_to_device(values, self._device) for values in (chosen, draws.streams.take(chosen)))
        num_others = num_drawable.take(own) - 1
        if is_reserved is not None:
            num_others = num_others + is_reserved.take(own)
        is_neighbor, neighbors = self._neighbors(old.take(own), num_others, self._excess.take(streams), words)
        assign(new, own, where(is_neighbor, neighbors, new.take(own)))


def _graphs(streams: Sequence[IdStream], device: torch.device) -> Iterator[_GraphDraw]:
    """Yields one draw for each distinct pair of graph and walk; a graph is copied to a GPU once."""
    kinds = {(id(s.sse.graph), s.sse.walk): s.sse for s in streams if _draws_neighbors(s.sse)}
    placed: dict[int, NeighborDraw] = {}
    for (graph, walk), sse in kinds.items():
        assert sse.graph is not None
        placed[graph] = placed[graph].with_walk(walk) if graph in placed else NeighborDraw(sse.graph, walk, device)
        excess = [s.sse.rho - 1.0 if s.sse.graph is sse.graph and s.sse.walk == walk else 0.0 for s in streams]
        yield _GraphDraw(placed[graph], np.array(excess), device)


def _draws_neighbors(sse: SSE) -> bool:
    return sse.graph is not None and sse.rho > 1 and sse.p0 > 0


def graph_bytes(sse: Mapping[str, SSE], device_kind: str = "cuda") -> dict[str, int]:
    """Returns what the graphs take of the memory of every rank's device, in bytes by table.

    On CUDA every rank has a copy of all arrays. On a CPU a graph that is mapped from its folder counts nothing: ranks
    of a machine share the file's pages, which the system drops and reads again as it needs to. A graph that was built
    in memory counts in full, in each process. Sizes are those of arrays and files; their contents are not read.

    Args:
        sse: Rules by table, as :func:`distembed.sse.config.build_sse` returns them.
        device_kind: Kind of the device, ``cuda`` or ``cpu``.

    Returns:
        Bytes by table; a graph of several tables counts under the first of them, and tables without one have 0.
    """
    found = dict.fromkeys(sse, 0)
    counted: set[int] = set()
    for table, rule in sse.items():
        if rule.graph is None or not _draws_neighbors(rule) or id(rule.graph) in counted:
            continue
        counted.add(id(rule.graph))
        is_shared_file = device_kind == "cpu" and rule.graph.folder is not None
        found[table] = 0 if is_shared_file else rule.graph.nbytes
    return found


def _other_reserved(streams: Sequence[IdStream]) -> Iterator[list[int]]:
    """Yields the reserved ids beyond those from 0 on: the least one of each stream, then the second one, and so on.

    A stream that has no more of them gives an id that is in no table.
    """
    rest = [s.sse.reserved[s.num_first_reserved :] for s in streams]
    for i in range(max((len(ids) for ids in rest), default=0)):
        yield [ids[i] if i < len(ids) else _NO_ID for ids in rest]


def _require_room(streams: Sequence[IdStream], dtype: torch.dtype) -> None:
    """Makes sure that a type holds every id that may be drawn."""
    for stream in streams:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise UserError(f"table {stream.table!r}: ids are of {dtype}, but must be integers; give int64 or int32.")
        if torch.iinfo(dtype).max < stream.num_embeddings - 1:
            raise UserError(
                f"table {stream.table!r}: ids are of {dtype}, which does not hold those that may be drawn, up to "
                f"{stream.num_embeddings - 1}; give int64."
            )
