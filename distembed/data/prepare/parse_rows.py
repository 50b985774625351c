r"""Parses a block of Criteo lines into columns, and sets the malformed rows aside.

A row is ``label \t I1 .. I13 \t C1 .. C26``. It is malformed, for the first of these reasons that holds:

- ``columns``: it does not have 40 fields;
- ``label``: the label is neither ``0`` nor ``1``;
- ``dense``: an integer is neither empty nor ``-?[0-9]+`` within 64 bits;
- ``id``: an id is neither empty nor 1 to 8 hexadecimal digits, of either case.

Almost every block is well-formed and has ids of 8 digits: a typed parse reads it. Where anything else turns up, the
whole block is parsed again as text, which is three times slower and finds the rows at fault. Each distinct id is
decoded once a block: a column of ids becomes codes into the block's list of keys, which are uint32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
from numpy.typing import NDArray

from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.data.prepare.blocks import IdColumn, ParsedBlock, RejectedRow, code_dtype
from distembed.data.prepare.column_numbers import decode_hexadecimals

REASONS: tuple[str, ...] = ("columns", "label", "dense", "id")

_LABEL = "label"
_COLUMNS: tuple[str, ...] = (_LABEL, *CRITEO_DENSE, *CRITEO_CATEGORICAL)
_ID_TEXT = pa.binary(8)
# What pyarrow parses at a time: at 1 MiB the columns that it builds stay in cache, and it is twice as fast as at 27.
_CACHED_BYTES = 1 << 20

_INT64 = np.iinfo(np.int64)

# What the typed parse would let pass though the grammar above does not: blanks around numbers, and 0x1F.
_SUSPICIOUS = (b" ", b"x", b"X", b"+", b"\r")

# pyarrow takes a lone carriage return for a line's end, skips a byte order mark, and can only report UTF-8. None of
# these bytes belongs in a field, so each may as well be another byte that does not.
_HARMLESS = bytes(byte if byte < 128 and byte != ord("\r") else 1 for byte in range(256))


class _IrregularError(Exception):
    """The typed parse met something that only the parse as text can judge."""


def parse_block(data: bytes) -> ParsedBlock:
    """Parses whole lines; what is wrong with a line makes it a rejected row, never an error."""
    text = data.replace(b"\r\n", b"\n") if b"\r" in data else data
    try:
        return _parse_typed(data, text)
    except (pa.ArrowInvalid, _IrregularError):
        return _parse_text(data, text)


def _parse_typed(data: bytes, text: bytes) -> ParsedBlock:
    """Parses integers and ids of 8 digits by pyarrow's own types.

    Raises:
        _IrregularError: A field may not be as the grammar says.
    """
    if not text.isascii() or any(pattern in text for pattern in _SUSPICIOUS):
        raise _IrregularError
    types = [pa.binary(1), *[pa.int64()] * len(CRITEO_DENSE), *[_ID_TEXT] * len(CRITEO_CATEGORICAL)]
    columns, bad_lines = _read_csv(text, types, _CACHED_BYTES)
    labels = _fixed_bytes(columns[0], np.uint8)
    if columns[0].null_count or not ((labels == ord("0")) | (labels == ord("1"))).all():
        raise _IrregularError
    first_id = 1 + len(CRITEO_DENSE)
    return ParsedBlock(
        num_lines=len(labels) + len(bad_lines),
        num_rows=len(labels),
        numbers=((labels - ord("0")).astype(np.int8), *map(_log_transform, columns[1:first_id])),
        ids=tuple(_encode_ids(column) for column in columns[first_id:]),
        rejected=_rejected_rows(data, dict.fromkeys(bad_lines, "columns")),
    )


def _parse_text(data: bytes, text: bytes) -> ParsedBlock:
    """Reads every field as bytes, and judges it."""
    columns, bad_lines = _read_csv(
        text.removesuffix(b"\r").translate(_HARMLESS), [pa.binary()] * len(_COLUMNS), len(text) + 1
    )
    num_rows = len(columns[0])
    first_id = 1 + len(CRITEO_DENSE)
    wrong_label = _not(pc.is_in(columns[0], value_set=pa.array([b"0", b"1"])))
    dense = [_judge_dense(column) for column in columns[1:first_id]]
    ids = [_judge_ids(column) for column in columns[first_id:]]
    wrong_dense = np.logical_or.reduce([wrong for _, wrong in dense])
    wrong_id = np.logical_or.reduce([wrong for _, wrong in ids])

    lines = np.delete(np.arange(num_rows + len(bad_lines)), bad_lines)
    reasons = dict.fromkeys(bad_lines, "columns")
    for reason, wrong in (("id", wrong_id), ("dense", wrong_dense), ("label", wrong_label)):
        reasons |= dict.fromkeys(lines[wrong].tolist(), reason)
    good = pa.array(np.flatnonzero(~(wrong_label | wrong_dense | wrong_id)))
    return ParsedBlock(
        num_lines=num_rows + len(bad_lines),
        num_rows=len(good),
        numbers=(
            pc.equal(columns[0].take(good), b"1").to_numpy(zero_copy_only=False).astype(np.int8),
            *(_log_transform(column.take(good)) for column, _ in dense),
        ),
        ids=tuple(_encode_ids(column.take(good)) for column, _ in ids),
        rejected=_rejected_rows(data, reasons),
    )


def _read_csv(text: bytes, types: Sequence[pa.DataType], bytes_at_a_time: int) -> tuple[list[pa.Array], list[int]]:
    """Returns the columns of the rows that have 40 fields, and the numbers (from 0) of the lines that have not.

    Raises:
        ArrowInvalid: A line is longer than ``bytes_at_a_time``, or a field is not of its type.
    """
    bad_lines: list[int] = []

    def set_aside(row: pcsv.InvalidRow) -> str:
        bad_lines.append(row.number - 1)
        return "skip"

    table = pcsv.read_csv(
        pa.BufferReader(text),
        pcsv.ReadOptions(use_threads=False, block_size=bytes_at_a_time, column_names=list(_COLUMNS)),
        pcsv.ParseOptions(
            delimiter="\t",
            quote_char=False,
            double_quote=False,
            escape_char=False,
            newlines_in_values=False,
            ignore_empty_lines=False,
            invalid_row_handler=set_aside,
        ),
        pcsv.ConvertOptions(
            column_types=dict(zip(_COLUMNS, types, strict=True)),
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )
    columns = table.combine_chunks().columns
    return [column.chunk(0) if column.num_chunks else pa.array([], column.type) for column in columns], bad_lines


def _judge_dense(column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns the column as int64, and which rows are malformed: these are null in the column."""
    wrong = _not(pc.match_substring_regex(column, "^-?[0-9]+$"), column)
    long = np.flatnonzero(pc.fill_null(pc.greater(pc.binary_length(column), 18), False).to_numpy(zero_copy_only=False))
    for row in long.tolist():
        if not wrong[row]:
            # Python refuses more than 4300 digits, and leading zeros are harmless.
            digits = column[row].as_py().lstrip(b"-").lstrip(b"0") or b"0"
            value = int(digits[:20]) * (-1 if column[row].as_py().startswith(b"-") else 1)
            wrong[row] = not _INT64.min <= value <= _INT64.max
    return pc.cast(pc.cast(_without(column, wrong), pa.string()), pa.int64()), wrong


def _judge_ids(column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns the column as text of exactly 8 digits, and which rows are malformed: these are null in the column."""
    wrong = _not(pc.match_substring_regex(column, "^[0-9a-fA-F]{1,8}$"), column)
    padded = pc.utf8_lpad(pc.cast(_without(column, wrong), pa.string()), width=8, padding="0")
    return pc.cast(pc.cast(padded, pa.binary()), _ID_TEXT), wrong


def _not(matches: pa.Array, column: pa.Array | None = None) -> NDArray[np.bool_]:
    """Returns where ``matches`` is false; a missing value counts as a match where ``column`` is given."""
    wrong: NDArray[np.bool_] = ~pc.fill_null(matches, column is not None).to_numpy(zero_copy_only=False)
    return wrong


def _without(column: pa.Array, wrong: NDArray[np.bool_]) -> pa.Array:
    return pc.if_else(pa.array(~wrong), column, pa.scalar(None, column.type)) if wrong.any() else column


def _log_transform(column: pa.Array) -> NDArray[np.float32]:
    """Returns log(1 + max(x, 0)) of a column, NaN where it is null."""
    values = (column.fill_null(0) if column.null_count else column).to_numpy()
    result: NDArray[np.float32] = np.maximum(values, 0).astype(np.float32)
    np.log1p(result, out=result)
    if column.null_count:
        result[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return result


def _encode_ids(column: pa.Array) -> IdColumn:
    """Returns codes and keys of a column of 8-digit texts, which are compared as 64-bit numbers."""
    texts = pa.Array.from_buffers(pa.uint64(), len(column), column.buffers(), column.null_count, column.offset)
    encoded = texts.dictionary_encode()
    keys = np.concatenate([np.zeros(1, np.uint32), _decode_hex(encoded.dictionary.to_numpy())])
    codes = np.empty(len(column), code_dtype(len(keys)))
    indices = encoded.indices.fill_null(-1) if encoded.indices.null_count else encoded.indices
    np.add(indices.to_numpy(), 1, out=codes, casting="unsafe")
    return IdColumn(codes, keys)


def _decode_hex(texts: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Returns the numbers of 8 hexadecimal digits whose texts' 8 bytes are given.

    Raises:
        _IrregularError: A text is no such number.
    """
    keys, wrong = decode_hexadecimals(texts.view(np.uint8).reshape(-1, 8))
    if wrong.any():
        raise _IrregularError
    return keys


def _fixed_bytes(column: pa.Array, dtype: type[np.uint8]) -> NDArray[np.uint8]:
    values = np.frombuffer(column.buffers()[1] or b"", dtype)
    return values[column.offset : column.offset + len(column)]


def _rejected_rows(data: bytes, reasons: dict[int, str]) -> tuple[RejectedRow, ...]:
    if not reasons:
        return ()
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    # pyarrow gives an empty line as 40 missing values.
    return tuple(
        RejectedRow(line, reasons[line] if lines[line] else "columns", lines[line]) for line in sorted(reasons)
    )
