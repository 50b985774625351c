"""One trained run, its export and a server of it, for all tests of the server."""

import http.client
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import distembed
from distembed import LoadedModel
from tests.server.exported_models import session_model, session_run
from tests.server.processes import Server, serving


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_run(tmp_path_factory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_model(tmp_path_factory)


@pytest.fixture(scope="session")
def trained(run: Path) -> LoadedModel:
    return distembed.load(run)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server") / "own", "--max-body", "1MiB", "--threads", 2) as started:
        yield started
        idle = http.client.HTTPConnection("127.0.0.1", started.port)
        idle.request("GET", "/healthz")
        assert idle.getresponse().read()
        assert started.end(signal.SIGINT) == 0  # a connection without a request is not waited for
        assert "Traceback" not in started.output
