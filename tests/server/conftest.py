"""One trained run, its export and a server of it, for all tests of the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import distembed
from distembed import LoadedModel
from tests.server.exported_models import exported, trained_run
from tests.server.processes import Server, serving


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def model(run: Path) -> Path:
    return exported(run, run.parent / "model")


@pytest.fixture(scope="session")
def trained(run: Path) -> LoadedModel:
    return distembed.load(run)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server") / "own", "--max-body", "1MiB", "--threads", 2) as started:
        yield started
        assert "Traceback" not in started.output
