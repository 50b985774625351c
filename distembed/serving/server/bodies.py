"""Bodies of requests and answers: JSON, and streams of Arrow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
import pyarrow as pa
from starlette.exceptions import HTTPException

from distembed.data.table.values import json_values
from distembed.serving.given_rows import shown
from distembed.serving.server.scoring import Outputs, Request

JSON_TYPE, ARROW_TYPE = "application/json", "application/vnd.apache.arrow.stream"
# orjson makes a float of an integer of more than 64 bits, so bodies with a long number are read by Python's own parser
_LONG_NUMBER = re.compile(rb"[0-9]{20}|-[0-9]{19}")


def read_rows(body: bytes, content_type: str, most_rows: int) -> Request:
    """Returns the rows of a body.

    Raises:
        HTTPException: The body is not of its type or has no rows (400), or has more than ``most_rows`` (413).
    """
    request = _arrow_rows(body, most_rows) if content_type == ARROW_TYPE else _json_rows(body)
    _require_rows(request.num_rows, most_rows)
    return request


def write_json(outputs: Outputs) -> bytes:
    """Returns outputs as JSON; a missing value is null."""
    plain = {name: values.to_pylist() if isinstance(values, pa.Array) else values for name, values in outputs.items()}
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)


def write_arrow(outputs: Outputs) -> bytes:
    """Returns outputs as a stream of Arrow with a column for each; a missing value is null."""
    columns = {
        name: values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
        for name, values in outputs.items()
    }
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _require_rows(num_rows: int, most_rows: int) -> None:
    if num_rows > most_rows:
        text = f"the body has {num_rows:,} rows, and a request may have {most_rows:,}; send several requests"
        raise HTTPException(413, text)


def _json_rows(body: bytes) -> Request:
    try:
        values = _json_values(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("columns"), dict) and "rows" not in values:
        return Request(_rows_of_columns(values["columns"]))
    rows = values.get("rows") if isinstance(values, dict) else values
    if not isinstance(rows, list):
        text = 'give {"rows": [{"COLUMN": VALUE, ...}, ...]}, or {"columns": {"COLUMN": [VALUE, ...], ...}}'
        raise HTTPException(400, text)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise HTTPException(400, f"row {number} is {shown(row)} and no object of values by their columns")
    return Request(rows)


def _json_values(body: bytes) -> Any:
    if not _LONG_NUMBER.search(body):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(body)
    return json_values(body)


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    num_rows: int | None = None
    for name, values in columns.items():
        if not isinstance(values, list):
            raise HTTPException(400, f"column {name!r} is {shown(values)} and no list of values")
        if num_rows is not None and len(values) != num_rows:
            text = f"column {name!r} has {len(values):,} values, and the columns before it have {num_rows:,}"
            raise HTTPException(400, text)
        num_rows = len(values)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _arrow_rows(body: bytes, most_rows: int) -> Request:
    try:
        batches, num_rows = [], 0
        with pa.ipc.open_stream(body) as reader:
            for batch in reader:
                num_rows += batch.num_rows
                _require_rows(num_rows, most_rows)  # columns of nulls take no byte for any number of rows
                batches.append(batch)
            table = pa.Table.from_batches(batches, reader.schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the body is no stream of Arrow: {error}") from error
    return Request(table=table)
