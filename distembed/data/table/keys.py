"""Keys of a column of raw values, which are texts or of Arrow's types, or lists of these.

Each distinct value of a block is looked at once: a column becomes codes into its distinct values, and these become
keys. What a value of a kind is, and which key it has, is a function of its own, chosen by :data:`KEY_KINDS`.

A typed value has the key and the verdict of its text (``value_texts.py``): 2.0 and "2.00" are 2, true and "True" are
true. Integers, numbers and truth values are read without the detour, which costs time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.prepare.blocks import IdColumn, code_dtype
from distembed.data.prepare.column_numbers import hexadecimal_keys
from distembed.data.table.numbers import Bools, has_missing_text, is_missing, values_as_numbers
from distembed.data.table.text_keys import text_keys
from distembed.data.table.value_texts import value_texts

_DIGITS = r"^[+-]?[0-9]+$"
_CROSS_SEPARATOR, _ESCAPE = "|", "\\"
_LARGEST_EXACT = 2**53 - 1
"""Above it, another integer may have been rounded to a number in floating point."""


@dataclass(frozen=True)
class Keys:
    """What became of distinct values.

    Attributes:
        keys: Key of each value.
        wrong: Which values are malformed.
        texts: Text of each value, for keys that are hashes.
        are_distinct: Whether the keys are known to be there once each.
    """

    keys: NDArray[Any]
    wrong: Bools
    texts: pa.Array | None = None
    are_distinct: bool = False

    def some(self, places: NDArray[np.int64]) -> Keys:
        """Returns what became of some of the values."""
        texts = None if self.texts is None else self.texts.take(pa.array(places))
        return Keys(self.keys[places], self.wrong[places], texts, self.are_distinct)


@dataclass(frozen=True)
class CodedColumn:
    """Values of a column: value i is number ``codes[i]`` of the distinct ones, counted from 1; 0 is a missing one.

    Attributes:
        codes: Codes of all values, int32.
        distinct: The distinct values.
        lengths: Number of values of each row, int32, for lists; None where each row has one.
    """

    codes: NDArray[np.int32]
    distinct: pa.Array
    lengths: NDArray[np.int32] | None = None


def string_keys(distinct: pa.Array) -> Keys:
    """Returns hashes of the values' texts."""
    texts = value_texts(distinct)
    return Keys(text_keys(texts), np.zeros(len(texts), bool), texts, are_distinct=texts is distinct)


def integer_keys(distinct: pa.Array) -> Keys:
    """Returns integers of 64 bits: of digits, of numbers that are whole and of at most 53 bits, and of truth values.

    A text may have a fraction of zeros, as pandas writes integers of which some are missing, or an exponent. It is a
    number then: with more than 53 bits it may have been rounded, and is malformed.
    """
    if pa.types.is_string(distinct.type) or pa.types.is_decimal(distinct.type):
        return _written_integers(distinct.cast(pa.string()))
    if not pa.types.is_integer(distinct.type):
        return _whole_numbers(distinct)
    values = distinct.to_numpy(zero_copy_only=False)
    return Keys(values.astype(np.int64), values > np.iinfo(np.int64).max)


def hash_keys(distinct: pa.Array) -> Keys:
    """Returns numbers of 32 bits, of up to 8 hexadecimal digits; an integer's digits are read as hexadecimal ones."""
    keys, wrong = hexadecimal_keys(distinct.cast(pa.string()))
    if wrong.any():  # hexadecimal digits are a value's own text
        keys[wrong], wrong[wrong] = hexadecimal_keys(value_texts(distinct.filter(pa.array(wrong))))
    return Keys(keys, wrong)


def log_bin_keys(distinct: pa.Array) -> Keys:
    """Returns the square of the logarithm of numbers above 2, rounded down, and lower numbers rounded down."""
    numbers, wrong = values_as_numbers(distinct)
    bins = np.where(numbers > 2, np.square(np.log(np.maximum(numbers, 2))), numbers)
    wrong |= ~(np.abs(bins) <= _LARGEST_EXACT)
    return Keys(np.floor(np.where(wrong, 0, bins)).astype(np.int64), wrong)


KEY_KINDS: Mapping[str, Callable[[pa.Array], Keys]] = {
    "string": string_keys,
    "integer": integer_keys,
    "hexadecimal": hash_keys,
    "log_bins": log_bin_keys,
}
"""Kind of values -> keys of distinct ones, none of which is missing."""


def coded(column: pa.Array, missing: pa.Array) -> CodedColumn:
    """Returns a column's values as codes of the distinct ones.

    Args:
        column: One value a row, which may be a dictionary's.
        missing: Texts that stand for a missing value.
    """
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    indices = encoded.indices.fill_null(-1) if encoded.indices.null_count else encoded.indices
    codes = indices.to_numpy() + np.int32(1)
    distinct = encoded.dictionary
    gone = is_missing(distinct) | has_missing_text(distinct, missing)
    if not gone.any():
        return CodedColumn(codes, distinct)
    new_codes = np.concatenate([[0], np.where(gone, 0, np.cumsum(~gone))]).astype(np.int32)
    return CodedColumn(new_codes[codes], distinct.filter(pa.array(~gone)))


def coded_lists(lists: pa.Array, missing: pa.Array, max_length: int | None) -> CodedColumn:
    """Returns the values of lists as codes of the distinct ones; what is missing within a list is left out.

    Args:
        lists: A list of values a row; a missing list is an empty one.
        missing: Texts that stand for a missing value.
        max_length: Most values of a row, the last ones; None for all.
    """
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)
    values = coded(pc.list_flatten(lists), missing)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    present = values.codes > 0
    lengths = np.bincount(rows[present], minlength=len(lengths)).astype(np.int32)
    codes = values.codes[present]
    if max_length is not None and len(lengths) and lengths.max() > max_length:
        place_from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(codes))
        codes = codes[place_from_end <= max_length]
        lengths = np.minimum(lengths, np.int32(max_length))
    return CodedColumn(codes, values.distinct, lengths)


def crossed(columns: Sequence[CodedColumn]) -> CodedColumn:
    r"""Returns what several columns say together as one column of texts: ``a|b``, where ``|`` within a value is ``\|``.

    It is missing where the value of one of them is.

    Args:
        columns: Columns with one value a row each.
    """
    first, *others = [_with_distinct_texts(column) for column in columns]
    codes, texts = first.codes, _escaped(first.distinct)
    for other in others:
        pairs = codes.astype(np.int64) * (len(other.distinct) + 1) + other.codes
        pairs[(codes == 0) | (other.codes == 0)] = -1
        distinct, places = np.unique(pairs, return_inverse=True)
        num_missing = int(len(distinct) > 0 and distinct[0] < 0)
        codes = (places + 1 - num_missing).astype(np.int32)
        left, right = np.divmod(distinct[num_missing:], len(other.distinct) + 1)
        texts = pc.binary_join_element_wise(
            texts.take(pa.array(left - 1)), _escaped(other.distinct).take(pa.array(right - 1)), _CROSS_SEPARATOR
        )
    return CodedColumn(codes, texts)


def _with_distinct_texts(column: CodedColumn) -> CodedColumn:
    """Returns a column whose distinct values are texts."""
    texts = value_texts(column.distinct).dictionary_encode()
    places = np.concatenate([np.zeros(1, np.int32), texts.indices.to_numpy() + np.int32(1)])
    return dataclasses.replace(column, codes=places[column.codes], distinct=texts.dictionary)


def wrong_rows(column: CodedColumn, wrong: Bools, num_rows: int) -> Bools:
    """Returns which rows have a malformed value, given which of the distinct ones are."""
    values = np.concatenate([[False], wrong])[column.codes]
    if column.lengths is None:
        return values
    rows = np.repeat(np.arange(num_rows), column.lengths)
    return np.bincount(rows[values], minlength=num_rows) > 0


def id_column(column: CodedColumn, keys: Keys, good: Bools | None) -> IdColumn:
    """Returns the keys of the well-formed rows, each of which is there once and is of some row.

    Args:
        column: The values.
        keys: The keys of the distinct ones.
        good: Which rows are well-formed; None where all are.
    """
    codes, lengths = column.codes, column.lengths
    if good is not None:
        codes = codes[good if lengths is None else np.repeat(good, lengths)]
        lengths = lengths if lengths is None else lengths[good]
    codes, keys = _with_distinct_keys(codes, keys)
    used = np.zeros(len(keys.keys) + 1, bool)
    used[codes] = True
    used[0] = True
    if not used.all():
        codes = (np.cumsum(used) - 1)[codes]
        keys = keys.some(np.flatnonzero(used[1:]))
    values = np.concatenate([np.zeros(1, keys.keys.dtype), keys.keys])
    texts = None if keys.texts is None else pa.concat_arrays([pa.array([""]), keys.texts])
    return IdColumn(codes.astype(code_dtype(len(values))), values, texts, lengths)


def with_distinct_keys(column: CodedColumn, keys: Keys) -> tuple[CodedColumn, Keys]:
    """Returns a column whose keys are there once each, so that its parts need not be searched for equal ones."""
    codes, keys = _with_distinct_keys(column.codes, keys)
    return dataclasses.replace(column, codes=codes), dataclasses.replace(keys, are_distinct=True)


def _with_distinct_keys(codes: NDArray[np.int32], keys: Keys) -> tuple[NDArray[np.int32], Keys]:
    """Returns the keys each once, and the codes into these: several values may have one key, such as 10 and 10.0.

    The key of a malformed value is a placeholder, which is never joined with the key of a well-formed one.
    """
    if keys.are_distinct or len(keys.keys) < 2:
        return codes, keys
    # two texts with one key are told apart where ids are given
    encoded = (pa.array(keys.keys, mask=keys.wrong) if keys.texts is None else keys.texts).dictionary_encode("encode")
    if len(encoded.dictionary) == len(keys.keys):
        return codes, keys
    places = encoded.indices.to_numpy()
    first = np.unique(places, return_index=True)[1]
    return np.concatenate([np.zeros(1, np.int32), places + np.int32(1)])[codes], keys.some(first)


def _whole_numbers(values: pa.Array) -> Keys:
    """Returns the integers of numbers and truth values, or of their texts."""
    numbers, wrong = values_as_numbers(values)
    wrong = wrong | ~((np.floor(numbers) == numbers) & (np.abs(numbers) <= _LARGEST_EXACT))
    return Keys(np.where(wrong, 0, numbers).astype(np.int64), wrong)


def _written_integers(texts: pa.Array) -> Keys:
    """Returns the integers of texts."""
    is_other = ~pc.match_substring_regex(texts, _DIGITS).to_numpy(zero_copy_only=False)
    if not is_other.any():
        return _written_digits(texts)
    found = _written_digits(pc.if_else(pa.array(is_other), "0", texts))
    others = _whole_numbers(texts.filter(pa.array(is_other)))
    found.keys[is_other], found.wrong[is_other] = others.keys, others.wrong
    return found


def _written_digits(texts: pa.Array) -> Keys:
    """Returns the integers of texts of digits, which may have a sign."""
    wrong = np.zeros(len(texts), bool)
    digits = pc.utf8_ltrim(texts, "+")
    try:
        return Keys(digits.cast(pa.int64()).to_numpy().copy(), wrong)
    except pa.ArrowInvalid:  # some have more than 64 bits
        numbers = [_int64(text) for text in digits.to_pylist()]
        wrong |= np.array([number is None for number in numbers], bool)
        return Keys(np.array([number or 0 for number in numbers], np.int64), wrong)


def _int64(digits: str) -> int | None:
    """Returns the integer of a sign and digits; None where it has more than 64 bits."""
    sign = -1 if digits.startswith("-") else 1
    magnitude = digits.lstrip("-").lstrip("0")
    number = sign * int(magnitude or "0") if len(magnitude) <= 19 else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _escaped(texts: pa.Array) -> pa.Array:
    """Returns texts in which neither the separator of crosses nor the mark before it stands by itself."""
    for character in (_ESCAPE, _CROSS_SEPARATOR):
        if pc.any(pc.match_substring(texts, character)).as_py():
            texts = pc.replace_substring(texts, character, _ESCAPE + character)
    return texts
