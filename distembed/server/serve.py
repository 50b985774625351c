"""Serves an exported model until the process is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from distembed.errors import UserError
from distembed.exported.programs import load_programs
from distembed.exported.reading import read_manifest, require_sample, require_unchanged
from distembed.server.app import ServerSettings, make_app
from distembed.server.scoring import Scorer

_LOOPBACK = ("127.", "localhost", "::1")


def serve(folder: Path, host: str, port: int, settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Loads a model, makes sure that it scores as where it was exported, and serves it.

    SIGTERM and Ctrl-C end it, once what is being scored is answered.

    Args:
        folder: Folder of the exported model.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        settings: How it is served.
        say: Takes a line for the user.

    Raises:
        UserError: The model is damaged, scores otherwise, or its raw rows are not known; or the port is in use.
    """
    listening = _listen(host, port)
    manifest = read_manifest(folder)
    require_unchanged(folder, manifest)
    program = load_programs(folder, manifest)
    difference = require_sample(folder, manifest, program)
    scorer = Scorer(folder, manifest, program, settings.most_batch_rows)
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.threads))
    address = f"http://{host}:{listening.getsockname()[1]}"
    say(f"{folder}: {manifest.model} for {manifest.task}; its sample scores as exported (within {difference:.2g})")
    if not host.startswith(_LOOPBACK):
        say(f"note: {host} can be reached by others, and there is neither encryption nor a password.")
    say(f"serving on {address} (POST /predict; GET /healthz /readyz /metrics /model); Ctrl-C ends it")
    app = make_app(scorer, settings)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=30)
    asyncio.run(_run(_Server(config), listening))


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens.

    Raises:
        UserError: The port is in use, or there is no such address.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened on: {error}; choose another --port."
        ) from error
    return listening


async def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    await server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that leaves signals to us: uvicorn raises them again at its end, and the process would end by them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
