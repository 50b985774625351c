"""MF and BPR on the MovieLens-100k that the wheel of RecBole ships, which is read as data."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import yaml

from tests.small_runs import distembed


@pytest.fixture(scope="module")
def movielens() -> Path:
    """The folder of ml-100k: that of DISTEMBED_RECBOLE, or of the wheel, nothing of which is imported."""
    found = importlib.util.find_spec("recbole")
    wheel = None if found is None or found.origin is None else Path(found.origin).parent
    path = os.environ.get("DISTEMBED_RECBOLE", "" if wheel is None else str(wheel / "dataset_example" / "ml-100k"))
    if not path:
        pytest.skip("DISTEMBED_RECBOLE is unset: it names the folder ml-100k of the wheel recbole==1.2.1")
    if not (Path(path) / "ml-100k.inter").is_file():
        pytest.fail(f"DISTEMBED_RECBOLE is {path!r}, which has no file ml-100k.inter")
    return Path(path)


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
