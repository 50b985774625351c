"""One trained run, and its export, for all tests of the server."""

from pathlib import Path

import pytest

import distembed
from distembed import LoadedModel
from tests.server.exported_models import exported, trained_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def model(run: Path) -> Path:
    return exported(run, run.parent / "model")


@pytest.fixture(scope="session")
def trained(run: Path) -> LoadedModel:
    return distembed.load(run)
