"""Bodies of requests as they arrive: no larger than they may be, and not too many in memory at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from distembed.serving.server.bodies import BadBody


class TooLarge(Exception):
    """A body above the largest size."""


class MemoryFull(Exception):
    """The bodies of requests take as much memory as they may."""


class BodyReader:
    """Reads bodies of requests.

    Args:
        most_bytes: Bytes of the largest body.
        most_held_bytes: Bytes of all bodies that are read or scored at a time.
    """

    def __init__(self, most_bytes: int, most_held_bytes: int) -> None:
        self._most_bytes, self._most_held_bytes = most_bytes, most_held_bytes
        self._held_bytes = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Yields the whole body, which counts as held within the block.

        Raises:
            TooLarge: It has more bytes than it may.
            MemoryFull: There are too many others.
            BadBody: The length that it is said to have is none.
            ClientDisconnect: The client has gone.
        """
        self._require_size(_said_length(request))
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                self._held_bytes += len(piece)
                self._require_size(size)
                if self._held_bytes > self._most_held_bytes:
                    raise MemoryFull
                pieces.append(piece)
            yield b"".join(pieces)
        finally:
            self._held_bytes -= size

    def _require_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise TooLarge


def _said_length(request: Request) -> int:
    """Returns the length that a body is said to have; 0 where nothing is said."""
    text = request.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise BadBody(f"content-length is {text[:30]!r}, which is no number of bytes")
    return int(text[:30])
