"""A table as the source of rows of a preparation: inputs are cut into parts, read as blocks, and parsed."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import SourceFile
from distembed.data.prepare.ingest import InputPart, OpenPart
from distembed.data.prepare.options import ProgressCallback, ProgressUpdate
from distembed.data.prepare.table.criteo_rows import WANTED, criteo_layout, parse_regular, strict_rows
from distembed.data.prepare.table.inputs import (
    JSON_LINES,
    PARQUET,
    TEXT,
    InputBytes,
    TableInput,
    blocks_of_lines,
    lines_between,
    require_text,
    sha256_of,
)
from distembed.data.prepare.table.text_rows import (
    DelimitedBlock,
    Dialect,
    ParquetBlock,
    RawBlock,
    RawRows,
    TextLayout,
    keys_of_lines,
    opened_parquet,
)
from distembed.data.table.blocks import ParsedBlock, RejectedRow
from distembed.data.table.columns import TextFormat
from distembed.data.table.parser import REASONS, TableParser, row_text
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import CRITEO, TableSchema
from distembed.data.table.schema_files import load_schema

MOST_LINE_BYTES = 16 << 20
_RECBOLE_TYPES = ("token", "token_seq", "float", "float_seq")


def text_layout(
    source: TableInput,
    first: bytes,
    text: TextFormat,
    may_lack: Collection[str] = (),
    wanted: TableColumns | None = None,
) -> TextLayout:
    """Finds the format, separator and columns of a text input from its first megabyte, unpacked.

    ``text`` has the schema's settings, which take precedence; ``may_lack`` has columns that a file without a header
    may lack, all of them together. RecBole's files have a type after each name of their header, as ``user_id:token``,
    and no quotation marks.
    Refuses input that is not text, JSON lines without an object, and a separator that is also the quotation mark.
    """
    require_text(source.place, first)
    bom_bytes = len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
    end = first.find(b"\n", bom_bytes) + 1 or len(first)
    line = first[bom_bytes:end]
    by_line = JSON_LINES if line.lstrip().startswith(b"{") and text.separator is None else TEXT  # for a pipe
    if (source.format or by_line) == JSON_LINES:
        keys = keys_of_lines(first[bom_bytes : first.rfind(b"\n") + 1 or len(first)])
        if not keys:
            raise UserError(
                f"{source.place} has no JSON object on any of its first lines: JSON lines have one on each; write a "
                "list of objects so, such as with `jq -c '.[]'`"
            )
        return TextLayout(tuple(dict.fromkeys((*keys, *(text.columns or ())))), None, bom_bytes, 0, wanted)
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
            in_schema = wanted.names if wanted is not None else ()
            columns = [field if field in in_schema else name for field, (name, _) in zip(fields, typed, strict=True)]
            quote, lists = None, [name for name, kind in typed if kind == "token_seq"]
    else:
        columns, first_row = text.columns or [str(number) for number in range(1, len(fields) + 1)], bom_bytes
        present = [name for name in columns if name not in may_lack]
        if len(fields) == len(present):
            columns = present
    missing = tuple(text.missing_values)
    dialect = Dialect(tuple(columns), separator, quote, text.newlines_in_values, missing)
    return TextLayout(tuple(columns), dialect, first_row, int(text.header and end > bom_bytes), lists=tuple(lists))


def _fields(line: bytes, separator: str, quote: str | None) -> list[str]:
    decoded = line.decode(errors="backslashreplace").rstrip("\r\n")
    if decoded and quote is not None:
        with suppress(csv.Error):  # a field longer than Python's reader takes
            return next(csv.reader([decoded], delimiter=separator, quotechar=quote), [])
    return decoded.split(separator) if decoded else []


class TextPart:
    """A range of a text input that is being read."""

    def __init__(
        self,
        source: TableInput,
        part: InputPart,
        block_bytes: int,
        layout: TextLayout | None,
        learn: Callable[[TableInput, bytes], TextLayout],
    ) -> None:
        self._source, self._part, self._block_bytes = source, part, block_bytes
        self._layout, self._learn = layout, learn
        # from the byte before: a newline there means that a line begins exactly at the part's start
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
        may_lack: The columns that text files without a header may lack, as rows to predict lack the labels.
        wanted_by: Who names the columns, for errors.
    """

    reasons = REASONS

    def __init__(
        self,
        inputs: Sequence[TableInput],
        schema: TableSchema,
        needs_label: bool = True,
        others: Sequence[str] = (),
        may_lack: Collection[str] = (),
        wanted_by: str = "the schema",
    ) -> None:
        self._tables, self._text, self._may_lack = list(inputs), schema.text, may_lack
        self.inputs = [table.raw for table in inputs]
        self.parser = TableParser(schema, needs_label)
        self.parser.columns.wanted_by = wanted_by
        self.layout = self.parser.layout
        self.columns = tuple(dict.fromkeys((*self.parser.columns.names, *others)))
        kinds = [f"{name} ({'/'.join(kinds)})" for name, kinds in self.parser.columns.kinds.items()]
        self.wanted = f"A row has {', '.join(kinds[:8])}{' ...' if len(kinds) > 8 else ''}."
        hints = {
            "text": "Text is read as UTF-8: convert other encodings, such as with `iconv -f WINDOWS-1252 -t UTF-8`."
        }
        if schema.time is not None and schema.time.format in ("auto", "seconds"):
            hints["time"] = (
                f"The schema's time.format is {schema.time.format!r}, where numbers are seconds since 1970 until the "
                "year 9999: of milliseconds, give `format: milliseconds`, of texts one such as %Y%m%d."
            )
        self.hints: Mapping[str, str] = hints
        self._is_criteo = schema.parser == CRITEO and needs_label and not others
        if self._is_criteo:
            if _columns(schema) != _columns(load_schema(CRITEO)):
                raise UserError(
                    "the schema's parser is 'criteo', which reads Criteo's columns as the shipped schema has them "
                    "alone; give `parser: table`"
                )
            self.wanted = WANTED
        lists = [(column.column or name, column) for name, column in schema.categorical.items() if column.holds_lists]
        self._lists = [column for column, settings in lists if settings.separator is None]
        self._groups: dict[int, list[int]] = {}
        self._layouts: dict[int, TextLayout] = {}
        self._known: dict[str, None] = {}
        for number, table in enumerate(inputs):
            self._look_at(number, table)
        for number, layout in self._layouts.items():  # once all are known: a key of one file is one of all
            self._require_columns(inputs[number].place, layout)

    def parts(self, part_bytes: int) -> list[InputPart]:
        return [part for number, table in enumerate(self._tables) for part in self._parts(number, table, part_bytes)]

    def checksum(self, source: int) -> str:
        return sha256_of(self._tables[source].place)

    def open(self, part: InputPart, block_bytes: int) -> OpenPart:
        table = self._tables[part.source]
        if table.format == PARQUET:
            return _ParquetPart(table, part, self._groups[part.source], self.columns, block_bytes)
        return TextPart(table, part, block_bytes, self._layouts.get(part.source), self._learn)

    def parse(self, raw: RawBlock) -> ParsedBlock:
        columns = self.parser.columns
        if self._is_criteo and isinstance(raw, DelimitedBlock):
            if (regular := parse_regular(raw.text)) is not None:
                return regular
            rows = strict_rows(raw, columns.names)
        else:
            rows = raw.rows(columns.names, columns.numbers)
        block, rejected = self.parser.parse(rows.table), list(rows.bad)
        for row in block.rejected:
            line = int(rows.lines[row.line])
            rejected.append(RejectedRow(line, row.reason, rows.line_text(line) if rows.line_text else row.text))
        rejected.sort(key=lambda row: row.line)
        return replace(block, num_lines=rows.num_lines, rejected=tuple(rejected))

    def _look_at(self, number: int, table: TableInput) -> None:
        """Learns an input's columns and row groups or text layout from its footer or beginning; pipes are not read."""
        if table.format == PARQUET:
            if table.is_pipe:
                raise UserError(f"{table.place} is a pipe, from which Parquet cannot be read; name the file itself.")
            with opened_parquet(table.place) as file:
                types, metadata = file.schema_arrow, file.metadata
            sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
            if table.raw.num_bytes is not None and (total := sum(sizes)) > 0:  # before compression
                sizes = [size * table.raw.num_bytes // total for size in sizes]
            self._groups[number] = sizes
            self.parser.columns.require(types, table.place, self.columns)
            self._known |= dict.fromkeys(types.names)
        elif not table.is_pipe and (first := next(InputBytes(table.place).pieces(), b"")):
            self._layouts[number] = self._layout(table, first)

    def _layout(self, table: TableInput, first: bytes) -> TextLayout:
        """Returns the layout of a text input from its first bytes, and adds its columns to the known ones."""
        layout = text_layout(table, first, self._text, self._may_lack, self.parser.columns)
        if self._is_criteo and layout.dialect is not None:
            layout = criteo_layout(layout, table.place, first)
        self._known |= dict.fromkeys(layout.columns)
        return layout

    def _learn(self, table: TableInput, first: bytes) -> TextLayout:
        """Returns the layout of a pipe from its first bytes, and checks its columns, when the pipe is first read."""
        layout = self._layout(table, first)
        self._require_columns(table.place, layout)
        return layout

    def _require_columns(self, place: str, layout: TextLayout) -> None:
        """Raises a UserError if a text input lacks a column, or a column of lists has no separator in CSV or TSV.

        JSON lines may lack a key that another input has: a missing key is a missing value.
        """
        is_json = layout.dialect is None
        names = tuple(self._known) if is_json else layout.columns
        types = pa.schema([(name, pa.string()) for name in names])
        self.parser.columns.require(types, place, self.columns, _LATER_KEYS if is_json else "")
        if self._lists and layout.dialect is not None:
            raise UserError(
                f"{place}, column {self._lists[0]!r}: lists in CSV and TSV need a `separator` in the schema, as '|' is"
            )

    def _parts(self, number: int, table: TableInput, part_bytes: int) -> list[InputPart]:
        """Cuts an input into ranges of bytes, or of Parquet row groups, of about ``part_bytes``; the last has no end.

        An input that is compressed, a pipe, on a web server, or with newlines in values is one part.
        """
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
        return [InputPart(number, start, stop) for start, stop in zip_longest(starts, starts[1:])]


_BYTES_A_VALUE = 8  # in memory at least, however often a value is repeated in the file


class _ParquetPart:
    """Row groups of a Parquet file that are being read."""

    def __init__(
        self, table: TableInput, part: InputPart, groups: Sequence[int], columns: Sequence[str], block_bytes: int
    ) -> None:
        self._table, self._part, self._columns, self._block_bytes = table, part, columns, block_bytes
        self._groups = range(len(groups))[part.start : part.stop]
        self._num_bytes = sum(groups[number] for number in self._groups)
        self.bytes_read = self.header_lines = 0
        self.sha256: str | None = None

    def raw_blocks(self) -> Generator[RawBlock, None, None]:
        with opened_parquet(self._table.place) as file:
            groups = [file.metadata.row_group(group) for group in self._groups]
            num_rows, rows_read = sum(group.num_rows for group in groups), 0
            row_bytes = max(1.0, sum(group.total_byte_size for group in groups) / max(1, num_rows))
            batch_rows = max(1, int(self._block_bytes / max(row_bytes, _BYTES_A_VALUE * len(self._columns))))
            for batch in file.iter_batches(batch_rows, list(self._groups), list(self._columns), use_threads=False):
                rows_read += batch.num_rows
                self.bytes_read = int(rows_read / num_rows * self._num_bytes)
                yield ParquetBlock(pa.table(batch))
        if self._part.is_whole:
            self.sha256 = sha256_of(self._table.place)

    def notes(self) -> list[str]:
        return []


def _columns(schema: TableSchema) -> tuple[object, ...]:
    dense = [(name, column.column, column.transform) for name, column in schema.dense.items()]
    ids = [(name, ids.column, ids.kind, ids.holds_lists, ids.cross) for name, ids in schema.categorical.items()]
    return schema.label, schema.labels, schema.weight, schema.time, schema.split_column, schema.text, dense, ids


@dataclass(frozen=True)
class NamedRows:
    """Rows of an input."""

    source: int  # number of the input
    columns: Mapping[str, pa.Array]  # by name: plain arrays, or a dictionary's where the schema has single keys
    lines: NDArray[np.int64]  # number of the line of each row in the input, from 1; in Parquet, of the row
    bad: tuple[RejectedRow, ...]  # lines that are no rows, with their numbers in the input
    raw: RawRows  # the rows as they were read

    @property
    def num_lines(self) -> int:
        return len(self.lines) + len(self.bad)

    def text(self, row: int) -> bytes:
        """Returns the line of a row; its values with tabs between them where rows are no lines."""
        if self.raw.line_text is not None:
            return self.raw.line_text(int(self.raw.lines[row]))
        return row_text(self.columns, row)


class RowReader:
    """Reads the columns of a schema from inputs, in order."""

    def __init__(self, inputs: Sequence[TableInput], schema: TableSchema) -> None:
        self.inputs = list(inputs)
        self.num_lines = [0] * len(inputs)  # number of rows and bad lines read so far
        self._checksums: list[tuple[int, str]] = []
        self._source = TableSource(inputs, schema, wanted_by="the command")

    def blocks(self, block_bytes: int, report: ProgressCallback) -> Iterator[NamedRows]:
        """Yields all rows in blocks of about ``block_bytes`` of text; reports a block when the next is requested."""
        sizes = [table.raw.num_bytes for table in self.inputs]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        for number, table in enumerate(self.inputs):
            bytes_before = sum(size for size, _ in self._checksums)
            opened, lines_before = self._source.open(InputPart(number), block_bytes), 0
            for raw in opened.raw_blocks():
                lists = opened.lists if isinstance(opened, TextPart) else ()
                rows = self._named(number, raw, lines_before + opened.header_lines, lists)
                yield rows
                lines_before += rows.raw.num_lines
                report(ProgressUpdate("read", bytes_before + opened.bytes_read, total, sum(self.num_lines)))
            size = opened.bytes_read if table.raw.num_bytes is None else table.raw.num_bytes
            self._checksums.append((size, opened.sha256 or ""))

    def sources(self, num_rejected: Sequence[int] | None = None) -> tuple[SourceFile, ...]:
        """Returns the manifest's entries after all rows were read; ``num_rejected`` counts each input's bad rows."""
        counts = zip(self.inputs, self._checksums, self.num_lines, num_rejected or [0] * len(self.inputs), strict=True)
        return tuple(SourceFile(table.raw.name, *checksum, *numbers) for table, checksum, *numbers in counts)

    def _named(self, number: int, block: RawBlock, lines_before: int, lists: Sequence[str] = ()) -> NamedRows:
        """Returns a block's rows with the input's line numbers; skips empty lines, splits ``lists`` at blanks."""
        columns = self._source.parser.columns
        raw = block.rows(self._source.columns, columns.numbers)
        bad = tuple(replace(row, line=lines_before + row.line + 1) for row in raw.bad if row.text.strip())
        named_columns = columns.taken_from(raw.table)
        for name in lists:
            if name in columns.separators:
                named_columns[name] = pc.ascii_split_whitespace(named_columns[name])
        self.num_lines[number] += len(raw.lines) + len(bad)
        return NamedRows(number, named_columns, raw.lines + lines_before + 1, bad, raw)
