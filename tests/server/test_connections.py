"""Connections on which no whole head comes are closed, and no others."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request

from distembed.serving.server import connections

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def listening(seconds: float) -> AsyncIterator[Callable[[], Awaitable[Streams]]]:
    """Serves an application that takes a second to answer."""
    app = FastAPI()

    @app.get("/slow")
    async def slow(_: Request) -> str:
        await asyncio.sleep(seconds)
        return "done"

    server = uvicorn.Server(uvicorn.Config(app, http=connections.BoundedConnection, log_level="error"))
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[own]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield lambda: asyncio.open_connection("127.0.0.1", own.getsockname()[1])
        finally:
            server.should_exit = True
            await task


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return await reader.readexactly(6)


async def closed(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), 20) == b""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)


def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async def work() -> None:
        async with listening(0) as connect:
            silent, slow, later = [await connect() for _ in range(3)]
            slow[1].write(GET[:20])
            later[1].write(GET)
            assert await answer(later[0]) == b'"done"'
            later[1].write(GET[:20])  # the head of the next one
            for reader, writer in (silent, slow, later):
                assert await closed(reader)
                writer.close()

    asyncio.run(work())


def test_an_answer_takes_as_long_as_it_does() -> None:
    async def work() -> None:
        async with listening(0.5) as connect:
            reader, writer = await connect()
            for _ in range(2):
                writer.write(GET)
                assert await answer(reader) == b'"done"'
            writer.write(GET * 3)  # one after the other, without waiting
            for _ in range(3):
                assert await answer(reader) == b'"done"'
            assert await closed(reader)
            writer.close()

    asyncio.run(work())
