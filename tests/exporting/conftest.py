"""One trained run, on rows of every kind of column, for all tests of exporting."""

from pathlib import Path

import pytest

from distembed.serving.model_folder.reading import read_manifest
from tests.server.exported_models import exported, session_model, session_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_run(tmp_path_factory)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session_model(tmp_path_factory)


@pytest.fixture(scope="session")
def shards(run: Path, model: Path) -> Path:
    """The same in shards, of servers with room for the largest table."""
    largest = max(table.bytes for table in read_manifest(model).tables)
    return exported(run, run.parent / "shards", server_bytes=largest)
