"""Rows of a table to the columns of a dataset, as a schema says; malformed rows are set aside.

The input is an Arrow table of the columns that the schema names; no embedding table is meant here. The columns are
texts, as of CSV files, or typed, as of Parquet: a number or a truth value and its text are the same value, and true is
1 where a number is wanted. A row is malformed, for the first of these reasons:

- ``label``: a label is none of its kind, or the only label is missing;
- ``weight``: the weight is missing, negative, or no finite number;
- ``time``: the time is missing, or not in the format;
- ``dense``: a number is there and is not finite in 32 bits;
- ``list``: a list of numbers has one that is not finite in 32 bits, or has not one for each value beside it;
- ``times``: a list of times has one that is missing or not finite, not one for each value beside it, or a time before
  the preceding one;
- ``id``: a categorical value is there, and is none of its kind.

Sources of rows have reasons of their own, for lines that are no rows: ``columns``, ``text`` and ``json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.table.blocks import BlockLayout, KeyColumn, NumberColumn, ParsedBlock, RejectedRow
from distembed.data.table.keys import (
    KEY_KINDS,
    CodedColumn,
    Keys,
    coded,
    coded_lists,
    crossed,
    kept_entries,
    keyed_column,
    list_lengths,
    with_distinct_keys,
    wrong_rows,
)
from distembed.data.table.numbers import (
    Bools,
    dense_values,
    is_missing,
    label_values,
    optional_label_values,
    time_values,
    times_since_first,
    transformed,
    values_as_numbers,
    weight_values,
    without_missing_texts,
)
from distembed.data.table.raw_columns import FEW_ROWS, TableColumns, as_lists
from distembed.data.table.schema import TableSchema

REASONS: tuple[str, ...] = ("columns", "text", "json", "label", "weight", "time", "dense", "list", "times", "id")

# What would begin another field or line of rejected.tsv.
_ESCAPED = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}


class _NumberUse(NamedTuple):
    """A column of the table that a feature takes numbers from."""

    reason: str  # reason for which malformed rows are rejected
    column: str  # name in the table
    transform: str


class TableParser:
    """Parses tables by a schema, in any number of threads at a time."""

    def __init__(self, schema: TableSchema, needs_label: bool = True) -> None:
        if not needs_label:
            schema = dataclasses.replace(schema, label=None, labels={}, weight=None, time=None, split=TableSchema.split)
        self._schema = schema
        self._missing = pa.array(schema.text.missing_values, pa.string())
        self.columns = TableColumns(schema)
        self.layout = table_layout(schema)

    def parse(self, raw: pa.Table) -> ParsedBlock:
        """Splits a table into a block of well-formed rows and rejected rows, whose ``line`` is the row number.

        A rejected row has its first reason in the order of :data:`REASONS`. Missing columns raise a UserError.
        """
        columns, num_rows = self.columns.taken_from(raw), raw.num_rows
        numbers: list[NDArray[Any]] = []
        ids: list[tuple[CodedColumn, Keys]] = []
        wrong: dict[tuple[str, str], Bools] = {}  # by reason and column
        for reason, name, (values, bad) in self._numbers(columns, num_rows):
            numbers.append(values)
            if bad.any():
                wrong[reason, name] = bad | wrong.get((reason, name), False)
        for name, column, keys in self._keys(columns, num_rows):
            ids.append((column, keys))
            if keys.wrong.any():
                wrong["id", name] = wrong_rows(column, keys.wrong, num_rows) | wrong.get(("id", name), False)
        reasons = np.full(num_rows, -1, np.int8)  # index in REASONS; -1 for a well-formed row
        # Writes the last reason first, so that an earlier reason of the same row overwrites it.
        for (reason, _), rows in sorted(wrong.items(), key=lambda entry: -REASONS.index(entry[0][0])):
            reasons[rows] = REASONS.index(reason)
        good = reasons < 0 if (reasons >= 0).any() else None
        rejected = []
        for row in np.flatnonzero(reasons >= 0).tolist():
            reason = REASONS[reasons[row]]
            name = next(column for (row_reason, column), rows in wrong.items() if row_reason == reason and rows[row])
            rejected.append(RejectedRow(row, reason, row_text(columns, row), name))
        if good is not None:
            for index, number in enumerate(self.layout.numbers):
                kept = good
                if number.beside is not None:
                    lengths = ids[self.layout.feature_keys[number.beside][0]][0].lengths
                    assert lengths is not None, "the schema checks that lists are beside"
                    kept = np.repeat(good, lengths)
                numbers[index] = numbers[index][kept]
        return ParsedBlock(
            num_lines=num_rows,
            num_rows=num_rows if good is None else int(good.sum()),
            numbers=tuple(numbers),
            ids=tuple(keyed_column(column, keys, good) for column, keys in ids),
            rejected=tuple(rejected),
        )

    def _numbers(
        self, columns: Mapping[str, pa.Array], num_rows: int
    ) -> Iterator[tuple[str, str, tuple[NDArray[Any], Bools]]]:
        """Yields (reason if malformed, column's name, (numbers, malformed mask)) in the order of the layout."""
        schema = self._schema
        if schema.label is not None:
            yield "label", schema.label.column, label_values(columns[schema.label.column], schema.label)
        for label in schema.labels.values():
            yield "label", label.column, optional_label_values(columns[label.column], label, self._missing)
        if schema.weight is not None:
            yield "weight", schema.weight.column, weight_values(columns[schema.weight.column])
        if schema.time is not None:
            yield "time", schema.time.column, time_values(columns[schema.time.column], schema.time)
        uses = [
            _NumberUse("dense", column, schema.dense[name].transform)
            for name, column in schema.dense_columns.items()
            if schema.dense[name].beside is None
        ]
        # bins are cut at quantiles of all rows, which are known only after parsing: until then their values are numbers
        uses += [_NumberUse("id", schema.categorical_columns[name][0], "none") for name in _quantile_bins(schema)]
        for use, numbers_and_mask in zip(uses, self._numbers_of_uses(uses, columns, num_rows), strict=True):
            yield use.reason, use.column, numbers_and_mask
        for name, dense in schema.dense_sequences.items():
            reason = "times" if dense.since_first else "list"
            yield reason, schema.dense_columns[name], self._number_lists(name, columns)

    def _number_lists(self, name: str, columns: Mapping[str, pa.Array]) -> tuple[NDArray[Any], Bools]:
        """Returns a number for each kept value of the lists beside a column of lists, and the mask of malformed rows.

        ::

            item    a - b c    d e    f        - is missing, max_length 2: b c d e f are kept
            time    1 2 3 4    -      5 6      gives 3 4, two missing numbers, and a malformed row
        """
        dense = self._schema.dense[name]
        beside = self._schema.categorical[str(dense.beside)]
        values = as_lists(columns[self._schema.categorical_columns[str(dense.beside)][0]], beside.separator)
        value_lengths, entries = list_lengths(values), pc.list_flatten(values)
        is_present = ~is_missing(without_missing_texts(entries, self._missing))
        kept, _ = kept_entries(value_lengths, is_present, beside.max_length)
        lists = as_lists(columns[self._schema.dense_columns[name]], dense.separator)
        lengths = list_lengths(lists)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        if dense.since_first:
            numbers, wrong_entries = times_since_first(pc.list_flatten(lists), rows)
        else:
            numbers, wrong_entries = self._numbers_of(pc.list_flatten(lists))

        def rows_with(mask: Bools, rows: NDArray[np.int64]) -> Bools:
            return np.bincount(rows[mask], minlength=len(lengths)) > 0

        has_numbers = rows_with(~np.isnan(numbers) | wrong_entries, rows)
        is_aligned = lengths == value_lengths
        rows_of_values = np.repeat(np.arange(len(lengths)), value_lengths)
        if dense.since_first:  # a row with values has numbers too
            has_numbers = rows_with(~np.isnan(numbers), rows) | rows_with(is_present, rows_of_values)
            wrong_entries &= has_numbers[rows]
        wrong = rows_with(wrong_entries, rows) | (has_numbers & ~is_aligned)
        own = np.full(len(kept), np.nan)  # a number for each value
        own[np.repeat(is_aligned, value_lengths)] = numbers[np.repeat(is_aligned, lengths)]
        rows = rows_of_values
        if dense.gap_to is not None:
            ends, wrong_ends = self._numbers_of(columns[dense.gap_to])
            own, wrong = ends[rows] - own, wrong | wrong_ends
        floats, is_infinite = transformed(own, dense.transform)
        return floats[kept], wrong | rows_with(is_infinite, rows)

    def _numbers_of(self, array: pa.Array) -> tuple[NDArray[np.float64], Bools]:
        """Returns values as numbers, NaN for missing ones, and the mask of malformed values."""
        return values_as_numbers(without_missing_texts(array, self._missing))

    def _numbers_of_uses(
        self, uses: Sequence[_NumberUse], columns: Mapping[str, pa.Array], num_rows: int
    ) -> list[tuple[NDArray[Any], Bools]]:
        """Returns the float32 numbers and the mask of malformed rows of each use."""
        by_use: dict[int, tuple[NDArray[Any], Bools]] = {}
        to_parse = [(use.transform, columns[use.column]) for use in uses]
        for transform, rows_by_use, array in _concatenated_by_kind(to_parse, num_rows):
            values, wrong = dense_values(without_missing_texts(array, self._missing), transform)
            by_use |= {index: (values[rows], wrong[rows]) for index, rows in rows_by_use.items()}
        return [by_use[index] for index in range(len(uses))]

    def _keys(self, columns: Mapping[str, pa.Array], num_rows: int) -> Iterator[tuple[str, CodedColumn, Keys]]:
        """Yields (columns' names, values, keys of the distinct values) in the order of the layout."""
        single = self._single_keys(columns, num_rows)
        for name, table_columns in self._schema.categorical_columns.items():
            categorical = self._schema.categorical[name]
            if categorical.kind == "quantile_bins":
                continue
            if name in single:
                column, keys = single[name]
            else:
                if categorical.cross is not None:
                    column = crossed([coded(columns[name_], self._missing) for name_ in table_columns])
                else:
                    lists = as_lists(columns[table_columns[0]], categorical.separator)
                    column = coded_lists(lists, self._missing, categorical.max_length)
                keys = KEY_KINDS[categorical.kind](column.distinct)
            yield " x ".join(table_columns), column, keys
        if self._schema.split_column is not None:
            column = coded(columns[self._schema.split_column], self._missing)
            yield self._schema.split_column, column, KEY_KINDS["string"](column.distinct)

    def _single_keys(self, columns: Mapping[str, pa.Array], num_rows: int) -> dict[str, tuple[CodedColumn, Keys]]:
        """Returns values and keys of each feature with one value a row: no list, cross or quantile bin."""
        names = [
            name
            for name, column in self._schema.categorical.items()
            if column.kind != "quantile_bins" and column.cross is None and not column.holds_lists
        ]
        kinds = [self._schema.categorical[name].kind for name in names]
        arrays = [columns[self._schema.categorical_columns[name][0]] for name in names]
        coded_keys: dict[str, tuple[CodedColumn, Keys]] = {}
        for kind, rows_by_column, array in _concatenated_by_kind(list(zip(kinds, arrays, strict=True)), num_rows):
            column = coded(array, self._missing)
            codes, keys = column.codes, KEY_KINDS[kind](column.distinct)
            if len(rows_by_column) > 1:  # merges equal keys once here, not again in each part
                codes, keys = with_distinct_keys(codes, keys)
            for index, rows in rows_by_column.items():
                coded_keys[names[index]] = dataclasses.replace(column, codes=codes[rows]), keys
        return coded_keys


def _concatenated_by_kind(
    columns: Sequence[tuple[str, pa.Array]], num_rows: int
) -> Iterator[tuple[str, dict[int, slice], pa.Array]]:
    """Concatenates columns of one kind and Arrow type, if they have few rows: one call of Arrow then parses them all.

    A kind is a transform of numbers, or a kind of keys. Yields the kind, the rows of each column in the concatenation,
    by its position in ``columns``, and the values: C1 = a b and C2 = c a become a b c a, with rows 0:2 and 2:4. Columns
    of many rows stay separate.
    """
    groups: dict[tuple[str, pa.DataType, int], list[int]] = {}
    for index, (kind, array) in enumerate(columns):
        groups.setdefault((kind, array.type, index if num_rows > FEW_ROWS else 0), []).append(index)
    for (kind, *_), indices in groups.items():
        arrays = [columns[index][1] for index in indices]
        rows_by_column = {index: slice(slot * num_rows, (slot + 1) * num_rows) for slot, index in enumerate(indices)}
        yield kind, rows_by_column, pa.concat_arrays(arrays) if len(arrays) > 1 else arrays[0]


def table_layout(schema: TableSchema) -> BlockLayout:
    """Returns the columns of the blocks that :class:`TableParser` makes for a schema, in their order."""
    numbers: list[NumberColumn] = []
    for name, label in schema.all_labels.items():
        file_dtype = np.dtype(np.float32 if label.kind == "number" else np.int8)
        if name in schema.labels:  # which rows may lack: NaN
            column = NumberColumn(name, "label", np.dtype(np.float32), keeps_missing=True, written_as=file_dtype)
        else:
            column = NumberColumn(name, "label", file_dtype)
        numbers.append(column)
    if schema.weight is not None:
        numbers.append(NumberColumn(schema.weight.name, "weight", np.dtype(np.float32)))
    if schema.time is not None:
        numbers.append(NumberColumn(schema.time.name, "time", np.dtype(np.int64)))
    for name, dense in schema.dense.items():
        if dense.beside is None:
            # transforms of a number by itself, as the logarithm, are the parser's
            transform = dense.transform if dense.transform == "standardize" else "none"
            keeps_missing = dense.missing == "keep"
            numbers.append(NumberColumn(name, "dense", np.dtype(np.float32), transform, keeps_missing=keeps_missing))
    for name in _quantile_bins(schema):
        num_bins = schema.categorical[name].num_bins
        numbers.append(NumberColumn(name, "bins", np.dtype(np.float32), transform="quantile_bins", num_bins=num_bins))
    for name, dense in schema.dense_sequences.items():
        keeps_missing = dense.missing == "keep"
        numbers.append(
            NumberColumn(name, "dense", np.dtype(np.float32), keeps_missing=keeps_missing, beside=dense.beside)
        )
    ids = [_key_column(name, schema) for name, column in schema.categorical.items() if column.kind != "quantile_bins"]
    if schema.split_column is not None:
        ids.append(KeyColumn(schema.split_column, "split", "string"))
    return BlockLayout(tuple(numbers), tuple(ids), tuple(schema.categorical))


def _key_column(name: str, schema: TableSchema) -> KeyColumn:
    column = schema.categorical[name]
    owner = schema.categorical[column.vocabulary or name]
    return KeyColumn(
        name,
        "feature",
        "integer" if column.kind == "log_bins" or column.kind == "quantile_bins" else column.kind,
        is_list=column.holds_lists,
        min_count=owner.min_count or schema.min_count,
        hash_size=schema.hash_size_of(owner),
        hash_seed=owner.hash_seed,
        max_length=column.max_length,
        vocabulary=column.vocabulary,
    )


def _quantile_bins(schema: TableSchema) -> list[str]:
    return [name for name, column in schema.categorical.items() if column.kind == "quantile_bins"]


def row_text(columns: Mapping[str, pa.Array], row: int) -> bytes:
    """Joins the values of a row by tabs, for ``rejected.tsv``; tabs and line ends within a value are escaped."""
    values = (column[row].as_py() for column in columns.values())
    text = "\t".join("" if value is None else str(value).translate(_ESCAPED) for value in values)
    return text.encode(errors="backslashreplace")
