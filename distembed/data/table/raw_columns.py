"""The columns of a raw table that a schema names: found by name, checked for their types, and made plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distembed.base.errors import UserError
from distembed.base.names import nearest
from distembed.base.units import enumerate_names
from distembed.data.table.columns import BINS
from distembed.data.table.schema import TableSchema

FEW_ROWS = 1024
"""Columns of more rows are parsed one by one; with fewer rows, parsing several columns end to end is faster."""
# Kinds of Arrow's types; a number may have a fraction.
TEXT, NUMBER, INTEGER, BOOLEAN, TIME, LIST = "text", "number", "integer", "boolean", "time", "list"

_NUMERIC = (TEXT, NUMBER, INTEGER, BOOLEAN)
VALUE_TYPES = {
    "string": (*_NUMERIC, TIME),
    **dict.fromkeys(("integer", "hexadecimal", "log_bins", "quantile_bins"), _NUMERIC),
}
"""Kind of a categorical column -> kinds of types that hold its values."""


class TableColumns:
    """The columns that a schema names.

    Attributes:
        kinds: Kinds of types that each column may be of, by the column's name.
        numbers: The columns that are nothing but numbers.
        separators: Separator of a list in a text, by the name of each column that has lists.
    """

    wanted_by = "the schema"

    def __init__(self, schema: TableSchema) -> None:
        uses: list[tuple[str, Sequence[str]]] = []
        entries: dict[str, Sequence[str]] = {}  # of lists
        self.separators: dict[str, str | None] = {}
        uses += [(label.column, _NUMERIC) for label in schema.all_labels.values()]
        uses += [(schema.weight.column, _NUMERIC)] if schema.weight is not None else []
        uses += [(schema.time.column, (TEXT, NUMBER, INTEGER, TIME))] if schema.time is not None else []

        def of_lists(column: str, allowed: Sequence[str], separator: str | None) -> tuple[str, ...]:
            """Returns the kinds of types of a column of lists, given the kinds of their entries."""
            entries[column] = [kind for kind in entries.get(column, allowed) if kind in allowed]
            # a column with two separators has texts only: no separator would apply to a list
            return (LIST, *allowed) if self.separators.setdefault(column, separator) == separator else tuple(allowed)

        for name, column_name in schema.dense_columns.items():
            dense = schema.dense[name]
            is_list = dense.beside is not None
            allowed_entries = (*_NUMERIC, TIME) if dense.since_first else _NUMERIC
            uses.append((column_name, of_lists(column_name, allowed_entries, dense.separator) if is_list else _NUMERIC))
            uses += [(dense.gap_to, _NUMERIC)] if dense.gap_to is not None else []
        for name, columns in schema.categorical_columns.items():
            allowed: Sequence[str] = VALUE_TYPES[schema.categorical[name].kind]
            if schema.categorical[name].holds_lists:
                allowed = of_lists(columns[0], allowed, schema.categorical[name].separator)
            uses += [(column, allowed) for column in columns]
        uses += [(schema.split_column, VALUE_TYPES["string"])] if schema.split_column is not None else []
        # columns that are keys, whose distinct values suffice, and columns with another use
        keyed = {schema.split_column} if schema.split_column is not None else set()
        used_otherwise = {label.column for label in schema.all_labels.values()}
        used_otherwise |= {column.column for column in (schema.weight, schema.time) if column is not None}
        for name, columns in schema.categorical_columns.items():
            column = schema.categorical[name]
            (used_otherwise if column.kind in BINS or column.holds_lists else keyed).update(columns)
        for name, dense in schema.dense_sequences.items():
            used_otherwise |= {schema.dense_columns[name], *([] if dense.gap_to is None else [dense.gap_to])}
        self.numbers = frozenset(schema.dense_columns.values()) - keyed - used_otherwise
        self._keyed = keyed - used_otherwise - set(schema.dense_columns.values())
        self._entries = {column: tuple(kinds) for column, kinds in entries.items()}
        self.kinds: dict[str, tuple[str, ...]] = {}
        for used, allowed in uses:
            self.kinds[used] = tuple(kind for kind in self.kinds.get(used, allowed) if kind in allowed)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.kinds)

    def takes_lists(self, name: str) -> bool:
        return LIST in self.kinds.get(name, (LIST,))

    def takes(self, name: str, type_: pa.DataType) -> bool:
        """Returns whether the schema allows an Arrow type for a column; a column it does not name may have any type."""
        if name not in self.kinds:
            return True
        kind = type_kind(type_)
        if kind == LIST and self.takes_lists(name):
            return type_kind(type_.value_type) in (*self._entries[name], None)
        return kind in (*self.kinds[name], None)

    def require(
        self, types: pa.Schema, source: str = "the table", wanted: Sequence[str] = (), remedy: str = ""
    ) -> None:
        """Raises a UserError unless a table has the schema's and the ``wanted`` columns once, of allowed types."""
        names = types.names  # a new list each time that it is asked for
        missing = [name for name in dict.fromkeys((*self.kinds, *wanted)) if name not in names]
        if missing:
            guesses = {name: nearest(name, names) for name in missing}
            hints = [f"{guess!r} for {name!r}" for name, guess in guesses.items() if guess]
            hint = f" Did you mean {' and '.join(hints)}?" if hints else ""
            only_kept = [repr(name) for name in missing if name not in self.kinds]
            who = f"{self.wanted_by} names" + (f" ({enumerate_names(only_kept)} is to be kept)" if only_kept else "")
            raise UserError(
                f"{source} has no column {enumerate_names([repr(name) for name in missing])}, which "
                f"{who if len(only_kept) < len(missing) else 'is to be kept'}.{hint} It has "
                f"{enumerate_names([repr(name) for name in names]) or 'no columns'}.{remedy}"
            )
        for name in dict.fromkeys((*self.kinds, *wanted)):
            if names.count(name) > 1:
                raise UserError(f"{source} has several columns named {name!r}; rename them.")
        for name, allowed in self.kinds.items():
            type_ = types.field(name).type
            if not self.takes(name, type_):
                is_of_lists = type_kind(type_) == LIST and self.takes_lists(name)
                takes = f"lists of {' or '.join(self._entries[name])}" if is_of_lists else " or ".join(allowed)
                hint = "; `is_list: true` takes lists" if type_kind(type_) == LIST and not is_of_lists else ""
                raise UserError(
                    f"{source}, column {name!r}: its type is {type_}; {self.wanted_by} takes {takes} there{hint}."
                )

    def taken_from(self, table: pa.Table) -> dict[str, pa.Array]:
        """Returns the schema's columns as arrays, after :meth:`require`; texts have the type ``string``.

        Text columns that only give keys are dictionary-encoded above FEW_ROWS rows.
        """
        self.require(table.schema)
        return {name: self._array(name, table.column(name)) for name in self.kinds}

    def _array(self, name: str, column: pa.ChunkedArray) -> pa.Array:
        if name in self._keyed and len(column) > FEW_ROWS and pa.types.is_string(column.type):
            return one_array(column.dictionary_encode())  # chunk by chunk, which are in cache
        return plain_array(one_array(column))


def as_lists(column: pa.Array, separator: str | None) -> pa.Array:
    """Converts a column to lists: splits texts at the separator; without one, each value is a list of one entry.

    A missing value is an empty list, or null.
    """
    if type_kind(column.type) == LIST:
        return column
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)  # missing, and no text
    if separator is None:
        is_there = column.is_valid().to_numpy(zero_copy_only=False)
        return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(is_there)), pa.int32()), column.drop_null())
    return pc.split_pattern(column.cast(pa.string()), separator)


@lru_cache(maxsize=1024)
def type_kind(type_: pa.DataType) -> str | None:
    """Returns the kind of an Arrow type; None for the null type, "other" for types that no schema takes, as structs."""
    if pa.types.is_dictionary(type_):
        return type_kind(type_.value_type)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        return LIST if type_kind(type_.value_type) not in (LIST, "other") else "other"
    tests = {
        None: (pa.types.is_null,),
        BOOLEAN: (pa.types.is_boolean,),
        INTEGER: (pa.types.is_integer,),
        NUMBER: (pa.types.is_floating, pa.types.is_decimal),
        TIME: (pa.types.is_timestamp, pa.types.is_date),
        TEXT: (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *_BINARY),
    }
    return next((kind for kind, kind_tests in tests.items() if any(test(type_) for test in kind_tests)), "other")


_BINARY = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Returns the chunks of a column as one array."""
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def plain_array(column: pa.Array) -> pa.Array:
    """Converts a column to a type that the parser handles: no dictionary, no view, no half precision, no large list.

    All texts and binaries become ``string``; bytes that are not UTF-8 become backslash escapes.
    """
    if pa.types.is_string(column.type):
        return column
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    if type_kind(column.type) == LIST:
        # Arrow's cast of a list to its own type loses entries that are all null
        lists = column if pa.types.is_list(column.type) else column.cast(pa.list_(column.type.value_type))
        values = plain_array(lists.flatten())
        # flatten() leaves out the values of null lists, so offsets are computed from the lengths
        ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(lists), 0)).cast(pa.int32())
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
        return pa.ListArray.from_arrays(offsets, values)
    if pa.types.is_decimal32(column.type) or pa.types.is_decimal64(column.type):  # which Arrow computes little with
        return column.cast(pa.decimal128(column.type.precision, column.type.scale))
    if pa.types.is_float16(column.type):
        return column.cast(pa.float32())
    if type_kind(column.type) not in (TEXT, None):
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if value is None else value.decode(errors="backslashreplace") for value in column.to_pylist()]
        return pa.array(texts, pa.string())
