"""A dataset, its rows in the order of training, and a run on it."""

from pathlib import Path

import pytest

from tests.small_runs import distembed
from tests.training.stream_runs import Row, draw_rows, prepare, training_order


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("prepared"), draw_rows())


@pytest.fixture(scope="session")
def ordered(config: Path) -> list[Row]:
    """The rows of the training split, in the order in which training on the dataset reads them."""
    rows = draw_rows()
    return [rows[number] for number in training_order(config.parent / "dataset", 64)]


@pytest.fixture(scope="session")
def trained(config: Path) -> Path:
    """A run on the prepared rows."""
    run = config.parent / "trained"
    distembed("train", config, "--run-dir", run)
    return run
