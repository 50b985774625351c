"""The endpoints of a server: scores of rows, whether it is alive and ready, its counts, and the model's manifest.

Bodies of requests and answers are JSON, or streams of Arrow.
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from distembed.data.table.values import json_values
from distembed.serving.server.batching import Batcher, ServerSettings
from distembed.serving.server.scoring import Outputs, RowRequest, Scores
from distembed.serving.server.versions import ServedModel, VersionFollower

JSON_TYPE, ARROW_TYPE = "application/json", "application/vnd.apache.arrow.stream"
# orjson makes a float of an integer of more than 64 bits, so bodies with a long number are read by Python's own parser
_LONG_NUMBER = re.compile(rb"[0-9]{20}|-[0-9]{19}")
VERSION_HEADER = "distembed-version"
"""The header of an answer that names the version of the model: its number and the beginning of its identity."""
_MOST_BAD_ROWS = 100
"""Bad rows that an answer lists."""
_CLIENT_GONE = 499
"""Status that counts a request whose client has gone."""
_RETRY = {"retry-after": "1"}
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_log = logging.getLogger(__name__)


class _Metrics:
    """The counts of one server, for Prometheus."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time, open files
        self.requests = Counter("distembed_requests", "Requests by status code.", ["status"], registry=registry)
        self.rows = Counter("distembed_rows", "Rows that were scored.", registry=registry)
        self.bad_rows = Counter("distembed_bad_rows", "Rows that could not be scored.", registry=registry)
        text = "Seconds from a whole request to its answer."
        self.seconds = Histogram("distembed_request_seconds", text, buckets=_SECONDS, registry=registry)
        text = "Rows that were scored together."
        self.batch_rows = Histogram("distembed_batch_rows", text, buckets=_ROWS, registry=registry)
        text = "Requests that wait to be scored."
        self.waiting = Gauge("distembed_waiting_requests", text, registry=registry)

    def follow(self, model: ServedModel, follower: VersionFollower | None) -> None:
        """Adds the version that is served, and the versions that were taken and refused."""
        for name, text, read in (
            ("version", "Number of the served version.", lambda: model.version.sequence),
            ("version_step", "Training steps of the served version.", lambda: model.version.step),
            ("version_timestamp_seconds", "Time at which the served version was taken.", lambda: model.since),
            ("taken_deltas", "Deltas that were applied.", lambda: model.taken["delta"]),
            ("taken_exports", "Whole exports that replaced the model.", lambda: model.taken["export"]),
            ("refused_versions", "Versions that are there and refused.", lambda: len(_refused(follower))),
        ):
            Gauge(f"distembed_{name}", text, registry=self.registry).set_function(read)


def make_app(model: ServedModel, settings: ServerSettings, follower: VersionFollower | None = None) -> FastAPI:
    """Returns the application that serves a model, and the versions that the follower finds."""
    metrics = _Metrics()
    batcher = Batcher(model.score, settings, metrics.batch_rows.observe)
    metrics.follow(model, follower)
    metrics.waiting.set_function(lambda: batcher.num_waiting)
    predictor = _Predictor(batcher, metrics, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = None if follower is None else asyncio.create_task(follower.follow(batcher))
        yield
        if following is not None:
            following.cancel()
        batcher.close()

    # without FastAPI's pages of documentation, which load scripts from other servers
    app = FastAPI(title="distembed", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        return _refusal(error)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        """Scores rows: JSON `{"rows": [{"COLUMN": VALUE}]}`, or a stream of Arrow; `?malformed=null` for bad ones."""
        began = time.perf_counter()
        response = await predictor.respond(request)
        metrics.seconds.observe(time.perf_counter() - began)
        metrics.requests.labels(str(response.status_code)).inc()
        return response

    @app.get("/health")
    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        served = model.version
        version = {"sequence": served.sequence, "step": served.step, "identity": served.identity}
        return {"status": "ok", "version": {**version, "since": model.since}, "refused": _refused(follower)}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        # a server listens only after the model is loaded and its sample has scored as it did at the export
        return {"status": "ok"}

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model")
    async def read_model() -> Response:
        return _json(200, replace(model.manifest, checksums={}).to_json())

    return app


def _refused(follower: VersionFollower | None) -> dict[str, str]:
    return {} if follower is None else dict(follower.refused)


class _Predictor:
    """Answers POST /predict: reads and checks the body, has it scored, and writes scores in the body's format."""

    def __init__(self, batcher: Batcher, metrics: _Metrics, settings: ServerSettings) -> None:
        self._batcher, self._metrics, self._settings = batcher, metrics, settings

    async def respond(self, request: Request) -> Response:
        """Returns the answer to a request; raises nothing: an unforeseen error is logged and becomes status 500."""
        try:
            return await self._scores(request)
        except HTTPException as error:
            return _refusal(error)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception:
            _log.exception("a request failed")
            return _json(500, {"error": "scoring failed; the server's log says why"})

    async def _scores(self, request: Request) -> Response:
        content_type = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
        if content_type not in (JSON_TYPE, ARROW_TYPE):
            raise HTTPException(415, f"the content type is {content_type!r}; send {JSON_TYPE} or {ARROW_TYPE}")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HTTPException(415, f"the content encoding is {encoding!r}; send the body without one")
        malformed = request.query_params.get("malformed", "refuse")
        if malformed not in ("refuse", "null"):
            raise HTTPException(400, f"malformed is {malformed!r}; give refuse or null")
        answer = await self._answer(request, content_type)
        if answer.problem is not None:
            raise HTTPException(422, answer.problem, {VERSION_HEADER: answer.version})
        self._metrics.bad_rows.inc(len(answer.bad))
        if answer.bad and malformed == "refuse":
            listed = [{"row": bad_row.row, "field": bad_row.field, "reason": bad_row.reason} for bad_row in answer.bad]
            text = f"{len(listed)} rows cannot be scored; mend them, or ask with ?malformed=null"
            return _json(422, {"error": text, "rows": listed[:_MOST_BAD_ROWS]}, {VERSION_HEADER: answer.version})
        self._metrics.rows.inc(len(next(iter(answer.outputs.values()))) - len(answer.bad))
        write = _arrow_body if content_type == ARROW_TYPE else _json_body
        return Response(write(answer.outputs), headers={VERSION_HEADER: answer.version}, media_type=content_type)

    async def _answer(self, request: Request, content_type: str) -> Scores:
        """Reads a request's rows and returns their scores; gives up at the timeout, or if the client disconnects."""
        settings, body = self._settings, None
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                body = await _read_body(request, settings.most_body_bytes)
                rows = _request_rows(body, content_type, settings.most_rows)
                answer = asyncio.ensure_future(self._batcher.answer(rows))
                gone = asyncio.ensure_future(request.receive())  # the message after the whole body: the client has gone
                try:
                    await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        raise ClientDisconnect
                    return answer.result()
                finally:
                    answer.cancel()
                    gone.cancel()
        except asyncio.QueueFull:
            raise HTTPException(429, f"{settings.most_waiting} requests wait already; come again", _RETRY) from None
        except TimeoutError:
            seconds = f"within {settings.timeout_seconds:g} s"
            if body is None:
                raise HTTPException(408, f"the body was not there {seconds}", {"connection": "close"}) from None
            raise HTTPException(503, f"no answer {seconds}; come again", _RETRY) from None


async def _read_body(request: Request, most_bytes: int) -> bytes:
    """Returns the body of a request; one of more than ``most_bytes`` is refused before all of it is in memory."""
    body = bytearray()
    size = int(request.headers.get("content-length", "0"))  # uvicorn accepts numbers only
    if size <= most_bytes:
        async for piece in request.stream():
            body += piece
            size = max(size, len(body))
            if size > most_bytes:
                break
    if size > most_bytes:
        raise HTTPException(413, f"the body has more than {most_bytes:,} bytes; send fewer rows")
    return bytes(body)


def _refusal(error: HTTPException) -> Response:
    return _json(error.status_code, {"error": str(error.detail)}, error.headers)


def _json(status: int, values: dict[str, Any], headers: Any = None) -> Response:
    return Response(orjson.dumps(values), status, headers, JSON_TYPE)


def _request_rows(body: bytes, content_type: str, most_rows: int) -> RowRequest:
    """Parses a body; an HTTPException has status 400 for a body that is not of its type, and 413 for too many rows."""
    request = _arrow_rows(body, most_rows) if content_type == ARROW_TYPE else _json_rows(body)
    _require_rows(request.num_rows, most_rows)
    return request


def _json_body(outputs: Outputs) -> bytes:
    plain = {name: values.to_pylist() if isinstance(values, pa.Array) else values for name, values in outputs.items()}
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _arrow_body(outputs: Outputs) -> bytes:
    columns = {
        name: values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
        for name, values in outputs.items()
    }
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _require_rows(num_rows: int, most_rows: int) -> None:
    if num_rows > most_rows:
        text = f"the body has {num_rows:,} rows, and a request may have {most_rows:,}; send several requests"
        raise HTTPException(413, text)


def _json_rows(body: bytes) -> RowRequest:
    """Parses rows, a list of objects or ``{"rows": ...}``, or lists by column, ``{"columns": ...}``."""
    try:
        values = _json_values(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("columns"), dict) and "rows" not in values:
        return RowRequest(_rows_of_columns(values["columns"]))
    rows = values.get("rows") if isinstance(values, dict) else values
    if not isinstance(rows, list):
        text = 'give {"rows": [{"COLUMN": VALUE, ...}, ...]}, or {"columns": {"COLUMN": [VALUE, ...], ...}}'
        raise HTTPException(400, text)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise HTTPException(400, f"row {number} is {reprlib.repr(row)} and no object of values by their columns")
    return RowRequest(rows)


def _json_values(body: bytes) -> Any:
    """Parses JSON: by orjson, or, where numbers are too long for it or it refuses the text, by Python's parser."""
    if not _LONG_NUMBER.search(body):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(body)
    return json_values(body)


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of columns, which must be lists of one length."""
    num_rows: int | None = None
    for name, values in columns.items():
        if not isinstance(values, list):
            raise HTTPException(400, f"column {name!r} is {reprlib.repr(values)} and no list of values")
        if num_rows is not None and len(values) != num_rows:
            text = f"column {name!r} has {len(values):,} values, and the columns before it have {num_rows:,}"
            raise HTTPException(400, text)
        num_rows = len(values)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _arrow_rows(body: bytes, most_rows: int) -> RowRequest:
    """Reads a stream of Arrow, batch by batch, so that too many rows are refused before they are all in memory."""
    try:
        batches, num_rows = [], 0
        with pa.ipc.open_stream(body) as reader:
            for batch in reader:
                num_rows += batch.num_rows
                _require_rows(num_rows, most_rows)  # a small body may hold any number of rows: nulls take no bytes
                batches.append(batch)
            table = pa.Table.from_batches(batches, reader.schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the body is no stream of Arrow: {error}") from error
    return RowRequest(table=table)
