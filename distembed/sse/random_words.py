"""Random numbers that are a function of where they are used, not of a generator's hidden state.

A *stream* belongs to one table's feature under one seed. At every step of every rank it is one SplitMix64 generator
(Steele, Lea, Flood, OOPSLA 2014), and each use there has 64 of its outputs: use n has the words ``64 n`` to ``64 n +
63``. The generator's state is the exclusive or of two hashes, of the stream's names and of step and rank. Any word can
be computed at any time. So a resumed run repeats exactly, and how far a pipeline works ahead does not matter.

All generators go round one cycle of 2^64 states. Of 10^10 streams at steps with 1,000 uses each some would share a
stretch of it, at places that have nothing to do with each other.

All is done on the CPU for all devices, so that a GPU follows the same numbers.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from distembed.partitions.splitmix import GOLDEN_GAMMA, mix64_array

Words = NDArray[np.uint64]

WORDS_A_USE = 64
_TWO_TO_32 = np.uint64(2**32)


def stream_key(seed: int, *names: str) -> np.uint64:
    """The key of a stream; distinct seeds or lists of names give unlike ones."""
    digest = hashlib.blake2b(digest_size=8, person=b"distembed stream")
    for name in (str(seed), *names):
        encoded = name.encode("utf-8", errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return np.frombuffer(digest.digest(), dtype=np.uint64)[0]


def place_key(step: int, rank: int) -> np.uint64:
    """The key of a step of a rank; the exclusive or with a stream's is the state of its generator there."""
    place = step.to_bytes(8, "little") + rank.to_bytes(8, "little")
    return np.frombuffer(hashlib.blake2b(place, digest_size=8, person=b"distembed place.").digest(), dtype=np.uint64)[0]


def state_offsets(uses: NDArray[np.int64]) -> Words:
    """How far each use's words are from the generator's state."""
    return uses.view(np.uint64) * np.uint64(WORDS_A_USE * GOLDEN_GAMMA % 2**64)


def word(states: Words, number: int) -> Words:
    """The word of this number, 0 to 63, of each use."""
    return mix64_array(states + np.uint64(number * GOLDEN_GAMMA % 2**64) if number else states)


def below(words: Words, bounds: Words) -> NDArray[np.int64]:
    """Uniform integers in ``[0, bound)`` of each word; where a word would favour some of them, it is mixed again.

    For bounds of less than 32 bits by a multiplication (Lemire, "Fast Random Integer Generation in an Interval", ACM
    TOMACS 2019), for others by a division, which takes longer.

    Args:
        words: ``[n]``.
        bounds: 1 to 2^63, ``[n]``.
    """
    is_large = np.flatnonzero(bounds >= _TWO_TO_32)
    products = (words >> np.uint64(32)) * bounds
    results = products >> np.uint64(32)
    products &= _TWO_TO_32 - np.uint64(1)
    suspects = np.flatnonzero(products < bounds)
    rejected = suspects[products[suspects] < _TWO_TO_32 % bounds[suspects]]
    if len(is_large):
        results[is_large] = words[is_large] % bounds[is_large]
        # in the last run of ``bound`` numbers, which is not complete; 2^64 - bound is beyond the one before it
        in_last_run = words[is_large] - results[is_large] > ~(bounds[is_large] - np.uint64(1))
        rejected = np.union1d(np.setdiff1d(rejected, is_large), is_large[in_last_run])
    if len(rejected):
        results[rejected] = below(mix64_array(words[rejected]), bounds[rejected]).view(np.uint64)
    return results.view(np.int64)


def unit(words: Words) -> NDArray[np.float64]:
    """Uniform numbers inside (0, 1), of 52 bits."""
    numbers = (words >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers
