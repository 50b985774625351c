"""Which ids of a batch are replaced: each by itself, at a cost that follows the number of the replaced ones.

The gap from one replaced id to the next is geometric (Devroye 1986, X.2): ``1 + floor(log u / log(1 - p))`` for a
uniform u. So numbers are drawn for the replaced ids and not for all others.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distembed.sse.random_words import Words, state_offsets, unit, word

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Drawn:
    """The ids of a batch that are replaced.

    Attributes:
        features: number of each id's feature, rising.
        places: of each id.
        states: of each id's random words, of which word 0 is used up.
    """

    features: Integers
    places: Integers
    states: Words


def draw_places(counts: tuple[int, ...], starts: tuple[int, ...], rates: tuple[float, ...], keys: Words) -> Drawn:
    """Draws which ids are replaced.

    Args:
        counts: ids of each feature.
        starts: place of each feature's first id; the others follow.
        rates: probability that an id of the feature is replaced.
        keys: state of each feature's generator, ``[features]``.
    """
    safety = 3.0
    while True:
        gaps = _gap_layout(counts, starts, rates, safety)
        states = keys.take(gaps.features)
        states += gaps.offsets
        places = _places(gaps, unit(word(states, 0)))
        # every feature's last gap has to reach beyond its last id; else gaps are added to the same ones
        if (places[gaps.lasts] >= gaps.limits[gaps.lasts]).all():
            kept = np.flatnonzero(places < gaps.limits)
            return Drawn(gaps.features.take(kept), places.take(kept), states.take(kept))
        safety *= 2


@dataclass(frozen=True)
class _GapLayout:
    """Which gaps are drawn.

    Attributes:
        num_gaps: of each feature, ``[features]``.
        starts: place of each feature's first id, ``[features]``.
        features: of each gap.
        limits: place after the last id of each gap's feature.
        longest: what a gap is cut to: ids of its feature.
        offsets: of each gap's words, which it has by its number within the feature.
        scales: ``1 / log(1 - p)`` of each gap.
        lasts: index of the last gap of each feature that has some.
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
    """Room for the expected number of gaps and ``safety`` standard deviations; batches of one shape share it."""
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
    """Place of the id at the end of each gap; it may lie beyond the last one of its feature."""
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
