"""An S3 server on this machine's loopback, in a process of its own, many of whose answers are that it has failed."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.processes import start_processes
from tests.robustness.strikes import retry_at_once

BUCKET = "bucket"
_FAILED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>InternalError</Code><Message>We encountered an internal error. Please try again.</Message></Error>"""


@contextmanager
def failing_s3(folder: Path, share: float, seed: int) -> Iterator[str]:
    """Within the block there is a server with an empty bucket; yields its URL."""
    (process,) = start_processes(1, serve, folder, share, seed).processes
    try:
        while not (folder / "port").exists():
            assert process.is_alive(), (folder / "said").read_text()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}"
    finally:
        process.kill()
        process.join()


@contextmanager
def reached_s3(folder: Path, share: float) -> Iterator[str]:
    """Within the block this process and those that it starts reach such a server; yields the URL of its bucket."""
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    with pytest.MonkeyPatch.context() as patched, failing_s3(folder, share, seed=0) as url:
        for name, value in {**settings, "AWS_ENDPOINT_URL": url}.items():
            patched.setenv(name, value)
        retry_at_once()
        s3fs.S3FileSystem.clear_instance_cache()  # those of this process know the server of the test before
        yield f"s3://{BUCKET}"
        s3fs.S3FileSystem.clear_instance_cache()


def serve(_: int, folder: Path, share: float, seed: int) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(BUCKET, "us-east-1")
    application = Failing(
        DomainDispatcherApplication(create_backend_app), share, random.Random(seed), folder / "refused"
    )
    server = make_server("127.0.0.1", 0, application, threaded=True)
    (folder / ".port").write_text(str(server.port))
    (folder / ".port").rename(folder / "port")
    server.serve_forever()


class Failing:
    """A WSGI application that answers some requests by 500 in place of another, before or after that has done them.

    Requests for paths that begin as the file ``refused`` says, if it is there, are answered by the status in it:
    ``403 /bucket/rows/part-1``.
    """

    def __init__(
        self, application: Callable[..., Iterable[bytes]], share: float, draw: random.Random, refused: Path
    ) -> None:
        self._application = application
        self._refused = refused
        self._share = share
        self._draw = draw
        self._lock = threading.Lock()

    def __call__(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with suppress(FileNotFoundError):
            status, start = self._refused.read_text().split()
            if environment["PATH_INFO"].startswith(start):
                start_response(f"{status} Refused", [("Content-Type", "application/xml"), ("Connection", "close")])
                return []
        with self._lock:
            fails, is_done = self._draw.random() < self._share, self._draw.random() < 0.5
        if not fails:
            return self._application(environment, start_response)
        if is_done:
            b"".join(self._application(environment, lambda *_: None))
        else:
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        start_response("500 Internal Server Error", [("Content-Type", "application/xml"), ("Connection", "close")])
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [_FAILED]
