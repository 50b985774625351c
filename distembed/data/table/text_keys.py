"""Keys of 64 bits for texts: a hash that is the same on every machine and in every version, computed by numpy.

A text of n bytes in UTF-8 is read as words w_1, w_2, ... of 8 bytes (little endian, zeros at the end)::

    h_0 = mix(n)        h_i = mix(h_(i-1) xor w_i)        key = the last h

with SplitMix64's output function ``mix``, which is one to one. Texts of the same length and up to 8 bytes therefore
have different keys; of others, two of a hundred million have the same with a probability of 0.0003. A vocabulary with
two texts of one key is refused (:func:`distembed.data.prepare.vocabulary.require_distinct_keys`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.splitmix import GOLDEN_GAMMA, MULTIPLIERS, SHIFTS, mix64_array

_WORD = 8
_BITS = 2**64 - 1
_FEW = 32  # texts, up to which Python takes less time for a word of each than numpy


def text_keys(texts: pa.Array) -> NDArray[np.uint64]:
    """Returns the key of each text of an Arrow array of strings, none of which is null."""
    if len(texts) <= _FEW:
        given = [text.encode() for text in texts.to_pylist()]
        return np.array([_folded(len(text), b"\0" * _WORD + text) for text in given], np.uint64)
    texts = texts.cast(pa.large_string())
    offsets = np.frombuffer(texts.buffers()[1] or b"\0" * 8, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    padded = bytes(texts.buffers()[2] or b"")[: offsets[-1]] + b"\0" * _WORD
    words = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))  # the word at each byte
    lengths = np.diff(offsets)
    keys = mix64_array(lengths.astype(np.uint64))
    start, longer = 0, np.flatnonzero(lengths)
    while len(longer) > _FEW:
        word = words[offsets[longer] + start]
        rest = np.minimum(lengths[longer] - start, _WORD).astype(np.uint64)
        word = word << (np.uint64(64) - rest * np.uint64(8)) >> (np.uint64(64) - rest * np.uint64(8))
        keys[longer] = mix64_array(keys[longer] ^ word)
        start += _WORD
        longer = longer[lengths[longer] > start]
    for place in longer.tolist():
        keys[place] = _folded(int(keys[place]), padded[offsets[place] + start : offsets[place + 1]])
    return keys


def _folded(key: int, text: bytes) -> int:
    """Returns the last h of a text's words, given the h before them; numpy takes ten times as long for one text."""
    for word in memoryview(text + b"\0" * (-len(text) % _WORD)).cast("Q"):
        key = (key ^ word) + GOLDEN_GAMMA & _BITS
        key = (key ^ key >> SHIFTS[0]) * MULTIPLIERS[0] & _BITS
        key = (key ^ key >> SHIFTS[1]) * MULTIPLIERS[1] & _BITS
        key ^= key >> SHIFTS[2]
    return key
