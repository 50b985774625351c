"""The endpoints: rows in, scores out; whether it is alive and ready; what it counts; what the model is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from distembed.server.batching import Batcher, QueueFull
from distembed.server.bodies import ARROW_TYPE, JSON_TYPE, BadBody, read_rows, write_arrow, write_json
from distembed.server.metrics import METRICS_TYPE, ServerMetrics
from distembed.server.scoring import Answer, Scorer
from distembed.server.scoring import Request as Rows

_MOST_BAD_ROWS = 100
"""Bad rows that an answer lists."""


@dataclass(frozen=True)
class ServerSettings:
    """How a server works.

    Attributes:
        threads: Threads that score.
        most_batch_rows: Rows of a batch from which on no request is added to it, and most rows of the program's input.
        most_waiting: Requests that may wait; further ones are told to come again (429).
        wait_seconds: Seconds that a free thread waits for more requests.
        timeout_seconds: Seconds after which a request that waits is given up (503).
        most_body_bytes: Bytes of the largest body (413).
    """

    threads: int = 1
    most_batch_rows: int = 1024
    most_waiting: int = 256
    wait_seconds: float = 0.0
    timeout_seconds: float = 30.0
    most_body_bytes: int = 16 << 20


class TooLarge(Exception):
    """A body above the largest size."""


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

    app = FastAPI(title="distembed", lifespan=lifespan)
    endpoint = _Predict(batcher, metrics, settings)

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

    async def respond(self, request: Request) -> Response:
        """Returns the answer, whatever the request is."""
        content_type = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
        if content_type not in (JSON_TYPE, ARROW_TYPE):
            return _problem(415, f"the content type is {content_type!r}; send {JSON_TYPE} or {ARROW_TYPE}")
        malformed = request.query_params.get("malformed", "refuse")
        if malformed not in ("refuse", "null"):
            return _problem(400, f"malformed is {malformed!r}; give refuse or null")
        try:
            rows = read_rows(await self._body(request), content_type)
            answer = await self._answer(request, rows)
        except TooLarge:
            return _problem(413, f"the body has more than {self._settings.most_body_bytes:,} bytes; send fewer rows")
        except BadBody as error:
            return _problem(400, str(error))
        except QueueFull:
            return _problem(
                429, f"{self._settings.most_waiting} requests wait already; come again", {"retry-after": "1"}
            )
        except TimeoutError:
            return _problem(
                503, f"no answer within {self._settings.timeout_seconds:g} s; come again", {"retry-after": "1"}
            )
        return self._response(answer, malformed, content_type)

    async def _body(self, request: Request) -> bytes:
        """Returns the whole body; no more than the largest one is ever held.

        Raises:
            TooLarge: It has more bytes.
        """
        most = self._settings.most_body_bytes
        if int(request.headers.get("content-length", 0)) > most:
            raise TooLarge
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise TooLarge
            pieces.append(piece)
        return b"".join(pieces)

    async def _answer(self, request: Request, rows: Rows) -> Answer:
        """Returns the answer to rows, unless it takes too long or the client goes."""
        async with asyncio.timeout(self._settings.timeout_seconds):
            return await self._batcher.answer(rows)

    def _response(self, answer: Answer, malformed: str, content_type: str) -> Response:
        if answer.problem is not None:
            return _problem(422, answer.problem)
        self._metrics.bad_rows.inc(len(answer.bad))
        if answer.bad and malformed == "refuse":
            listed = [{"row": each.row, "field": each.field, "reason": each.reason} for each in answer.bad]
            text = f"{len(listed)} rows cannot be scored; mend them, or ask with ?malformed=null"
            return _json(422, {"error": text, "rows": listed[:_MOST_BAD_ROWS]})
        self._metrics.rows.inc(len(next(iter(answer.outputs.values()))))
        if content_type == ARROW_TYPE:
            return Response(write_arrow(answer.outputs), media_type=ARROW_TYPE)
        return Response(write_json(answer.outputs), media_type=JSON_TYPE)


def _problem(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return _json(status, {"error": text}, headers)


def _json(status: int, values: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(values), status, headers, JSON_TYPE)
