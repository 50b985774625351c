"""Runs whose ids are replaced: repeated after a resume to the last bit, counted, evaluated as they are."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from distembed.base.checksums import KEY, with_checksum
from distembed.base.errors import UserError
from distembed.sse import Graph
from tests.small_runs import SIZES, call, distembed, losses, metrics, stopped_at

P0 = {"C1": 0.1, "C2": 0.3, "C3": 0.1, "M": 0.0}
NUM_STEPS = 20
"""The number of steps of a run, whose epoch would have 31."""


@pytest.fixture
def perturbed(config: Path, tmp_path: Path) -> Path:
    """Ids replaced at rates of their own, in C2 along a graph, and at M's none."""
    ids = np.arange(SIZES["C2"])
    Graph.from_edges(len(ids), ids, np.roll(ids, 1)).write(tmp_path / "graph")
    tables = {"C2": {"p0": P0["C2"], "graph": str(tmp_path / "graph"), "rho": 100}, "M": {"p0": P0["M"]}}
    changes: dict[str, Any] = {
        "extends": config.name,
        "train": {"max_steps": NUM_STEPS, "checkpoint_every": 8, "keep_checkpoints": 9},
        "sse": {"default": {"p0": 0.1}, "tables": tables},
    }
    path = tmp_path / "perturbed.yaml"
    path.write_text(yaml.safe_dump(changes))
    return path


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_resumed_run_replaces_the_same_ids_as_one_that_was_not_stopped(perturbed: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    distembed("train", perturbed, "--run-dir", whole, ranks=2)
    stopped_at(8, whole, part)  # in the middle of its epoch
    distembed("train", perturbed, "--run-dir", part, "--resume", ranks=2)
    assert len(losses(whole)) == NUM_STEPS and losses(part) == losses(whole)
    for split in ("validation", "test"):
        first, second = ([m["logloss"] for m in metrics(run, "eval") if m["split"] == split] for run in (whole, part))
        assert first == second
    check_shares(whole)


def check_shares(run: Path) -> None:
    """The first lines count what the pipeline prepares ahead on both ranks, so that none is left for the last ones."""
    shares = [line.get("replaced_share", {}) for line in metrics(run, "train")]
    counted = {table: [own[table] for own in shares if table in own] for table in SIZES}
    assert counted["M"] == []
    for table in ("C1", "C2", "C3"):
        mean, num_ids = float(np.mean(counted[table])), NUM_STEPS * 64
        assert abs(mean - P0[table]) < 5 * (P0[table] * (1 - P0[table]) / num_ids) ** 0.5


@pytest.mark.thorough
def test_one_rank_trains_evaluates_and_refuses_as_the_config_says(
    config: Path, perturbed: Path, tmp_path: Path
) -> None:
    runs = {name: tmp_path / name for name in ("plain", "never", "whole")}
    call("train", config, f"train.max_steps={NUM_STEPS}", "--run-dir", runs["plain"])
    call("train", perturbed, "sse.default.p0=0", "sse.tables={}", "--run-dir", runs["never"])
    call("train", perturbed, "--run-dir", runs["whole"])
    assert losses(runs["never"]) == losses(runs["plain"])
    assert losses(runs["whole"]) != losses(runs["plain"])
    assert "replaced_share" not in metrics(runs["never"], "train")[0]
    part = stopped_at(8, runs["whole"], tmp_path / "part")
    call("train", perturbed, "--run-dir", part, "--resume")
    assert losses(part) == losses(runs["whole"])
    # right after training, and read back by a command that never trained
    call("evaluate", runs["whole"], "--json")
    evaluation = json.loads((runs["whole"] / "evaluation.json").read_text())
    call("predict", runs["whole"], "--output", tmp_path / "predictions.csv")
    rows = np.loadtxt(tmp_path / "predictions.csv", delimiter=",", skiprows=1)
    expected = -np.mean(np.log(np.where(rows[:, 1] > 0, rows[:, 0], 1 - rows[:, 0])))
    assert evaluation["logloss"] == pytest.approx(expected, rel=1e-6)
    refuses(perturbed, part, tmp_path)


def refuses(perturbed: Path, part: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sse.default.p0: 0.1 before, 0.2 now"):
        call("train", perturbed, "sse.default.p0=0.2", "--run-dir", part, "--resume")
    with pytest.raises(UserError, match=r"sse.tables is 'C9'"):
        call("train", perturbed, "sse.tables.C9.p0=0.2", "--run-dir", tmp_path / "new")
    with pytest.raises(UserError, match=r"'C3'.*the graph has 400 ids and the table 1000"):
        call("train", perturbed, f"sse.tables.C3.graph={tmp_path / 'graph'}", "--run-dir", tmp_path / "new")
    shutil.copytree(tmp_path / "graph", tmp_path / "other")
    description = json.loads((tmp_path / "other" / "graph.json").read_text())
    description["details"] = {"ids": {"table": "C2", "fingerprint": "that of other values"}}
    del description[KEY]
    (tmp_path / "other" / "graph.json").write_text(json.dumps(with_checksum(description)))
    with pytest.raises(UserError, match=r"other was prepared for table 'C2' of a dataset with other ids"):
        call("train", perturbed, f"sse.tables.C2.graph={tmp_path / 'other'}", "--run-dir", tmp_path / "new")
    shutil.rmtree(tmp_path / "graph")
    Graph.from_edges(SIZES["C2"], [0], [5]).write(tmp_path / "graph")
    with pytest.raises(UserError, match=r"graph of table 'C2' is not the one"):
        call("train", perturbed, "--run-dir", part, "--resume")
    assert not (tmp_path / "new").exists()
