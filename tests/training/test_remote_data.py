"""Runs on the URL of a dataset are those on its folder; an S3 that fails is in ``tests/robustness``."""

import json
from pathlib import Path

import pytest

from distembed.training.config import load_config
from launch.jobs.preflight import check_dataset
from tests.small_runs import distembed
from tests.training.test_runs import losses, metrics


@pytest.mark.distributed
def test_ranks_train_and_evaluate_on_a_url_as_on_the_folder(
    config: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{dataset}"
    local, there = tmp_path / "local", tmp_path / "there"
    for run, path in ((local, dataset), (there, url)):
        distembed("train", config, f"data.path={path}", "train.max_steps=10", "--run-dir", run, ranks=2)
    assert losses(there) == losses(local) and len(losses(there)) == 10
    found, expected = ([{**line, "seconds": 0, "time": 0} for line in metrics(run, "eval")] for run in (there, local))
    assert found == expected and len(found) == 2
    fetched = list((tmp_path / "cache").rglob("pieces/??/*"))
    # one or two row groups and the footer of validation and test, and all eight of training
    assert len(fetched) == 8 + 1 + 2 + 1 + 1 + 1
    evaluated = json.loads(distembed("evaluate", local, "--data", url, "--json").stdout)
    assert evaluated["rows"] == found[-1]["rows"] and evaluated["auc"] == pytest.approx(found[-1]["auc"], abs=1e-6)
    finding = check_dataset(load_config(config, [f"data.path={url}"]))
    assert (finding.status, finding.detail) == ("ok", f"{url}: 3 file(s)")
