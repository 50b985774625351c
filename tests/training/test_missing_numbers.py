"""Runs on datasets in which numbers may be missing: on one rank and on two, and models that cannot tell them apart."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from tests.small_runs import call, config_values, distembed, losses, stopped_at, write_dataset


def without_a_third(split: str, table: pa.Table) -> pa.Table:
    """The first number is missing in every third row."""
    numbers = table["I1"].to_numpy()
    masked = pa.array(numbers, mask=np.arange(len(numbers)) % 3 == 0)
    return table.set_column(table.column_names.index("I1"), "I1", masked)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    dataset = write_dataset(tmp_path / "dataset", change=without_a_third, missing_dense=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    return tmp_path / "config.yaml"


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_give_the_losses_of_one_and_a_stop_changes_nothing(config: Path, tmp_path: Path) -> None:
    settings = ["model.dense=both", "model.soft_one_hot={value_range: [-2, 2]}", "train.batch_size=65"]
    one, two, resumed = tmp_path / "one", tmp_path / "two", tmp_path / "resumed"
    call("train", config, *settings, "train.checkpoint_every=17", "--run-dir", one)
    call("train", config, *settings, "--run-dir", stopped_at(17, one, resumed), "--resume")
    distembed("train", config, *settings, "--run-dir", two, ranks=2)
    assert len(losses(one)) == 31 and losses(resumed) == losses(one)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_a_model_that_takes_numbers_alone_is_refused(config: Path, tmp_path: Path) -> None:
    for command in (["train", config, "--run-dir", tmp_path / "run"], ["describe", config]):
        done = distembed(*command, code=2)
        assert "model.dense is 'bottom'" in done.stderr and "set model.dense to soft_one_hot or both" in done.stderr
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
