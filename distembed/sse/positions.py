"""Draws which ids of a batch are replaced, independently of each other, at a cost that follows their number.

The gap from one replaced id to the next is geometric (Devroye 1986, X.2): ``1 + floor(log u / log(1 - p))`` for a
uniform u. So numbers are drawn for the replaced ids and not for all others.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distembed.sse.random_words import Integers, Words, state_offsets, unit, word


@dataclass(frozen=True)
class DrawnPlaces:
    """The ids of a batch that are replaced.

    Attributes:
        features: Number of each id's feature, rising.
        places: Place of each id in the batch.
        states: State of each id's random words, of which word 0 is used up.
    """

    features: Integers
    places: Integers
    states: Words


def draw_places(counts: tuple[int, ...], starts: tuple[int, ...], rates: tuple[float, ...], keys: Words) -> DrawnPlaces:
    """Draws which ids are replaced.

    Args:
        counts: Number of ids of each feature.
        starts: Place of each feature's first id; the others follow.
        rates: Probability that an id of the feature is replaced.
        keys: State of each feature's generator, ``[features]``.
    """
    safety = 3.0
    while True:
        gaps = _gap_layout(counts, starts, rates, safety)
        states = keys.take(gaps.features)
        states += gaps.offsets
        places = _places(gaps, unit(word(states, 0)))
        # every feature's last gap has to reach beyond its last id; else gaps are added to the same ones
        if (places[gaps.lasts] >= gaps.limits[gaps.lasts]).all():
            inside = np.flatnonzero(places < gaps.limits)
            return DrawnPlaces(gaps.features.take(inside), places.take(inside), states.take(inside))
        safety *= 2


@dataclass(frozen=True)
class _GapLayout:
    """Which gaps are drawn for batches of one shape.

    Attributes:
        num_gaps: Number of gaps of each feature, ``[features]``.
        starts: Place of each feature's first id, ``[features]``.
        features: Feature of each gap, ``[gaps]``.
        limits: Place after the last id of each gap's feature, ``[gaps]``.
        longest: Length that each gap is cut to, the number of ids of its feature, ``[gaps]``.
        offsets: Offset of each gap's words, by the gap's number within its feature, ``[gaps]``.
        scales: ``1 / log(1 - p)`` of each gap, ``[gaps]``.
        lasts: Index of the last gap of each feature that has some.
    """

    num_gaps: Integers
    starts: Integers
    features: Integers
    limits: Integers
    longest: NDArray[np.float64]
    offsets: Words
    scales: NDArray[np.float64]
    lasts: Integers


@lru_cache(maxsize=8)
def _gap_layout(
    counts: tuple[int, ...], starts: tuple[int, ...], rates: tuple[float, ...], safety: float
) -> _GapLayout:
    """Returns room for the expected number of gaps and ``safety`` standard deviations."""
    ids, chances = np.array(counts, dtype=np.int64), np.array(rates, dtype=np.float64)
    first = np.array(starts, dtype=np.int64)
    expected = ids * chances
    # so many gaps as ids, and one, reach beyond the last id at any rate
    num_gaps = np.minimum(np.ceil(expected + safety * np.sqrt(expected) + 2 * safety).astype(np.int64), ids + 1)
    num_gaps[expected == 0] = 0
    features = np.repeat(np.arange(len(ids)), num_gaps)
    ends = np.cumsum(num_gaps)
    numbers = np.arange(len(features)) - (ends - num_gaps)[features]
    with np.errstate(divide="ignore", over="ignore"):  # 1 and the least probabilities have scales of 0 and infinity
        scales = (1.0 / np.log1p(-chances))[features]
    return _GapLayout(
        num_gaps,
        first,
        features,
        (first + ids)[features],
        ids[features].astype(np.float64),
        state_offsets(numbers),
        scales,
        ends[num_gaps > 0] - 1,
    )


def _places(gaps: _GapLayout, uniform: NDArray[np.float64]) -> Integers:
    """Returns the place of the id at the end of each gap, which may lie beyond the last one of its feature."""
    lengths = np.log(uniform, out=uniform)
    lengths *= gaps.scales
    # what reaches beyond the feature is cut short before it overflows an integer
    np.minimum(lengths, gaps.longest, out=lengths)
    lengths += 1.0
    ends = lengths.astype(np.int64)
    np.cumsum(ends, out=ends)
    before = np.zeros(len(gaps.num_gaps), dtype=np.int64)
    before[gaps.features[gaps.lasts[1:]]] = ends[gaps.lasts[:-1]]
    ends -= np.repeat(before + 1 - gaps.starts, gaps.num_gaps)
    return ends
