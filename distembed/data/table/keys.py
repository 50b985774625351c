"""Keys of a column of raw values, which are texts or of Arrow's types, or lists of these.

Each distinct value of a block is looked at once: a column becomes codes into its distinct values, and these become
keys. Each kind of values has a function from values to keys, chosen by :data:`KEY_KINDS`.

A typed value has the key and the verdict of its text (``values.py``): 2.0 and "2.00" are 2, true and "True" are
true. Integers, numbers and truth values are read without the detour, which costs time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.hashing import text_keys
from distembed.data.table.blocks import IdColumn, code_dtype
from distembed.data.table.numbers import Bools, has_missing_text, is_missing, values_as_numbers
from distembed.data.table.values import value_texts

_DIGITS = r"^[+-]?[0-9]+$"
_HEX_DIGITS = 8
_HEXADECIMAL = re.compile(f"[0-9a-fA-F]{{1,{_HEX_DIGITS}}}")
_HEX_VALUE = np.full(256, 255, np.uint8)
for _value, _digits in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
    _HEX_VALUE[list(_digits)] = _value
# Python reads up to so many texts in less time than Arrow is called.
_FEW = 32
_CROSS_SEPARATOR, _ESCAPE = "|", "\\"
# Above it, another integer may have been rounded to a number in floating point.
_LARGEST_EXACT = 2**53 - 1


@dataclass(frozen=True)
class Keys:
    """The key of each distinct value of a column; different values, as "2" and "2.0", may have equal keys."""

    keys: NDArray[Any]
    wrong: Bools  # which values are malformed; their keys are meaningless
    texts: pa.Array | None = None  # text of each value, if keys are hashes of texts
    are_distinct: bool = False  # whether no two keys are equal, so that merging equal keys can be skipped

    def take(self, positions: NDArray[np.int64]) -> Keys:
        """Selects the keys, flags and texts at some positions."""
        texts = None if self.texts is None else self.texts.take(pa.array(positions))
        return Keys(self.keys[positions], self.wrong[positions], texts, self.are_distinct)


@dataclass(frozen=True)
class CodedColumn:
    """Dictionary-encoded values: value i is ``distinct[codes[i] - 1]``; code 0 is a missing value."""

    codes: NDArray[np.int32]
    distinct: pa.Array
    lengths: NDArray[np.int32] | None = None  # number of values of each row of lists; None where each row has one


def string_keys(distinct: pa.Array) -> Keys:
    """Hashes the canonical text of each value to 64 bits; no value is malformed."""
    texts = value_texts(distinct)
    return Keys(text_keys(texts), np.zeros(len(texts), bool), texts, are_distinct=texts is distinct)


def integer_keys(distinct: pa.Array) -> Keys:
    """Converts values to int64; a value that is no integer, or may have been rounded to one, is malformed.

    Digits and integers may use all 64 bits. A value that passes through floating point must have at most 53 bits, as
    "1e3", or "3.0" by which pandas writes 3 in a column with missing values. True is 1 and false is 0.
    """
    if pa.types.is_string(distinct.type) or pa.types.is_decimal(distinct.type):
        return _written_integers(distinct.cast(pa.string()))
    if not pa.types.is_integer(distinct.type):
        return _whole_numbers(distinct)
    values = distinct.to_numpy(zero_copy_only=False)
    return Keys(values.astype(np.int64), values > np.iinfo(np.int64).max)


def hash_keys(distinct: pa.Array) -> Keys:
    """Reads each value's text as 1 to 8 hexadecimal digits: the integer 10 has the key 0x10. Others are malformed."""
    keys, wrong = hexadecimal_keys(distinct.cast(pa.string()))
    if wrong.any():  # the canonical text may have digits only where the column's text has not: 10.0 is 10
        keys[wrong], wrong[wrong] = hexadecimal_keys(value_texts(distinct.filter(pa.array(wrong))))
    return Keys(keys, wrong)


def hexadecimal_keys(texts: pa.Array) -> tuple[NDArray[np.uint32], Bools]:
    """Reads texts of 1 to 8 hexadecimal digits, or takes integers below 2^32 as they are.

    Returns the numbers, 0 for malformed values, and a mask of the malformed values.
    """
    if pa.types.is_integer(texts.type):
        numbers, wrong = plain_numbers(texts)
        wrong |= numbers >= 2**32
        return np.where(wrong, 0, numbers).astype(np.uint32), wrong
    if len(texts) <= _FEW:
        matches = [_HEXADECIMAL.fullmatch(text) for text in texts.to_pylist()]
        keys = np.array([int(match[0], 16) if match else 0 for match in matches], np.uint32)
        return keys, np.array([match is None for match in matches], bool)
    if pc.all(pc.equal(pc.binary_length(texts), _HEX_DIGITS)).as_py():
        return decode_hexadecimals(texts)
    good = pc.match_substring_regex(texts, f"^{_HEXADECIMAL.pattern}$")
    digits = pc.utf8_lpad(pc.if_else(good, texts, "0"), width=_HEX_DIGITS, padding="0")
    return decode_hexadecimals(digits)[0], ~good.to_numpy(zero_copy_only=False)


def decode_hexadecimals(texts: pa.Array) -> tuple[NDArray[np.uint32], Bools]:
    """Decodes texts of exactly 8 bytes; returns the numbers and a mask of texts with other letters (their number is 0).

    The array has no nulls, and is a ``string`` with 32-bit offsets or a fixed-size binary without an offset.
    """
    *_, data = texts.buffers()
    start = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset] if pa.types.is_string(texts.type) else 0
    letters = np.frombuffer(data, np.uint8)[start : start + len(texts) * _HEX_DIGITS].reshape(-1, _HEX_DIGITS)
    digits = _HEX_VALUE[letters]
    wrong: Bools = np.max(digits, axis=1, initial=0) > 15
    # two digits are a byte; the four bytes of a text are a big-endian integer
    pairs = digits[:, 0::2] << 4 | digits[:, 1::2]
    numbers: NDArray[np.uint32] = pairs.view(">u4").reshape(-1).astype(np.uint32)
    numbers[wrong] = 0
    return numbers, wrong


def plain_numbers(values: pa.Array) -> tuple[NDArray[np.int64], Bools]:
    """Reads integers, or texts of up to 18 decimal digits besides leading zeros; signs are refused.

    Returns the numbers and a mask of the malformed values: negative, null, too large, or not only digits.
    """
    if pa.types.is_integer(values.type):
        numbers = values.cast(pa.int64(), safe=False).fill_null(-1).to_numpy()
        return numbers, numbers < 0
    good = pc.match_substring_regex(values, "^0*[0-9]{1,18}$").fill_null(False)
    numbers = pc.if_else(good, values, "0").cast(pa.int64()).to_numpy()
    return numbers, ~good.to_numpy(zero_copy_only=False)


def log_bin_keys(distinct: pa.Array) -> Keys:
    """Returns floor(ln(x)^2) for numbers x above 2, and floor(x) for others; too large results are malformed."""
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
"""Kind of values -> function from distinct values, without missing ones, to keys."""


def coded(column: pa.Array, missing: pa.Array) -> CodedColumn:
    """Dictionary-encodes a column; nulls, NaN and the texts in ``missing`` get code 0 and are no distinct values."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    indices = encoded.indices.fill_null(-1) if encoded.indices.null_count else encoded.indices
    codes = indices.to_numpy() + np.int32(1)
    distinct = encoded.dictionary
    gone = is_missing(distinct) | has_missing_text(distinct, missing)
    if not gone.any():
        return CodedColumn(codes, distinct)
    # old code -> new code: values that stay are numbered anew from 1, missing ones become 0
    new_codes = np.concatenate([[0], np.where(gone, 0, np.cumsum(~gone))]).astype(np.int32)
    return CodedColumn(new_codes[codes], distinct.filter(pa.array(~gone)))


def coded_lists(lists: pa.Array, missing: pa.Array, max_length: int | None) -> CodedColumn:
    """Dictionary-encodes the entries of lists end to end, without missing entries; keeps the last ``max_length``."""
    values = coded(pc.list_flatten(lists), missing)
    kept, lengths = kept_entries(list_lengths(lists), values.codes > 0, max_length)
    return CodedColumn(values.codes[kept], values.distinct, lengths)


def list_lengths(lists: pa.Array) -> NDArray[np.int64]:
    """Returns the number of entries of each list; a null has none."""
    lengths: NDArray[np.int64] = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def kept_entries(lengths: NDArray[np.int64], present: Bools, max_length: int | None) -> tuple[Bools, NDArray[np.int32]]:
    """Returns the mask of the entries that lists keep, end to end: the last ``max_length`` that are present.

    The second result has the number of kept entries of each list.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(rows[present], minlength=len(lengths)).astype(np.int32)
    if max_length is None or not len(counts) or counts.max() <= max_length:
        return present, counts
    # 1 for the last present entry of its list, 2 for the one before
    place_from_end = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum())
    kept = present.copy()
    kept[present] = place_from_end <= max_length
    return kept, np.minimum(counts, np.int32(max_length))


def crossed(columns: Sequence[CodedColumn]) -> CodedColumn:
    r"""Joins columns of one value a row into a column of texts ``a|b``, missing where any of the values is missing.

    ``|`` and ``\`` within a value are escaped by ``\``, so that different pairs have different texts.
    """
    texts = []
    for column in columns:
        column_texts = value_texts(column.distinct)
        for character in (_ESCAPE, _CROSS_SEPARATOR):
            column_texts = pc.replace_substring(column_texts, character, _ESCAPE + character)
        texts.append(column_texts.take(pa.array(column.codes - 1, mask=column.codes == 0)))
    return coded(pc.binary_join_element_wise(*texts, _CROSS_SEPARATOR), pa.array([], pa.string()))


def wrong_rows(column: CodedColumn, wrong: Bools, num_rows: int) -> Bools:
    """Returns a mask of the rows that hold a malformed value, given the mask ``wrong`` of the distinct values."""
    values = np.concatenate([[False], wrong])[column.codes]
    if column.lengths is None:
        return values
    rows = np.repeat(np.arange(num_rows), column.lengths)
    return np.bincount(rows[values], minlength=num_rows) > 0


def keyed_column(column: CodedColumn, keys: Keys, good: Bools | None) -> IdColumn:
    """Builds the column of the rows in ``good`` (None: all rows), with only the keys that these rows use, each once."""
    codes, lengths = column.codes, column.lengths
    if good is not None:
        codes = codes[good if lengths is None else np.repeat(good, lengths)]
        lengths = lengths if lengths is None else lengths[good]
    codes, keys = with_distinct_keys(codes, keys)
    used = np.zeros(len(keys.keys) + 1, bool)
    used[codes] = True
    used[0] = True
    if not used.all():  # numbers the used codes anew, in their order
        codes = (np.cumsum(used) - 1)[codes]
        keys = keys.take(np.flatnonzero(used[1:]))
    values = np.concatenate([np.zeros(1, keys.keys.dtype), keys.keys])
    texts = None if keys.texts is None else pa.concat_arrays([pa.array([""]), keys.texts])
    return IdColumn(codes.astype(code_dtype(len(values))), values, texts, lengths)


def with_distinct_keys(codes: NDArray[np.int32], keys: Keys) -> tuple[NDArray[np.int32], Keys]:
    """Merges equal keys, as of 10 and 10.0, and returns the codes into the merged keys and these keys.

    All malformed values merge into one entry, apart from well-formed values.
    """
    if keys.are_distinct:
        return codes, keys
    # Merges hashed values by text, not by key: a collision of two texts is reported later, where they get ids.
    encoded = (pa.array(keys.keys, mask=keys.wrong) if keys.texts is None else keys.texts).dictionary_encode("encode")
    if len(encoded.dictionary) < len(keys.keys):
        # keys 10, 10, 7 have the key codes 0, 0, 1: codes 1, 2, 3 become 1, 1, 2, and 0, a missing value, stays 0
        key_codes = encoded.indices.to_numpy()
        codes = np.concatenate([np.zeros(1, np.int32), key_codes + np.int32(1)])[codes]
        keys = keys.take(np.unique(key_codes, return_index=True)[1])
    return codes, dataclasses.replace(keys, are_distinct=True)


def _whole_numbers(values: pa.Array) -> Keys:
    """Converts whole numbers of at most 53 bits, booleans, or the texts of either; other values are malformed."""
    numbers, wrong = values_as_numbers(values)
    wrong = wrong | ~((np.floor(numbers) == numbers) & (np.abs(numbers) <= _LARGEST_EXACT))
    return Keys(np.where(wrong, 0, numbers).astype(np.int64), wrong)


def _written_integers(texts: pa.Array) -> Keys:
    """Converts texts of digits with all 64 bits, and other texts as :func:`_whole_numbers` does."""
    is_digits = pc.match_substring_regex(texts, _DIGITS)
    digits = pc.if_else(is_digits, pc.utf8_ltrim(texts, "+"), "0")
    try:
        keys, wrong = digits.cast(pa.int64()).to_numpy().copy(), np.zeros(len(texts), bool)
    except pa.ArrowInvalid:  # some have more than 64 bits: 20 digits are enough to see it
        signs = [-1 if text.startswith("-") else 1 for text in digits.to_pylist()]
        magnitudes = [int((text.lstrip("-0") or "0")[:20]) for text in digits.to_pylist()]
        numbers = np.array(signs, object) * np.array(magnitudes, object)
        wrong = ~((numbers >= -(2**63)) & (numbers < 2**63)).astype(bool)
        keys = np.where(wrong, 0, numbers).astype(np.int64)
    is_other = ~is_digits.to_numpy(zero_copy_only=False)
    if is_other.any():
        other_texts = _whole_numbers(texts.filter(pa.array(is_other)))
        keys[is_other], wrong[is_other] = other_texts.keys, other_texts.wrong
    return Keys(keys, wrong)
