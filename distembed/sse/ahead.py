"""Draws the random numbers of the next step while this one runs, in a thread, for ids that are on a GPU.

Drawing takes up to a few milliseconds of the thread that launches a step's operations, which a GPU would wait for. The
numbers are a function of the step, so that they are the same whenever they are drawn. They depend on how many ids a
batch has only in where they end: numbers for more ids begin with those for fewer, so that the next batch need not be
known.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from distembed.sse.draws import Drawer, StepDraws

_ROOM = 8
"""Numbers of ids are rounded up by at most an eighth, so that those of successive batches are often the same."""


class DrawAhead:
    """Draws in a thread of its own, one step ahead; the thread ends with the process.

    Args:
        draw: Draws the numbers of a step; only the thread calls it from now on.
    """

    def __init__(self, draw: Drawer) -> None:
        self._draw = draw
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[tuple[int, ...], int, int, Future[StepDraws]] | None = None

    def __call__(self, counts: tuple[int, ...], starts: tuple[int, ...], step: int, rank: int) -> StepDraws:
        """Returns the random numbers of one step; arguments as those of :class:`Drawer`."""
        roomy = tuple(map(_rounded_up, counts))
        ready, self._next = self._next, None
        if ready is not None and ready[1:3] == (step, rank) and _reaches(ready[0], counts):
            drawn_for, future = ready[0], ready[3]
        else:
            drawn_for, future = roomy, self._submit(roomy, step, rank)
        draws = future.result()
        # a run of shorter batches keeps the room of the longest: few numbers are drawn in vain
        self._next = (roomy, step + 1, rank, self._submit(roomy, step + 1, rank))
        return first_ids(draws, _starts(drawn_for), counts, starts)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy starts with, in a process that may be another: no thread, and nothing drawn ahead."""
        if self._next is not None:
            self._next[3].result()
        return {**vars(self), "_thread": None, "_next": None}

    def _submit(self, counts: tuple[int, ...], step: int, rank: int) -> Future[StepDraws]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="distembed-sse")
        return self._thread.submit(self._draw, counts, _starts(counts), step, rank)


def first_ids(draws: StepDraws, drawn_starts: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> StepDraws:
    """Returns the numbers for fewer ids of each stream than they were drawn for, at other places.

    Args:
        draws: Random numbers of a step.
        drawn_starts: Place of each stream's first id that they were drawn for.
        counts: Number of ids of each stream, not above that which they were drawn for.
        starts: Place of each stream's first id.
    """
    place_in_stream = draws.places - np.asarray(drawn_starts, dtype=np.int64).take(draws.streams)
    kept = np.flatnonzero(place_in_stream < np.asarray(counts, dtype=np.int64).take(draws.streams))
    streams = draws.streams.take(kept)
    return replace(
        draws,
        bounds=np.searchsorted(streams, np.arange(len(counts) + 1)),
        streams=streams,
        places=place_in_stream.take(kept) + np.asarray(starts, dtype=np.int64).take(streams),
        num_first=draws.num_first.take(kept),
        num_drawable=draws.num_drawable.take(kept),
        words=draws.words.take(kept),
        among_others=draws.among_others.take(kept),
        states=draws.states.take(kept),
    )


def _rounded_up(count: int) -> int:
    """Returns the next number with few digits in base 2."""
    step = max(1, (1 << count.bit_length()) // (2 * _ROOM))
    return -(-count // step) * step


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the first place of each stream where they lie one after another."""
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    return tuple((ends - np.asarray(counts, dtype=np.int64)).tolist())


def _reaches(roomy: Sequence[int], counts: Sequence[int]) -> bool:
    return all(most >= count for most, count in zip(roomy, counts, strict=True))
