"""Rows of ids in the bits that they need: 6 bits an id for 64 rows, where bytes would take 8 and int64 64.

The codes of the ids are one stream of bits in 32-bit words, the lowest bit first. Of three-bit codes a to l::

    word 0    bits 31 ... 0     kkjjjiiihhhgggfffeeedddcccbbbaaa
    word 1    bits 31 ... 0     ............................lllk     code k lies in both words

A code is read from two neighbouring words at once, by shifts and a mask, for any number of ids. Ids at the end that all
have the last id's row are one code together: where ids are numbered by frequency, rare ids that share a row take none.

Trade-off: a lookup reads two words and computes on integers, where an array of bytes would be read once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32, Int64
from numpy.typing import NDArray

from distembed.base.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_WORD_BITS = 32
_CODES_AT_ONCE = _WORD_BITS << 15
"""Codes that are packed at once: a multiple of 32, so that each piece ends with a word."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The row of each id, packed.

    Attributes:
        words: The bits of the codes, with a word more than they need; int64 rows where one needs more than 32 bits.
        bits: The bits of a code, from 0 to 32; 64 for rows that are not packed.
        num_codes: The number of codes; the last code is the row of all further ids.
    """

    words: Int32[Tensor, " words"]
    bits: int
    num_codes: int

    @classmethod
    def of(cls, rows: NDArray[Any], bits: int | None = None) -> PackedRows:
        """Packs the row of each id, at least one, of an array of non-negative integers below 2^63.

        With ``bits``, at most 32, each code takes so many, and so does each id at the end: the size is known before.
        """
        num_codes = len(rows)
        if bits is None:
            differing = np.flatnonzero(rows != rows[-1])
            num_codes = int(differing[-1]) + 2 if len(differing) else 1
            bits = int(rows.max()).bit_length()
        if bits > _WORD_BITS:
            return cls(torch.from_numpy(rows[:num_codes].astype(np.int64)), 64, num_codes)
        num_words = _num_words(num_codes, bits)
        words = np.zeros(num_words, np.uint32)
        for start in range(0, num_codes, _CODES_AT_ONCE):
            packed = _pack(rows[start : min(start + _CODES_AT_ONCE, num_codes)], bits)
            first = start * bits // _WORD_BITS
            words[first : first + len(packed)] = packed[: num_words - first]
        return cls(torch.from_numpy(words.view(np.int32)), bits, num_codes)

    @property
    def num_bytes(self) -> int:
        """The bytes of the words."""
        return int(self.words.nbytes)

    def to(self, device: torch.device) -> PackedRows:
        """Returns the rows with their words on a device."""
        return replace(self, words=self.words.to(device))

    def take(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        """Returns the rows of ids on the words' device; ids beyond the ends get the first or the last row."""
        places = ids.long().clamp(0, self.num_codes - 1)
        if self.bits == 64:
            return torch.take(self.words, places)
        if isinstance(ids, torch.Tensor):
            words = self.words
        else:  # torch.fx traces it: no device is known yet
            words = self.words.to(ids.device)
        # pair i is words i and i + 1, gathered at once; torch.jit.trace has no view of both as one integer
        pairs = words.as_strided((len(self.words) - 1, 2), (1, 1))
        first_bits = places * self.bits
        low, high = torch.nn.functional.embedding(first_bits >> 5, pairs).long().unbind(-1)
        read = (high << _WORD_BITS) | (low & 0xFFFFFFFF)
        return (read >> (first_bits & 31)) & ((1 << self.bits) - 1)

    def first(self, num_ids: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the rows of the first ids, unpacked, as int64 unless ``dtype`` is given."""
        rows = torch.empty(num_ids, dtype=dtype or torch.int64)
        for start in range(0, num_ids, _CODES_AT_ONCE):
            stop = min(start + _CODES_AT_ONCE, num_ids)
            rows[start:stop] = self.take(torch.arange(start, stop))
        return rows


def packed_bytes(num_codes: int, num_rows: int) -> int:
    """Returns the bytes of so many codes of rows below ``num_rows``, at most 2^32."""
    return 4 * _num_words(num_codes, (num_rows - 1).bit_length())


def _num_words(num_codes: int, bits: int) -> int:
    return max(2, -(-num_codes * bits // _WORD_BITS) + 1)  # a code's second word exists, even without bits


def _pack(codes: NDArray[Any], bits: int) -> NDArray[np.uint32]:
    """Returns the words of codes: 32 codes fill ``bits`` words, and code j of each 32 lies at the same place there."""
    groups = np.zeros((-(-len(codes) // _WORD_BITS), _WORD_BITS), np.uint64)
    groups.reshape(-1)[: len(codes)] = codes
    words = np.zeros((len(groups), bits), np.uint32)
    for column in range(_WORD_BITS if bits else 0):
        word, shift = divmod(column * bits, _WORD_BITS)
        shifted = groups[:, column] << np.uint64(shift)
        words[:, word] |= shifted.astype(np.uint32)
        if shift + bits > _WORD_BITS:
            words[:, word + 1] |= (shifted >> np.uint64(_WORD_BITS)).astype(np.uint32)
    return words.reshape(-1)
