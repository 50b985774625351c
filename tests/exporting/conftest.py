"""One trained run, on rows of every kind of column, for all tests of exporting."""

from pathlib import Path

import pytest

from tests.server.exported_models import session_model, session_run, session_shards


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_run(tmp_path_factory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_model(tmp_path_factory)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_shards(tmp_path_factory)
