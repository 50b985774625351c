"""Bodies of requests and answers: JSON, and streams of Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pyarrow as pa
from numpy.typing import NDArray

from distembed.server.scoring import Request

JSON_TYPE, ARROW_TYPE = "application/json", "application/vnd.apache.arrow.stream"


class BadBody(ValueError):
    """A body that has no rows."""


def read_rows(body: bytes, content_type: str) -> Request:
    """Returns the rows of a body.

    Raises:
        BadBody: It is not of its type, or has no rows.
    """
    return _arrow_rows(body) if content_type == ARROW_TYPE else _json_rows(body)


def write_json(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Returns outputs as JSON; numbers that are none are null."""
    return orjson.dumps(dict(outputs), option=orjson.OPT_SERIALIZE_NUMPY)


def write_arrow(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Returns outputs as a stream of Arrow with a column for each."""
    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in outputs.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _json_rows(body: bytes) -> Request:
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"the body is no JSON: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("columns"), dict) and "rows" not in values:
        return Request(_rows_of_columns(values["columns"]))
    rows = values.get("rows") if isinstance(values, dict) else values
    if not isinstance(rows, list):
        raise BadBody('give {"rows": [{"COLUMN": VALUE, ...}, ...]}, or {"columns": {"COLUMN": [VALUE, ...], ...}}')
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadBody(f"row {number} is {str(row)[:60]!r} and no object of values by their columns")
    return Request(rows)


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    lengths = {name: len(values) if isinstance(values, list) else None for name, values in columns.items()}
    for name, length in lengths.items():
        if length is None or length != next(iter(lengths.values())):
            raise BadBody(f"column {name!r} is no list of as many values as the others: {lengths}"[:300])
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _arrow_rows(body: bytes) -> Request:
    try:
        with pa.ipc.open_stream(body) as reader:
            table = reader.read_all()
            table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise BadBody(f"the body is no stream of Arrow: {error}") from error
    return Request(table=table)
