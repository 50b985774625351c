"""Whole runs under every plan, on one, two and four ranks: the same losses, and the plan that was asked for."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from distembed.base.errors import UserError
from tests.small_runs import SIZES, call, distembed, losses, stopped_at

# a path cannot be divided by columns
PLANS: dict[str, dict[str, Any]] = {
    "table_wise": {"sharding_types": ["table_wise"]},
    "column_wise": {
        "sharding_types": ["column_wise"],
        "min_partition": 4,
        "tables": {"C3": {"sharding_types": ["table_wise"]}},
    },
    "row_wise": {"sharding_types": ["row_wise"]},
    "data_parallel": {"sharding_types": ["data_parallel"]},
    "mixed": {
        "min_partition": 4,
        "tables": {
            "C1": {"sharding_types": ["data_parallel"]},
            "C2": {"sharding_types": ["row_wise"]},
            "C3": {"sharding_types": ["table_wise"]},
            "M": {"sharding_types": ["table_column_wise"]},
        },
    },
}
"""The ``plan`` section of each run."""


@pytest.fixture
def compositions(config: Path, tmp_path: Path) -> Path:
    """Two vectors an id, products, networks a quotient, and means of concatenations."""
    tables = {
        "C1": {"composition": "feature", "force": True},
        "C3": {"composition": "path_mlp", "hidden": [8]},
        "M": {"composition": "concat", "dims": [4, 4], "pooling": "mean", "force": True},
    }
    path = tmp_path / "compositions.yaml"
    # 65 rows cannot be halved
    changes = {"extends": config.name, "embedding": {"tables": tables}, "train": {"batch_size": 65, "max_steps": 12}}
    path.write_text(yaml.safe_dump(changes))
    return path


def expected_type(plan: dict[str, Any], table: str) -> str:
    own = plan.get("tables", {}).get(table, plan)
    (sharding_type,) = own["sharding_types"]
    return str(sharding_type)


def check_plan(folder: Path, name: str, world_size: int, said: str) -> None:
    """Checks that the saved plan is the one that was asked for, and that what is printed says the same."""
    (placed,) = json.loads((folder / name / "plan.json").read_text())["plan"].values()
    assert placed.keys() == SIZES.keys()
    for table, placement in placed.items():
        sharding_type = expected_type(PLANS[name], table)
        assert placement["sharding_type"] == sharding_type
        assert placement["compute_kernel"] == ("dense" if sharding_type == "data_parallel" else "fused")
        widths = [shard["size"][1] for shard in placement["shards"]]
        if sharding_type == "data_parallel":
            assert not widths
        elif sharding_type == "row_wise":
            assert [shard["rank"] for shard in placement["shards"]] == list(range(world_size))
        else:
            # two vectors of 8 numbers for C1, else one
            assert sum(widths) == (16 if table == "C1" else 8)
            assert len(widths) == 1 or all(width >= 4 for width in widths)
        if sharding_type == "column_wise" and world_size > 1:
            assert len(widths) > 1
    (line,) = [line for line in said.splitlines() if line.startswith("plan: ")]
    for sharding_type, count in Counter(placement["sharding_type"] for placement in placed.values()).items():
        assert f"{count} {sharding_type}" in line


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("many", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_plan_trains_alike_on_one_rank_and_on_many(compositions: Path, tmp_path: Path, many: int) -> None:
    curves, evaluations = {}, {}
    for world_size in (1, many):
        folder = tmp_path / f"on{world_size}"
        for name, plan in PLANS.items():
            arguments = ("train", compositions, f"plan={json.dumps(plan)}", "--run-dir", folder / name)
            done = distembed(*arguments, ranks=world_size)
            curves[name, world_size] = losses(folder / name)
            evaluations[name, world_size] = json.loads((folder / name / "evaluation.json").read_text())["logloss"]
            check_plan(folder, name, world_size, done.stdout)
    expected = curves["table_wise", 1]
    assert len(expected) == 12 and expected[-1] < expected[0]
    for key, curve in curves.items():
        assert curve == pytest.approx(expected, rel=1e-5), key
        assert evaluations[key] == pytest.approx(evaluations["table_wise", 1], rel=1e-5), key


OVERRIDES = ["train.max_steps=8", "train.checkpoint_every=4", "train.keep_checkpoints=9"]


def train(config: Path, run: Path, *arguments: object) -> str:
    """Runs the command in this process and returns what it prints."""
    return call("train", config, *OVERRIDES, "--run-dir", run, *arguments)


def plan_of(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return values


@pytest.fixture
def chosen(config: Path, tmp_path: Path) -> Path:
    """Returns the folder of a run whose plan was given, and is not the one that the planner would make."""
    one_cpu = ["--gpus", "1", "--gpu", "cpu-256gb"]
    plan = tmp_path / "saved.json"
    arguments = ["plan", str(config), *OVERRIDES, *one_cpu, "plan.sharding_types=[row_wise]", "-o", str(plan)]
    call(*arguments)
    train(config, tmp_path / "anew")
    train(config, tmp_path / "chosen", "--plan", plan)
    assert plan_of(tmp_path / "anew") != plan_of(tmp_path / "chosen")
    return tmp_path / "chosen"


def test_the_plan_stays(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = stopped_at(4, chosen, tmp_path / "part")
    said = train(config, part, "--resume")
    assert "resuming at step 4" in said and "plan: 4 row_wise" in said and "planned anew" not in said
    assert plan_of(part) == plan_of(chosen)
    assert len(losses(part)) == 8 and losses(part) == losses(chosen)


@pytest.mark.thorough
def test_the_plan_is_made_anew_where_the_config_asks_for_another(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = stopped_at(4, chosen, tmp_path / "part")
    said = train(config, part, "plan.sharding_types=[data_parallel]", "--resume")
    assert "plan: 4 data_parallel" in said and "plan section has changed" in said
    assert plan_of(part) != plan_of(chosen)
    # from then on, that is the run's
    assert "plan: 4 data_parallel" in train(config, part, "plan.sharding_types=[data_parallel]", "--resume")


def test_a_plan_that_cannot_be_read_is_not_passed_over(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = stopped_at(4, chosen, tmp_path / "part")
    (part / "plan.json").write_text(json.dumps(plan_of(chosen)["plan"]))
    with pytest.raises(UserError, match=r"(?s)--resume: 2 mistakes in the plan of .*Or remove it"):
        train(config, part, "--resume")
    (part / "plan.json").unlink()
    assert "resuming at step 4" in train(config, part, "--resume")
    assert plan_of(part) == plan_of(tmp_path / "anew")


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_plan_is_made_anew_on_another_number_of_ranks(config: Path, chosen: Path, tmp_path: Path) -> None:
    part = stopped_at(4, chosen, tmp_path / "part")
    done = distembed("train", config, *OVERRIDES, "--run-dir", part, "--resume", ranks=2)
    assert "planned anew" in done.stdout and "world_size: 1 in the plan, 2 now" in done.stdout
    assert plan_of(part)["made_for"]["world_size"] == 2
    assert losses(part) == pytest.approx(losses(chosen), rel=1e-4)
    # and on the first number again, two ranks' plan is of no use
    last = stopped_at(4, part, tmp_path / "last")
    train(config, last, "--resume")
    assert plan_of(last) == plan_of(tmp_path / "anew")
    # while two ranks keep theirs
    again = stopped_at(4, part, tmp_path / "again")
    done = distembed("train", config, *OVERRIDES, "--run-dir", again, "--resume", ranks=2)
    assert "planned anew" not in done.stdout and plan_of(again) == plan_of(part)
