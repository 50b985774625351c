r"""Criteo's published rows: their grammar, a fast parse of regular blocks, and headers.

A row is ``label \t I1 .. I13 \t C1 .. C26``. It is malformed, for the first of these reasons that holds:

- ``columns``: it does not have 40 fields;
- ``label``: the label is neither ``0`` nor ``1``;
- ``dense``: an integer is neither empty nor ``-?[0-9]+`` within 64 bits;
- ``id``: an id is neither empty nor 1 to 8 hexadecimal digits, of either case.

Almost every block is regular: all of its rows are well-formed, and ids have 8 digits. Arrow reads a regular block
typed, and each distinct id is decoded once. Any other block is parsed as a table, in which values that Criteo's grammar
refuses are made malformed before.

A first line is a header where it has 40 fields and the first 14, of the label and the integers, are all
different, none is empty and none is a number: ``label I1 .. C26`` in any words. So are the numbers 0 to 39, which
pandas writes above columns without names. Any other line is a row, well-formed or malformed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.data.prepare.table.text_rows import DelimitedBlock, Lines, RawRows, TextLayout
from distembed.data.table.blocks import IdColumn, ParsedBlock, code_dtype
from distembed.data.table.keys import decode_hexadecimals, integer_keys
from distembed.data.table.numbers import dense_values, is_number
from distembed.data.table.raw_columns import one_array

WANTED = "A row is a label (0 or 1), 13 integers and 26 hexadecimal ids, separated by tabs."

_COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
_FIRST_ID = 1 + len(CRITEO_DENSE)
_ID_TEXT = pa.binary(8)
_TYPES = [pa.binary(1), *[pa.int64()] * len(CRITEO_DENSE), *[_ID_TEXT] * len(CRITEO_CATEGORICAL)]
_PANDAS_HEADER = [str(column) for column in range(len(_COLUMNS))]
# What Arrow parses at a time: at 1 MiB the columns that it builds stay in cache, and it is twice as fast as at 27.
_CACHED_BYTES = 1 << 20
# What Arrow would let pass though the grammar does not: blanks around numbers, signs, and 0x1F.
_SUSPICIOUS = (b" ", b"x", b"X", b"+", b"\r")
# A table's line is UTF-8, and a carriage return ends it. In Criteo's grammar, these bytes only make a value malformed.
_HARMLESS = bytes(byte if byte < 128 and byte != ord("\r") else 1 for byte in range(256))


def parse_regular(text: bytes) -> ParsedBlock | None:
    """Parses whole lines quickly if all rows are well-formed and all ids have 8 digits; returns None otherwise."""
    text = text.replace(b"\r\n", b"\n") if b"\r" in text else text
    if not text.isascii() or any(mark in text for mark in _SUSPICIOUS):
        return None
    with suppress(ValueError):  # as Arrow's errors are
        return _parse_typed(text)
    return None


def _parse_typed(text: bytes) -> ParsedBlock:
    """Parses labels, int64 integers and 8-byte ids; a ValueError (Arrow's too) if any row is not regular."""
    table = pcsv.read_csv(
        pa.BufferReader(text),
        pcsv.ReadOptions(use_threads=False, block_size=_CACHED_BYTES, column_names=_COLUMNS),
        pcsv.ParseOptions(delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False),
        pcsv.ConvertOptions(
            column_types=dict(zip(_COLUMNS, _TYPES, strict=True)),
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )
    columns = [one_array(column) for column in table.columns]
    del table  # the columns are copies
    labels = np.frombuffer(columns[0].buffers()[1], np.uint8)[: len(columns[0])] - ord("0")
    if columns[0].null_count or labels.max() > 1:
        raise ValueError("a label is neither 0 nor 1")
    return ParsedBlock(
        num_lines=len(labels),
        num_rows=len(labels),
        numbers=(labels.astype(np.int8), *(dense_values(column, "log")[0] for column in columns[1:_FIRST_ID])),
        ids=tuple(map(_id_column, columns[_FIRST_ID:])),
    )


def _id_column(column: pa.Array) -> IdColumn:
    """Returns codes and keys of a column of 8-digit texts; the 8 bytes are viewed as uint64, which encodes faster."""
    texts = pa.Array.from_buffers(pa.uint64(), len(column), column.buffers(), column.null_count, column.offset)
    encoded = texts.dictionary_encode()
    numbers, wrong = decode_hexadecimals(encoded.dictionary)
    if wrong.any():
        raise ValueError("an id is not hexadecimal")
    keys = np.concatenate([np.zeros(1, np.uint32), numbers])
    codes = np.empty(len(column), code_dtype(len(keys)))
    indices = encoded.indices.fill_null(-1) if encoded.indices.null_count else encoded.indices
    np.add(indices.to_numpy(), 1, out=codes, casting="unsafe")
    return IdColumn(codes, keys)


def strict_rows(block: DelimitedBlock, columns: Sequence[str]) -> RawRows:
    """Parses a block as a table, after replacing values that only Criteo's grammar refuses by malformed ones.

    Non-ASCII bytes and carriage returns are replaced before the parse, and shown as they were in rejected rows.
    """
    text = block.text.replace(b"\r\n", b"\n")
    text = text[:-1] + b"\n" if text.endswith(b"\r") else text
    rows = dataclasses.replace(block, text=text.translate(_HARMLESS)).rows(columns)
    table = rows.table
    for index, name in enumerate(table.column_names):
        table = table.set_column(index, name, _strict_values(name, one_array(table.column(name))))
    line = Lines(block.text).line
    bad = tuple(dataclasses.replace(row, text=line(row.line)) for row in rows.bad)
    return dataclasses.replace(rows, table=table, bad=bad, line_text=line)


def _strict_values(name: str, texts: pa.Array) -> pa.Array:
    """Replaces values that the grammar refuses: a label by null, an id by "?", an integer by infinity."""
    if name == _COLUMNS[0]:
        return pc.if_else(pc.is_in(texts, value_set=pa.array(["0", "1"])), texts, pa.scalar(None, pa.string()))
    if name not in CRITEO_DENSE:
        return pc.if_else(pc.match_substring_regex(texts, "^[0-9a-fA-F]{1,8}$"), texts, "?")
    is_digits = pc.fill_null(pc.match_substring_regex(texts, "^-?[0-9]+$"), False)
    integers = integer_keys(pc.if_else(is_digits, texts, "0"))
    numbers = np.where(integers.wrong | ~is_digits.to_numpy(zero_copy_only=False), np.inf, integers.keys)
    return pa.array(numbers, mask=texts.is_null().to_numpy(zero_copy_only=False))


def criteo_layout(layout: TextLayout, place: str, first: bytes) -> TextLayout:
    """Returns the layout, changed to skip the first line, with a note, if this line is a header (see the module)."""
    end = first.find(b"\n", layout.first_row_byte) + 1 or len(first)
    line = first[layout.first_row_byte : end].removesuffix(b"\n").removesuffix(b"\r")
    fields = line.decode(errors="backslashreplace").split("\t")
    first_names = fields[:_FIRST_ID]
    is_named = len(set(first_names)) == len(first_names) and all(n.strip() and not is_number(n) for n in first_names)
    if fields != _PANDAS_HEADER and not (len(fields) == len(_COLUMNS) and is_named):
        return layout
    names = [field.strip('"') for field in fields]
    note = f"{place}: its first line is a header ({names[0]}, {names[1]}, ..., {names[-1]}), which is no row"
    return dataclasses.replace(layout, first_row_byte=end, header_lines=1, notes=(note,))
