"""Reads columns of integers or texts as numbers, and marks the values that are none instead of raising an error."""

from __future__ import annotations

import binascii

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_MAX_KEY = 2**32 - 1
_HEX_DIGITS = 8
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?$"


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
    good = _matches(values, f"^[0-9a-fA-F]{{1,{_HEX_DIGITS}}}$")
    digits = pc.utf8_lpad(pc.if_else(good, values, "0"), width=_HEX_DIGITS, padding="0")
    text = np.frombuffer(digits.buffers()[2] or b"", np.uint8)[: _HEX_DIGITS * len(digits)]
    return np.frombuffer(binascii.unhexlify(text.data), ">u4").astype(np.uint32), _not(good)


def positive_numbers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns finite numbers above 0, and which values are none."""
    numbers, malformed = finite_numbers(values)
    return numbers, malformed | (numbers <= 0)


def finite_numbers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns finite numbers, and which values are none: these are NaN."""
    if pa.types.is_string(values.type):
        values = pc.if_else(_matches(values, _NUMBER), values, pa.scalar(None, values.type))
    numbers = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False).copy()
    malformed = ~np.isfinite(numbers)
    numbers[malformed] = np.nan
    return numbers, malformed


def _integers(values: pa.Array) -> NDArray[np.int64]:
    """Returns the integers as int64; null, and what exceeds 63 bits, becomes negative."""
    unsigned = pa.types.is_uint64(values.type)
    filled = values.fill_null(2**64 - 1 if unsigned else -1) if values.null_count else values
    numbers: NDArray[np.int64] = filled.to_numpy().astype(np.int64)
    return numbers


def _matches(values: pa.Array, pattern: str) -> pa.Array:
    return pc.fill_null(pc.match_substring_regex(values, pattern), False)


def _not(matches: pa.Array) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = ~matches.to_numpy(zero_copy_only=False)
    return result
