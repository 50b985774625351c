"""What may change when a run is resumed, and what is refused, all of it at once."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from distembed.base.errors import UserError
from distembed.checkpoints.checkpoint import load_weights
from distembed.optim.config import ScheduleConfig
from distembed.optim.optimizers import learning_rate_factor
from distembed.training.build import use_bf16
from distembed.training.config import load_config
from distembed.training.resume import require_same_config, require_same_precision
from tests.small_runs import call, train_small

WEIGHTS = ["bottom.layers.0.weight", "top.layers.2.weight"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """The run of 6 steps of 31, and its config beside it."""
    return train_small(tmp_path_factory.mktemp("short"), dataset, 6)


@pytest.mark.thorough
def test_what_cannot_change_the_weights_may_change(short: Path, dataset: Path, tmp_path: Path) -> None:
    run, place, moved = tmp_path / "run", tmp_path / "elsewhere", tmp_path / "moved"
    shutil.copytree(short, run)
    shutil.copytree(dataset, moved)
    shutil.move(run / "checkpoints", place)
    config = short.parent / "config.yaml"
    longer = ["train.max_steps=12"]
    changes = [
        f"data.path={moved}",
        "data.test=validation",
        "data.validation=null",
        "train.log_every=5",
        "train.evaluate_every=4",
        "train.checkpoint_every=3",
        "train.keep_checkpoints=1",
        f"train.checkpoint_dir={place}",
        "plan.sharding_types=[row_wise]",
    ]
    said = call("train", config, *longer, *changes, "--run-dir", run, "--resume")
    assert "resuming at step 6 of 12" in said
    assert [path.name for path in place.iterdir() if path.name.startswith("step-")] == ["step-00000012"]
    assert json.loads((run / "evaluation.json").read_text())["split"] == "validation"
    call("train", config, *longer, "--run-dir", tmp_path / "whole")
    own, others = (
        load_weights(folder / "step-00000012", WEIGHTS) for folder in (place, tmp_path / "whole" / "checkpoints")
    )
    for weight, other in zip(own, others, strict=True):
        assert weight.equal(other)


def test_a_run_of_another_length_is_refused_where_the_weights_would_be_others(short: Path, tmp_path: Path) -> None:
    config = short.parent / "config.yaml"
    refused = {
        ("train.max_steps=5",): ["train.max_steps: 6 before, 5 now, but a run may only become longer"],
        ("train.epochs=1", "train.seed=3", "train.batch_size=65", "model.top=[8]"): [
            "train.seed: 0 before, 3 now",
            "train.batch_size: 64 before, 65 now",
            "model.top: [16] before, [8] now",
        ],
        ("train.sparse_optimizer.learning_rate=0.5", "data.train=test"): [
            "train.sparse_optimizer.learning_rate: 1.0 before, 0.5 now",
            "data.train: 'train' before, 'test' now",
        ],
    }
    for changes, lines in refused.items():
        overrides = ["train.max_steps=6", *changes]
        with pytest.raises(UserError) as error:
            require_same_config(short, load_config(config, overrides))
        assert all(f"\n  {line}" in str(error.value) for line in lines)
        assert str(error.value).count("\n") == len(lines)
    for longer in ("train.max_steps=7", "train.max_steps=null", "train.epochs=2"):
        require_same_config(short, load_config(config, ["train.max_steps=6", longer]))


@pytest.mark.parametrize("schedule", ["{warmup: 0.1}", "{decay: linear}", "{decay: cosine, final_factor: 0.5}"])
@pytest.mark.parametrize("optimizer", ["dense_optimizer", "sparse_optimizer"])
def test_a_run_whose_learning_rate_follows_its_length_keeps_it(
    short: Path, tmp_path: Path, schedule: str, optimizer: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(short / "run.json", run)
    scheduled = load_config(short.parent / "config.yaml", [f"train.{optimizer}.schedule={schedule}"])
    (run / "config.yaml").write_text(scheduled.to_yaml())
    require_same_config(run, scheduled)
    with pytest.raises(UserError, match=f"train.epochs: 1 before, 2 now, but train.{optimizer}.schedule follows"):
        require_same_config(run, load_config(run / "config.yaml", ["train.epochs=2"]))


def test_a_schedule_depends_on_the_length_exactly_where_its_factors_do() -> None:
    for decay in ("none", "linear", "cosine"):
        for warmup in (0.0, 0.25):
            for final in (0.0, 0.5, 1.0):
                schedule = ScheduleConfig(warmup, decay, final)  # type: ignore[arg-type]
                short, long = ([learning_rate_factor(schedule, step, steps) for step in range(8)] for steps in (8, 80))
                assert (short != long) == schedule.depends_on_length


@pytest.mark.parametrize("other", ["bf16", "fp32"])
def test_a_run_goes_on_in_the_precision_that_it_was_started_in(short: Path, tmp_path: Path, other: str) -> None:
    """Whatever ``auto`` chooses here, a run that was started where it chose the other one is refused."""
    run, config = tmp_path / "run", short.parent / "config.yaml"
    shutil.copytree(short, run)
    overrides = ["train.max_steps=7", "train.precision=auto"]
    (run / "config.yaml").write_text(load_config(config, ["train.max_steps=6", "train.precision=auto"]).to_yaml())
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "precision": other}))
    here = {"bf16": "fp32", "fp32": "bf16"}[other]
    require_same_precision(run, other)
    with pytest.raises(UserError, match=f"trained in {other}, .*auto chooses {here} .* set train.precision={other}"):
        require_same_precision(run, here)
    if use_bf16("auto", torch.device("cpu")) == (here == "bf16"):
        with pytest.raises(UserError, match=f"were trained in {other}"):
            call("train", config, *overrides, "--run-dir", run, "--resume")
    else:
        call("train", config, *overrides, "--run-dir", run, "--resume")
        assert json.loads((run / "run.json").read_text())["precision"] == other
    with pytest.raises(UserError, match=f"train.precision: 'auto' before, '{here}' now"):
        require_same_config(run, load_config(config, ["train.max_steps=7", f"train.precision={here}"]))
    require_same_config(run, load_config(config, ["train.max_steps=7", f"train.precision={other}"]))


def test_checkpoints_have_to_be_where_the_config_now_says(short: Path, tmp_path: Path) -> None:
    config = load_config(
        short.parent / "config.yaml", ["train.max_steps=6", f"train.checkpoint_dir={tmp_path / 'new'}"]
    )
    with pytest.raises(
        UserError, match="train.checkpoint_dir is .*new', where no checkpoint is; the run's newest is step-00000006 in"
    ):
        require_same_config(short, config)
    shutil.copytree(short / "checkpoints", tmp_path / "new")
    require_same_config(short, config)
