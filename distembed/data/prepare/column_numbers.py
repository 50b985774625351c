"""Reads columns of integers or texts as numbers, and marks the values that are none instead of raising an error."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_MAX_KEY = 2**32 - 1
_HEX_DIGITS = 8
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_HEXADECIMAL = re.compile(f"[0-9a-fA-F]{{1,{_HEX_DIGITS}}}")
_FEW = 32
"""Number of texts up to which Python reads them in less time than Arrow is called."""
_HEX_VALUE = np.full(256, 255, np.uint8)
_HEX_VALUE[np.frombuffer(b"0123456789", np.uint8)] = range(10)
_HEX_VALUE[np.frombuffer(b"abcdef", np.uint8)] = range(10, 16)
_HEX_VALUE[np.frombuffer(b"ABCDEF", np.uint8)] = range(10, 16)


def decimal_numbers(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns numbers of 0 to 2^63-1, and which values are none."""
    if pa.types.is_integer(values.type):
        numbers = _integers(values)
        return numbers, numbers < 0
    good = _matches(values, "^0*[0-9]{1,18}$")
    return pc.cast(pc.if_else(good, values, "0"), pa.int64()).to_numpy(), _not(good)


def hexadecimal_keys(values: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Returns numbers of 32 bits, and which values are none; a text is 1 to 8 hexadecimal digits."""
    if pa.types.is_integer(values.type):
        numbers = _integers(values)
        malformed = (numbers < 0) | (numbers > _MAX_KEY)
        return np.where(malformed, 0, numbers).astype(np.uint32), malformed
    if len(values) <= _FEW and pa.types.is_string(values.type) and not values.null_count:
        matches = [_HEXADECIMAL.fullmatch(text) for text in values.to_pylist()]
        keys = np.array([int(match[0], 16) if match else 0 for match in matches], np.uint32)
        return keys, np.array([match is None for match in matches], bool)
    if pc.all(pc.equal(pc.binary_length(values), _HEX_DIGITS), min_count=0).as_py() and not values.null_count:
        return decode_hexadecimals(_text_bytes(values).reshape(-1, _HEX_DIGITS))
    good = _matches(values, f"^[0-9a-fA-F]{{1,{_HEX_DIGITS}}}$")
    digits = pc.utf8_lpad(pc.if_else(good, values, "0"), width=_HEX_DIGITS, padding="0")
    return decode_hexadecimals(_text_bytes(digits).reshape(-1, _HEX_DIGITS))[0], _not(good)


def decode_hexadecimals(texts: NDArray[np.uint8]) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Returns the numbers of texts of 8 hexadecimal digits, and which texts are none: their numbers are 0.

    Args:
        texts: Bytes of the texts, ``[texts, 8]``.
    """
    digits = _HEX_VALUE[texts]
    malformed: NDArray[np.bool_] = np.max(digits, axis=1, initial=0) > 15
    pairs = digits[:, 0::2] << 4 | digits[:, 1::2]
    numbers: NDArray[np.uint32] = pairs.view(">u4").reshape(-1).astype(np.uint32)
    numbers[malformed] = 0
    return numbers, malformed


def positive_numbers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns finite numbers above 0, and which values are none."""
    numbers, malformed = finite_numbers(values)
    return numbers, malformed | (numbers <= 0)


def finite_numbers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns finite numbers, and which values are none: these are NaN."""
    try:
        # texts that are all numbers, as almost all are, need no second look: what is not finite is found below
        numbers = pc.cast(values, pa.float64(), safe=False)
    except pa.ArrowInvalid:
        values = pc.if_else(_matches(values, _NUMBER), values, pa.scalar(None, values.type))
        numbers = pc.cast(values, pa.float64(), safe=False)
    found = numbers.to_numpy(zero_copy_only=False)
    malformed = ~np.isfinite(found)
    return np.where(malformed, np.nan, found) if np.isinf(found).any() else found, malformed


def _integers(values: pa.Array) -> NDArray[np.int64]:
    """Returns the integers as int64; null, and what exceeds 63 bits, becomes negative."""
    unsigned = pa.types.is_uint64(values.type)
    filled = values.fill_null(2**64 - 1 if unsigned else -1) if values.null_count else values
    numbers: NDArray[np.int64] = filled.to_numpy().astype(np.int64)
    return numbers


def _text_bytes(texts: pa.Array) -> NDArray[np.uint8]:
    """Returns the bytes of all texts, end to end."""
    offsets = np.frombuffer(texts.buffers()[1] or bytes(8), np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]


def _matches(values: pa.Array, pattern: str) -> pa.Array:
    return pc.fill_null(pc.match_substring_regex(values, pattern), False)


def _not(matches: pa.Array) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = ~matches.to_numpy(zero_copy_only=False)
    return result
