"""Serves an exported model until the process is told to end."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from distembed.base.errors import UserError
from distembed.serving.server.app import make_app
from distembed.serving.server.batching import ServerSettings
from distembed.serving.server.versions import LoadedVersion, ServedModel, VersionFollower

_SHUTDOWN_SECONDS = 30
_KEEP_ALIVE_SECONDS = 10
_MOST_PENDING = 1024
"""Connections that may wait to be accepted."""


def serve(
    folder: Path,
    host: str,
    port: int,
    settings: ServerSettings,
    say: Callable[[str], None],
    compiled: bool = False,
    deltas: Path | None = None,
) -> None:
    """Loads a model, checks its files and the scores of its sample against the export, and serves it.

    SIGTERM and Ctrl-C end the server after it has answered the waiting requests; a second one ends it at once.

    Args:
        folder: Folder of the exported model.
        host: The address to listen on.
        port: The port; 0 for any free one.
        settings: How it is served.
        say: Prints a line for the user.
        compiled: Whether to run the compiled program, which is code of the person who exported the model.
        deltas: Folder whose newer versions of the model are taken, at the start and as they appear; None for none.

    Raises:
        UserError: The model is damaged, its sample has other scores, raw rows cannot be decoded, or the port is in use.
    """
    if compiled and deltas is not None:
        raise UserError(
            "--compiled runs a program with its tables within, which no delta can change: serve the model without "
            "--compiled, or without --deltas."
        )
    with _address_errors(host, port):
        listening = _bind(host, port)
    with listening:
        loaded = LoadedVersion.load(folder, settings.most_batch_rows, compiled)
        model, manifest, difference = ServedModel(loaded), loaded.manifest, loaded.difference
        follower = None if deltas is None else VersionFollower(deltas, model, settings.most_batch_rows, say)
        del loaded  # whose memory ends where another version replaces it
        if follower is not None:
            follower.take_all()
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.threads))
        with _address_errors(host, port):
            listening.listen(_MOST_PENDING)
        say(f"{folder}: {manifest.model} for {manifest.task}; its sample scores as exported (within {difference:.2g})")
        address, port = listening.getsockname()[:2]
        if not ipaddress.ip_address(address).is_loopback:
            say(f"note: {host} can be reached by others, and there is neither encryption nor a password.")
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            make_app(model, settings, follower),
            http="httptools",
            log_level="error",
            access_log=False,
            backlog=_MOST_PENDING,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        text = f"serving on {url} (POST /predict; GET /healthz /readyz /metrics /model); Ctrl-C ends it"
        _Server(config, lambda: say(text)).run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket that holds the address but does not listen yet: clients connect after the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets made with IPPROTO_TCP; without it answers wait for 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except Exception:
        listening.close()
        raise
    return listening


@contextmanager
def _address_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError, UnicodeError) as error:
        text = f"--host {host} --port {port} cannot be listened on: {error}; choose another one."
        raise UserError(text) from error


class _Server(uvicorn.Server):
    """A server that prints when it takes signals, and whose process ends with exit code 0 after one.

    uvicorn's own handler raises the signal again when the server has ended, which would end the process.
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
