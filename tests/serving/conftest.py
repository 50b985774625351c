"""A run on Criteo's rows and a run on a table, for all tests of raw rows."""

from pathlib import Path

import pytest
import yaml

from distembed.data.prepare import CriteoOptions, prepare_criteo
from tests.criteo_runs import criteo_run, write_lines
from tests.in_process import in_this_process
from tests.serving.arrow_rows import draw_rows, prepare_table
from tests.small_runs import config_values

NUM_LINES = 8192 + 500
"""Rows of more than one batch."""
NUM_ROWS = 500


@pytest.fixture(scope="session")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on Criteo's rows, ``many.tsv``, and what is predicted of these rows once they are prepared."""
    folder = tmp_path_factory.mktemp("criteo")
    run = criteo_run(folder)
    lines = write_lines(folder / "many.tsv", NUM_LINES, seed=1)
    prepare_criteo([lines], folder / "many", CriteoOptions(split="none", vocabulary=run))
    output = folder / "expected.parquet"
    in_this_process("predict", run, "--data", folder / "many", "--split", "train", "--output", output)
    return folder


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on columns of every kind, whose dataset has moved ``away``, and predictions of its test rows."""
    folder = tmp_path_factory.mktemp("table")
    prepare_table(draw_rows(NUM_ROWS), folder / "dataset")
    (folder / "config.yaml").write_text(yaml.safe_dump(config_values(folder / "dataset")))
    in_this_process("train", folder / "config.yaml", "train.max_steps=3", "--run-dir", folder / "run")
    in_this_process("predict", folder / "run", "--output", folder / "expected.parquet")
    (folder / "dataset").rename(folder / "away")  # all that is needed is in the run
    return folder
