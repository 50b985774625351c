"""Rows of a table to the columns of a dataset, as a schema says; malformed rows are set aside.

What is parsed is an Arrow table of the columns that the schema names. They are texts, as of CSV files, or typed, as of
Parquet: a number or a truth value and its text are the same value, and true is 1 where a number is wanted. A row is
malformed, for the first of these reasons:

- ``label``: the label is missing, or none of its kind;
- ``weight``: the weight is missing, negative, or no finite number;
- ``time``: the time is missing, or not in the format;
- ``dense``: a number is there and is not finite in 32 bits;
- ``id``: a categorical value is there, and is none of its kind.

Sources of rows have reasons of their own, for what is no row of the table at all: ``columns``, ``text`` and ``json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.prepare.blocks import (
    BlockLayout,
    KeyColumn,
    KeyKind,
    NumberColumn,
    NumberTransform,
    ParsedBlock,
    RejectedRow,
)
from distembed.data.table.few_rows import grouped, parts
from distembed.data.table.keys import (
    KEY_KINDS,
    CodedColumn,
    Keys,
    coded,
    coded_lists,
    crossed,
    id_column,
    with_distinct_keys,
    wrong_rows,
)
from distembed.data.table.numbers import (
    Bools,
    dense_values,
    has_missing_text,
    label_values,
    time_values,
    weight_values,
)
from distembed.data.table.raw_columns import TableColumns, as_lists
from distembed.data.table.schema import TableSchema

REASONS: tuple[str, ...] = ("columns", "text", "json", "label", "weight", "time", "dense", "id")

KEY_KIND: Mapping[str, KeyKind] = {
    "string": "string",
    "integer": "integer",
    "hexadecimal": "hexadecimal",
    "log_bins": "integer",
}
"""Kind of a categorical column -> kind of its keys in blocks."""
# What would begin another field or line of rejected.tsv.
_ESCAPED = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}


@dataclass(frozen=True)
class _Judged:
    """The columns of all rows, and which rows are malformed by which reason and column."""

    numbers: list[NDArray[Any]]
    ids: list[tuple[CodedColumn, Keys]]
    wrong: dict[tuple[str, str], Bools]

    def mark(self, reason: str, column: str, rows: Bools) -> None:
        """Adds the rows that are malformed by a column, if there are any."""
        if rows.any():
            self.wrong[reason, column] = rows


class TableParser:
    """Parses tables by a schema, in any number of threads at a time.

    Args:
        schema: What becomes of the columns.
        needs_label: Whether rows have what only training needs, the label, the weight, the time and the column that
            splits are made by; if not, the layout has none of them, as for rows to predict.

    Attributes:
        columns: The columns of a table that are parsed.
        layout: The columns of every block.
    """

    def __init__(self, schema: TableSchema, needs_label: bool = True) -> None:
        self._schema = schema if needs_label else _without_label(schema)
        self._missing = pa.array(schema.text.missing_values, pa.string())
        self.columns = TableColumns(self._schema)
        self.layout = table_layout(self._schema)
        self._single = _single_columns(self._schema)

    def parse(self, raw: pa.Table) -> ParsedBlock:
        """Returns the block of the table's rows; a malformed row is a rejected one, whose line is its row's number.

        Raises:
            UserError: The table lacks a column, or one is of a type that has no such values.
        """
        columns = self.columns.taken_from(raw)
        judged = self._judge(columns, raw.num_rows)
        reasons = _first_reasons(judged.wrong, raw.num_rows)
        good = reasons < 0 if (reasons >= 0).any() else None
        return ParsedBlock(
            num_lines=raw.num_rows,
            num_rows=raw.num_rows if good is None else int(good.sum()),
            numbers=tuple(column if good is None else column[good] for column in judged.numbers),
            ids=tuple(id_column(column, keys, good) for column, keys in judged.ids),
            rejected=() if good is None else tuple(_rejected(columns, reasons, judged.wrong)),
        )

    def _judge(self, columns: dict[str, pa.Array], num_rows: int) -> _Judged:
        """Returns the values of all rows, in the layout's order, and what is wrong with them."""
        schema, judged = self._schema, _Judged([], [], {})

        def take(reason: str, column: str, found: tuple[NDArray[Any], Bools]) -> None:
            judged.numbers.append(found[0])
            judged.mark(reason, column, found[1])

        if schema.label is not None:
            take("label", schema.label.column, label_values(columns[schema.label.column], schema.label))
        if schema.weight is not None:
            take("weight", schema.weight.column, weight_values(columns[schema.weight.column]))
        if schema.time is not None:
            take("time", schema.time.column, time_values(columns[schema.time.column], schema.time))
        for reason, column, found in self._dense(columns, num_rows):
            take(reason, column, found)
        for name, coded_column, keys in self._keys(columns, num_rows):
            judged.ids.append((coded_column, keys))
            if keys.wrong.any():
                judged.mark("id", name, wrong_rows(coded_column, keys.wrong, num_rows))
        return judged

    def _dense(
        self, columns: Mapping[str, pa.Array], num_rows: int
    ) -> Iterator[tuple[str, str, tuple[NDArray[Any], Bools]]]:
        """Yields the columns of numbers with the reason for which their rows are malformed, in the layout's order."""
        schema = self._schema
        uses: list[tuple[str, str, str]] = [
            ("dense", column, schema.dense[name].transform) for name, column in schema.dense_columns.items()
        ]
        uses += [("id", schema.categorical_columns[name][0], "none") for name in _quantile_bins(schema)]
        groups = grouped([(transform, columns[column]) for _, column, transform in uses], num_rows)
        found: dict[int, tuple[NDArray[Any], Bools]] = {}
        for transform, places, array in groups:
            values, wrong = dense_values(self._present(array), transform)
            for rows, place in zip(parts(len(places), num_rows), places, strict=True):
                found[place] = values[rows], wrong[rows]
        for place, (reason, column, _) in enumerate(uses):
            yield reason, column, found[place]

    def _present(self, column: pa.Array) -> pa.Array:
        """Returns a column in which values with a text that stands for a missing value are null."""
        missing = has_missing_text(column, self._missing)
        return pc.if_else(pa.array(missing), pa.scalar(None, column.type), column) if missing.any() else column

    def _keys(self, columns: Mapping[str, pa.Array], num_rows: int) -> Iterator[tuple[str, CodedColumn, Keys]]:
        """Yields the columns of values that get ids with what they are of in the table, in the layout's order."""
        single = self._single_keys(columns, num_rows)
        for name, table_columns in self._schema.categorical_columns.items():
            categorical = self._schema.categorical[name]
            if categorical.kind == "quantile_bins":
                continue
            if name in single:
                column, keys = single[name]
            elif categorical.cross is not None:
                column = crossed([coded(columns[each], self._missing) for each in table_columns])
                keys = KEY_KINDS[categorical.kind](column.distinct)
            else:
                lists = as_lists(columns[table_columns[0]], categorical.separator)
                column = coded_lists(lists, self._missing, categorical.max_length)
                keys = KEY_KINDS[categorical.kind](column.distinct)
            yield " x ".join(table_columns), column, keys
        if self._schema.split_column is not None:
            column = coded(columns[self._schema.split_column], self._missing)
            yield self._schema.split_column, column, KEY_KINDS["string"](column.distinct)

    def _single_keys(self, columns: Mapping[str, pa.Array], num_rows: int) -> dict[str, tuple[CodedColumn, Keys]]:
        """Returns the columns with one value a row that is its own, by their names in the dataset."""
        found: dict[str, tuple[CodedColumn, Keys]] = {}
        uses = [(self._schema.categorical[name].kind, columns[column]) for name, column in self._single]
        for kind, places, array in grouped(uses, num_rows):
            column = coded(array, self._missing)
            keys = KEY_KINDS[kind](column.distinct)
            if len(places) > 1:
                column, keys = with_distinct_keys(column, keys)
            for rows, place in zip(parts(len(places), num_rows), places, strict=True):
                found[self._single[place][0]] = dataclasses.replace(column, codes=column.codes[rows]), keys
        return found


def table_layout(schema: TableSchema) -> BlockLayout:
    """Returns the columns of every block of a table of this schema."""
    numbers: list[NumberColumn] = []
    if schema.label is not None:
        is_number = schema.label.kind == "number"
        numbers.append(NumberColumn(schema.label.name, "label", np.dtype(np.float32 if is_number else np.int8)))
    if schema.weight is not None:
        numbers.append(NumberColumn(schema.weight.name, "weight", np.dtype(np.float32)))
    if schema.time is not None:
        numbers.append(NumberColumn(schema.time.name, "time", np.dtype(np.int64)))
    for name, dense in schema.dense.items():
        # what a number alone decides, as its logarithm, is done by the parser
        transform: NumberTransform = "standardize" if dense.transform == "standardize" else "none"
        keeps_missing = dense.missing == "keep"
        numbers.append(
            NumberColumn(name, "dense", np.dtype(np.float32), transform=transform, keeps_missing=keeps_missing)
        )
    for name in _quantile_bins(schema):
        num_bins = schema.categorical[name].num_bins
        numbers.append(NumberColumn(name, "bins", np.dtype(np.float32), transform="quantile_bins", num_bins=num_bins))
    ids = [_key_column(name, schema) for name, each in schema.categorical.items() if each.kind != "quantile_bins"]
    if schema.split_column is not None:
        ids.append(KeyColumn(schema.split_column, "split", "string"))
    return BlockLayout(tuple(numbers), tuple(ids), tuple(schema.categorical))


def _key_column(name: str, schema: TableSchema) -> KeyColumn:
    column = schema.categorical[name]
    owner = schema.categorical[column.vocabulary or name]
    return KeyColumn(
        name,
        "feature",
        KEY_KIND[column.kind],
        is_list=column.holds_lists,
        min_count=owner.min_count or schema.min_count,
        hash_size=schema.hash_size_of(owner),
        hash_seed=owner.hash_seed,
        max_length=column.max_length,
        vocabulary=column.vocabulary,
    )


def _single_columns(schema: TableSchema) -> list[tuple[str, str]]:
    """Returns the names of the features that are the one value of a column, which gets a key, and those columns."""
    return [
        (name, schema.categorical_columns[name][0])
        for name, column in schema.categorical.items()
        if column.kind != "quantile_bins" and column.cross is None and not column.holds_lists
    ]


def _quantile_bins(schema: TableSchema) -> list[str]:
    """Returns the names of the features that are bins of equally many rows."""
    return [name for name, column in schema.categorical.items() if column.kind == "quantile_bins"]


def _without_label(schema: TableSchema) -> TableSchema:
    """Returns the schema of rows to predict."""
    return dataclasses.replace(schema, label=None, weight=None, time=None, split=TableSchema.split)


def _first_reasons(wrong: Mapping[tuple[str, str], Bools], num_rows: int) -> NDArray[np.int8]:
    """Returns the place in ``REASONS`` of what is wrong first with each row; -1 for a well-formed one."""
    reasons = np.full(num_rows, -1, np.int8)
    for (reason, _), rows in sorted(wrong.items(), key=lambda each: -REASONS.index(each[0][0])):
        reasons[rows] = REASONS.index(reason)
    return reasons


def _rejected(
    columns: Mapping[str, pa.Array], reasons: NDArray[np.int8], wrong: Mapping[tuple[str, str], Bools]
) -> Iterator[RejectedRow]:
    """Yields the malformed rows, with their values as texts separated by tabs."""
    for row in np.flatnonzero(reasons >= 0).tolist():
        reason = REASONS[reasons[row]]
        values = (column[row].as_py() for column in columns.values())
        text = "\t".join("" if value is None else str(value).translate(_ESCAPED) for value in values)
        first = next(column for (of_reason, column), rows in wrong.items() if of_reason == reason and rows[row])
        yield RejectedRow(row, reason, text.encode(errors="backslashreplace"), first)
