"""Runs on datasets in which numbers may be missing: on one rank and on two, and models that cannot tell them apart."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from distembed.data import Manifest, create_manifest
from tests.small_runs import ROWS, config_values, distembed, write_dataset


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Gives a config of the small dataset, in which the first number is missing in every third row."""
    dataset = write_dataset(tmp_path / "dataset")
    for split in ROWS:
        file = dataset / split / "part-0.parquet"
        table = pq.read_table(file)
        numbers = table["I1"].to_numpy().copy()
        missing = np.arange(len(numbers)) % 3 == 0
        table = table.set_column(table.column_names.index("I1"), "I1", pa.array(numbers, mask=missing))
        pq.write_table(table, file, row_group_size=256)
    schema = Manifest.load(dataset).schema
    schema = type(schema)(schema.label, schema.dense, schema.categorical, missing_dense=True)
    create_manifest(dataset, schema, {split: [f"{split}/part-0.parquet"] for split in ROWS})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    return tmp_path / "config.yaml"


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.distributed
def test_two_ranks_give_the_losses_of_one_and_a_stop_changes_nothing(config: Path, tmp_path: Path) -> None:
    settings = ["model.dense=both", "model.soft_one_hot={value_range: [-2, 2]}", "train.batch_size=65"]
    one, two, resumed = tmp_path / "one", tmp_path / "two", tmp_path / "resumed"
    distembed("train", config, *settings, "train.checkpoint_every=17", "train.keep_checkpoints=9", "--run-dir", one)
    shutil.copytree(one, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000031")
    distembed("train", config, *settings, "--run-dir", resumed, "--resume")
    distembed("train", config, *settings, "--run-dir", two, ranks=2)
    assert len(losses(one)) == 31 and losses(resumed) == losses(one)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_a_model_that_takes_numbers_alone_is_refused(config: Path, tmp_path: Path) -> None:
    for command in (["train", config, "--run-dir", tmp_path / "run"], ["describe", config]):
        done = distembed(*command, code=2)
        assert "model.dense is 'bottom'" in done.stderr and "set model.dense to soft_one_hot or both" in done.stderr
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
