"""``distembed plan``: what fits, what does not and why, and that remedies are ones."""

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from distembed import cli
from distembed.config import load_config
from distembed.data.schema import CRITEO_TERABYTE_CARDINALITIES
from distembed.errors import UserError
from distembed.fit import find_fit
from distembed.planning.cluster import Cluster
from distembed.planning.devices import DEVICES, find_device

KAGGLE = Path(__file__).parents[1] / "configs" / "criteo_kaggle.yaml"
GIB = 2**30
LAYERS = [(13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)]
DENSE_PARAMETERS = sum(inputs * outputs + outputs for inputs, outputs in LAYERS)


def plan(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command, within this process."""

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.app(["plan", str(KAGGLE), *map(str, arguments), "--json"], standalone_mode=False)
    return int(code or 0), json.loads(printed.getvalue())


def test_what_is_planned_adds_up() -> None:
    code, fit = plan("--nodes", 2, "--gpus", 2, "--gpu", "l4-24gb")
    assert code == 0 and fit["fits"] and not fit["remedies"]
    assert len(fit["ranks"]) == 4 and len(fit["tables"]) == 26
    (placed,) = fit["plan"].values()
    for rank in fit["ranks"]:
        memory = rank["memory"]
        assert rank["total"] == sum(memory.values()) <= rank["capacity"] == DEVICES["l4-24gb"].memory_bytes
        by_table = {item: sum(own[item] for own in rank["tables"].values()) for item in ("weights", "optimizer_state")}
        assert by_table == {"weights": memory["table_weights"], "optimizer_state": memory["table_optimizer_state"]}
        # elementwise Adagrad keeps a number for each weight; Adam of the networks keeps two, and counts steps
        assert memory["table_optimizer_state"] == memory["table_weights"]
        assert memory["gradients"] == 4 * DENSE_PARAMETERS <= memory["network_weights"] < 1.01 * memory["gradients"]
        assert memory["network_optimizer_state"] == 2 * memory["gradients"] + 4 * 14
        assert memory["allocator"] == round(0.05 * rank["capacity"])
    sizes = {table["name"]: table["bytes_on_all_ranks"] for table in fit["tables"]}
    assert sum(sizes.values()) == sum(rank["memory"]["table_weights"] * 2 for rank in fit["ranks"])
    assert {name: own["ranks"] for name, own in placed.items()} == {t["name"]: t["ranks"] for t in fit["tables"]}


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ("sgd", 1.0),
        ("adagrad", 2.0),
        ("adam", 3.0),
        ("row_wise_adagrad", 1 + 1 / 128),
        ("partial_row_wise_adam", 2 + 1 / 128),
    ],
)
def test_the_tables_of_mlperf_with_their_optimizer(optimizer: str, factor: float) -> None:
    settings = ["data.schema=criteo_terabyte", "embedding.default={partition: naive, embedding_dim: 128}"]
    settings += ["model={name: dcn}", f"train.sparse_optimizer={{name: {optimizer}}}", "plan.min_partition=32"]
    fit = find_fit(load_config(KAGGLE, settings), Cluster(find_device("h100-80gb"), 1, 8))
    weights = sum(CRITEO_TERABYTE_CARDINALITIES) * 128 * 4
    assert weights / GIB == pytest.approx(97.4, abs=0.05)
    assert fit.needed.weights == weights and fit.needed.total == round(weights * factor)
    assert fit.fits and not fit.needed.gradients


def test_what_does_not_fit_is_refused_with_remedies_that_hold() -> None:
    settings = ["embedding.default.partition=naive", "--gpus", 1]
    code, fit = plan(*settings, "--memory", "2GB")
    assert code == 3 and not fit["fits"] and fit["plan"] is None
    needed, left = fit["needed_by_tables"], fit["left_for_tables"]
    assert needed["weights"] + needed["optimizer_state"] > left > 0
    kinds = {remedy.split("=")[0].split()[0] for remedy in fit["remedies"]}
    assert kinds == {"--nodes", "--gpu", "embedding.default.partition"}
    for remedy in fit["remedies"]:
        memory = [] if "--gpu" in remedy else ["--memory", "2GB"]
        assert plan(*settings, *memory, *shlex.split(remedy))[0] == 0, remedy
    # and each is the least of its kind
    nodes = next(int(remedy.split()[1]) for remedy in fit["remedies"] if remedy.startswith("--nodes"))
    assert nodes > 1 and plan(*settings, "--memory", "2GB", "--nodes", nodes - 1)[0] == 3


def test_constraints_that_leave_no_room_are_a_remedy_to_drop() -> None:
    constraints = ["plan.sharding_types=[table_wise]", "plan.tables={C3: {sharding_types: [data_parallel]}}"]
    settings = ["embedding.default.partition=naive", "--gpus", 4, "--memory", "1.8GB", *constraints]
    code, fit = plan(*settings)
    assert code == 3
    (freed,) = [remedy for remedy in fit["remedies"] if remedy.startswith("plan.")]
    assert shlex.split(freed) == ["plan.sharding_types=null", "plan.tables={}"]
    assert plan(*settings, *shlex.split(freed))[0] == 0


def test_tables_in_host_memory_are_shown_and_never_unasked() -> None:
    settings = ["embedding.default.partition=naive", "--gpus", 1, "--memory", "4GB"]
    assert plan(*settings)[0] == 3
    with pytest.raises(UserError, match="--host-memory"):
        plan(*settings, "plan.host_memory=true")
    code, fit = plan(*settings, "plan.host_memory=true", "--host-memory", "64GB")
    assert code == 0
    hosted = [table for table in fit["tables"] if table["host_bytes"]]
    (rank,) = fit["ranks"]
    assert hosted and all("host memory" in table["why"] for table in hosted)
    assert sum(table["host_bytes"] for table in hosted) == sum(rank["host_memory"].values()) <= rank["host_capacity"]
    assert sum(table["cache_bytes"] for table in fit["tables"]) == rank["memory"]["table_cache"] > 0
    for table in fit["tables"]:
        is_hosted = table["compute_kernel"] in ("fused_uvm", "fused_uvm_caching")
        assert is_hosted == bool(table["host_bytes"])
        # Adagrad keeps a number for each weight
        own = 2 * 4 * 16 * table["rows"][0]
        assert table["host_bytes"] + table["bytes_on_all_ranks"] - table["cache_bytes"] == own
    # and there is no more of it than there is
    assert plan(*settings, "plan.host_memory=true", "--host-memory", "10MB")[0] == 3


def test_a_report_is_written_beside_what_is_printed(tmp_path: Path) -> None:
    for name in ("plan.html", "plan.png", "plan.svg"):
        assert plan("--gpus", 2, "--report", tmp_path / name)[0] == 0
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UserError, match="pdf"):
        plan("--gpus", 2, "--report", tmp_path / "plan.pdf")


def test_wrong_requests_are_named() -> None:
    with pytest.raises(UserError, match=r"--gpu is 'h100'.*h100-80gb"):
        plan("--gpu", "h100")
    with pytest.raises(UserError, match="--memory is 'much'"):
        plan("--memory", "much")
    with pytest.raises(UserError, match="--nodes is 0"):
        Cluster(find_device("l4-24gb"), 0, 1)


def test_training_takes_the_plan_that_is_reported(tmp_path: Path) -> None:
    from tests.training.conftest import write_dataset

    dataset = write_dataset(tmp_path / "dataset")
    values = {
        "data": {"path": str(dataset)},
        "model": {"bottom": [16], "top": [16]},
        "embedding": {"default": {"partition": "quotient_remainder", "embedding_dim": 8, "threshold": 10}},
        "train": {"batch_size": 64, "max_steps": 1, "device": "cpu"},
        "plan": {"tables": {"C3": {"sharding_types": ["data_parallel"]}, "M": {"sharding_types": ["row_wise"]}}},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    run = tmp_path / "run"
    assert cli.app(["plan", str(config), *ONE_CPU, "-o", str(tmp_path / "kept.json")], standalone_mode=False) is None
    cli.app(["train", str(config), "--run-dir", str(run)], standalone_mode=False)
    made = json.loads((run / "plan.json").read_text())
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert made == kept["plan"]
    # and another one only if it is given: of a run, or of the command
    (placed,) = kept["plan"].values()
    placed["C1"] = {**placed["C1"], "sharding_type": "data_parallel", "compute_kernel": "dense", "shards": []}
    for file, values in (("changed.json", kept), ("plan.json", kept["plan"])):
        (tmp_path / file).write_text(json.dumps(values))
        again = tmp_path / f"run-{file}"
        cli.app(["train", str(config), "--plan", str(tmp_path / file), "--run-dir", str(again)], standalone_mode=False)
        assert json.loads((again / "plan.json").read_text()) == kept["plan"]
    check_refused(config, tmp_path, kept)


ONE_CPU = ["--gpus", "1", "--gpu", "cpu-256gb"]


def check_refused(config: Path, tmp_path: Path, kept: dict[str, Any]) -> None:
    file = tmp_path / "other.json"

    def train(values: Any, *overrides: str) -> None:
        file.write_text(values if isinstance(values, str) else json.dumps(values))
        arguments = [str(config), *overrides, "--plan", str(file), "--run-dir", str(tmp_path / "none")]
        cli.app(["train", *arguments], standalone_mode=False)

    with pytest.raises(UserError, match="made for 2 ranks, and there are 1"):
        train({**kept, "gpus": 2})
    with pytest.raises(UserError, match=r"table 'C2' is planned as .* numbers, and is"):
        train(kept, "embedding.tables.C2.collisions=8")
    (module,) = kept["plan"]
    without = {name: own for name, own in kept["plan"][module].items() if name != "C3"}
    with pytest.raises(UserError, match="table 'C3' is in the model and not in the plan"):
        train({module: without})
    for broken in ("{", "[1]", {"a": 1}, {"plan": {"a": {"b": {}}}, "nodes": 1, "gpus": 1}):
        with pytest.raises(UserError, match="plan"):
            train(broken)
    assert not (tmp_path / "none").exists()
