"""A table as the source of rows of a preparation: inputs are cut into parts, read as blocks, and parsed."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, zip_longest

import pyarrow as pa

from distembed.base.errors import UserError
from distembed.data.prepare.input_bytes import InputBytes, blocks_of_lines, lines_between, require_text, sha256_of
from distembed.data.prepare.row_source import OpenPart, Part
from distembed.data.prepare.table.criteo_rows import WANTED, criteo_layout, parse_regular, strict_rows
from distembed.data.prepare.table.inputs import JSON_LINES, PARQUET, TEXT, TableInput
from distembed.data.prepare.table.raw_rows import RawBlock, parquet_batches, parsed_block, row_group_bytes
from distembed.data.prepare.table.text_rows import DelimitedBlock, Dialect, TextLayout, keys_of_lines
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.parser import REASONS, TableParser
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import CRITEO, TableSchema, TextFormat, load_schema

MOST_LINE_BYTES = 16 << 20
_RECBOLE_TYPES = ("token", "token_seq", "float", "float_seq")


def text_layout(
    source: TableInput,
    first: bytes,
    text: TextFormat,
    may_lack: str | None = None,
    wanted: TableColumns | None = None,
) -> TextLayout:
    """Returns how a text input is read, given its beginning, unpacked, and how the schema says that text is read.

    RecBole's files have a type after each name of their header, as ``user_id:token``, and no quotation marks.
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
    decoded = line.decode(errors="backslashreplace").rstrip("\r\n")
    if decoded and quote is not None:
        with suppress(csv.Error):  # a field longer than Python's reader takes
            return next(csv.reader([decoded], delimiter=separator, quotechar=quote), [])
    return decoded.split(separator) if decoded else []


def first_bytes(source: TableInput) -> bytes:
    """Returns the beginning of an input that is no pipe, unpacked: about a megabyte."""
    return next(InputBytes(source.place).pieces(), b"")


class TextPart:
    """A range of a text input that is being read."""

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
            yield layout.block(text)

    def notes(self) -> list[str]:
        return list(self._layout.notes) if self._layout is not None and self.header_lines else []


_LATER_KEYS = (
    " Of JSON lines, these are the keys in the first megabyte of each file; list a key that comes later in the "
    "schema: `text: {header: false, columns: [...]}`."
)


class TableSource:
    """Files, pipes and URLs that have a table's rows.

    Args:
        inputs: The inputs in order, from :func:`~distembed.data.prepare.table.inputs.find_inputs`.
        schema: The roles of the columns.
        needs_label: Whether rows have the columns that only training needs.
        others: Columns that raw blocks have in addition to the schema's.
        may_lack: The column that text files without a header may lack, as rows to predict lack the label.
        wanted_by: Who names the columns, for errors.
    """

    reasons = REASONS

    def __init__(
        self,
        inputs: Sequence[TableInput],
        schema: TableSchema,
        needs_label: bool = True,
        others: Sequence[str] = (),
        may_lack: str | None = None,
        wanted_by: str = "the schema",
    ) -> None:
        self._tables, self._text, self._may_lack = list(inputs), schema.text, may_lack
        self.inputs = [each.raw for each in inputs]
        self.parser = TableParser(schema, needs_label)
        self.parser.columns.wanted_by = wanted_by
        self.layout = self.parser.layout
        self.columns = tuple(dict.fromkeys((*self.parser.columns.names, *others)))
        self.wanted = f"A row has {_wanted(self.parser.columns)}."
        self.hints: Mapping[str, str] = _hints(schema)
        self._is_criteo = schema.parser == CRITEO and needs_label and not others
        if self._is_criteo:
            _require_criteo(schema)
            self.wanted = WANTED
        lists = [(each.column or name, each) for name, each in schema.categorical.items() if each.holds_lists]
        self._lists = [column for column, each in lists if each.separator is None]
        self._groups: dict[int, list[int]] = {}
        self._layouts: dict[int, TextLayout] = {}
        self._known: dict[str, None] = {}
        for number, each in enumerate(inputs):
            self._look_at(number, each)
        for number, layout in self._layouts.items():  # once all are known: a key of one file is one of all
            self._require_columns(inputs[number].place, layout)

    def parts(self, part_bytes: int) -> list[Part]:
        return [part for number, each in enumerate(self._tables) for part in self._parts(number, each, part_bytes)]

    def checksum(self, source: int) -> str:
        return sha256_of(self._tables[source].place)

    def open(self, part: Part, block_bytes: int) -> OpenPart:
        table = self._tables[part.source]
        if table.format == PARQUET:
            return _ParquetPart(table, part, self._groups[part.source], self.columns, block_bytes)
        return TextPart(table, part, block_bytes, self._layouts.get(part.source), self._learn)

    def parse(self, raw: RawBlock) -> ParsedBlock:
        if self._is_criteo and isinstance(raw, DelimitedBlock):
            columns = self.parser.columns.names
            return parse_regular(raw.text) or parsed_block(strict_rows(raw, columns), self.parser)
        return parsed_block(raw.rows(self.parser.columns.names, self.parser.columns.numbers), self.parser)

    def _look_at(self, number: int, table: TableInput) -> None:
        if table.format == PARQUET:
            if table.is_pipe:
                raise UserError(f"{table.place} is a pipe, from which Parquet cannot be read; name the file itself.")
            types, self._groups[number] = row_group_bytes(table.place, table.raw.num_bytes)
            self.parser.columns.require(types, table.place, self.columns)
            self._known |= dict.fromkeys(types.names)
        elif not table.is_pipe and (first := first_bytes(table)):
            self._layouts[number] = self._layout(table, first)

    def _layout(self, table: TableInput, first: bytes) -> TextLayout:
        """Returns how a text input is read, given its first bytes."""
        layout = text_layout(table, first, self._text, self._may_lack, self.parser.columns)
        if self._is_criteo and layout.dialect is not None:
            layout = criteo_layout(layout, table.place, first)
        self._known |= dict.fromkeys(layout.columns)
        return layout

    def _learn(self, table: TableInput, first: bytes) -> TextLayout:
        """Returns how a pipe is read, given its first bytes."""
        layout = self._layout(table, first)
        self._require_columns(table.place, layout)
        return layout

    def _require_columns(self, place: str, layout: TextLayout) -> None:
        """Makes sure that a text input has the columns, none of them lists; of JSON lines, that some input has them."""
        is_json = layout.dialect is None
        names = tuple(self._known) if is_json else layout.columns
        types = pa.schema([(name, pa.string()) for name in names])
        self.parser.columns.require(types, place, self.columns, _LATER_KEYS if is_json else "")
        if self._lists and layout.dialect is not None:
            raise UserError(
                f"{place}, column {self._lists[0]!r}: lists in CSV and TSV need a `separator` in the schema, as '|' is"
            )

    def _parts(self, number: int, table: TableInput, part_bytes: int) -> list[Part]:
        """Returns ranges of bytes, or runs of row groups, of about so many bytes each."""
        if table.format == PARQUET:
            starts, size = [0], 0
            for group, num_bytes in enumerate(self._groups[number]):
                if size >= part_bytes:
                    starts.append(group)
                    size = 0
                size += num_bytes
        elif not table.can_be_cut or self._text.newlines_in_values:
            starts = [0]
        else:
            starts = list(range(0, table.raw.num_bytes or 1, part_bytes))
        return [Part(number, start, stop) for start, stop in zip_longest(starts, starts[1:])]


class _ParquetPart:
    """Row groups of a Parquet file that are being read."""

    def __init__(
        self, table: TableInput, part: Part, groups: Sequence[int], columns: Sequence[str], block_bytes: int
    ) -> None:
        self._table, self._part, self._columns, self._block_bytes = table, part, columns, block_bytes
        self._groups = range(len(groups))[part.start : part.stop]
        self._num_bytes = sum(groups[number] for number in self._groups)
        self.bytes_read = self.header_lines = 0
        self.sha256: str | None = None

    def raw_blocks(self) -> Generator[RawBlock, None, None]:
        for block, share in parquet_batches(self._table.place, self._groups, self._columns, self._block_bytes):
            self.bytes_read = int(share * self._num_bytes)
            yield block
        if self._part.is_whole:
            self.sha256 = sha256_of(self._table.place)

    def notes(self) -> list[str]:
        return []


def _wanted(columns: TableColumns) -> str:
    kinds = [f"{name} ({'/'.join(kinds)})" for name, kinds in columns.kinds.items()]
    return ", ".join(kinds[:8]) + (" ..." if len(kinds) > 8 else "")


def _hints(schema: TableSchema) -> dict[str, str]:
    """Returns a likely cause for each reason that most rows may be malformed by."""
    text = {"text": "Text is read as UTF-8: convert other encodings, such as with `iconv -f WINDOWS-1252 -t UTF-8`."}
    if schema.time is None or schema.time.format not in ("auto", "seconds"):
        return text
    return text | {
        "time": f"The schema's time.format is {schema.time.format!r}, where numbers are seconds since 1970 until the "
        "year 9999: of milliseconds, give `format: milliseconds`, of texts one such as %Y%m%d."
    }


def _require_criteo(schema: TableSchema) -> None:
    """Refuses a schema whose rows are not Criteo's, or become something else than the shipped schema makes of them."""
    if _columns(schema) != _columns(load_schema(CRITEO)):
        raise UserError(
            "the schema's parser is 'criteo', which reads Criteo's columns as the shipped schema has them alone; give "
            "`parser: table`"
        )


def _columns(schema: TableSchema) -> tuple[object, ...]:
    dense = [(name, each.column, each.transform) for name, each in schema.dense.items()]
    ids = [(name, each.column, each.kind, each.holds_lists, each.cross) for name, each in schema.categorical.items()]
    return schema.label, schema.weight, schema.time, schema.split_column, schema.text, dense, ids
