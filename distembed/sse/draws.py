"""Draws the random numbers of a step: which ids of a batch are replaced, and by which ids.

The numbers depend on the number of ids and not on the ids. So :class:`Drawer` makes the numbers of several steps at
once where successive batches have one shape, as batches of single-valued features do: with few numbers numpy's calls
would take most of the time. For ids on a GPU, :class:`DrawAhead` draws the next step's numbers in a thread while this
step runs: numbers for more ids begin with the numbers for fewer, so that the next batch need not be known.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import ge
from typing import Any

import numpy as np

from distembed.sse.random_words import WORDS_A_USE, Integers, Words, below, draw_places, place_key, stream_key, word
from distembed.sse.rule import MAX_WALK_STEPS, IdStream

# numbers of the random words of a replaced id: 0 for the gap before it, 1 for another id, from 2 on for a neighbour
_ANOTHER, FIRST_NEIGHBOR_WORD = 1, 2
# a walk's steps take up to three words each
assert FIRST_NEIGHBOR_WORD + 3 * MAX_WALK_STEPS <= WORDS_A_USE
_NUMBERS_AT_ONCE = 16_384  # most random numbers that are drawn ahead, for up to _MOST_STEPS_AT_ONCE steps
_MOST_STEPS_AT_ONCE = 16
_ROOM = 8  # numbers of ids are rounded up by at most an eighth, so that successive batches often become equal


@dataclass(frozen=True)
class StepDraws:
    """The ids of a batch that a step replaces (the *drawn* ids), and the random numbers for each.

    All arrays have shape ``[drawn]``, ordered by stream and place, except ``bounds``.
    """

    bounds: Integers  # stream s has the drawn ids bounds[s] to bounds[s + 1], ``[streams + 1]``
    streams: Integers  # index of each id's stream, ascending
    places: Integers  # index of each id in the batch's tensor of ids, ascending within a stream
    num_first: Integers  # number of reserved ids from 0 on in each id's table
    num_drawable: Words  # number of ids that may be drawn in each id's table
    words: Words  # random word of each id, from which ``among_others`` and :meth:`among_all` are computed
    # uniform integer below ``num_drawable - 1``, plus ``num_first``: to replace an id that is not reserved
    among_others: Integers
    states: Words  # state of each id's random words; words 0 and 1 are used up

    def among_all(self, chosen: Any) -> Integers:
        """Returns uniform integers below ``num_drawable``, plus ``num_first``, to replace reserved ids (by index)."""
        return below(self.words[chosen], self.num_drawable[chosen]) + self.num_first[chosen]


class Drawer:
    """Draws the random numbers of a list of streams on the CPU; the result depends on the arguments alone.

    Numbers of further steps are cached while successive batches have one shape.
    """

    def __init__(self, streams: Sequence[IdStream]) -> None:
        self._streams = list(streams)
        self._keys = np.array([stream_key(s.seed, s.table, s.feature) for s in streams])
        self._num_drawable = np.array([max(2, s.num_drawable) for s in streams], dtype=np.uint64)
        self._num_first = np.array([s.num_first_reserved for s in streams])
        # a schedule changes the rates from step to step
        self._constant_rates = None if any(s.sse.schedule for s in streams) else self._rates(0)
        self._shape: tuple[object, ...] = ()
        self._steps_at_once = 1
        self._drawn: dict[int, StepDraws] = {}

    def __call__(self, counts: tuple[int, ...], starts: tuple[int, ...], step: int, rank: int) -> StepDraws:
        """Returns the random numbers of one step.

        Args:
            counts: Number of ids of each stream in the batch.
            starts: Index of each stream's first id in the batch; the rest follow without gaps.
            step: Step of the run, over all epochs.
            rank: Rank of this process.
        """
        shape = counts, starts, rank
        is_same, self._shape = shape == self._shape, shape
        if not is_same or step not in self._drawn:
            # If this batch's shape repeats the last one's, draw further steps too: numpy's cost per call is shared.
            num_steps = self._steps_at_once if is_same else 1
            steps = range(step, step + num_steps)
            draws = self._draw(counts, starts, steps, rank)
            self._steps_at_once = max(1, min(_MOST_STEPS_AT_ONCE, _NUMBERS_AT_ONCE // (len(draws[0].places) + 1)))
            self._drawn = dict(zip(steps, draws, strict=True))
        return self._drawn[step]

    def _rates(self, step: int) -> tuple[float, ...]:
        return tuple(stream.rate(step) for stream in self._streams)

    def _draw(self, counts: tuple[int, ...], starts: tuple[int, ...], steps: range, rank: int) -> list[StepDraws]:
        """Returns the random numbers of several steps whose batches have equal ``counts`` and ``starts``."""
        num_steps, num_streams = len(steps), len(self._streams)
        constant = self._constant_rates
        rates = sum(map(self._rates, steps), ()) if constant is None else constant * num_steps
        keys = np.concatenate([self._keys ^ place_key(step, rank) for step in steps])
        drawn = draw_places(counts * num_steps, starts * num_steps, rates, keys)
        bounds = np.searchsorted(drawn.features, np.arange(len(keys) + 1))
        # draw_places saw num_steps * num_streams features, step after step
        streams = drawn.features if num_steps == 1 else drawn.features % num_streams
        num_drawable = self._num_drawable.take(streams)
        num_first = self._num_first.take(streams)
        words = word(drawn.states, _ANOTHER)
        among_others = below(words, num_drawable - np.uint64(1))
        among_others += num_first
        draws = []
        for index in range(num_steps):
            step_bounds = bounds[index * num_streams : (index + 1) * num_streams + 1]
            step_ids = slice(step_bounds[0], step_bounds[-1])
            values: list[Any] = [streams, drawn.places, num_first, num_drawable, words, among_others, drawn.states]
            draws.append(StepDraws(step_bounds - step_bounds[0], *(value[step_ids] for value in values)))
        return draws


class DrawAhead:
    """Draws the next step's numbers in a thread while a step runs, for as many ids as this step had, rounded up.

    :func:`first_ids` cuts them to the next batch. Only the thread calls ``draw`` from then on: it is not locked.
    """

    def __init__(self, draw: Drawer) -> None:
        self._draw = draw
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[tuple[int, ...], int, int, Future[StepDraws]] | None = None

    def __call__(self, counts: tuple[int, ...], starts: tuple[int, ...], step: int, rank: int) -> StepDraws:
        """Returns the random numbers of one step, as :class:`Drawer` does."""
        roomy = tuple(map(_rounded_up, counts))
        ready, self._next = self._next, None
        if ready is not None and ready[1:3] == (step, rank) and all(map(ge, ready[0], counts)):
            drawn_for, future = ready[0], ready[3]
        else:
            drawn_for, future = roomy, self._submit(roomy, step, rank)
        draws = future.result()
        # drawn for this batch's rounded counts; a next batch beyond them is drawn again, while it waits
        self._next = (roomy, step + 1, rank, self._submit(roomy, step + 1, rank))
        return first_ids(draws, _starts(drawn_for), counts, starts)

    def __getstate__(self) -> dict[str, Any]:
        """Copies without the thread and its draws: a copy may live in another process."""
        if self._next is not None:
            self._next[3].result()
        return {**vars(self), "_thread": None, "_next": None}

    def _submit(self, counts: tuple[int, ...], step: int, rank: int) -> Future[StepDraws]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="distembed-sse")
        return self._thread.submit(self._draw, counts, _starts(counts), step, rank)


def first_ids(draws: StepDraws, drawn_starts: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> StepDraws:
    """Cuts a step's numbers down to the first ``counts`` ids of each stream, whose first ids are at ``starts``.

    An id's numbers depend on its position in the stream alone, so the result equals a draw for ``counts``.

    Args:
        draws: Random numbers of a step, for at least as many ids.
        drawn_starts: Index of each stream's first id for which the numbers were drawn.
        counts: Number of ids of each stream in the batch.
        starts: Index of each stream's first id in the batch.
    """
    index_in_stream = draws.places - np.asarray(drawn_starts, dtype=np.int64).take(draws.streams)
    within = np.flatnonzero(index_in_stream < np.asarray(counts, dtype=np.int64).take(draws.streams))
    streams = draws.streams.take(within)
    return replace(
        draws,
        bounds=np.searchsorted(streams, np.arange(len(counts) + 1)),
        streams=streams,
        places=index_in_stream.take(within) + np.asarray(starts, dtype=np.int64).take(streams),
        num_first=draws.num_first.take(within),
        num_drawable=draws.num_drawable.take(within),
        words=draws.words.take(within),
        among_others=draws.among_others.take(within),
        states=draws.states.take(within),
    )


def _rounded_up(count: int) -> int:
    """Rounds up to a multiple of a power of two that is at most an eighth of the number."""
    step = max(1, (1 << count.bit_length()) // (2 * _ROOM))
    return -(-count // step) * step


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the index of each stream's first id in a batch that has the streams one after another."""
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    return tuple((ends - np.asarray(counts, dtype=np.int64)).tolist())
