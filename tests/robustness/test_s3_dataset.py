"""Runs on a dataset in an S3 that fails often are those of the folder that was uploaded."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from distembed.data.remote import upload
from tests.robustness.s3_server import reached_s3
from tests.small_runs import distembed, losses, metrics

FAILED_SHARE = 0.2


@pytest.mark.slow
@pytest.mark.distributed
def test_every_command_takes_a_dataset_in_s3(
    config: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with reached_s3(tmp_path / "server", FAILED_SHARE) as bucket:
        url = f"{bucket}/criteo"
        for path in dataset.rglob("*"):
            if path.is_file():
                upload(path, f"{url}/{path.relative_to(dataset)}")
        local, there = tmp_path / "local", tmp_path / "there"
        halves = (["train.max_steps=15"], ["train.max_steps=25", "--resume"])
        for settings in halves:
            distembed("train", config, *settings, "--run-dir", local, ranks=2)
            distembed("train", config, f"data.path={url}", *settings, "--run-dir", there, ranks=2)
        assert losses(there) == losses(local) and len(losses(there)) == 25
        found, expected = (
            [{**line, "seconds": 0, "time": 0} for line in metrics(run, "eval")] for run in (there, local)
        )
        assert found == expected
        answers = {}
        for data in (url, dataset):
            output = tmp_path / f"{len(answers)}.parquet"
            distembed("predict", there, "--data", data, "--output", output, ranks=2)
            described = json.loads(distembed("describe", config, f"data.path={data}", "--json").stdout)
            planned = distembed("plan", config, f"data.path={data}", "--nodes", 1, "--gpus", 2, "--gpu", "h100-80gb")
            answers[data] = pq.read_table(output), described, planned.stdout
        assert answers[url] == answers[dataset]
        assert f"dataset {url}: whole" in distembed("check", url).stdout
