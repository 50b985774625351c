"""A resumed run keeps the plan that it was started with, wherever its inputs are still the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.commands.shared import console
from tests.small_runs import distembed
from tests.training.test_schemes import losses

OVERRIDES = ["train.max_steps=8", "train.checkpoint_every=4", "train.keep_checkpoints=9"]


def train(config: Path, run: Path, *arguments: object) -> str:
    """Runs the command in this process and returns what it prints."""
    with console.capture() as said:
        cli.app(["train", str(config), *OVERRIDES, "--run-dir", str(run), *map(str, arguments)], standalone_mode=False)
    return said.get()


def plan_of(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return values


def interrupted(run: Path, copy: Path) -> Path:
    """Returns a copy of a run as if it had been stopped in its middle."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    return copy


@pytest.fixture
def chosen(config: Path, tmp_path: Path) -> Path:
    """Returns the folder of a run whose plan was given, and is not the one that the planner would make."""
    one_cpu = ["--gpus", "1", "--gpu", "cpu-256gb"]
    plan = tmp_path / "saved.json"
    arguments = ["plan", str(config), *OVERRIDES, *one_cpu, "plan.sharding_types=[row_wise]", "-o", str(plan)]
    with console.capture():
        cli.app(arguments, standalone_mode=False)
    train(config, tmp_path / "anew")
    train(config, tmp_path / "chosen", "--plan", plan)
    assert plan_of(tmp_path / "anew") != plan_of(tmp_path / "chosen")
    return tmp_path / "chosen"


def test_the_plan_stays(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = interrupted(chosen, tmp_path / "part")
    said = train(config, part, "--resume")
    assert "resuming at step 4" in said and "plan: 4 row_wise" in said and "planned anew" not in said
    assert plan_of(part) == plan_of(chosen)
    assert len(losses(part)) == 8 and losses(part) == losses(chosen)


def test_the_plan_is_made_anew_where_the_config_asks_for_another(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = interrupted(chosen, tmp_path / "part")
    said = train(config, part, "plan.sharding_types=[data_parallel]", "--resume")
    assert "plan: 4 data_parallel" in said and "plan section has changed" in said
    assert plan_of(part) != plan_of(chosen)
    # from then on, that is the run's
    assert "plan: 4 data_parallel" in train(config, part, "plan.sharding_types=[data_parallel]", "--resume")


def test_a_plan_that_cannot_be_read_is_not_passed_over(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = interrupted(chosen, tmp_path / "part")
    (part / "plan.json").write_text(json.dumps(plan_of(chosen)["plan"]))
    with pytest.raises(UserError, match=r"--resume: .*does not say what its plan was made for.* Or remove it"):
        train(config, part, "--resume")
    (part / "plan.json").unlink()
    assert "resuming at step 4" in train(config, part, "--resume")
    assert plan_of(part) == plan_of(tmp_path / "anew")


@pytest.mark.distributed
def test_the_plan_is_made_anew_on_another_number_of_ranks(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = interrupted(chosen, tmp_path / "part")
    done = distembed("train", config, *OVERRIDES, "--run-dir", part, "--resume", ranks=2)
    assert "planned anew" in done.stdout and "world_size: 1 in the plan, 2 now" in done.stdout
    assert plan_of(part)["made_for"]["world_size"] == 2
    assert losses(part) == pytest.approx(losses(chosen), rel=1e-4)
    # and on the first number again, two ranks' plan is of no use
    last = interrupted(part, tmp_path / "last")
    train(config, last, "--resume")
    assert plan_of(last) == plan_of(tmp_path / "anew")
    # while two ranks keep theirs
    again = interrupted(part, tmp_path / "again")
    done = distembed("train", config, *OVERRIDES, "--run-dir", again, "--resume", ranks=2)
    assert "planned anew" not in done.stdout and plan_of(again) == plan_of(part)
