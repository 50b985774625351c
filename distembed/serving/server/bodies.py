"""Bodies of requests and answers: JSON, and streams of Arrow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.table.given_values import json_values
from distembed.serving.given_rows import shown
from distembed.serving.server.arrow_messages import is_compressed
from distembed.serving.server.outputs import Outputs
from distembed.serving.server.scoring import Request

JSON_TYPE, ARROW_TYPE = "application/json", "application/vnd.apache.arrow.stream"
_LONG_NUMBER = re.compile(rb"[0-9]{20}|-[0-9]{19}")
"""Integers that may have more than 64 bits."""
_MOST_EXPANDED_BYTES = 256 << 20
"""Bytes of all columns once each row has a value of its own."""


class BadBody(ValueError):
    """A body that has no rows."""


class TooManyRows(ValueError):
    """A body with more rows than a request may have, or with rows that take more memory."""


def read_rows(body: bytes, content_type: str, most_rows: int) -> Request:
    """Returns the rows of a body.

    Raises:
        BadBody: It is not of its type, or has no rows.
        TooManyRows: It has more rows than that.
    """
    request = _arrow_rows(body, most_rows) if content_type == ARROW_TYPE else _json_rows(body)
    _require_rows(request.num_rows, most_rows)
    return request


def write_json(outputs: Outputs) -> bytes:
    """Returns outputs as JSON; what is missing is null."""
    plain = {name: values.to_pylist() if isinstance(values, pa.Array) else values for name, values in outputs.items()}
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)


def write_arrow(outputs: Outputs) -> bytes:
    """Returns outputs as a stream of Arrow with a column for each; what is missing is null."""
    table = pa.table({name: _arrow(values) for name, values in outputs.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _arrow(values: NDArray[Any] | pa.Array) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)


def _require_rows(num_rows: int, most_rows: int) -> None:
    if num_rows > most_rows:
        raise TooManyRows(f"the body has {num_rows:,} rows, and a request may have {most_rows:,}; send several")


def _json_rows(body: bytes) -> Request:
    try:
        values = _json_values(body)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is no JSON: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("columns"), dict) and "rows" not in values:
        return Request(_rows_of_columns(values["columns"]))
    rows = values.get("rows") if isinstance(values, dict) else values
    if not isinstance(rows, list):
        raise BadBody('give {"rows": [{"COLUMN": VALUE, ...}, ...]}, or {"columns": {"COLUMN": [VALUE, ...], ...}}')
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadBody(f"row {number} is {shown(row)} and no object of values by their columns")
    return Request(rows)


def _json_values(body: bytes) -> Any:
    """Returns what a body has, by orjson where that suffices: it keeps 64 bits of an integer, and refuses NaN.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is too deep.
    """
    if not _LONG_NUMBER.search(body):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(body)
    return json_values(body)


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    num_rows: int | None = None
    for name, values in columns.items():
        if not isinstance(values, list):
            raise BadBody(f"column {name!r} is {shown(values)} and no list of values")
        if num_rows is not None and len(values) != num_rows:
            raise BadBody(f"column {name!r} has {len(values):,} values, and those before it {num_rows:,}")
        num_rows = len(values)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _arrow_rows(body: bytes, most_rows: int) -> Request:
    """Returns the rows of a stream of Arrow.

    What a few bytes say may take any memory: a compressed stream, a dictionary's long text for many rows, or columns
    without a value, which take none for any number of rows.
    """
    try:
        if is_compressed(body):
            raise BadBody("the stream of Arrow is compressed; send it as it is")
        batches, num_rows = [], 0
        with pa.ipc.open_stream(body) as reader:
            for batch in reader:
                num_rows += batch.num_rows
                _require_rows(num_rows, most_rows)
                batches.append(batch)
            table = pa.Table.from_batches(batches, reader.schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is no stream of Arrow: {error}") from error
    expanded = 0
    for name, column in zip(table.column_names, table.columns, strict=True):
        expanded += sum(map(_expanded_bytes, column.chunks))
        if expanded > _MOST_EXPANDED_BYTES:
            raise TooManyRows(
                f"the values up to column {name!r} take too much memory where rows do not share them; send fewer rows"
            )
    return Request(table=table)


def _expanded_bytes(array: pa.Array) -> int:
    """Returns the bytes of a column, at most, where each row has its own copy of what it may share with others."""
    if pa.types.is_dictionary(array.type):
        return len(array) * _longest(array.dictionary)
    if pa.types.is_run_end_encoded(array.type):
        return len(array) * _longest(array.values)
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        num_entries = pc.sum(pc.list_value_length(array)).as_py() or 0
        return int(num_entries) * (16 + _longest(array.values))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        entries = array.flatten()
        return 16 * len(entries) + _expanded_bytes(entries)
    return int(_view_lengths(array).sum(dtype=np.int64)) if _is_view(array.type) else 0


def _longest(array: pa.Array) -> int:
    """Returns the bytes of the longest of an array's values, at most."""
    if _is_view(array.type):
        return int(_view_lengths(array).max(initial=0))
    return pc.max(pc.binary_length(array)).as_py() or 0 if _has_length(array.type) else 16


def _view_lengths(array: pa.Array) -> NDArray[np.int32]:
    """Returns the length with which each view begins; many views may be of the same bytes."""
    if not len(array):
        return np.empty(0, np.int32)
    views = np.frombuffer(array.buffers()[1], np.int32, 4 * (array.offset + len(array)))
    return views[4 * array.offset :: 4].clip(min=0)


def _is_view(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(type_) or pa.types.is_binary_view(type_))


def _has_length(type_: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(type_) for test in tests)
