"""Draws the random numbers of a step: which ids of a batch are replaced, and integers that say by which.

They depend on the number of ids and not on the ids. So where successive batches have one shape, as those of
single-valued features do, the numbers of several steps are made at once: with few numbers numpy's calls would take most
of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distembed.sse.positions import draw_places
from distembed.sse.random_words import WORDS_A_USE, Integers, Words, below, place_key, stream_key, word
from distembed.sse.rule import MAX_WALK_STEPS
from distembed.sse.stream import IdStream

# what the words of an id are used for; word 0 is for the gap before it
_ANOTHER, FIRST_NEIGHBOR_WORD = 1, 2
# a walk's steps take up to three words each
assert FIRST_NEIGHBOR_WORD + 3 * MAX_WALK_STEPS <= WORDS_A_USE
_NUMBERS_AT_ONCE = 16_384
_MOST_STEPS_AT_ONCE = 16


@dataclass(frozen=True)
class StepDraws:
    """The random numbers of a step, one of each for every id that is replaced; ``[drawn]`` but for ``bounds``.

    Attributes:
        bounds: Where the drawn ids of each stream begin, and the last ones end, ``[streams + 1]``.
        streams: Number of each id's stream, rising.
        places: Place of each id in the batch.
        num_first: Number of reserved ids from 0 on in each id's table.
        num_drawable: Number of ids that may be drawn in each id's table.
        words: Random word of each id, for ``among_others`` or :meth:`among_all`.
        among_others: Uniform integer below ``num_drawable - 1``, plus ``num_first``; used where the id itself may be
            drawn in its table.
        states: State of each id's random words, of which the first two are used up.
    """

    bounds: Integers
    streams: Integers
    places: Integers
    num_first: Integers
    num_drawable: Words
    words: Words
    among_others: Integers
    states: Words

    def among_all(self, chosen: Any) -> Integers:
        """Returns uniform integers below ``num_drawable``, plus ``num_first``; used for reserved ids.

        Args:
            chosen: Indices of the drawn ids to give one for.
        """
        return below(self.words[chosen], self.num_drawable[chosen]) + self.num_first[chosen]


class Drawer:
    """Draws the random numbers of a list of streams, step by step."""

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
            starts: Place of each stream's first id.
            step: Step of the run, over all epochs.
            rank: Rank of this process.
        """
        shape = counts, starts, rank
        is_same, self._shape = shape == self._shape, shape
        if not is_same or step not in self._drawn:
            # the next steps' as well if this batch has the shape of the one before, and few ids of it are replaced
            num_steps = self._steps_at_once if is_same else 1
            steps = range(step, step + num_steps)
            draws = self._draw(counts, starts, steps, rank)
            self._steps_at_once = _steps_at_once(len(draws[0].places))
            self._drawn = dict(zip(steps, draws, strict=True))
        return self._drawn[step]

    def _rates(self, step: int) -> tuple[float, ...]:
        return tuple(stream.rate(step) for stream in self._streams)

    def _draw(self, counts: tuple[int, ...], starts: tuple[int, ...], steps: range, rank: int) -> list[StepDraws]:
        """Returns the random numbers of several steps whose batches have one shape."""
        num_steps, num_streams = len(steps), len(self._streams)
        constant = self._constant_rates
        rates = sum(map(self._rates, steps), ()) if constant is None else constant * num_steps
        keys = np.concatenate([self._keys ^ place_key(step, rank) for step in steps])
        drawn = draw_places(counts * num_steps, starts * num_steps, rates, keys)
        bounds = np.searchsorted(drawn.features, np.arange(len(keys) + 1))
        # each feature at each step is drawn as a feature of its own
        streams = drawn.features if num_steps == 1 else drawn.features % num_streams
        num_drawable = self._num_drawable.take(streams)
        num_first = self._num_first.take(streams)
        words = word(drawn.states, _ANOTHER)
        among_others = below(words, num_drawable - np.uint64(1))
        among_others += num_first
        draws = []
        for i in range(num_steps):
            step_bounds = bounds[i * num_streams : (i + 1) * num_streams + 1]
            own = slice(step_bounds[0], step_bounds[-1])
            values: tuple[Any, ...] = (
                streams,
                drawn.places,
                num_first,
                num_drawable,
                words,
                among_others,
                drawn.states,
            )
            draws.append(StepDraws(step_bounds - step_bounds[0], *(value[own] for value in values)))
        return draws


def _steps_at_once(num_drawn: int) -> int:
    """Returns how many steps' numbers to make at once where one step needs so many."""
    return max(1, min(_MOST_STEPS_AT_ONCE, _NUMBERS_AT_ONCE // (num_drawn + 1)))
