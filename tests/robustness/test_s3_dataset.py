"""Runs on a dataset in an S3 that fails often are those of the folder that was uploaded."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import s3fs

from distembed.data.remote import upload
from tests.robustness.s3_server import BUCKET, failing_s3
from tests.robustness.strikes import retry_at_once
from tests.small_runs import distembed
from tests.training.test_runs import losses, metrics

FAILED_SHARE = 0.2
URL = f"s3://{BUCKET}/criteo"


@pytest.mark.slow
@pytest.mark.distributed
def test_every_command_takes_a_dataset_in_s3(
    config: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    with failing_s3(tmp_path / "server", FAILED_SHARE, seed=0) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        retry_at_once()
        s3fs.S3FileSystem.clear_instance_cache()  # those of this process know the server of the test before
        for path in dataset.rglob("*"):
            if path.is_file():
                upload(path, f"{URL}/{path.relative_to(dataset)}")
        local, there = tmp_path / "local", tmp_path / "there"
        halves = (["train.max_steps=15"], ["train.max_steps=25", "--resume"])
        for settings in halves:
            distembed("train", config, *settings, "--run-dir", local, ranks=2)
            distembed("train", config, f"data.path={URL}", *settings, "--run-dir", there, ranks=2)
        assert losses(there) == losses(local) and len(losses(there)) == 25
        found, expected = (
            [{**line, "seconds": 0, "time": 0} for line in metrics(run, "eval")] for run in (there, local)
        )
        assert found == expected
        answers = {}
        for data in (URL, dataset):
            output = tmp_path / f"{len(answers)}.parquet"
            distembed("predict", there, "--data", data, "--output", output, ranks=2)
            described = json.loads(distembed("describe", config, f"data.path={data}", "--json").stdout)
            planned = distembed("plan", config, f"data.path={data}", "--nodes", 1, "--gpus", 2, "--gpu", "h100-80gb")
            answers[data] = pq.read_table(output), described, planned.stdout
        assert answers[URL] == answers[dataset]
        assert f"dataset {URL}: whole" in distembed("check", URL).stdout
        s3fs.S3FileSystem.clear_instance_cache()
