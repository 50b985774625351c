"""Text files of a table: what their first lines say of their columns, and ranges of them as blocks."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from distembed.base.errors import UserError
from distembed.data.prepare.blocks import Part
from distembed.data.prepare.input_bytes import InputBytes, blocks_of_lines, lines_between, require_text
from distembed.data.prepare.table.delimited import DelimitedBlock, Dialect
from distembed.data.prepare.table.inputs import JSON_LINES, TEXT, TableInput
from distembed.data.prepare.table.json_lines import JsonBlock, keys_of_lines
from distembed.data.prepare.table.raw_rows import RawBlock
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import TextFormat

MOST_LINE_BYTES = 16 << 20
_RECBOLE_TYPES = ("token", "token_seq", "float", "float_seq")
_END_BYTES = 16
"""What is looked at of the end of an input."""


@dataclass(frozen=True)
class TextLayout:
    """How a text input is read."""

    columns: tuple[str, ...]  # of JSON lines, the keys of the first lines, and those that the schema lists
    dialect: Dialect | None  # how lines become fields; None for JSON lines
    first_row_byte: int  # number of bytes before the first row: a mark of the byte order, and a header
    header_lines: int  # number of lines before the first row
    wanted: TableColumns | None = None  # the types of columns of JSON lines; None where they may be of any
    lists: tuple[str, ...] = ()  # columns whose values are words with blanks between them, in RecBole's files
    notes: tuple[str, ...] = ()  # notes on the lines before the first row
    whole_end: re.Pattern[bytes] | None = None  # matches the end of an input that was not cut short

    def block(self, text: bytes) -> RawBlock:
        """Returns the block of some lines."""
        return JsonBlock(text, self.wanted) if self.dialect is None else DelimitedBlock(text, self.dialect)


def text_layout(
    source: TableInput,
    first: bytes,
    text: TextFormat,
    may_lack: str | None = None,
    wanted: TableColumns | None = None,
) -> TextLayout:
    """Returns how a text input is read, given its beginning, unpacked, and how the schema says that text is read.

    RecBole's files have a type after each name of their header, as ``user_id:token``, and no quotation marks.

    Args:
        source: The input.
        first: Its beginning.
        text: The schema's settings of text.
        may_lack: The column that a file without a header lacks where its first line has one field too few.
        wanted: The types of columns of JSON lines; None where they may be of any.

    Raises:
        UserError: It is another kind of file, JSON lines without an object, or separated by the quotation mark.
    """
    require_text(source.place, first)
    mark = len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
    end = first.find(b"\n", mark) + 1 or len(first)
    line = first[mark:end]
    by_line = JSON_LINES if line.lstrip().startswith(b"{") and text.separator is None else TEXT  # for a pipe
    if (source.format or by_line) == JSON_LINES:
        keys = keys_of_lines(first[mark : first.rfind(b"\n") + 1 or len(first)])
        if not keys:
            raise UserError(
                f"{source.place} has no JSON object on any of its first lines: JSON lines have one on each; write a "
                "list of objects so, such as with `jq -c '.[]'`"
            )
        return TextLayout(tuple(dict.fromkeys((*keys, *(text.columns or ())))), None, mark, 0, wanted)
    separator = text.separator or source.separator or ("\t" if b"\t" in line else ",")
    if separator == text.quote:
        raise UserError(
            f"the schema's text.quote is {text.quote!r}, which separates the fields of {source.place}; give another, "
            "or text.separator too"
        )
    fields = _fields(line, separator, text.quote)
    quote, lists = text.quote, list[str]()
    if text.header:
        columns, first_row = fields, end
        typed = [field.rpartition(":")[::2] for field in fields]
        if typed and all(name and kind in _RECBOLE_TYPES for name, kind in typed):
            known = wanted.names if wanted is not None else ()
            columns = [field if field in known else name for field, (name, _) in zip(fields, typed, strict=True)]
            quote, lists = None, [name for name, kind in typed if kind == "token_seq"]
    else:
        columns, first_row = text.columns or [str(number) for number in range(1, len(fields) + 1)], mark
        if len(fields) == len(columns) - 1:
            columns = [name for name in columns if name != may_lack]
    missing = tuple(text.missing_values)
    dialect = Dialect(tuple(columns), separator, quote, text.newlines_in_values, missing)
    return TextLayout(tuple(columns), dialect, first_row, int(text.header and end > mark), lists=tuple(lists))


def _fields(line: bytes, separator: str, quote: str | None) -> list[str]:
    """Returns the fields of a first line."""
    decoded = line.decode(errors="backslashreplace").rstrip("\r\n")
    if decoded and quote is not None:
        with suppress(csv.Error):  # a field longer than Python's reader takes
            return next(csv.reader([decoded], delimiter=separator, quotechar=quote), [])
    return decoded.split(separator) if decoded else []


def first_bytes(source: TableInput) -> bytes:
    """Returns the beginning of an input that is no pipe, unpacked: about a megabyte."""
    return next(InputBytes(source.place).pieces(), b"")


class TextPart:
    """A range of a text input that is being read.

    Args:
        source: The input.
        part: The range.
        block_bytes: About how many bytes a block has.
        layout: How the input is read; None for a pipe, whose first bytes say it.
        learn: Function that returns how a pipe is read, given its first bytes.
    """

    def __init__(
        self,
        source: TableInput,
        part: Part,
        block_bytes: int,
        layout: TextLayout | None,
        learn: Callable[[TableInput, bytes], TextLayout],
    ) -> None:
        self._source, self._part, self._block_bytes = source, part, block_bytes
        self._layout, self._learn = layout, learn
        self._bytes = InputBytes(source.place, max(0, part.start - 1))
        self._end = b"\n"
        self.header_lines = 0  # known once the first block is there
        self.lists: Sequence[str] = ()

    @property
    def bytes_read(self) -> int:
        if self._part.stop is None:
            return self._bytes.bytes_read
        return min(self._bytes.bytes_read, self._part.stop - self._part.start)

    @property
    def sha256(self) -> str | None:
        return self._bytes.sha256 if self._part.is_whole else None

    def raw_blocks(self) -> Generator[RawBlock, None, None]:
        place, pieces = self._source.place, self._bytes.pieces()
        first = next(pieces, b"")
        if not first:
            return
        if self._layout is None:
            if first.startswith(b"PAR1"):
                raise UserError(f"{place} is Parquet, which cannot be read from a pipe; name the file itself.")
            self._layout = self._learn(self._source, first)
        layout = self._layout
        self.lists = layout.lists
        lines = lines_between(chain([first], pieces), self._part.start, self._part.stop)
        if self._part.start == 0:  # before blocks are cut: quotation marks of a header are no value's
            self.header_lines = layout.header_lines
            lines = chain([next(lines)[layout.first_row_byte :]], lines)
        quote = layout.dialect.record_quote if layout.dialect is not None else None
        for text in blocks_of_lines(place, lines, self._block_bytes, MOST_LINE_BYTES, quote):
            self._end = text[-_END_BYTES:]
            yield layout.block(text)

    def notes(self) -> list[str]:
        layout = self._layout
        if layout is None:  # a pipe without a byte
            return []
        notes = list(layout.notes) if self.header_lines else []
        if self._part.stop is None and layout.whole_end is not None and not layout.whole_end.search(self._end):
            notes.append(
                f"{self._source.place}: its last line has no line's end and may have been cut short (kept as it is "
                "where it is well-formed)"
            )
        return notes
