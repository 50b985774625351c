"""A run that goes on from another's weights, with tables that have grown: known ids are what they were."""

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints import load_checkpoint
from distembed.data.dataset.manifest import Manifest, id_fingerprint
from distembed.data.dataset.schema import Label, Schema
from distembed.embedding.collections import embedding_modules, weight_names_of_table
from distembed.training.build import Blueprint, TrainingState, build_training_state, take_over
from distembed.training.config import load_config
from distembed.training.describe import describe
from distembed.training.initial_run import InitialRun, grown_config
from distembed.training.start import RunOptions, RunStart, find_start
from tests.criteo_runs import criteo_run, write_lines
from tests.grown_tables import BEFORE, NOW, config_values, write_assignments, write_dataset
from tests.layouts import OPTIMIZER_NAMES, Trained, Whole, gather_numbers
from tests.ranks import run_on_ranks
from tests.small_runs import call, distembed, losses

STEPS = 4
FIRST = "row_wise_adagrad"
"""Optimizer of the run that most tests go on from."""


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets and the assignments of two days."""
    folder = tmp_path_factory.mktemp("days")
    for day, sizes in enumerate((BEFORE, NOW), start=1):
        write_dataset(folder / f"day{day}", sizes, seed=day)
        write_assignments(folder / f"day{day}.parquet", sizes["given"])
    return folder


def write_config(folder: Path, days: Path, day: int, sparse: str = FIRST, **changes: Any) -> Path:
    values = config_values(days / f"day{day}", days / f"day{day}.parquet", sparse)
    values["train"] |= changes
    path = folder / f"day{day}-{sparse}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train_day(folder: Path, days: Path, day: int, *arguments: object, sparse: str = FIRST, ranks: int = 1) -> Path:
    run = folder / f"run{day}-{sparse}"
    config = write_config(folder, days, day, sparse)
    distembed("train", config, f"train.max_steps={STEPS}", "--run-dir", run, *arguments, ranks=ranks)
    return run


@pytest.fixture(scope="module")
def first_run(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_day(tmp_path_factory.mktemp("first"), days, 1)


def numbers(state: TrainingState) -> Whole:
    return gather_numbers(Trained(state.model, state.optimizers.combined, True, lambda step: None))


def steps_of_adam(state: TrainingState) -> set[float]:
    states = state.optimizers.combined.state_dict()["state"].values()
    return {float(each["step"]) for each in states if "step" in each}


def check_taken_over(rank: int, world_size: int, run: Path, config: Path) -> None:
    """Every number of the earlier run is there, and all others are a fresh start's; all ranks call it."""
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    start = find_start(load_config(config), RunOptions(config.parent / "next"), Collectives().on_first, print)
    assert start.initial is not None
    blueprint = Blueprint.for_ranks(start.config, start.manifest.schema, ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=10)
    fresh = numbers(state)
    assert take_over(start.initial, blueprint, state) == STEPS
    taken = numbers(state)
    earlier = Blueprint.for_ranks(start.initial.config, start.initial.schema, ranks, {})
    old_state = build_training_state(earlier, ranks, num_steps=10)
    load_checkpoint(start.initial.checkpoint, old_state.model, old_state.optimizers.combined)
    old = numbers(old_state)
    assert steps_of_adam(state) == {float(STEPS)}
    num_grown = sum(
        check_numbers(getattr(old, kind), getattr(taken, kind), getattr(fresh, kind)) for kind in ("weights", "states")
    )
    assert num_grown > 0
    check_vectors(earlier, old, blueprint, taken)


def check_numbers(old: dict[str, Any], taken: dict[str, Any], fresh: dict[str, Any]) -> int:
    """Known rows are the old ones and new rows the fresh ones; returns how many tensors have new rows."""
    assert old.keys() == taken.keys()
    for name, values in taken.items():
        rows = min(len(old[name]), len(values))
        assert np.array_equal(values[:rows], old[name][:rows]), name
        # torch makes states at the first step, and those of these optimizers begin at 0
        expected = fresh.get(name, np.zeros_like(values))
        assert np.array_equal(values[rows:], expected[rows:]), name
    return sum(len(taken[name]) > len(old[name]) for name in taken)


def check_vectors(earlier: Blueprint, old: Whole, blueprint: Blueprint, taken: Whole) -> None:
    """Each known id has its vector to the bit, and new ids differ where the scheme tells ids apart."""
    (before,), (now,) = (embedding_modules(each.build_unsharded()).values() for each in (earlier, blueprint))
    for table, grown in zip(before.tables(), now.tables(), strict=True):
        vectors = []
        for module, each, found in ((before, table, old), (now, grown, taken)):
            names = weight_names_of_table(module, each)
            weights = [
                torch.from_numpy(values)
                for name in names
                for key, values in found.weights.items()
                if key.endswith(f".{name}")
            ]
            vectors.append(each.combine.embed(weights, each.scheme.rows(torch.arange(each.num_embeddings))))
        assert torch.equal(vectors[0], vectors[1][: table.num_embeddings]), table.name
        distinct = grown.num_embeddings / grown.scheme.ids_per_row
        assert len(vectors[1].unique(dim=0)) == pytest.approx(distinct), table.name


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    "sparse",
    [
        pytest.param(name, marks=[] if name == FIRST else pytest.mark.slow)
        for name in OPTIMIZER_NAMES
        if name != "sgd"  # which has no states
    ],
)
def test_known_ids_keep_vectors_and_optimizer_states_on_one_and_on_two_ranks(
    sparse: str, days: Path, first_run: Path, tmp_path: Path
) -> None:
    run = first_run if sparse == FIRST else train_day(tmp_path, days, 1, sparse=sparse)
    config = write_config(tmp_path, days, 2, sparse, init_from=str(run))
    for world_size in (1, 2):
        run_on_ranks(world_size, check_taken_over, run, config)


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_new_run_stands_alone_resumes_and_is_gone_on_from_in_turn(
    days: Path, first_run: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    shutil.copytree(first_run, first)
    second = train_day(tmp_path, days, 2, "--init-from", first, "train.checkpoint_every=2", ranks=2)
    record = json.loads((second / "run.json").read_text())["init_from"]
    assert record["id"] == json.loads((first / "run.json").read_text())["id"]
    assert Path(record["checkpoint"]) == first / "checkpoints" / "step-00000004"
    assert record["id_fingerprint"] == id_fingerprint(days / "day1", Manifest.load(days / "day1"))
    # killed before its first checkpoint, it begins with the same weights again
    killed = tmp_path / "killed"
    shutil.copytree(second, killed)
    shutil.rmtree(killed / "checkpoints")
    config = tmp_path / f"day2-{FIRST}.yaml"
    distembed("train", config, f"train.max_steps={STEPS}", "--run-dir", killed, "--resume", "--init-from", first)
    assert np.allclose(losses(killed), losses(second), rtol=1e-4)
    described = [[config, f"train.init_from={first}"], [second / "config.yaml"]]
    told, own = (json.loads(call("describe", *each, "--json"))["tables"] for each in described)
    assert told == own
    # from then on nothing is needed of the first run
    shutil.rmtree(first)
    distembed("train", config, f"train.max_steps={STEPS + 2}", "--run-dir", second, "--resume")
    distembed("evaluate", second)
    tables = {table.config.name: table.config for table in describe(load_config(second / "config.yaml")).tables}
    assert {name: table.num_embeddings for name, table in tables.items()} == NOW
    assert tables["qr"].scheme.num_rows == (26, 7)  # 103 ids at 4 collisions, and 177 with as many remainders
    assert tables["small"].scheme.name == "naive"  # 20 ids were below the threshold of 25, and 80 are above
    (tmp_path / "next").mkdir()
    third = train_day(tmp_path / "next", days, 2, "--init-from", second, "train.max_steps=1")
    assert load_config(third / "config.yaml").embedding == load_config(second / "config.yaml").embedding
    # Adam's states have gathered the steps of all three
    assert json.loads(next(third.glob("checkpoints/*/progress.json")).read_text())["progress"]["steps_before"] == 10


def start_next(tmp_path: Path, days: Path, run: object, changes: dict[str, Any]) -> RunStart:
    values = config_values(days / "day2", days / "day2.parquet", FIRST)
    values["embedding"]["tables"] |= changes
    values["train"]["init_from"] = str(run)
    path = tmp_path / "next.yaml"
    path.write_text(yaml.safe_dump(values))
    return find_start(load_config(path), RunOptions(tmp_path / "next"), lambda function: function(), print)


def test_a_checkpoint_may_be_named_in_place_of_its_run(days: Path, first_run: Path, tmp_path: Path) -> None:
    checkpoint = first_run / "checkpoints" / "step-00000004"
    by_run, by_checkpoint = (start_next(tmp_path, days, each, {}) for each in (first_run, checkpoint))
    assert by_run.initial is not None and by_run.initial == by_checkpoint.initial
    # in a place of their own, checkpoints say whose they are
    shutil.copytree(first_run / "checkpoints", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / ".run").write_text(str(first_run))
    url = f"file://{tmp_path}/elsewhere/step-00000004"
    by_url = start_next(tmp_path, days, url, {}).initial
    assert by_url == dataclasses.replace(by_run.initial, checkpoint=url)
    for nowhere in (tmp_path / "nowhere", f"file://{tmp_path}/elsewhere/step-00000008"):
        with pytest.raises(UserError, match="no run and no checkpoint of a run that is here"):
            start_next(tmp_path, days, nowhere, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qr": {"collisions": 5}}, "table 'qr': collisions was None and is 5"),
        ({"cat": {"composition": "sum"}}, "table 'cat': composition was 'concat' and is 'sum'"),
        ({"mlp": {"composition": "path_mlp", "hidden": [6]}}, r"table 'mlp': hidden was \[5\] and is \[6\]"),
    ],
)
def test_other_settings_of_tables_are_refused_by_name(
    changes: dict[str, Any], message: str, days: Path, first_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        start_next(tmp_path, days, first_run, changes)


def test_a_label_that_another_tower_has_learned_is_refused(tmp_path: Path) -> None:
    a, b, c = Label("a"), Label("b"), Label("c", "number")

    def begin(before: Sequence[str], now: Sequence[str], model: str = "mmoe", labels: tuple[Label, ...] = ()) -> None:
        schema = Schema(None, ("d",), (), labels=(a, b, c))
        old, new = (
            load_config(
                None,
                [f"task={{name: multi, labels: {{{', '.join(names)}}}}}", f"model.name={model}", "train.init_from=x"],
            )
            for names in (before, now)
        )
        initial = InitialRun(tmp_path, "checkpoint", old, schema, old.embedding, old.embedding, None, "")
        grown_config(new, initial, Schema(None, ("d",), (), labels=labels or (a, b, c)))

    begin(["a: {}", "c: {}"], ["c: {weight: 2.0}", "a: {}"])
    begin([], [])
    begin(["a: {}", "b: {}"], ["a: {}", "b: {}"], labels=(a, b, Label("new")))  # which is not learned
    with pytest.raises(UserError, match=r"labels of the task would be a \(binary\), .* was trained on b \(binary\)"):
        begin(["b: {}"], ["a: {}"])
    for labels in ((b, a, c), (a, b, Label("c")), (a, b)):
        with pytest.raises(UserError, match="labels of the task would be"):
            begin([], [], labels=labels)
    with pytest.raises(UserError, match="model.click is 'b', and .* was trained with 'a'"):
        begin(["a: {}", "b: {after: a}"], ["a: {after: b}", "b: {}"], model="esmm")


def test_assignments_that_move_known_ids_are_refused(days: Path, first_run: Path, tmp_path: Path) -> None:
    moved = pq.read_table(days / "day2.parquet").to_pydict()
    moved["make"][1] = -1  # sorts before all others, so that these move
    pq.write_table(pa.table(moved), tmp_path / "moved.parquet")
    given = {"partition": "explicit", "assignments": str(tmp_path / "moved.parquet"), "columns": ["make", "type"]}
    with pytest.raises(UserError, match="table 'given': id 0 has other rows"):
        start_next(tmp_path, days, first_run, {"given": given})


@pytest.mark.slow
def test_the_next_day_of_raw_rows(tmp_path: Path) -> None:
    """The commands one after the other: values of the first day keep their ids, and new ones are behind them."""
    first = criteo_run(tmp_path, "train.keep_best=true", "train.evaluate_every=1")
    rows = write_lines(tmp_path / "next.tsv", 400, seed=1)
    for name, options in (("anew", []), ("next", ["--vocabulary", first, "--grow"])):
        distembed("prepare", "criteo", rows, "-o", tmp_path / name, *options)
    config = [tmp_path / "config.yaml", "train.max_steps=2", "--init-from", first]
    refused = distembed("train", *config, f"data.path={tmp_path / 'anew'}", code=2)
    assert "stood for" in refused.stderr or "ids and has" in refused.stderr
    distembed("train", *config, f"data.path={tmp_path / 'next'}", "--run-dir", tmp_path / "second")
    before, now = (
        {feature.name: feature.num_embeddings for feature in Manifest.load(run / "dataset").schema.categorical}
        for run in (first, tmp_path / "second")
    )
    assert all(now[name] >= size for name, size in before.items()) and now != before
    distembed("predict", tmp_path / "second", "--input", rows, "-o", tmp_path / "scores.parquet")
    assert pq.read_metadata(tmp_path / "scores.parquet").num_rows == 400


BENCH = Path(__file__).parents[2] / "tools" / "bench_grow.py"
LATER = ["train.dense_optimizer.schedule.warmup=0.0", "train.dense_optimizer.learning_rate=0.0003"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_days_one_after_the_other_are_nearly_as_good_as_at_once(criteo_sample: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    arguments = [criteo_sample, "--seeds", 3, "--only", "full", "--output", output, "--later", *LATER]
    subprocess.run([sys.executable, BENCH, *map(str, arguments)], check=True, capture_output=True)
    (row,) = json.loads(output.read_text())
    by_day, at_once = (statistics.mean(logloss for logloss, _ in row[way]) for way in ("by_day", "at_once"))
    assert by_day - at_once < 0.002
