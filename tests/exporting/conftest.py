"""One trained run, on rows of every kind of column, for all tests of exporting."""

from pathlib import Path

import pytest

from distembed.serving.model_folder.reading import read_manifest
from tests.server.exported_models import exported, trained_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="session")
def model(run: Path) -> Path:
    return exported(run, run.parent / "model")


@pytest.fixture(scope="session")
def shards(run: Path, model: Path) -> Path:
    """The same in shards, of servers with room for the largest table."""
    largest = max(table.bytes for table in read_manifest(model).tables)
    return exported(run, run.parent / "shards", server_bytes=largest)
