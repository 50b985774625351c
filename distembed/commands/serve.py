"""The command ``distembed serve``: an exported model over HTTP."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from distembed.base.errors import UserError
from distembed.commands.shared import say

app = typer.Typer()


@app.command(
    "serve", epilog="Example: `distembed serve model`, then `curl --json '{\"rows\": [...]}' localhost:8000/predict`"
)
def serve_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that `distembed export` made.")],
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's own are open to all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that score.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows of requests that are scored together.")] = 1024,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=10000, help="Milliseconds that a free thread waits for more requests.")
    ] = 0,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that a request may take, or it gets 503.")] = 30,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest body of a request; 413 above.")] = "16MiB",
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of a request; 413 above.")] = 65536,
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="Run the compiled program of MODEL: code, of whoever exported it."),
    ] = False,
) -> None:
    """Serve an exported model over HTTP, for trying and for small loads: JSON or Arrow in, scores out."""
    try:
        import fastapi  # noqa: F401
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is missing, which serving needs: `tools/setup.sh serve` installs it.") from error
    from distembed.base.units import parse_bytes

    body_bytes = parse_bytes("--max-body", max_body)
    from distembed.serving.server.batching import ServerSettings
    from distembed.serving.server.serve import serve

    settings = ServerSettings(threads, max_batch, queue, max_wait_ms / 1000, timeout, body_bytes, max_rows)
    serve(model, host, port, settings, _say_at_once, compiled)


def _say_at_once(text: str) -> None:
    """Prints a line that whoever waits for the server reads at once, be it from a file."""
    say(text)
    sys.stdout.flush()
