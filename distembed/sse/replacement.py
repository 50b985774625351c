"""Replaces ids of a batch, as a pure function of the ids, the step and the rank.

The CPU draws which ids are replaced, and all random integers (:mod:`distembed.sse.draws`); the new ids, which depend on
the old ones, are computed on the ids' device without a copy back.

SSE-Graph takes constant time for any number of ids. With odds rho of a neighbour against another id, ``p(j, k)``
is ``rho c`` for the d neighbours k of j and ``c`` for the n other ids (equation 3). That is a mixture: with probability
``(rho - 1) d / ((rho - 1) d + n)`` a neighbour is drawn, else any of the n other ids, neighbours among them, with equal
probability. So no id has to be looked up among the neighbours.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from distembed.base.errors import UserError
from distembed.graph import Graph
from distembed.sse.arrays import (
    Array,
    as_array,
    as_float64,
    as_int64,
    assign,
    count_each,
    on_device,
    sent_to_device,
    where,
)
from distembed.sse.draws import FIRST_NEIGHBOR_WORD, DrawAhead, Drawer, StepDraws
from distembed.sse.random_words import word
from distembed.sse.rule import SSE, IdStream, Walk

_WORD_BITS, _UNIT_BITS = 63, 53
_NO_ID = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ReplacedIds:
    """The ids of a batch after replacement."""

    ids: Int[Tensor, "*shape"]  # the given tensor if no id was drawn, else one with the new ids
    num_drawn: NDArray[np.int64]  # number of ids of each stream that were drawn to be replaced, ``[streams]``
    # number of these that stayed as they were, ``[streams]`` on the ids' device; None where none can
    num_unchanged: Array | None = None


class Replacer:
    """Replaces the ids of a list of streams, in batches of one device and dtype.

    With ``may_be_outside``, ids may lie outside of their tables, like a label of -100; they stay as they are. Raises a
    UserError for a dtype that cannot hold a stream's ids.
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
        self._firsts = self._per_stream([s.first for s in streams]) if any(s.first for s in streams) else None
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
            ids: Ids of all features, feature by feature.
            counts: Number of ids of each stream.
            starts: Index of each stream's first id in the flattened ids.
            step: Step of the run, over all epochs.
            rank: Rank of this process.
            in_place: Whether new ids are written into ``ids`` if they are contiguous, instead of into a copy.
        """
        draws = self._draw(counts, starts, step, rank)
        num_drawn = np.diff(draws.bounds)
        if not len(draws.places):
            return ReplacedIds(ids, num_drawn)
        replaced = ids.detach().reshape(-1) if in_place else ids.detach().reshape(-1).clone()
        array, positions = as_array(replaced), sent_to_device(draws.places, self.device)
        old_ids, streams = as_int64(array.take(positions)), sent_to_device(draws.streams, self.device)
        firsts = None if self._firsts is None else self._firsts.take(streams)
        if firsts is not None:
            old_ids = old_ids - firsts
        outside = None
        if self._num_embeddings is not None:
            outside = (old_ids < 0) | (old_ids >= self._num_embeddings.take(streams))
        new_ids, is_reserved = self._another(old_ids, streams, draws)
        for graph in self._graphs:
            # an id outside of the table has no node in the graph: any node serves, as the result is discarded below
            inside = old_ids if outside is None else where(outside, self._num_first.take(streams), old_ids)
            graph.put_neighbors(new_ids, inside, is_reserved, self._num_drawable.take(streams), draws)
        unchanged = outside
        if self._keep_reserved is not None:
            stays = is_reserved & self._keep_reserved.take(streams)
            unchanged = stays if unchanged is None else unchanged | stays
        written = new_ids if unchanged is None else where(unchanged, old_ids, new_ids)
        assign(array, positions, written if firsts is None else written + firsts)
        num_unchanged = None if unchanged is None else count_each(streams, unchanged, self._num_streams)
        return ReplacedIds(replaced.view(ids.shape), num_drawn, num_unchanged)

    def _another(self, old: Array, streams: Array, draws: StepDraws) -> tuple[Array, Array | None]:
        """Returns an unreserved id for each id, different from it, and which ids are reserved (None if none can be)."""
        # Uniform among the N - 1 other ids: draw a number as if the old one were left out, then step over it.
        #   ids       0 1 2 [3] 4 5      reserved ids are stepped over in the same way, from the least on
        #   numbers   0 1 2     3 4      new = number + (number >= old)
        among_others = sent_to_device(draws.among_others, self.device)
        if not self._has_reserved:
            return among_others + (among_others >= old), None
        is_reserved = old < sent_to_device(draws.num_first, self.device)
        # number of the old id when reserved ids are left out; the run from 0 on is left in, as in among_others
        position = old
        other_reserved = [row.take(streams) for row in self._other_reserved]
        for reserved_id in other_reserved:
            is_reserved = is_reserved | (old == reserved_id)
            position = position + (old > reserved_id) * -1
        new = among_others + (among_others >= position)
        # a reserved id is not among the N ids that may be drawn: any of the N replaces it, none is stepped over
        if isinstance(is_reserved, Tensor):  # on a GPU: all are computed, since the host does not know which are needed
            new = where(is_reserved, sent_to_device(draws.among_all(slice(None)), self.device), new)
        else:
            reserved = np.flatnonzero(is_reserved)
            new[reserved] = draws.among_all(reserved)
        for reserved_id in other_reserved:
            new = new + (new >= reserved_id)
        return new, is_reserved


class NeighborDraw:
    """Decides which drawn ids become a neighbour in one graph, and draws the neighbours.

    Args:
        graph: Neighbours of each id; its arrays are copied to a GPU.
        walk: Random walk whose last node is the neighbour; None for one step.
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
        """Returns a copy with another walk, which shares the graph's arrays."""
        draw_copy = copy.copy(self)
        draw_copy._set_walk(walk)
        return draw_copy

    def _set_walk(self, walk: Walk | None) -> None:
        self._restart, self._max_steps = (1.0, 1) if walk is None else (walk.restart, walk.max_steps)

    @property
    def num_words(self) -> int:
        """Number of random words that an id needs.

        Each step of a walk takes one to stop or go on (the first: neighbour or any id), one to choose an edge, and in
        weighted graphs one to choose between the edge and its alias.
        """
        return (2 if self._alias_tables is None else 3) * self._max_steps

    def __call__(self, ids: Array, num_others: Array, excess: Array, words: Sequence[Array]) -> tuple[Array, Array]:
        """Returns whether each id is replaced by a neighbour, and the neighbour (arbitrary where it is not).

        Args:
            ids: Nodes of the graph.
            num_others: Number n of ids that may replace each, neighbours included.
            excess: rho - 1 for each id, above 0.
            words: Random integers below 2^63 for each id, ``num_words`` arrays of them.
        """
        words_per_step = len(words) // self._max_steps
        # a neighbour if u ((rho - 1) d + n) < (rho - 1) d; both sides are divided by rho - 1, which may be huge
        degrees = as_float64(self._degrees(ids))
        chosen = _unit(words[0]) * (degrees + as_float64(num_others) / excess) < degrees
        previous, node = ids, self._neighbor(ids, words[1:words_per_step])
        walking = chosen
        for step in range(1, self._max_steps):
            stop, *slot = words[words_per_step * step : words_per_step * (step + 1)]
            walking = walking & (_unit(stop) >= self._restart) & (self._degrees(node) > 0)
            previous = where(walking, node, previous)
            node = where(walking, self._neighbor(node, slot), node)
        # a walk that ends where it began draws its last node before that
        return chosen, where(node == ids, previous, node)

    def _degrees(self, ids: Array) -> Array:
        return self._starts.take(ids + 1) - self._starts.take(ids)

    def _neighbor(self, ids: Array, words: Sequence[Array]) -> Array:
        """Draws a neighbour of each id in proportion to its weight, by Walker's alias method (Walker 1977).

        One of the id's d edges is drawn uniformly; it is kept with probability ``keep``, else replaced by its alias.
        The result is arbitrary for an id without edges.
        """
        starts = self._starts.take(ids)
        degrees = (self._starts.take(ids + 1) - starts).clip(1)
        starts = starts.clip(0, len(self._neighbors) - 1)
        # the remainder of a word below 2^63 favours the first edges by less than d / 2^63
        edges = starts + words[0] % degrees
        if self._alias_tables is not None:
            keep, alias = self._alias_tables
            edges = where(_unit(words[1]) < keep.take(edges), edges, starts + alias.take(edges))
        return as_int64(self._neighbors.take(edges))


def _unit(words: Array) -> Array:
    """Turns integers of 63 bits into numbers in [0, 1), by their upper 53 bits."""
    return as_float64(words >> (_WORD_BITS - _UNIT_BITS)) * 2.0**-_UNIT_BITS


class _GraphDraw:
    """Replaces ids by neighbours, for the streams that share a graph and a walk.

    Args:
        neighbors: Draws neighbours in that graph.
        excess: rho - 1 of each stream; 0 for a stream that does not have this graph and walk.
        device: Device of the ids.
    """

    def __init__(self, neighbors: NeighborDraw, excess: NDArray[np.float64], device: torch.device) -> None:
        self._neighbors = neighbors
        self._has_graph = excess > 0
        self._excess = on_device(excess, device)
        self._device = device

    def put_neighbors(
        self, new: Array, old: Array, is_reserved: Array | None, num_drawable: Array, draws: StepDraws
    ) -> None:
        """Overwrites some of the ``new`` ids by neighbours of the ``old`` ones, in the streams with this graph."""
        # n of the mixture: N - 1 drawable ids for a drawable old id, and N for a reserved one
        chosen = np.flatnonzero(self._has_graph.take(draws.streams))
        states = draws.states.take(chosen)
        word_numbers = range(FIRST_NEIGHBOR_WORD, FIRST_NEIGHBOR_WORD + self._neighbors.num_words)
        drawn = [(word(states, number) >> np.uint64(1)).view(np.int64) for number in word_numbers]
        words = [sent_to_device(values, self._device) for values in drawn]
        graph_ids, streams = (sent_to_device(values, self._device) for values in (chosen, draws.streams.take(chosen)))
        num_others = num_drawable.take(graph_ids) - 1
        if is_reserved is not None:
            num_others = num_others + is_reserved.take(graph_ids)
        is_neighbor, neighbors = self._neighbors(old.take(graph_ids), num_others, self._excess.take(streams), words)
        assign(new, graph_ids, where(is_neighbor, neighbors, new.take(graph_ids)))


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
    """Returns the memory of every rank's device that the graphs take, in bytes by table.

    On CUDA every rank has a copy of all arrays. On a CPU a graph that is mapped from its folder counts nothing: ranks
    of a machine share the file's pages, which the system drops and reads again as it needs to. A graph that was built
    in memory counts in full, in each process.

    Args:
        sse: Rules by table, as :func:`distembed.sse.config.build_sse` returns them.
        device_kind: Kind of the device, ``cuda`` or ``cpu``.

    Returns:
        Bytes by table; a graph of several tables counts under the first of them, and tables without one have 0.
    """
    bytes_by_table = dict.fromkeys(sse, 0)
    counted: set[int] = set()
    for table, rule in sse.items():
        if rule.graph is None or not _draws_neighbors(rule) or id(rule.graph) in counted:
            continue
        counted.add(id(rule.graph))
        is_shared_file = device_kind == "cpu" and rule.graph.folder is not None
        bytes_by_table[table] = 0 if is_shared_file else rule.graph.nbytes
    return bytes_by_table


def _other_reserved(streams: Sequence[IdStream]) -> Iterator[list[int]]:
    """Yields, stream by stream, the i-th reserved id after the run from 0 on, for i = 0, 1, ...

    ``reserved`` is ascending. A stream with fewer reserved ids gives ``_NO_ID``, which no id equals or exceeds.
    """
    later_ids = [stream.sse.reserved[stream.num_first_reserved :] for stream in streams]
    for index in range(max((len(ids) for ids in later_ids), default=0)):
        yield [ids[index] if index < len(ids) else _NO_ID for ids in later_ids]


def _require_room(streams: Sequence[IdStream], dtype: torch.dtype) -> None:
    """Raises a UserError unless a dtype is of integers and can hold every id that may be drawn."""
    for stream in streams:
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise UserError(f"table {stream.table!r}: ids are of {dtype}, but must be integers; give int64 or int32.")
        last_id = stream.first + stream.num_embeddings - 1
        if torch.iinfo(dtype).max < last_id:
            raise UserError(
                f"table {stream.table!r}: ids are of {dtype}, which does not hold the table's largest id, {last_id}; "
                "give int64."
            )
