"""Connections that are closed when no whole head of a request comes: uvicorn waits for one without end."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0
"""Seconds from the beginning of a connection, or from the last answer on it, to the end of a request's head."""


class BoundedConnection(HttpToolsProtocol):
    """A connection with a client, as uvicorn makes one for each."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def on_headers_complete(self) -> None:
        """Stops waiting for the head of a request."""
        self._end_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begins to wait for the next head."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting for the head of a request."""
        self._end_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._end_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering and not self.transport.is_closing():
            self.transport.close()
