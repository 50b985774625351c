"""Random numbers that are a function of where they are used, not of a generator's hidden state.

A *stream* is that of one table's feature under one seed. Every step of every rank has 2^64 generators of it, by number,
and each of these gives words of 64 bits, also by number. Any of them can be computed at any time: a resumed run repeats
exactly, and how far a pipeline works ahead does not matter.

A generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Its seed is its number, mixed under 128 bits of key, which
BLAKE2b makes of seed, names, step and rank. All is done on the CPU for all devices, so that a GPU follows the same
numbers.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from distembed.splitmix import GOLDEN_GAMMA, mix64_array

Words = NDArray[np.uint64]


def stream_key(seed: int, *names: str) -> Words:
    """The key of a stream, ``[2]``; distinct seeds or lists of names give unlike ones."""
    digest = hashlib.blake2b(digest_size=16, person=b"distembed stream")
    for name in (str(seed), *names):
        encoded = name.encode("utf-8", errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return np.frombuffer(digest.digest(), dtype=np.uint64)


def place_key(step: int, rank: int) -> Words:
    """The key of a step of a rank, ``[2]``; with a stream's it is combined by exclusive or."""
    place = step.to_bytes(8, "little") + rank.to_bytes(8, "little")
    return np.frombuffer(hashlib.blake2b(place, digest_size=16, person=b"distembed place.").digest(), dtype=np.uint64)


def generators(numbers: Words, keys: Words) -> Words:
    """States of the generators of these numbers.

    Args:
        numbers: ``[n]``.
        keys: of each one's stream and place, ``[2, n]``.
    """
    states = mix64_array(numbers ^ keys[0])
    states += keys[1]
    return states


def word(states: Words, number: int) -> Words:
    """The word of this number of each generator."""
    return mix64_array(states + np.uint64(number * GOLDEN_GAMMA % 2**64) if number else states)


def below(words: Words, bounds: Words) -> NDArray[np.int64]:
    """Uniform integers in ``[0, bound)`` of each word, exactly: none is likelier than another.

    A word in the last, incomplete run of ``bound`` numbers, which would favour small results, is mixed again.

    Args:
        words: ``[n]``.
        bounds: 1 to 2^63, ``[n]``.
    """
    results = words % bounds
    if len(words):
        near_the_end = np.flatnonzero(words > ~bounds.max())
        ends = ~(bounds[near_the_end] - np.uint64(1))  # 2^64 - bound, beyond which a run cannot be complete
        rejected = near_the_end[words[near_the_end] - results[near_the_end] > ends]
        if len(rejected):
            results[rejected] = below(mix64_array(words[rejected]), bounds[rejected]).view(np.uint64)
    return results.view(np.int64)


def unit(words: Words) -> NDArray[np.float64]:
    """Uniform numbers inside (0, 1), of 52 bits."""
    numbers = (words >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers
