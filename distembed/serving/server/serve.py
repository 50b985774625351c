"""Serves an exported model until the process is told to end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from distembed.base.errors import UserError
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest, require_sample, require_unchanged
from distembed.serving.server.app import ServerSettings, make_app
from distembed.serving.server.connections import BoundedConnection
from distembed.serving.server.scoring import Scorer

_SHUTDOWN_SECONDS = 30
_MOST_PENDING = 1024
"""Connections that may wait to be accepted."""


def serve(
    folder: Path, host: str, port: int, settings: ServerSettings, say: Callable[[str], None], compiled: bool = False
) -> None:
    """Loads a model, makes sure that it scores as where it was exported, and serves it.

    SIGTERM and Ctrl-C end it, once what is being scored is answered; the same again ends it at once.

    Args:
        folder: Folder of the exported model.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        settings: How it is served.
        say: Takes a line for the user.
        compiled: Whether to run the compiled program, which is code of whoever exported the model.

    Raises:
        UserError: The model is damaged, scores otherwise, or its raw rows are not known; or the port is in use.
    """
    with _bind(host, port) as listening:
        manifest = read_manifest(folder)
        require_unchanged(folder, manifest)
        program = load_programs(folder, manifest, compiled)
        difference = require_sample(folder, manifest, program)
        scorer = Scorer(folder, manifest, program, settings.most_batch_rows)
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.threads))
        _listen(listening, host, port)
        say(f"{folder}: {manifest.model} for {manifest.task}; its sample scores as exported (within {difference:.2g})")
        address, port = listening.getsockname()[:2]
        if not ipaddress.ip_address(address).is_loopback:
            say(f"note: {host} can be reached by others, and there is neither encryption nor a password.")
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        serving = f"serving on {url} (POST /predict; GET /healthz /readyz /metrics /model); Ctrl-C ends it"
        config = uvicorn.Config(
            make_app(scorer, settings),
            http=BoundedConnection,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_run(_Server(config), listening, lambda: say(serving)))


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address; it does not listen yet, so that nobody waits for what may not be served.

    Raises:
        UserError: The port is in use, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on sockets alone that say that they are of TCP; without it answers wait for 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        listening.close()
        raise _not_listened_on(host, port, error) from error
    return listening


def _listen(listening: socket.socket, host: str, port: int) -> None:
    try:
        listening.listen(_MOST_PENDING)
    except OSError as error:
        raise _not_listened_on(host, port, error) from error


def _not_listened_on(host: str, port: int, error: Exception) -> UserError:
    return UserError(f"--host {host} --port {port} cannot be listened on: {error}; choose another one.")


async def _run(server: uvicorn.Server, listening: socket.socket, say_so: Callable[[], None]) -> None:
    def end() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    say_so()  # from now on signals end it as they should
    await server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    """A server that leaves signals to us: uvicorn raises them again at its end, and the process would end by them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
