"""Random numbers that are a function of where they are used, not of a generator's hidden state.

A *stream* belongs to one table's feature under one seed. At every step of every rank it is one SplitMix64 generator
(Steele, Lea, Flood, OOPSLA 2014), and each use there has 64 of its outputs, called words: use n has the words ``64 n``
to ``64 n + 63``. The generator's state is the exclusive or of two hashes, one of the stream's names and one of step and
rank. Any word can be computed at any time, so a resumed run repeats exactly, however far a pipeline works ahead.

All generators go round one cycle of 2^64 states. Among 10^10 pairs of stream and step with 1,000 uses each, some would
share a stretch of the cycle, at places that have nothing to do with each other.

Numbers are made on the CPU for all devices, so that a GPU draws the same ones.

The ids to replace are drawn at a cost that follows their number: the gap from one replaced id to the next is geometric
(Devroye 1986, X.2), ``1 + floor(log u / log(1 - p))`` for a uniform u.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distembed.data.hashing import GOLDEN_GAMMA, mix64_array

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

WORDS_A_USE = 64
_TWO_TO_32 = np.uint64(2**32)


def stream_key(seed: int, *names: str) -> np.uint64:
    """Returns a hash of a seed and names, and of the names' lengths: ``("a", "bc")`` differs from ``("ab", "c")``."""
    digest = hashlib.blake2b(digest_size=8, person=b"distembed stream")
    for name in (str(seed), *names):
        encoded = name.encode("utf-8", errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return np.frombuffer(digest.digest(), dtype=np.uint64)[0]


def place_key(step: int, rank: int) -> np.uint64:
    """Returns the key of a step of a rank; its exclusive or with a stream's key is the generator's state there."""
    message = step.to_bytes(8, "little") + rank.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"distembed place.").digest()
    return np.frombuffer(digest, dtype=np.uint64)[0]


def state_offsets(uses: NDArray[np.int64]) -> Words:
    """Returns the distance of each use's state from the generator's: 64 outputs per use, modulo 2^64, ``[uses]``."""
    return uses.view(np.uint64) * np.uint64(WORDS_A_USE * GOLDEN_GAMMA % 2**64)


def word(states: Words, number: int) -> Words:
    """Returns word ``number``, 0 to 63, of each use: SplitMix64's output for its state, that many outputs further."""
    return mix64_array(states + np.uint64(number * GOLDEN_GAMMA % 2**64) if number else states)


def below(words: Words, bounds: Words) -> NDArray[np.int64]:
    """Turns each word into a uniform integer in ``[0, bound)``; words that would favour some integers are mixed again.

    Bounds below 2^32 take a multiplication (Lemire, "Fast Random Integer Generation in an Interval", ACM TOMACS 2019),
    others a division, which takes longer.

    Args:
        words: Random words, ``[n]``.
        bounds: Bound of each integer, 1 to 2^63, ``[n]``.
    """
    # Lemire: for x uniform below 2^32, result = x * bound >> 32. Some results have one x more than others have; it is
    # rejected where x * bound mod 2^32 < 2^32 mod bound. As 2^32 mod bound < bound, few products need the division.
    is_large = np.flatnonzero(bounds >= _TWO_TO_32)
    products = (words >> np.uint64(32)) * bounds
    results = products >> np.uint64(32)
    products &= _TWO_TO_32 - np.uint64(1)
    suspects = np.flatnonzero(products < bounds)
    rejected = suspects[products[suspects] < _TWO_TO_32 % bounds[suspects]]
    if len(is_large):
        results[is_large] = words[is_large] % bounds[is_large]
        # words fall into runs of ``bound`` numbers; the last run is incomplete if it begins after 2^64 - bound
        in_last_run = words[is_large] - results[is_large] > ~(bounds[is_large] - np.uint64(1))
        rejected = np.union1d(np.setdiff1d(rejected, is_large), is_large[in_last_run])
    if len(rejected):
        results[rejected] = below(mix64_array(words[rejected]), bounds[rejected]).view(np.uint64)
    return results.view(np.int64)


def unit(words: Words) -> NDArray[np.float64]:
    """Turns words into uniform numbers inside (0, 1), of 52 bits."""
    numbers = (words >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


@dataclass(frozen=True)
class DrawnPlaces:
    """The ids of a batch that are replaced."""

    features: Integers  # index of each id's feature, ascending
    places: Integers  # index of each id in the batch, ascending within a feature
    states: Words  # state of each id's random words; word 0 is used up


def draw_places(counts: tuple[int, ...], starts: tuple[int, ...], rates: tuple[float, ...], keys: Words) -> DrawnPlaces:
    """Draws which ids are replaced; for more ids of a feature, the ids drawn for fewer come first, unchanged.

    Args:
        counts: Number of ids of each feature.
        starts: Index of each feature's first id in the batch; the rest follow without gaps.
        rates: Probability that an id of the feature is replaced.
        keys: State of each feature's generator, ``[features]``.
    """
    safety = 3.0
    while True:
        gaps = _gap_layout(counts, starts, rates, safety)
        states = keys.take(gaps.features)
        states += gaps.offsets
        places = _places(gaps, unit(word(states, 0)))
        # every feature's last gap must reach beyond its last id; else draw again with more gaps, the first ones equal
        if (places[gaps.lasts] >= gaps.limits[gaps.lasts]).all():
            inside = np.flatnonzero(places < gaps.limits)
            return DrawnPlaces(gaps.features.take(inside), places.take(inside), states.take(inside))
        safety *= 2


@dataclass(frozen=True)
class _GapLayout:
    """The gaps to draw for batches of one shape: one for each replaced id, and at least one beyond the last id."""

    num_gaps: Integers  # number of gaps of each feature, ``[features]``
    starts: Integers  # place of each feature's first id, ``[features]``
    features: Integers  # feature of each gap, ``[gaps]``
    limits: Integers  # place after the last id of each gap's feature, ``[gaps]``
    longest: NDArray[np.float64]  # length that each gap is cut to, the number of ids of its feature, ``[gaps]``
    offsets: Words  # offset of each gap's words, by the gap's number within its feature, ``[gaps]``
    scales: NDArray[np.float64]  # ``1 / log(1 - p)`` of each gap, ``[gaps]``
    lasts: Integers  # index of the last gap of each feature that has some


@lru_cache(maxsize=8)
def _gap_layout(
    counts: tuple[int, ...], starts: tuple[int, ...], rates: tuple[float, ...], safety: float
) -> _GapLayout:
    """Returns a layout with the expected number of gaps plus ``safety`` standard deviations for each feature."""
    ids, chances = np.array(counts, dtype=np.int64), np.array(rates, dtype=np.float64)
    first = np.array(starts, dtype=np.int64)
    expected = ids * chances
    # a gap is at least 1: one gap more than ids always reaches beyond the last id
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
    """Returns the index of the id at the end of each gap, which may lie beyond the last id of its feature.

    A gap is ``1 + floor(log u / log(1 - p))``. One running sum over all features gives the ends; the sum of earlier
    features is taken off, and the feature's start is added: gaps 3 4 and 2 of features that start at 0 and 10 have the
    running sum 3 7 9, less one and the earlier sums 0 and 7, so the places 2 6 and 11.
    """
    lengths = np.log(uniform, out=uniform)
    lengths *= gaps.scales
    # a gap beyond the feature's end is cut to its number of ids, before it could overflow an integer
    np.minimum(lengths, gaps.longest, out=lengths)
    lengths += 1.0
    ends = lengths.astype(np.int64)
    np.cumsum(ends, out=ends)
    before = np.zeros(len(gaps.num_gaps), dtype=np.int64)
    before[gaps.features[gaps.lasts[1:]]] = ends[gaps.lasts[:-1]]
    ends -= np.repeat(before + 1 - gaps.starts, gaps.num_gaps)
    return ends
