"""Hashes that are equal on every machine: SplitMix64, and 64-bit keys of texts, in numpy.

SplitMix64 is by Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. A text of n bytes
in UTF-8 is read as words w_1, w_2, ... of 8 bytes (little endian, zeros at the end)::

    h_0 = mix(n)        h_i = mix(h_(i-1) xor w_i)        key = the last h

The output function ``mix`` is one to one, so texts of up to 8 bytes and equal length have different keys. Among a
hundred million longer texts, two have equal keys with a probability of 0.0003; that vocabulary is refused
(:func:`distembed.data.table.vocabulary.require_distinct_keys`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the generator's output function of each value: one to one on 64 bits, each bit depends on all.

    Applied to ``s, s + GOLDEN_GAMMA, s + 2 GOLDEN_GAMMA, ...`` it gives the numbers of the generator with state s.
    """
    values = values + np.uint64(GOLDEN_GAMMA)
    shifted = np.empty_like(values)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        values ^= np.right_shift(values, np.uint64(shift), out=shifted)
        if multiplier is not None:
            values *= np.uint64(multiplier)
    return values


_WORD = 8
_BITS = 2**64 - 1
_FEW = 32  # texts, up to which Python takes less time for a word of each than numpy


def text_keys(texts: pa.Array) -> NDArray[np.uint64]:
    """Returns the key of each text of an Arrow array of strings without nulls."""
    if len(texts) <= _FEW:
        encoded = [text.encode() for text in texts.to_pylist()]
        # a word of zeros before the text makes h_0 of the length: mix(n xor 0)
        return np.array([_folded(len(text), b"\0" * _WORD + text) for text in encoded], np.uint64)
    texts = texts.cast(pa.large_string())
    offsets = np.frombuffer(texts.buffers()[1] or b"\0" * 8, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    padded = bytes(texts.buffers()[2] or b"")[: offsets[-1]] + b"\0" * _WORD
    # words[i] = the 8 bytes from byte i on, a view with overlaps; padding lets the last text's word be read
    words = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))
    lengths = np.diff(offsets)
    keys = mix64_array(lengths.astype(np.uint64))
    start, unfinished = 0, np.flatnonzero(lengths)
    while len(unfinished) > _FEW:
        word = words[offsets[unfinished] + start]
        num_bytes = np.minimum(lengths[unfinished] - start, _WORD).astype(np.uint64)
        # shifting left and back zeroes the bytes that belong to the next text
        word = word << (np.uint64(64) - num_bytes * np.uint64(8)) >> (np.uint64(64) - num_bytes * np.uint64(8))
        keys[unfinished] = mix64_array(keys[unfinished] ^ word)
        start += _WORD
        unfinished = unfinished[lengths[unfinished] > start]
    for index in unfinished.tolist():
        keys[index] = _folded(int(keys[index]), padded[offsets[index] + start : offsets[index + 1]])
    return keys


def _folded(key: int, text: bytes) -> int:
    """Folds the words of ``text`` into ``key``, which is h before the first of them, and returns the last h.

    Plain Python: one text takes numpy ten times as long.
    """
    for word in memoryview(text + b"\0" * (-len(text) % _WORD)).cast("Q"):
        key = (key ^ word) + GOLDEN_GAMMA & _BITS
        key = (key ^ key >> SHIFTS[0]) * MULTIPLIERS[0] & _BITS
        key = (key ^ key >> SHIFTS[1]) * MULTIPLIERS[1] & _BITS
        key ^= key >> SHIFTS[2]
    return key
