"""Raw rows to batches: rows of Python, JSON and Arrow as tables, parsed by the dataset's schema and encoded by its ids.

::

    given_rows      dictionaries, columns, pandas, Arrow  ->  RawRows: a table, and the rows that no table can hold
    RowDecoder      a table                               ->  the dataset's columns, and the malformed rows
    batches_of      the dataset's columns                 ->  batches of a model

Rows of clicks and ratings have columns of features (:class:`TableRowDecoder`). Recommenders take users
(:class:`UserRowDecoder`) or sequences of items (:class:`SequenceRowDecoder`). Rows need the lists that the model reads;
other lists of the dataset are filled with missing values.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import Jagged, RecordBlock, RecordLayout
from distembed.data.dataset.schema import ITEM, USER, Schema
from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.reader import Batch
from distembed.data.reader.batch import BatchAssembler
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.encoder import TIME_SINCE_FIRST, RowEncoder, raw_schema
from distembed.data.table.parser import TableParser
from distembed.data.table.raw_columns import TableColumns, as_lists, one_array, plain_array
from distembed.data.table.schema import TableSchema
from distembed.data.table.values import given_column
from distembed.data.table.vocabulary import FIRST_ID, MISSING_ID

_REASONS = {
    "label": "is no label",
    "weight": "is no weight of 0 or more",
    "dense": "is no finite number",
    "list": "is no list with one finite number for each value beside it",
    "times": "is no list with one finite time for each value beside it, none before the preceding one; give as many "
    "times as values, both sorted by time, in the unit of the prepared data (seconds since 1970 for dates)",
    "id": "is no value of this column's kind",
    "user": "is no user of the dataset",
    "sequence": "has no item of the dataset",
    "value": "is no text, number or truth value, nor a list of these where the column has lists",
}
_KINDS = (
    "a list of dictionaries, one a row; a dictionary of columns, each a list or an array; a pandas DataFrame; an Arrow "
    "table or record batch; or a distembed Batch"
)
_MOST_NAMES = 1000
"""Columns that an error about a missing column compares it with."""
Extra = Literal["label", "weight"]
"""Columns of raw rows that evaluations need and models are not given."""


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """Decoded rows of a table.

    Attributes:
        is_good: Whether each row of the table is well-formed.
        block: The well-formed rows alone, in order, as columns of the dataset.
        rejected: The malformed rows, each with its number in the table.
    """

    is_good: NDArray[np.bool_]
    block: RecordBlock
    rejected: tuple[RejectedRow, ...]


class RowDecoder(Protocol):
    """Turns raw rows into the dataset's columns; any number of threads may use it.

    ``schema`` describes the columns of raw tables, and ``columns`` has the types that each may have.
    """

    schema: TableSchema
    columns: TableColumns

    def decode(self, table: pa.Table) -> DecodedRows:
        """Decodes a table; malformed rows are in the result, a missing or mistyped column is a :class:`UserError`."""

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature; None is a missing value."""


class _Decoder:
    """Parses tables by a schema and encodes them by the vocabularies of a dataset, or of the copy that a run keeps."""

    def __init__(self, folder: Path, manifest: Manifest, schema: TableSchema) -> None:
        self.schema = schema
        self._parser = TableParser(schema)
        self.columns = self._parser.columns
        self._encoder = RowEncoder(folder, manifest, self._parser.layout)

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        return self._encoder.ids_of(feature, values)


class TableRowDecoder(_Decoder):
    """Decodes rows of clicks and ratings; ``extras`` are columns for metrics, which rows must then have.

    With ``features``, rows have these alone: ids and numbers of other features are missing, and lists of ids are empty.
    Of several labels, rows need ``labels`` alone where these are given.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        extras: Collection[Extra] = (),
        features: Collection[str] | None = None,
        labels: Collection[str] | None = None,
    ) -> None:
        schema = raw_schema(manifest)
        needed = {name: column for name, column in schema.labels.items() if labels is None or name in labels}
        if (
            len(needed) == 1
        ):  # a schema has several labels or none: the rest, which no task reads, have this one's values
            needed = dict.fromkeys(schema.labels, *needed.values())
        if features is not None:
            schema = schema.with_features(features)
        schema = dataclasses.replace(
            schema,
            label=schema.label if "label" in extras else None,
            labels=needed if "label" in extras else {},
            weight=schema.weight if "weight" in extras else None,
            time=None,
            split=TableSchema.split,
            parser="table",
        )
        super().__init__(folder, manifest, schema)
        self._dataset_schema = manifest.schema

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        parsed = self._parser.parse(table)
        is_good = np.ones(table.num_rows, bool)
        is_good[[row.line for row in parsed.rejected]] = False
        block = self._encoder.encode(parsed)
        empty = np.zeros(len(block.records), np.int64)
        return DecodedRows(is_good, _with_all_lists(self._dataset_schema, block, empty), parsed.rejected)


def features_read(schema: Schema, lists: Collection[str]) -> list[str]:
    """Returns the names of a dataset's features, but of its lists the names in ``lists`` alone."""
    single = [feature.name for feature in schema.categorical if not feature.multi_hot]
    return [*schema.dense, *single, *lists]


def _with_all_lists(schema: Schema, block: RecordBlock, lengths: NDArray[np.int64]) -> RecordBlock:
    """Adds the lists that a block lacks: missing ids, ``lengths`` in each row, and a missing number beside each id."""
    lists = dict(block.jagged)
    for feature in schema.categorical:
        if feature.multi_hot and feature.name not in lists:
            lists[feature.name] = Jagged.from_lengths(np.full(lengths.sum(), MISSING_ID, np.int64), lengths)
    for name in schema.dense_sequences:
        if name not in lists:
            beside = lists[schema.lists_beside(name)[0]].lengths
            lists[name] = Jagged.from_lengths(np.full(beside.sum(), np.nan, np.float32), beside)
    return RecordBlock(block.records, lists)


def _kept_entries(lists: Jagged, is_kept: NDArray[np.bool_]) -> Jagged:
    """Returns lists without some of their entries, end to end."""
    rows = np.repeat(np.arange(len(lists.lengths)), lists.lengths)[is_kept]
    return Jagged.from_lengths(lists.values[is_kept], np.bincount(rows, minlength=len(lists.lengths)))


class UserRowDecoder(_Decoder):
    """Decodes rows with a user each; a user that the dataset does not have is malformed."""

    def __init__(self, folder: Path, manifest: Manifest, features: Sequence[str] = (USER,)) -> None:
        full = dataclasses.replace(raw_schema(manifest), label=None)
        super().__init__(folder, manifest, full.with_features(features))
        self._user_column = [feature.name for feature in RecordLayout.from_schema(manifest.schema).single].index(USER)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says; unknown entries of lists are left out."""
        parsed = self._parser.parse(table)
        assert not parsed.rejected, "every text is a value"
        block = self._encoder.encode(parsed)
        lists = {name: _kept_entries(items, items.values >= FIRST_ID) for name, items in block.jagged.items()}
        is_good = block.records[:, self._user_column] >= FIRST_ID
        known = RecordBlock(block.records, lists).gather(np.flatnonzero(is_good))
        return DecodedRows(is_good, known, _unknown_rows(table[USER], ~is_good, "user", USER))


def _unknown_rows(
    texts: pa.ChunkedArray, is_unknown: NDArray[np.bool_], reason: str, feature: str
) -> tuple[RejectedRow, ...]:
    """Describes the rows whose users, or items, the dataset does not have."""
    rows = np.flatnonzero(is_unknown).tolist()
    return tuple(RejectedRow(row, reason, str(texts[row].as_py()).encode(), feature) for row in rows)


class UserItemsRowDecoder(UserRowDecoder):
    """Decodes rows with a user each and, optionally, a list of items to leave out of the user's recommendations.

    ``batch_schema`` is the schema of the decoded rows: the dataset's user and item, with the item as a list.
    """

    optional = (ITEM,)

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        features = {feature.name: feature for feature in manifest.schema.categorical}
        items = dataclasses.replace(features[ITEM], multi_hot=True)
        self.batch_schema = Schema(label=None, dense=(), categorical=(features[USER], items))
        super().__init__(folder, dataclasses.replace(manifest, schema=self.batch_schema), (USER, ITEM))

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        return super().decode(table if ITEM in table.column_names else table.append_column(ITEM, pa.nulls(len(table))))


class QueryItemsRowDecoder(_Decoder):
    """Decodes rows with the features of users and, optionally, a list of items to leave out of the recommendations.

    ``batch_schema`` is the schema of the decoded rows, with the item as a list; ``optional`` names it.

    Args:
        folder: The folder of what an exported model keeps of its dataset.
        manifest: Its manifest.
        names: The features of users, categorical and dense, and the item.
        item: The item.
    """

    def __init__(self, folder: Path, manifest: Manifest, names: Collection[str], item: str) -> None:
        self.optional = (item,)
        full, raw = manifest.schema, raw_schema(manifest).with_features(names)
        features = [
            dataclasses.replace(feature, multi_hot=feature.multi_hot or feature.name == item, table=None)
            for feature in full.categorical
            if feature.name in names
        ]
        dense = tuple(name for name in full.dense if name in names)
        self.batch_schema = Schema(None, dense, tuple(features), missing_dense=full.missing_dense)
        categorical = {**raw.categorical, item: dataclasses.replace(raw.categorical[item], is_list=True)}
        raw = dataclasses.replace(
            raw,
            label=None,
            labels={},
            weight=None,
            time=None,
            split=TableSchema.split,
            parser="table",
            categorical=categorical,
        )
        super().__init__(folder, dataclasses.replace(manifest, schema=self.batch_schema), raw)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        (column,) = [self.schema.categorical[name].column or name for name in self.optional]
        if column not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table)))
        parsed = self._parser.parse(table)
        is_good = np.ones(table.num_rows, bool)
        is_good[[row.line for row in parsed.rejected]] = False
        return DecodedRows(is_good, self._encoder.encode(parsed), parsed.rejected)


class SequenceRowDecoder(_Decoder):
    """Decodes rows with a list of items each, the earliest first, and lists of numbers, such as the time of each item.

    Items that the dataset does not have are left out with their numbers, and a row without any known item is malformed.
    Times become the time since the row's first item, as in a prepared row that begins there.

    Args:
        folder: The folder of the dataset, or the folder ``dataset`` of a run.
        manifest: Its manifest.
        lists: Names of the lists that the model reads; other columns are ignored.

    Raises:
        UserError: The model reads other ids for each item, or a time that the dataset does not record as one.
    """

    def __init__(self, folder: Path, manifest: Manifest, lists: Collection[str]) -> None:
        full, self._dataset_schema = raw_schema(manifest), manifest.schema
        self._numbers = [name for name in manifest.schema.dense_sequences if name in lists]
        if other_ids := [name for name in full.categorical if name in lists and name != ITEM]:
            raise UserError(
                f"the model reads {', '.join(other_ids)} beside the items of a sequence, and raw sequences have items "
                "and numbers alone: prepare the rows, and predict them by --split."
            )
        if self._numbers and TIME_SINCE_FIRST not in manifest.preparation:
            raise UserError(
                f"the model reads {', '.join(self._numbers)} beside the items, and the dataset, prepared by distembed "
                f"{manifest.tool_version}, does not record which list is the time: prepare it again, and train or load "
                "the run on it (--data, data=); or predict by --split."
            )
        schema = dataclasses.replace(full, label=None).with_features([ITEM, *self._numbers])
        super().__init__(folder, manifest, schema)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        if self._numbers:
            names = ", ".join(self._numbers)
            self.columns.require(table.schema, remedy=f" Give each row a list {ITEM!r} and lists as long of {names}.")
        parsed = self._parser.parse(table)
        is_good = np.ones(len(table), bool)
        is_good[[row.line for row in parsed.rejected]] = False
        block = self._encoder.encode(parsed)
        items = block.jagged[ITEM]
        is_known = items.values >= FIRST_ID  # lower ids are reserved for missing and unknown values
        block = _with_all_lists(self._dataset_schema, block, items.lengths)
        lists = {name: _kept_entries(entries, is_known) for name, entries in block.jagged.items()}
        has_items = lists[ITEM].lengths > 0
        is_unknown = np.zeros(len(table), bool)
        is_unknown[np.flatnonzero(is_good)[~has_items]] = True
        unknown = _unknown_rows(table[ITEM], is_unknown, "sequence", ITEM)
        rejected = sorted([*parsed.rejected, *unknown], key=lambda row: row.line)
        known = RecordBlock(block.records, lists).gather(np.flatnonzero(has_items))
        return DecodedRows(is_good & ~is_unknown, known, tuple(rejected))


def batches_of(schema: Schema, block: RecordBlock, batch_size: int) -> Iterator[Batch]:
    """Yields decoded rows as batches of ``batch_size`` rows, in order; the last one may have fewer rows."""
    assembler = BatchAssembler(schema)
    num_rows = len(block.records)
    for start in range(0, num_rows, batch_size):
        rows = range(start, min(start + batch_size, num_rows))
        batch_rows = block if len(rows) == num_rows else block.gather(np.arange(rows.start, rows.stop))
        yield from assembler.assemble([batch_rows], [len(rows)])


def decode_rows(decode: Callable[[pa.Table], DecodedRows], raw: RawRows) -> DecodedRows:
    """Decodes rows by :meth:`RowDecoder.decode`, and numbers them as the lines of ``raw`` in place of its table's rows.

    The table lacks the lines in ``raw.bad``, which are malformed in the result too; rejected lines are in order.
    """
    decoded = decode(raw.table)
    is_good = np.zeros(raw.num_lines, bool)
    is_good[raw.lines[decoded.is_good]] = True
    rejected = [dataclasses.replace(row, line=int(raw.lines[row.line])) for row in decoded.rejected]
    return DecodedRows(is_good, decoded.block, tuple(sorted([*raw.bad, *rejected], key=lambda row: row.line)))


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be scored: its number from 0, the name of a column, and its value with the problem."""

    row: int
    field: str
    reason: str


def bad_rows(raw: RawRows, rejected: Sequence[RejectedRow], columns: TableColumns) -> list[BadRow]:
    """Describes the rows that :func:`decode_rows` rejected, with the text of the bad value.

    The text is that of the value in a table of this row alone, so that it does not depend on the other rows.
    """
    described = []
    for row in rejected:
        value = row.text.decode(errors="replace")
        if row.reason != "value":
            table_row = int(np.searchsorted(raw.lines, row.line))  # row of the table; lines are in ascending order
            value = _shown_text(raw.table[row.column].slice(table_row, 1), row.column, columns)
        described.append(BadRow(row.line, row.column, f"{value} {_REASONS[row.reason]}"))
    return described


def bad_rows_text(bad: Sequence[BadRow], most: int = 5) -> str:
    """Lists the problems of the first ``most`` rows, for an error message."""
    listed = "; ".join(f"row {bad_row.row}, column {bad_row.field!r}: {bad_row.reason}" for bad_row in bad[:most])
    return listed + (f"; and {len(bad) - most} more" if len(bad) > most else "")


def _shown_text(column: pa.ChunkedArray, name: str, columns: TableColumns) -> str:
    """Returns the text of the one value of a column, or the texts of its list."""
    value = plain_array(one_array(column))
    if columns.takes_lists(name):
        texts = as_lists(value, columns.separators[name]).flatten().cast(pa.string())
        return reprlib.repr(texts.to_pylist())
    return reprlib.repr(value.cast(pa.string())[0].as_py())


def given_rows(rows: Any, columns: TableColumns) -> RawRows:
    """Turns rows of Python into a table; rows with a value that no table can hold are apart, in ``RawRows.bad``.

    Columns that are not needed become null. An Arrow table is taken as it is.

    Args:
        rows: Dictionaries, one a row, which may lack values; a dictionary of columns; a pandas DataFrame; an
            Arrow table or record batch.
        columns: The needed columns, with the types that each may have.

    Raises:
        UserError: ``rows`` is none of these, has columns of unequal lengths, or rows without any column.
    """
    if isinstance(rows, pa.Table | pa.RecordBatch):
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        return RawRows(table, np.arange(len(table)), len(table))
    if isinstance(rows, Mapping):
        return _rows_of_columns(rows, columns)
    if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
        _require_columns(rows, rows.columns)
        if not rows.columns.is_unique:
            repeated = rows.columns[rows.columns.duplicated()][0]
            raise UserError(f"rows has several columns named {repeated!r}; rename them.")
        return _rows_of_columns({str(name): rows[name] for name in rows.columns}, columns)
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _rows_of_dictionaries(rows, columns)
    raise UserError(f"rows is {_described(rows)}; give {_KINDS}.")


def missing_columns(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[str]:
    """Returns the columns that none of the rows has; a row may lack a value that another row has."""
    first = rows[0] if rows else {}
    return [name for name in columns if name not in first and not any(name in row for row in rows)]


def _rows_of_dictionaries(rows: Sequence[Any], columns: TableColumns) -> RawRows:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is {_described(row)}; give {_KINDS}.")
    missing = missing_columns(rows, columns.names)
    names = [name for name in columns.names if name not in missing]
    if missing:  # the decoder refuses the table later, and its error names the columns that are there
        names = list(dict.fromkeys((*names, *islice((name for row in rows for name in row), _MOST_NAMES))))
    _require_columns(rows, names)
    return _rows_of_columns({name: [row.get(name) for row in rows] for name in names}, columns)


def _require_columns(rows: Sized, names: Collection[Any]) -> None:
    """Refuses rows without any value: a table without columns would have no rows, and there would be no predictions."""
    if len(rows) and not len(names):
        raise UserError(f"rows has {len(rows):,} rows and not one column; give each row's values by their columns.")


def _rows_of_columns(values_by_column: Mapping[Any, Any], columns: TableColumns) -> RawRows:
    lengths: dict[str, int] = {}
    for name, values in values_by_column.items():
        if not isinstance(name, str):
            raise UserError(f"a column is named {name!r}, {_described(name)}; names of columns are texts.")
        if isinstance(values, str | bytes) or not isinstance(values, Sized):
            raise UserError(
                f"the column {name!r} of rows is {_described(values)}; give a list or an array with a value a row, and "
                "a single row as a list of one dictionary."
            )
        lengths[name] = len(values)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in list(lengths.items())[:5])
        raise UserError(f"the columns of rows have unequally many values ({listed}, ...); give one a row.")
    num_rows = next(iter(lengths.values()), 0)
    arrays = {}
    bad: dict[int, RejectedRow] = {}
    for name, values in values_by_column.items():
        arrays[name], wrong = given_column(values, name, columns) if name in columns.kinds else (pa.nulls(num_rows), [])
        own_values = list(values) if wrong else []
        for row in wrong:
            text = reprlib.repr(own_values[row]).encode(errors="backslashreplace")
            bad.setdefault(row, RejectedRow(row, "value", text, name))
    table, good_rows = pa.table(arrays), np.delete(np.arange(num_rows), sorted(bad))
    return RawRows(table.take(good_rows) if bad else table, good_rows, num_rows, tuple(bad[row] for row in sorted(bad)))


def _described(value: Any) -> str:
    """Returns the type of a value as text, with the value where it is short."""
    text = repr(value)
    return f"of type {type(value).__name__}" + (f" ({text})" if len(text) < 60 else "")
