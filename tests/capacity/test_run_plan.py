"""``distembed plan``: what fits, what does not and why, and that remedies are ones."""

import dataclasses
import errno
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distembed.base.errors import RunError, UserError
from distembed.commands import cli
from distembed.commands.shared import errors
from distembed.data.dataset.schema import CRITEO_TERABYTE_CARDINALITIES
from distembed.planning.devices import DEVICES, Cluster, find_device
from distembed.reports.plan.assessment import assess_capacity, is_fitting
from distembed.reports.plan.plannable import ConfiguredModel
from distembed.training.config import load_config
from tests.capacity import commands
from tests.capacity.commands import KAGGLE, MLPERF, NAIVE
from tests.small_runs import config_values, write_dataset

MLPERF_IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
GIB = 2**30
LAYERS = [(13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)]
DENSE_PARAMETERS = sum(inputs * outputs + outputs for inputs, outputs in LAYERS)


def plan(*arguments: object, config: Path = KAGGLE, tolerance: float = 0.5) -> tuple[int, dict[str, Any]]:
    return commands.plan(config, f"plan.time_tolerance={tolerance}", *arguments)


def test_what_is_planned_adds_up() -> None:
    code, planned = plan("--nodes", 2, "--gpus", 2, "--gpu", "l4-24gb")
    assert code == 0 and planned["fits"] and not planned["remedies"]
    assert len(planned["ranks"]) == 4 and len(planned["tables"]) == 26
    (placed,) = planned["plan"].values()
    for rank in planned["ranks"]:
        memory = rank["memory"]
        assert rank["total"] == sum(memory.values()) <= rank["capacity"] == DEVICES["l4-24gb"].memory_bytes
        by_table = {item: sum(own[item] for own in rank["tables"].values()) for item in ("weights", "optimizer_state")}
        assert by_table == {"weights": memory["table_weights"], "optimizer_state": memory["table_optimizer_state"]}
        # elementwise Adagrad keeps a number for each weight; Adam of the networks keeps two, and counts steps
        assert memory["table_optimizer_state"] == memory["table_weights"]
        assert memory["gradients"] == 4 * DENSE_PARAMETERS <= memory["network_weights"] < 1.01 * memory["gradients"]
        assert memory["network_optimizer_state"] == 2 * memory["gradients"] + 4 * 14
        assert memory["allocator"] == round(0.05 * rank["capacity"])
    sizes = {table["name"]: table["bytes_on_all_ranks"] for table in planned["tables"]}
    assert sum(sizes.values()) == sum(rank["memory"]["table_weights"] * 2 for rank in planned["ranks"])
    assert {name: own["ranks"] for name, own in placed.items()} == {t["name"]: t["ranks"] for t in planned["tables"]}


def test_the_tables_of_mlperf_with_their_optimizer() -> None:
    weights, cluster = sum(CRITEO_TERABYTE_CARDINALITIES) * 128 * 4, Cluster(find_device("h100-80gb"), 1, 8)
    assert weights / GIB == pytest.approx(97.4, abs=0.05)
    states = {"sgd": 0, "row_wise_adagrad": 1 / 128, "partial_row_wise_adam": 1 + 1 / 128, "adagrad": 1, "adam": 2}
    for optimizer, factor in states.items():
        settings = ["model={name: dcn}", f"train.sparse_optimizer={{name: {optimizer}}}", "plan.min_partition=32"]
        config = load_config(MLPERF, [*settings, commands.EARLY])
        assert ConfiguredModel(config).table_bytes() == round(weights * (1 + factor))
        if optimizer == "adagrad":
            planned = assess_capacity(config, cluster)
            assert planned.one_copy.weights == weights and planned.one_copy.total == 2 * weights
            assert planned.fits and not planned.one_copy.gradients
    # the largest of these states
    assert is_fitting(ConfiguredModel(config), cluster)


def test_mlperf_is_planned_with_its_own_networks_and_214_ids_a_row() -> None:
    layers = [(13, 512), (512, 256), (256, 128), (3456, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    parameters = sum(inputs * outputs + outputs for inputs, outputs in layers) + 3 * (2 * 3456 * 512 + 3456)
    code, planned = plan(config=MLPERF)
    assert code == 0 and [table["ids_per_row"] for table in planned["tables"]] == MLPERF_IDS and sum(MLPERF_IDS) == 214
    assert {rank["memory"]["gradients"] for rank in planned["ranks"]} == {4 * parameters}
    # every row is read, and read and written again as it is updated
    least = 3 * 214 * 65_536 / 8 * 128 * 4 / DEVICES["h100-80gb"].lookup_bandwidth
    assert max(rank["milliseconds"]["lookup"] for rank in planned["ranks"]) > 1e3 * least


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["data.ids_per_row=2.5"], [2.5] * 26),
        (["data.ids_per_row={C2: 3, C26: 0.5}"], [1, 3] + [1] * 23 + [0.5]),
        (["--ids-per-row", "C1=5"], [5, *MLPERF_IDS[1:]]),
    ],
)
def test_ids_of_a_row_are_one_number_or_by_feature(options: list[str], expected: list[float]) -> None:
    _, planned = plan("model={name: dcn}", "--gpus", 1, "--memory", "400GB", *options, config=MLPERF)
    assert [table["ids_per_row"] for table in planned["tables"]] == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((f"data.ids_per_row={value}", "data.ids_per_row has .*; give a number above 0") for value in (0, -1, ".nan")),
        ("data.ids_per_row=three", "data.ids_per_row has 'three'; give a number above 0"),
        ("data.ids_per_row=[1,true]", "data.ids_per_row has True; give a number above 0"),
        ("data.ids_per_row=[1,2]", r"has 2 numbers, and data.schema=criteo_terabyte has 26 .*\(C1, ..., C26\)"),
        ("data.ids_per_row={C99: 3}", "feature of data.ids_per_row is 'C99', which is not known. Did you mean 'C9'"),
        ("--ids-per-row=C99=3", "--ids-per-row is 'C99', which is not known. Did you mean 'C9'"),
        ("--ids-per-row=C1=nan", "--ids-per-row has 'C1=nan'; give FEATURE=NUMBER"),
        ("data.path=criteo", "a dataset .* knows how many ids its rows have, .* set data.ids_per_row=null"),
        ("data.path=criteo|data.ids_per_row=null|--ids-per-row=C1=3", "need no --ids-per-row; leave it out"),
    ],
)
def test_ids_of_a_row_that_cannot_be_are_refused(options: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan(*options.split("|"), config=MLPERF)


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_with_remedies() -> None:
    settings = [NAIVE, "--gpus", 1]
    code, planned = plan(*settings, "--memory", "2GB")
    assert code == 3 and not planned["fits"] and planned["plan"] is None
    needed, left = planned["needed_by_tables"], planned["left_for_tables"]
    assert needed["weights"] + needed["optimizer_state"] > left > 0
    kinds = {remedy.split("=")[0].split()[0] for remedy in planned["remedies"]}
    assert {"--nodes", "--gpus", "--memory", "embedding.default.partition"} <= kinds
    # that each holds, and is the least of its kind, is tested in test_remedies.py
    nodes = next(int(remedy.split()[1]) for remedy in planned["remedies"] if remedy.startswith("--nodes"))
    assert nodes > 1 and plan(*settings, "--memory", "2GB", "--nodes", nodes - 1)[0] == 3


@pytest.mark.slow
def test_constraints_that_leave_no_room_are_a_remedy_to_drop() -> None:
    constraints = ["plan.sharding_types=[table_wise]", "plan.tables={C3: {sharding_types: [data_parallel]}}"]
    settings = [NAIVE, "--gpus", 4, "--memory", "1.8GB", *constraints]
    code, planned = plan(*settings)
    assert code == 3
    (freed,) = [remedy for remedy in planned["remedies"] if remedy.startswith("plan.")]
    assert shlex.split(freed) == ["plan.sharding_types=null", "plan.tables={}"]
    assert plan(*settings, *shlex.split(freed))[0] == 0


def test_a_shortage_reserves_of_each_rank_a_share_of_its_own_memory() -> None:
    config, device = load_config(KAGGLE, [NAIVE, "plan.reserve=0.5"]), find_device("l4-24gb")
    alike, unlike = (
        assess_capacity(config, Cluster(device, 1, 2, memory_by_rank=(4 * 10**8, other)))
        for other in (4 * 10**8, 10**8)
    )
    assert not alike.fits and not unlike.fits
    # half of the 300 MB less
    assert alike.bytes_left_for_tables - unlike.bytes_left_for_tables == 150 * 10**6


@pytest.mark.thorough
def test_tables_in_host_memory_are_shown_and_never_unasked() -> None:
    settings = [NAIVE, "--gpus", 1, "--memory", "4GB"]
    device = dataclasses.replace(find_device("h100-80gb"), memory_bytes=4 * 10**9)
    assert not is_fitting(ConfiguredModel(load_config(KAGGLE, settings[:1])), Cluster(device, 1, 1))
    for allowed in ("plan.host_memory=true", "plan.tables={C3: {compute_kernels: [fused, fused_uvm]}}"):
        with pytest.raises(UserError, match="--host-memory"):
            plan(*settings, allowed)
    code, planned = plan(*settings, "plan.host_memory=true", "--host-memory", "64GB")
    assert code == 0
    hosted = [table for table in planned["tables"] if table["host_bytes"]]
    (rank,) = planned["ranks"]
    assert hosted and all("host memory" in table["why"] for table in hosted)
    assert sum(table["host_bytes"] for table in hosted) == sum(rank["host_memory"].values()) <= rank["host_capacity"]
    assert sum(table["cache_bytes"] for table in planned["tables"]) == rank["memory"]["table_cache"] > 0
    for table in planned["tables"]:
        is_hosted = table["compute_kernel"] in ("fused_uvm", "fused_uvm_caching")
        assert is_hosted == bool(table["host_bytes"])
        # Adagrad keeps a number for each weight
        own = 2 * 4 * 16 * table["rows"][0]
        assert table["host_bytes"] + table["bytes_on_all_ranks"] - table["cache_bytes"] == own
    # and there is no more of it than there is
    assert plan(*settings, "plan.host_memory=true", "--host-memory", "10MB")[0] == 3


@pytest.mark.thorough
def test_no_table_is_in_host_memory_that_is_faster_on_a_device_with_room() -> None:
    hosts = ["plan.host_memory=true", "--host-memory", "1TiB"]
    _, planned = plan("--gpus", 4, "--gpu", "a100-40gb", *hosts, config=MLPERF, tolerance=0.001)
    hosted = [table for table in planned["tables"] if table["host_bytes"]]
    assert hosted
    for table in hosted:
        on_devices = [own for own in table["alternatives"] if own["compute_kernel"] == "fused" and own["fits"]]
        assert all(own["milliseconds"] >= 0 for own in on_devices), table["name"]


def test_a_report_is_written_beside_what_is_printed(tmp_path: Path) -> None:
    assert plan("--gpus", 1, "--report", tmp_path / "plan.html")[0] == 0
    assert (tmp_path / "plan.html").stat().st_size > 1000
    with pytest.raises(UserError, match="pdf"):
        plan("--gpus", 1, "--report", tmp_path / "plan.pdf")


def test_files_that_cannot_be_written_are_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError("it was planned")

    for planner in ("report_capacity", "compress_config"):
        monkeypatch.setattr(f"distembed.reports.plan.run_plan.{planner}", unwanted)
    there = tmp_path / "there.svg"
    there.write_text("old")
    with pytest.raises(UserError, match="--compress .*there.svg exists already"):
        plan("--fit", there)  # its other name
    with pytest.raises(UserError, match="--output and --compress both name"):
        plan("--output", tmp_path / "one", "--compress", tmp_path / "one")
    assert there.read_text() == "old" and not (tmp_path / "one").exists()


def test_what_was_planned_is_printed_though_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match=r"kept\.json could not be written .*No space left"):
        plan("--gpus", 1, "--output", tmp_path / "kept.json")
    arguments = ["plan", str(KAGGLE), "--gpus", "1", "--json", "--output", str(tmp_path / "kept.json")]
    with pytest.raises(RunError):
        cli.app(arguments, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["fits"]
    assert not list(tmp_path.iterdir())


def test_a_plan_that_does_not_fit_is_not_written_and_that_is_said(tmp_path: Path) -> None:
    with errors.capture() as said:
        assert plan("--gpus", 1, "--memory", "20MB", "--output", tmp_path / "kept.json")[0] == 3
    assert f"not written: --output {tmp_path}/kept.json, since it does not fit" in said.get()
    # not even compressed: what is printed is the config as it is, and what would do
    files = ["--output", tmp_path / "kept.json", "--compress", tmp_path / "compressed.yaml"]
    with errors.capture() as said:
        code, values = plan("--gpus", 1, "--memory", "20MB", *files)
    assert code == 3 and not values["fits"] and values["remedies"]
    assert all(f"{option} {file}" in said.get() for option, file in zip(files[::2], files[1::2], strict=True))
    assert "no compression of the tables" in said.get()
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "start",
    [
        ["-m", "distembed"],
        pytest.param(["-c", "from distembed.commands.cli import app; app()"], marks=pytest.mark.slow),
    ],
)
def test_libraries_are_silent_however_the_command_is_started(start: list[str]) -> None:
    arguments = ["plan", str(KAGGLE), "--gpus", "1", "--json"]
    done = subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["fits"] and not done.stderr


def test_training_takes_the_plan_that_is_reported(tmp_path: Path) -> None:
    values = config_values(write_dataset(tmp_path / "dataset"))
    values["train"] = {"batch_size": 64, "max_steps": 1, "device": "cpu"}
    types = {"C3": "data_parallel", "M": "row_wise"}
    values["plan"] = {"tables": {name: {"sharding_types": [own]} for name, own in types.items()}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    run = tmp_path / "run"
    assert cli.app(["plan", str(config), *ONE_CPU, "-o", str(tmp_path / "kept.json")], standalone_mode=False) is None
    cli.app(["train", str(config), "--run-dir", str(run)], standalone_mode=False)
    made = json.loads((run / "plan.json").read_text())
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert made == {key: kept[key] for key in ("made_for", "plan")}
    # and another one only if it is given: of a run, or of the command
    (placed,) = kept["plan"].values()
    placed["C1"] = {**placed["C1"], "sharding_type": "data_parallel", "compute_kernel": "dense", "shards": []}
    for file, values in (("changed.json", kept), ("plan.json", {key: kept[key] for key in made})):
        (tmp_path / file).write_text(json.dumps(values))
        again = tmp_path / f"run-{file}"
        cli.app(["train", str(config), "--plan", str(tmp_path / file), "--run-dir", str(again)], standalone_mode=False)
        assert json.loads((again / "plan.json").read_text()) == {key: kept[key] for key in made}
    # tests.planning.test_saved_plan has all that a plan may be refused for
    arguments = ["train", str(config), "train.batch_size=100", "--plan", str(tmp_path / "kept.json")]
    with pytest.raises(UserError, match="batch_size: 64 in the plan, 100 now"):
        cli.app([*arguments, "--run-dir", str(tmp_path / "none")], standalone_mode=False)
    assert not (tmp_path / "none").exists()


ONE_CPU = ["--gpus", "1", "--gpu", "cpu-256gb"]
