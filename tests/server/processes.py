"""``distembed serve`` as a process of its own, and a client of plain HTTP."""

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.multiprocessing import ProcessContext, ProcessExitedException

from tests.processes import start_processes
from tests.small_runs import run_command

_PATIENCE = 120.0


@dataclass(frozen=True)
class Server:
    """A server that listens.

    Attributes:
        port: Its port on 127.0.0.1.
        pid: Its process.
        folder: Where its output and errors are.
    """

    port: int
    context: ProcessContext
    folder: Path

    @property
    def pid(self) -> int:
        return self.context.pids()[0]

    def ask(self, body: Any = None, path: str = "/predict", **headers: str) -> tuple[int, Any]:
        """Sends a request, and returns the status and what the JSON of the answer says."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        named = {"content-type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, named)
        reply = connection.getresponse()
        read = reply.read()
        connection.close()
        return reply.status, json.loads(read) if reply.headers["content-type"] == "application/json" else read

    def send(self, sent: bytes, rest_after: float = 0, rest: bytes = b"") -> bytes:
        """Sends bytes as they are, and returns all that comes until the connection is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as connection:
            connection.sendall(sent)
            if rest:
                time.sleep(rest_after)
                connection.sendall(rest)
            pieces = []
            while piece := connection.recv(65536):
                pieces.append(piece)
            return b"".join(pieces)

    def end(self, number: signal.Signals) -> int:
        """Sends a signal, waits for the process to end, and returns its exit code, or less than 0 for a signal."""
        os.kill(self.pid, number)
        return exit_code(self.context)

    @property
    def output(self) -> str:
        return "".join((self.folder / name).read_text() for name in ("output", "errors"))


def exit_code(context: ProcessContext) -> int:
    try:
        while not context.join(_PATIENCE):
            raise TimeoutError("the process does not end")
    except ProcessExitedException as ended:
        return int(ended.exit_code)
    return 0


@contextmanager
def serving(model: Path, folder: Path, *arguments: object) -> Iterator[Server]:
    """Starts ``distembed serve``, waits until it listens, and ends it by its process id."""
    folder.mkdir()
    context = start_processes(1, run_command, ("serve", model, "--port", 0, *arguments), folder)
    try:
        server = Server(_port(folder, context), context, folder)
        yield server
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _port(folder: Path, context: ProcessContext) -> int:
    """Returns the port that a server says it listens on."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        text = (folder / "output").read_text() if (folder / "output").exists() else ""
        if "serving on http://" in text:
            return int(text.partition("serving on http://")[2].partition(" ")[0].rpartition(":")[2])
        if not context.processes[0].is_alive():
            break
        time.sleep(0.02)
    raise AssertionError(f"it does not listen: {text}{(folder / 'errors').read_text()}")
