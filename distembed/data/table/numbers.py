"""Labels, weights, times and numbers of a column of raw values, which are texts or of Arrow's types.

A value that is none is marked, and never an error: each function returns the numbers, and which rows are malformed.
A missing value is null, or NaN in a column of floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.table.columns import LabelValues, TimeColumn
from distembed.data.table.values import value_texts

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999: numbers beyond are of another unit; milliseconds of today would be of the year 46,000."""
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_ZONED = r"(?:[Zz]|[+-][0-9]{2}:?[0-9]{2})$"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WHOLE_NUMBER = "^-?[0-9]{1,19}$"


def is_missing(column: pa.Array) -> Bools:
    """Returns a mask of nulls, and of NaN in a floating-point column."""
    is_floating = pa.types.is_floating(column.type)
    if not is_floating and not column.null_count:
        return np.zeros(len(column), bool)
    result: Bools = column.is_null(nan_is_null=is_floating).to_numpy(zero_copy_only=False)
    return result


def has_missing_text(column: pa.Array, missing: pa.Array) -> Bools:
    """Returns a mask of the values whose text, or canonical text, is in ``missing``: "-1" also covers the number -1."""
    texts = missing.to_pylist()
    # Only a number, boolean or date can be written in several ways; other texts need no canonical form.
    typed = [text for text in texts if is_number(text) or text.lower() in ("true", "false") or text[:4].isdecimal()]
    result: Bools = np.zeros(len(column), bool)
    if pa.types.is_string(column.type):
        result = pc.is_in(column, value_set=missing).to_numpy(zero_copy_only=False)
    if typed:
        typed_texts = value_texts(pa.array(typed, pa.string()))
        result = result | pc.is_in(value_texts(column), value_set=typed_texts).to_numpy(zero_copy_only=False)
    return result


def is_number(text: str) -> bool:
    """Returns whether Python reads a text as a number, infinity and NaN included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def finite_numbers(values: pa.Array) -> tuple[NDArray[np.float64], Bools]:
    """Converts values to float64; returns the numbers and a mask of values that are not finite numbers, set to NaN."""
    try:
        # texts that are all numbers, as almost all are, need no second look: infinite values are found below
        numbers = pc.cast(values, pa.float64(), safe=False)
    except pa.ArrowInvalid:
        is_number = pc.match_substring_regex(values, _NUMBER)
        numbers = pc.cast(pc.if_else(is_number, values, pa.scalar(None, values.type)), pa.float64(), safe=False)
    floats = numbers.to_numpy(zero_copy_only=False)
    wrong = ~np.isfinite(floats)
    return np.where(wrong, np.nan, floats) if np.isinf(floats).any() else floats, wrong


def number_values(column: pa.Array) -> tuple[NDArray[np.float64], Bools]:
    """Converts values to float64, NaN if missing; the mask marks values that are neither missing nor finite numbers."""
    numbers, not_finite = finite_numbers(column)
    return numbers, not_finite & ~is_missing(column) if not_finite.any() else not_finite


def values_as_numbers(column: pa.Array) -> tuple[NDArray[np.float64], Bools]:
    """Converts as :func:`number_values` does, and also "true" and "false" (in any case) to 1 and 0."""
    numbers, wrong = number_values(column)
    if wrong.any() and pa.types.is_string(column.type):
        lower = pc.utf8_lower(column)
        for text, number in (("true", 1.0), ("false", 0.0)):
            is_text = pc.fill_null(pc.equal(lower, text), False).to_numpy(zero_copy_only=False)
            numbers, wrong = np.where(is_text, number, numbers), wrong & ~is_text
    return numbers, wrong


def dense_values(column: pa.Array, transform: str) -> tuple[Floats, Bools]:
    """Converts values to float32, NaN if missing; ``log`` gives log(1 + max(x, 0)). Overflow is malformed."""
    numbers, wrong = values_as_numbers(column)
    values, is_infinite = transformed(numbers, transform)
    return values, wrong | is_infinite


def transformed(numbers: NDArray[np.float64], transform: str) -> tuple[Floats, Bools]:
    """Converts numbers as :func:`dense_values` does; the mask marks numbers that are infinite in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = numbers.astype(np.float32)
        is_infinite = np.isinf(values)
        if transform == "log":
            # 0 times NaN brings NaN back; numpy's logarithm of NaN takes ten times as long as of a number
            values = np.log1p(np.fmax(values, np.float32(0))) + values * np.float32(0)
    return values, is_infinite


def weight_values(column: pa.Array) -> tuple[Floats, Bools]:
    """Returns finite weights, 0 or more; a missing one is malformed."""
    values, wrong = dense_values(column, "none")
    return values, wrong | ~(values >= 0)


def without_missing_texts(column: pa.Array, missing: pa.Array) -> pa.Array:
    """Returns a column with null in the place of the values whose text, or canonical text, is in ``missing``."""
    is_text = has_missing_text(column, missing)
    return pc.if_else(pa.array(is_text), pa.scalar(None, column.type), column) if is_text.any() else column


def label_values(column: pa.Array, label: LabelValues) -> tuple[NDArray[np.int8] | Floats, Bools]:
    """Returns labels, int8 for binary ones and float32 for numbers; a missing one is malformed."""
    if label.at_least is not None:
        numbers, wrong = values_as_numbers(column)
        return (numbers >= label.at_least).astype(np.int8), wrong | np.isnan(numbers)
    if label.kind == "number":
        values, wrong = dense_values(column, "none")
        return values, wrong | np.isnan(values)

    def read(distinct: pa.Array) -> tuple[NDArray[np.int8], Bools]:
        numbers, wrong = values_as_numbers(distinct)
        return (numbers == 1).astype(np.int8), wrong | ~((numbers == 0) | (numbers == 1))

    return _by_distinct_value(column, read)


def optional_label_values(column: pa.Array, label: LabelValues, missing: pa.Array) -> tuple[Floats, Bools]:
    """Returns labels as float32, NaN where one is missing: null, NaN, or one of the texts ``missing``."""
    column = without_missing_texts(column, missing)
    values, wrong = label_values(column, label)
    is_absent = is_missing(column)
    return np.where(is_absent, np.float32(np.nan), values.astype(np.float32)), wrong & ~is_absent


def time_values(column: pa.Array, time: TimeColumn) -> tuple[NDArray[np.int64], Bools]:
    """Returns times in whole seconds since 1970, rounded down; a missing one is malformed."""
    if pa.types.is_temporal(column.type):
        return _timestamps(column)
    if time.format in ("seconds", "milliseconds"):
        return _seconds(column, 1000 if time.format == "milliseconds" else 1)
    if time.format != "auto":
        texts = column.cast(pa.string())
        return _by_distinct_value(texts, lambda distinct: _formatted_times(distinct, time.format))
    if pa.types.is_string(column.type):
        return _by_distinct_value(column, _written_times)
    return _seconds(column, 1)


def ordered_times(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.int64], Bools]:
    """Converts times, numbers or dates, to float64 and to int64, and returns both with a mask of malformed values.

    Rows are sorted by the float, which holds every number, then by the integer, which orders long integers (as
    nanoseconds) that are equal as floats of 53 bits. Dates become seconds, and their integers nanoseconds. A missing
    time is malformed.
    """
    if is_date := pa.types.is_temporal(column.type):
        try:
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        except pa.ArrowInvalid:  # before 1677 or after 2262
            microseconds = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
            column = pc.multiply(microseconds.cast(pa.float64(), safe=False), 1e3)
    times, wrong = finite_numbers(column)
    is_64_bit = np.abs(times) < 2.0**63
    integers = np.where(is_64_bit, times, 0).astype(np.int64)
    if pa.types.is_integer(column.type):
        integers = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    elif pa.types.is_string(column.type) and not (np.abs(times) < 2.0**53).all():  # smaller ones are exact
        digits = pc.and_(pc.match_substring_regex(column, _WHOLE_NUMBER), pa.array(is_64_bit)).fill_null(False)
        exact = pc.if_else(digits, column, "0").cast(pa.int64()).to_numpy()
        integers = np.where(digits.to_numpy(zero_copy_only=False), exact, integers)
    return times / 1e9 if is_date else times, integers, wrong


def times_since_first(times: pa.Array, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], Bools]:
    """Returns each time less the first time of its row; the mask marks malformed times, and times before the last one.

    ``rows`` has the row of each time, ascending. The difference is that of sequences prepared from these times.
    """
    numbers, _, wrong = ordered_times(times)
    is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
    wrong[1:] |= ~is_first[1:] & (numbers[1:] < numbers[:-1])
    return numbers - numbers[np.flatnonzero(is_first)][np.cumsum(is_first) - 1], wrong


def _by_distinct_value(
    column: pa.Array, read: Callable[[pa.Array], tuple[NDArray[Any], Bools]]
) -> tuple[NDArray[Any], Bools]:
    """Applies ``read`` to the distinct values, and repeats its results for all rows; a missing value is malformed."""
    encoded = column.dictionary_encode()
    values, wrong = read(encoded.dictionary)
    # one more entry, malformed, to which the null code of missing values points
    values, wrong = np.append(values, np.zeros(1, values.dtype)), np.append(wrong, True)
    codes = encoded.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return values[codes], wrong[codes]


def _seconds(column: pa.Array, units_per_second: int) -> tuple[NDArray[np.int64], Bools]:
    """Converts counts of a unit to whole seconds, rounded down; times outside of the years 1 to 9999 are malformed."""
    begin, end = _FIRST_SECOND * units_per_second, (_LAST_SECOND + 1) * units_per_second
    if pa.types.is_integer(column.type):
        integers = column.fill_null(0).to_numpy(zero_copy_only=False)
        wrong = is_missing(column) | (integers < begin) | (integers >= end)
        return np.where(wrong, 0, integers).astype(np.int64) // units_per_second, wrong
    numbers, wrong = number_values(column)
    wrong |= ~((numbers >= begin) & (numbers < end))
    return np.floor(np.where(wrong, 0, numbers) / units_per_second).astype(np.int64), wrong


def _timestamps(column: pa.Array) -> tuple[NDArray[np.int64], Bools]:
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms" if pa.types.is_date64(column.type) else "s"))
    if not pa.types.is_timestamp(column.type):  # a time of the day, or a length of time
        return np.zeros(len(column), np.int64), np.ones(len(column), bool)
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    seconds = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) // per_second
    return seconds, is_missing(column)


def _formatted_times(distinct: pa.Array, layout: str) -> tuple[NDArray[np.int64], Bools]:
    """Parses texts by a strptime format; returns seconds and a mask of the texts that do not fit or name no day."""
    times = pc.strptime(distinct, format=layout, unit="s", error_is_null=True)
    seconds, wrong = _timestamps(times)
    # Arrow turns February 30 into March 2. Where the day came out as 1 to 3 and the text has 29, 30 or 31, Python's
    # strptime decides.
    may_be_moved = pc.and_(pc.less_equal(pc.day(times), 3), pc.match_substring_regex(distinct, "29|30|31"))
    for index in np.flatnonzero(pc.fill_null(may_be_moved, False).to_numpy(zero_copy_only=False)).tolist():
        try:
            datetime.strptime(distinct[index].as_py(), layout)
        except ValueError as error:
            wrong[index] |= "range" in str(error) and "month" in str(error)
    return seconds, wrong


def _written_times(distinct: pa.Array) -> tuple[NDArray[np.int64], Bools]:
    """Returns the seconds of texts that are numbers of seconds, or days and times as ISO 8601 writes them."""
    seconds, wrong = _seconds(distinct, 1)
    # Only texts that are no numbers are read as ISO 8601: a number out of range, as of milliseconds, could pass for a
    # day and a time without hyphens.
    not_numbers = np.flatnonzero(wrong)
    if len(not_numbers):
        not_numbers = np.flatnonzero(wrong & number_values(distinct)[1])
        seconds = seconds.copy()
        seconds[not_numbers], wrong[not_numbers] = _iso_times(distinct.take(pa.array(not_numbers)))
    return seconds, wrong


def _iso_times(texts: pa.Array) -> tuple[NDArray[np.int64], Bools]:
    """Parses ISO 8601 days and times, in UTC unless they name a zone; returns seconds and a mask of malformed texts."""
    # Arrow parses a column that is all with or all without a zone; Python parses mixed and malformed columns.
    zoned = pc.match_substring_regex(texts, _ZONED)
    for kind in (pa.timestamp("ns"), pa.timestamp("ns", "UTC")):
        if pc.all(pc.equal(zoned, kind.tz is not None)).as_py():
            with suppress(pa.ArrowInvalid):
                return _timestamps(texts.cast(kind))
    seconds, wrong = np.zeros(len(texts), np.int64), np.ones(len(texts), bool)
    for index, text in enumerate(texts.to_pylist()):
        with suppress(ValueError):
            time = datetime.fromisoformat(text)
            seconds[index] = ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(seconds=1)
            wrong[index] = False
    return seconds, wrong
