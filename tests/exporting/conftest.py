"""One trained run, on rows of every kind of column, for all tests of exporting."""

from pathlib import Path

import pytest

from tests.server.exported_models import exported, session_model, session_run, two_shards_bytes


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_run(tmp_path_factory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_model(tmp_path_factory)


@pytest.fixture(scope="session")
def shards(run: Path, model: Path) -> Path:
    """The same in two shards."""
    return exported(run, run.parent / "shards", server_bytes=two_shards_bytes(model))
