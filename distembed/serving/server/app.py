"""The endpoints: rows in, scores out; whether it is alive and ready; what it counts; what the model is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from distembed.serving.server.batching import Batcher, QueueFull
from distembed.serving.server.bodies import (
    ARROW_TYPE,
    JSON_TYPE,
    BadBody,
    TooManyRows,
    read_rows,
    write_arrow,
    write_json,
)
from distembed.serving.server.metrics import METRICS_TYPE, ServerMetrics
from distembed.serving.server.receiving import BodyReader, MemoryFull, TooLarge
from distembed.serving.server.scoring import Answer, Scorer
from distembed.serving.server.scoring import Request as Rows

_MOST_BAD_ROWS = 100
"""Bad rows that an answer lists."""
_BODIES_HELD = 8
"""How many of the largest bodies may be in memory at a time."""
_GONE = 499
"""Status under which requests are counted whose clients have not waited for an answer."""
_RETRY = {"retry-after": "1"}
_CLOSE = {"connection": "close"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """How a server works.

    Attributes:
        threads: Threads that score.
        most_batch_rows: Rows of a batch from which on no request is added to it, and most rows of the program's input.
        most_waiting: Requests that may wait; further ones are told to come again (429).
        wait_seconds: Seconds that a free thread waits for more requests.
        timeout_seconds: Seconds after which a request is given up that waits (503), or is still not whole (408).
        most_body_bytes: Bytes of the largest body (413).
        most_rows: Most rows of a request (413).
    """

    threads: int = 1
    most_batch_rows: int = 1024
    most_waiting: int = 256
    wait_seconds: float = 0.0
    timeout_seconds: float = 30.0
    most_body_bytes: int = 16 << 20
    most_rows: int = 65536


def make_app(scorer: Scorer, settings: ServerSettings) -> FastAPI:
    """Returns the application that serves a model.

    Args:
        scorer: The model.
        settings: How it is served.
    """
    metrics = ServerMetrics(lambda: batcher.num_waiting)
    batcher = Batcher(
        scorer.score,
        settings.threads,
        settings.most_batch_rows,
        settings.most_waiting,
        settings.wait_seconds,
        metrics.batch_rows.observe,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()

    # no pages that describe it: they load scripts from elsewhere
    app = FastAPI(title="distembed", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    endpoint = _Predict(batcher, metrics, settings)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        """Says in JSON that there is no such path or method."""
        return _problem(error.status_code, str(error.detail), error.headers)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        """Scores rows: JSON `{"rows": [{"COLUMN": VALUE}]}`, or a stream of Arrow; `?malformed=null` for bad ones."""
        began = time.perf_counter()
        response = await endpoint.respond(request)
        metrics.seconds.observe(time.perf_counter() - began)
        metrics.requests.labels(str(response.status_code)).inc()
        return response

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Says that the process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Says that the model is loaded, and scored its sample as where it was exported: else it does not listen."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def read_metrics() -> Response:
        """Returns what is counted, for Prometheus."""
        return Response(metrics.text(), media_type=METRICS_TYPE)

    @app.get("/model")
    async def model() -> Response:
        """Returns the model's manifest without checksums."""
        values = replace(scorer.manifest, checksums={}).to_json()
        return Response(orjson.dumps(values), media_type=JSON_TYPE)

    return app


class _Predict:
    """Answers requests for scores.

    Args:
        batcher: Scores them.
        metrics: Counts them.
        settings: The server's.
    """

    def __init__(self, batcher: Batcher, metrics: ServerMetrics, settings: ServerSettings) -> None:
        self._batcher, self._metrics, self._settings = batcher, metrics, settings
        self._bodies = BodyReader(settings.most_body_bytes, _BODIES_HELD * settings.most_body_bytes)

    async def respond(self, request: Request) -> Response:
        """Returns the answer, whatever the request is; a fault of ours fails no other request."""
        try:
            return await self._checked_answer(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception:
            _log.exception("a request failed")
            return _problem(500, "scoring failed; the server's log says why")

    async def _checked_answer(self, request: Request) -> Response:
        content_type = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
        if content_type not in (JSON_TYPE, ARROW_TYPE):
            return _problem(415, f"the content type is {content_type!r}; send {JSON_TYPE} or {ARROW_TYPE}")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            return _problem(415, f"the content encoding is {encoding!r}; send the body as it is")
        malformed = request.query_params.get("malformed", "refuse")
        if malformed not in ("refuse", "null"):
            return _problem(400, f"malformed is {malformed!r}; give refuse or null")
        settings = self._settings
        is_whole = False
        try:
            async with asyncio.timeout(settings.timeout_seconds), self._bodies.body(request) as body:
                is_whole = True
                answer = await self._answer(request, read_rows(body, content_type, settings.most_rows))
        except TooLarge:
            return _problem(413, f"the body has more than {settings.most_body_bytes:,} bytes; send fewer rows")
        except TooManyRows as error:
            return _problem(413, str(error))
        except BadBody as error:
            return _problem(400, str(error))
        except QueueFull:
            return _problem(429, f"{settings.most_waiting} requests wait already; come again", _RETRY)
        except MemoryFull:
            return _problem(429, "the bodies of other requests take the memory that there is; come again", _RETRY)
        except TimeoutError:
            if not is_whole:
                return _problem(408, f"the body was not there within {settings.timeout_seconds:g} s", _CLOSE)
            return _problem(503, f"no answer within {settings.timeout_seconds:g} s; come again", _RETRY)
        return self._response(answer, malformed, content_type)

    async def _answer(self, request: Request, rows: Rows) -> Answer:
        """Returns the answer to rows.

        Raises:
            ClientDisconnect: The client has gone, and the request is left out.
        """
        answer = asyncio.ensure_future(self._batcher.answer(rows))
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()

    def _response(self, answer: Answer, malformed: str, content_type: str) -> Response:
        if answer.problem is not None:
            return _problem(422, answer.problem)
        self._metrics.bad_rows.inc(len(answer.bad))
        if answer.bad and malformed == "refuse":
            listed = [{"row": each.row, "field": each.field, "reason": each.reason} for each in answer.bad]
            text = f"{len(listed)} rows cannot be scored; mend them, or ask with ?malformed=null"
            return _json(422, {"error": text, "rows": listed[:_MOST_BAD_ROWS]})
        self._metrics.rows.inc(len(next(iter(answer.outputs.values()))) - len(answer.bad))
        if content_type == ARROW_TYPE:
            return Response(write_arrow(answer.outputs), media_type=ARROW_TYPE)
        return Response(write_json(answer.outputs), media_type=JSON_TYPE)


async def _until_gone(request: Request) -> None:
    """Returns when the client of a request, whose body was read, has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _problem(status: int, text: str, headers: Any = None) -> Response:
    return _json(status, {"error": text}, headers)


def _json(status: int, values: dict[str, Any], headers: Any = None) -> Response:
    return Response(orjson.dumps(values), status, headers, JSON_TYPE)
