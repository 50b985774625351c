"""Runs that do without some row groups: two ranks agree on which, say so, and end where they are too many."""

import json
import shutil
from pathlib import Path

import pytest

from tests.small_runs import distembed
from tests.training.test_runs import losses, metrics


@pytest.mark.distributed
def test_ranks_agree_on_what_they_cannot_read(config: Path, dataset: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset, damaged)
    path = damaged / "train" / "part-0.parquet"
    data = bytearray(path.read_bytes())
    data[200] ^= 1  # in the first of eight row groups
    path.write_bytes(data)
    settings = [f"data.path={damaged}", "train.log_every=31"]
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        done = distembed("train", config, *settings, "data.skip_unreadable=1", "--run-dir", run, ranks=ranks)
        assert done.stdout.count("warning: rows of others take the place of those of") == 1
        assert json.loads((run / "run.json").read_text())["unreadable_row_groups"] == [f"{path}, row group 0"]
        assert metrics(run, "train")[-1]["unreadable_row_groups"] == 1
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    refused = distembed("train", config, *settings, "--run-dir", tmp_path / "none", ranks=1, code=2)
    assert "row group 0 is damaged" in refused.stderr
