"""A client of an ASGI application in this process: whole requests, in pieces, and ones whose client goes."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from fastapi import FastAPI

from distembed.serving.server.app import make_app
from distembed.serving.server.batching import ServerSettings
from distembed.serving.server.versions import LoadedVersion, ServedModel


def served(model: Path, most_rows: int = 64) -> FastAPI:
    """Returns the application that serves an exported model, which scores so many rows at once."""
    return make_app(ServedModel(LoadedVersion.load(model, most_rows)), ServerSettings())


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: FastAPI,
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    target: str = "POST /predict",
    gone: asyncio.Event | None = None,
    is_whole: bool = True,
) -> Reply:
    """Sends a request, whose client goes when ``gone`` is set, and returns the answer; or one without its end."""
    method, _, place = target.partition(" ")
    path, _, query = place.partition("?")
    pieces = [body] if isinstance(body, bytes) else list(body)
    messages = [
        {"type": "http.request", "body": piece, "more_body": number + 1 < len(pieces) or not is_whole}
        for number, piece in enumerate(pieces)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:]))


def post(app: FastAPI, values: Any, query: str = "", **headers: str) -> Reply:
    """Sends values as JSON, or bytes as they are."""
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(ask(app, body, named, f"POST /predict{query}"))


def stream(table: pa.Table, **options: Any) -> bytes:
    """Returns a table as a stream of Arrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
