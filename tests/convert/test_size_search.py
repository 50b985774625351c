"""``distembed compress-search``: costs, candidates, and whole searches that are killed and go on."""

import json
import os
import signal
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from distembed.base.errors import FolderInUse, UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.partitions import Remainder
from distembed.serving.convert import StockCheckpoint
from distembed.serving.convert.combinations import find_combinations
from distembed.serving.convert.curvature import TrainedTable, TrainedTables
from distembed.serving.convert.searched_tables import SearchedTables
from distembed.training.config import load_config
from distembed.training.run_folder.lock import owned
from tests.processes import start_processes
from tests.small_runs import call, config_values, run_command, write_dataset
from tests.training.test_runs import wait_for_steps

FULL_BYTES = 2 * 4 * 8 * (5 + 400 + 1000 + 50)  # vectors and Adagrad's sums, of 8 numbers in float32
SCHEMES = {("quotient_remainder", "product"), ("multi_hash", "sum"), ("multi_hash", "concat"), ("remainder", "product")}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with a table that the labels depend on (C2), and a larger one that they do not (C3)."""
    folder = tmp_path_factory.mktemp("search")
    values = config_values(write_dataset(folder / "dataset"))
    values["train"] |= {"sparse_optimizer": {"name": "adagrad", "learning_rate": 0.2}, "epochs": 2, "loggers": []}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def run_search(rank: int, arguments: tuple[object, ...], folder: Path) -> None:
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may not start processes
    run_command(rank, arguments, folder)


def start(config: Path, output: Path, *arguments: object) -> Any:
    for name in ("output", "errors"):
        (config.parent / name).unlink(missing_ok=True)
    given = ("compress-search", config, "--output", output, *arguments)
    (process,) = start_processes(1, run_search, given, config.parent).processes
    return process


def end(process: Any, config: Path, code: int = 0) -> str:
    process.join()
    output = "".join((config.parent / name).read_text() for name in ("output", "errors"))
    assert process.exitcode == code and "Traceback" not in output, output
    return output


@pytest.mark.parametrize("columns", [1, 6])
def test_the_cost_is_half_the_curvature_times_the_squared_error_of_the_fit(columns: int) -> None:
    rng = np.random.default_rng(0)
    num_ids, rows = 50, 8
    vectors, curvature = rng.normal(size=(num_ids, 6)).astype(np.float32), rng.random((num_ids, columns))
    weights, expected = curvature.sum(axis=1), 0.0
    for row in range(rows):  # a hashed row is the weighted mean of its ids
        ids = np.arange(row, num_ids, rows)
        errors = vectors[ids] - np.average(vectors[ids].astype(np.float64), axis=0, weights=weights[ids])
        expected += 0.5 * float((curvature[ids] * errors**2).sum())
    table = CompositionalEmbeddingConfig("t", num_ids, 6, ["f"], Remainder(num_ids, num_buckets=rows))
    trained = TrainedTable(torch.from_numpy(vectors), torch.from_numpy(curvature))
    assert trained.cost(table) == pytest.approx(expected, rel=1e-5)
    assert trained.cost(CompositionalEmbeddingConfig("t", num_ids, 6, ["f"])) == 0.0


def test_without_any_gradients_a_smaller_table_costs_nothing() -> None:
    table = CompositionalEmbeddingConfig("t", 50, 6, ["f"], Remainder(50, num_buckets=1))
    assert TrainedTable(torch.randn(50, 6), torch.zeros(50, 6).double()).cost(table) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adagrad", "row_wise_adagrad"])
def test_curvatures_are_mean_squared_gradients_of_rows(config: Path, tmp_path: Path, optimizer: str) -> None:
    """In a step of 4 rows, SGD moves an id of one row by a quarter of that row's gradient."""
    settings = ["train.batch_size=4", "train.max_steps=1", "embedding.default.partition=naive", "train.log_every=1"]
    for name in (optimizer, "sgd"):
        own = f"train.sparse_optimizer={{name: {name}, learning_rate: 1.0}}"
        call("train", config, *settings, own, "--run-dir", tmp_path / name)
    searched = SearchedTables.of(load_config(tmp_path / optimizer / "config.yaml"))
    (found,) = (table for table in searched.tables if table.feature.name == "C2")
    ((name, table),) = found.full.items()
    trained = TrainedTables(tmp_path / optimizer).table(name, table)
    saved = StockCheckpoint(max((tmp_path / "sgd" / "checkpoints").glob("step-*")))
    (key,) = (key for key in saved if key.startswith("model.") and "C2__p0" in key)
    before = table.partition_tables()[0].init(torch.empty(400, 8))
    gradients = 4 * (before - saved[key]).double()
    expected = gradients.square() / 4
    if optimizer == "row_wise_adagrad":
        expected = expected.mean(dim=1, keepdim=True)
    assert 1 <= int((expected.sum(dim=1) > 0).sum()) <= 4
    assert trained.curvature.allclose(expected, rtol=1e-3, atol=1e-12)


def test_costs_are_of_one_checkpoint(config: Path, tmp_path: Path) -> None:
    settings = ["train.epochs=9", "embedding.default.partition=naive", "--run-dir", tmp_path / "full"]
    call("train", config, "train.max_steps=1", *settings)
    identity = TrainedTables(tmp_path / "full").identity
    assert TrainedTables(tmp_path / "full").identity == identity
    call("train", config, "train.max_steps=2", *settings, "--resume")
    assert TrainedTables(tmp_path / "full").identity != identity


def searched(config: Path, *overrides: str) -> SearchedTables:
    return SearchedTables.of(load_config(config, list(overrides)))


def rows_of(config: Path, chosen: Path) -> dict[str, int]:
    """The numbers of all tables in a config that a search has written, by table."""
    embedding = load_config(chosen).embedding
    tables = [table.tables(embedding.for_table(table.feature.name)) for table in searched(config).tables]
    built = [table for own in tables for table in own.values()]
    return {table.name: sum(part.num_rows * part.dim for part in table.partition_tables()) for table in built}


def test_candidates_shrink_within_a_scheme_down_to_a_row_and_keep_other_settings(config: Path) -> None:
    tables = searched(config, "embedding.default.hash_seed=3", "embedding.default.num_partitions=2")
    assert tables.full_bytes == FULL_BYTES
    for table in tables.tables:
        (full, full_bytes), *smaller = table.candidates()
        assert full.partition == "naive" and full_bytes == 2 * 4 * 8 * table.feature.num_embeddings
        if table.feature.num_embeddings <= 10:
            assert not smaller
            continue
        assert {(own.partition, own.composition) for own, _ in smaller} == SCHEMES
        for scheme in SCHEMES:
            sizes = [size for own, size in smaller if (own.partition, own.composition) == scheme]
            assert sizes == sorted(set(sizes), reverse=True) and sizes[0] < full_bytes
        assert min(size for _, size in smaller) == 2 * 4 * 8
        for own, size in smaller:
            (built,) = table.tables(own).values()
            assert size == sum(2 * 4 * part.num_rows * part.dim for part in built.partition_tables())
            assert own.hash_seed == 3 and own.force


@pytest.mark.parametrize("hash_seed", ["null", "3"])
def test_frequent_ids_keep_rows_where_ids_are_numbered_by_frequency(tmp_path: Path, hash_seed: str) -> None:
    rows = "".join(f"{number % 2}\t{number * number % 97}\t{number}\n" for number in range(300))
    (tmp_path / "rows.tsv").write_text("label\tsite\thashed\n" + rows)
    values = {"label": {"column": "label"}, "categorical": {"site": {"min_count": 1}, "hashed": {"hash_size": 90}}}
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(values))
    call("prepare", "table", tmp_path / "rows.tsv", "--schema", tmp_path / "schema.yaml", "--output", tmp_path / "data")
    tables = searched(
        Path("configs/table.yaml"),
        f"data.path={tmp_path / 'data'}",
        "embedding.default.threshold=2",
        f"embedding.default.hash_seed={hash_seed}",
    ).tables
    found = {table.feature.name: [own.bounds for own, _ in table.candidates() if own.bounds] for table in tables}
    assert not found["hashed"] and bool(found["site"]) == (hash_seed == "null")
    for table in tables:
        for own, size in table.candidates():
            if own.bounds:
                assert own.partition == "truncated" and size == 2 * 4 * 16 * (own.bounds[0] + 1)


def test_tables_with_settings_of_their_own_keep_them(config: Path) -> None:
    tables = searched(config, "embedding.tables.C3={partition: remainder, collisions: 10}")
    assert {table.feature.name for table in tables.tables} == {"C1", "C2", "M"} and tables.kept_bytes == 2 * 4 * 8 * 100
    found = tables.config_of(tables.full).embedding.tables
    assert found["C3"].partition == "remainder" and found["C2"].partition == found["C1"].partition == "naive"


ROW_WISE = "train.sparse_optimizer.name=row_wise_adagrad"


@pytest.mark.parametrize(
    ("overrides", "tries", "names"),
    [
        ([], None, ["given", "8,fp16,row_wise_adagrad", "4,fp16,row_wise_adagrad"]),
        (["embedding.default.data_type=bf16", ROW_WISE], None, ["given", "4,bf16,row_wise_adagrad"]),
        (["embedding.tables.C3={embedding_dim: 8}"], None, ["given", "8,fp16,row_wise_adagrad"]),  # one dim for all
        ([], [""], ["given"]),
        (
            [],
            [f"embedding.default.embedding_dim=4 {ROW_WISE}"] * 2 + [f"train.batch_size=4 {ROW_WISE}"],
            ["given", "4,row_wise_adagrad", "batch_size=4,name=row_wise_adagrad"],
        ),
        (
            [],
            ["embedding.default.embedding_dim=8,12 " + ROW_WISE],
            ["given", "8,row_wise_adagrad", "12,row_wise_adagrad"],
        ),
    ],
)
def test_combinations_are_products_of_values_beside_the_config_as_given(
    config: Path, overrides: list[str], tries: list[str] | None, names: list[str]
) -> None:
    said: list[str] = []
    found = find_combinations(config, overrides, tries, said.append)
    assert [own.name for own in found] == names and bool(said) == any("C3" in own for own in overrides)
    assert found[0].tables.config == load_config(config, overrides)
    for own in found[1:]:
        made = own.tables.config
        assert made.train.sparse_optimizer.name == "row_wise_adagrad"
        assert own.name.startswith((f"{made.embedding.default.embedding_dim},", "batch_size=4,"))


@pytest.mark.thorough
def test_a_killed_search_goes_on_and_ends_as_one_that_was_not(config: Path, tmp_path: Path) -> None:
    budget, curve = f"{FULL_BYTES // 4}B", ("--curve", "", "--try", ROW_WISE)
    whole = end(start(config, tmp_path / "whole", "--budget", budget, *curve), config)
    assert "costs of" in whole and "training full" in whole

    output = tmp_path / "killed"
    process = start(config, output, "--budget", budget, *curve)
    wait_for_steps(output / "runs" / "full", process, 5)
    os.kill(process.pid, signal.SIGINT)
    assert "interrupted" in end(process, config, code=75)
    process = start(config, output, "--budget", budget, *curve)
    wait_for_steps(output / "runs" / f"search-{FULL_BYTES // 4}", process, 5)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with owned(output, wait_seconds=60):  # the killed search's run saves its state first
        lines = (output / "costs.jsonl").read_text().splitlines(keepends=True)
        (output / "costs.jsonl").write_text("".join(lines[:-20]) + lines[-20][:30])
    resumed = end(start(config, output, "--budget", budget, *curve), config)
    assert "training full" not in resumed and f"resuming search-{FULL_BYTES // 4}" in resumed
    for name in ("config.yaml", "curve.json", "curve.svg"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name

    again = end(start(config, output, "--budget", f"{FULL_BYTES // 3}B", *curve, "--json"), config)
    assert "costs of" not in again and "training full" not in again
    check_result(config, tmp_path / "whole", FULL_BYTES // 4)


def check_result(config: Path, output: Path, budget: int) -> None:
    curve = json.loads((output / "curve.json").read_text())
    points = {point["name"]: point for point in curve["points"]}
    within = {name: point for name, point in points.items() if budget in point["budgets"]}
    assert within.keys() == {f"search-{budget}", f"search-{budget}-row_wise_adagrad"}
    assert points.keys() == {"full", "full-row_wise_adagrad", *within}
    assert curve["chosen"] == min(within, key=lambda name: within[name]["validation"])
    assert all(point["num_bytes"] <= budget for point in within.values())
    found = rows_of(config, output / "runs" / f"search-{budget}" / "config.yaml")
    assert 2 * 4 * sum(found.values()) == within[f"search-{budget}"]["num_bytes"]
    assert found["C2"] / 400 > found["C3"] / 1000  # labels depend on C2 alone
    assert "<svg" in (output / "curve.svg").read_text()
    call("train", output / "config.yaml", "train.max_steps=2", "--run-dir", output / "trained")
    described = json.loads((output / "trained" / "run.json").read_text())
    assert described["embedding_training_bytes"] == points[curve["chosen"]]["num_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "much"], "--budget is 'much'; give a size such as 500MB"),
        (["--budget", "50B"],  # at least 5 + 3 rows of 4 numbers in half precision and a state
         r"--budget is 50 bytes, and all tables take 93,120 \(90.94 KiB\) when they are full and "
         r"96 \(96 B\) at least, with optimizer states; give more"),
        (["--budget", "1MB"], "--budget is 1,000,000 bytes, .*; give less"),
        (["--budget", "20kB", "--curve", "4,a"], "--curve is '4,a'; give numbers such as 4,16,60"),
        (["--budget", "20kB", "--curve", "1"], "--curve has 1; give numbers above 1, such as 4,16,60"),
        (["--budget", "20kB", "--try", "embedding.default.data_type=fp16,int8"],
         "--try embedding.default.data_type=fp16,int8: 1 mistake in"),
        (["--budget", "20kB", "--try", "train.sparse_optimizer.name=sgd"], "--try .*: table .* is trained by 'sgd'"),
        (["--budget", "20kB", "--try", "data.validation=test"], "--try .*: it changes data or task, and tables are"),
        (["embedding.default.threshold=1000", "--budget", "20kB"],
         "embedding.default.threshold is 1000 ids, and the largest table .* has 1000; lower the threshold"),
        (["data.validation=null", "--budget", "20kB"], "data.validation is null, .*; name a split"),
        (["data.validation=valid", "--budget", "20kB"], "data.validation is 'valid', but the dataset"),
        (["train.sparse_optimizer={name: sgd}", "--budget", "20kB"],
         "is trained by 'sgd', and .*set train.sparse_optimizer.name to adagrad or row_wise_adagrad"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_trained(
    config: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        call("compress-search", config, *arguments, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_has_one_search_at_a_time_and_no_other_files(config: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"--output .*mine is a folder with other files \(thesis.tex\)"):
        call("compress-search", config, "--budget", "20kB", "--output", tmp_path / "mine")
    (tmp_path / "out").mkdir()
    with owned(tmp_path / "out"), pytest.raises(FolderInUse, match="out is in use by .*give another --output"):
        call("compress-search", config, "--budget", "20kB", "--output", tmp_path / "out")
