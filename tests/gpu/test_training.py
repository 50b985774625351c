"""Runs that train on the device and resume on the CPU, and the other way round, as one that the CPU trains alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from distembed.checkpoints.checkpoint import load_weights
from distembed.commands import cli
from distembed.commands.shared import console
from tests.small_runs import config_values

STEPS, HALF = 8, 4
WEIGHTS = ["embedding_bags.C2__p0.weight", "bottom.layers.0.weight"]
PARTITIONS = {
    "quotient-remainder": ["embedding.default.partition=quotient_remainder"],
    "path": ["embedding.default.composition=path_mlp"],
    "replaced ids": ["sse.default.p0=0.2"],
}
SETTINGS = ["train.checkpoint_every=4", "train.keep_checkpoints=9", f"train.max_steps={STEPS}"]

pytestmark = pytest.mark.gpu


def train(folder: Path, run: Path, device: str, *others: object) -> None:
    with console.capture():
        arguments = ["train", folder / "config.yaml", *SETTINGS, f"train.device={device}", *others, "--run-dir", run]
        cli.app([str(argument) for argument in arguments], standalone_mode=False)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def evaluations(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["auc"] for line in lines if line["kind"] == "eval"]


def weights(run: Path) -> list[torch.Tensor]:
    return load_weights(run / "checkpoints" / f"step-{STEPS:08}", WEIGHTS)


@pytest.mark.parametrize("name", PARTITIONS)
def test_runs_move_between_devices(name: str, device: torch.device, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    whole = {}
    for kind in ("cpu", device.type):
        whole[kind] = tmp_path / f"whole-{kind}"
        if not whole[kind].exists():
            train(tmp_path, whole[kind], kind, *PARTITIONS[name])
    found = losses(whole["cpu"])
    assert len(found) == STEPS and len(evaluations(whole["cpu"])) >= 1
    runs = [whole[device.type]]
    for before, after in (("cpu", device.type), (device.type, "cpu")):
        cut = tmp_path / f"{before}-then-{after}"
        if cut.exists():
            cut = cut.with_name(f"{cut.name}-again")
        shutil.copytree(whole[before], cut)
        shutil.rmtree(cut / "checkpoints" / f"step-{STEPS:08}")
        train(tmp_path, cut, after, *PARTITIONS[name], "--resume")
        runs.append(cut)
    for run in runs:
        assert losses(run) == pytest.approx(found, rel=1e-4), run
        assert evaluations(run) == pytest.approx(evaluations(whole["cpu"]), abs=1e-3), run
        for own, expected in zip(weights(run), weights(whole["cpu"]), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)
