"""The rating task: its metrics, the mean of the training ratings, bad settings and bad datasets."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest, Split
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.tasks import RatingConfig, RatingTask
from distembed.tasks.base import TaskContext
from distembed.training.config import load_config
from tests.small_runs import distembed

RATINGS = Schema("rating", (), (CategoricalFeature("user", 5), CategoricalFeature("item", 7)), label_kind="number")


def test_metrics_equal_loops() -> None:
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(3, 1, 101).astype(np.float32) for name in ("predictions", "labels")}
    pairs = list(zip(rows["predictions"].tolist(), rows["labels"].tolist(), strict=True))
    metrics = RatingTask().metrics(rows)
    assert metrics["rows"] == 101
    assert metrics["rmse"] == pytest.approx((sum((p - r) ** 2 for p, r in pairs) / 101) ** 0.5)
    assert metrics["mae"] == pytest.approx(sum(abs(p - r) for p, r in pairs) / 101)


def test_the_mean_is_that_of_the_split_that_is_trained_on(tmp_path: Path) -> None:
    splits = {"train": Split(2, 3.5, ()), "test": Split(2, 1.0, ())}
    Manifest(RATINGS, splits).save(tmp_path)
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    context = TaskContext(DataConfig(path=str(tmp_path)), "elsewhere", RATINGS, ranks, 0, {})
    for subtract_mean, expected in ((True, 3.5), (False, 0.0)):
        task = RatingTask(subtract_mean=subtract_mean)
        task.start(context)
        assert task.mean == expected


def test_bad_settings_and_datasets_are_named() -> None:
    with pytest.raises(UserError, match=r"clip is \[5.0, 1.0\]; give the lowest rating, then the highest"):
        load_config(None, ["model.name=mf", "task={name: rating, clip: [5, 1]}"])
    with pytest.raises(UserError, match="regularization"):
        load_config(None, ["model.name=mf", "task={name: rating, regularization: -1}"])
    with pytest.raises(UserError, match="have no label; make a dataset with `distembed prepare ratings`"):
        RatingConfig().batch_schema(dataclasses.replace(RATINGS, label=None))
    with pytest.raises(UserError, match="a label 'rating' of 0 and 1"):
        RatingConfig().batch_schema(dataclasses.replace(RATINGS, label_kind="binary"))


@pytest.mark.slow
def test_mf_and_bpr_learn_from_movielens(movielens: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    columns = ["--user", "user_id", "--item", "item_id", "--rating", "rating", "--time", "timestamp"]
    distembed("prepare", "ratings", movielens / "ml-100k.inter", *columns, "-o", data)
    training = {
        "batch_size": 1024,
        "epochs": 4,
        "precision": "fp32",
        "device": "cpu",
        "sparse_optimizer": {"name": "adagrad", "learning_rate": 0.1},
    }
    config = {"data": {"path": str(data)}, "model": {"name": "mf"}, "train": training}
    evaluations = {}
    for task in ("rating", "ranking"):
        path = tmp_path / f"{task}.yaml"
        path.write_text(yaml.safe_dump({**config, "task": {"name": task, "regularization": 0.02}}))
        distembed("train", path, "--run-dir", tmp_path / task)
        evaluations[task] = json.loads((tmp_path / task / "evaluation.json").read_text())
    assert evaluations["rating"]["rows"] == 10_000
    assert evaluations["rating"]["rmse"] < 0.97  # predicting the mean gives 1.12
    assert evaluations["ranking"]["hr@10"] > 0.6  # the most popular items give 0.5
