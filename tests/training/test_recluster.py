"""Runs whose tables are re-clustered: killed and resumed, on one rank and on two, and used afterwards."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from distembed.base.errors import UserError
from distembed.embedding import recluster as embedding_recluster
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.training import recluster as training_recluster
from tests.partitions.test_hashing import splitmix64
from tests.small_runs import call, config_values, distembed, losses, run_command, stopped_at

OVERRIDES = [
    "embedding.default.partition=clustered",
    "embedding.default.num_buckets=12",
    "embedding.default.num_partitions=4",
    "embedding.default.composition=concat_sum",
    "train.recluster.every=10",
    "train.recluster.until=25",
    "train.checkpoint_every=5",
    "train.keep_checkpoints=9",
    "train.epochs=2",
    "train.max_steps=35",
    "train.sparse_optimizer.name=adagrad",
    "train.sparse_optimizer.learning_rate=0.1",
    "train.sparse_optimizer.eps=0.01",
]


def saved(run: Path, step: int = 35) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: weights, assignments and optimizer states."""
    tensors = StockCheckpoint(run / "checkpoints" / f"step-{step:08}")
    return {name: tensors[name] for name in tensors if name.startswith(("model.", "optimizer."))}


def assert_equal(run: Path, other: Path) -> None:
    first, second = saved(run), saved(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def killed_at_the_second_clustering(
    rank: int, arguments: Sequence[object], folder: Path, ranks: int = 1, port: int = 0
) -> None:
    """Runs the command until the third table of the second clustering, of three tables each, has been clustered."""
    calls = []

    def recluster(*arguments: Any) -> Any:
        calls.append(embedding_recluster.recluster(*arguments))
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return calls[-1]

    training_recluster.recluster = recluster  # type: ignore[assignment]
    run_command(rank, arguments, folder, ranks, port)


@pytest.fixture(scope="module")
def wholes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """An uninterrupted run on one rank, and on two."""
    folder = tmp_path_factory.mktemp("wholes")
    (folder / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    for ranks in (1, 2):
        distembed("train", folder / "config.yaml", *OVERRIDES, "--run-dir", folder / str(ranks), ranks=ranks)
    return {ranks: folder / str(ranks) for ranks in (1, 2)}


@pytest.mark.distributed
@pytest.mark.thorough
def test_two_ranks_find_the_clusters_and_losses_of_one(wholes: dict[int, Path]) -> None:
    one, two = (saved(run) for run in wholes.values())
    assignments = [name for name in one if name.endswith("__assignment")]
    assert len(assignments) == 3
    for name in assignments:
        assert torch.equal(one[name], two[name])
    assert losses(wholes[2]) == pytest.approx(losses(wholes[1]), rel=1e-5)
    first, last = (saved(wholes[1], step) for step in (5, 35))
    assert not any(torch.equal(first[name], last[name]) for name in assignments)


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_tables_are_clustered_alike_however_they_are_sharded(
    config: Path, wholes: dict[int, Path], tmp_path: Path, sharding_type: str
) -> None:
    plan = (f"plan.sharding_types=[{sharding_type}]", "plan.min_partition=4")
    distembed("train", config, *OVERRIDES, *plan, "--run-dir", tmp_path / "run", ranks=2)
    one, two = saved(wholes[1]), saved(tmp_path / "run")
    for name, value in one.items():
        if name.endswith("__assignment"):
            assert torch.equal(value, two[name])
        elif "C2__p" in name:  # weights, and states of Adagrad
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", [5, 10, 15])
def test_a_resumed_run_ends_with_the_weights_of_the_one_that_was_not_stopped(
    config: Path, wholes: dict[int, Path], tmp_path: Path, ranks: int, step: int
) -> None:
    part = stopped_at(step, wholes[ranks], tmp_path / "part")
    distembed("train", config, *OVERRIDES, "--run-dir", part, "--resume", ranks=ranks)
    assert_equal(part, wholes[ranks])


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_while_it_clustered_ends_with_the_same_weights(
    config: Path, wholes: dict[int, Path], tmp_path: Path, ranks: int
) -> None:
    arguments = ("train", config, *OVERRIDES, "--run-dir", tmp_path / "run")
    distembed(*arguments, ranks=ranks, code=-signal.SIGKILL, run=killed_at_the_second_clustering)
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == "step-00000015"
    distembed(*arguments, "--resume", ranks=ranks)
    assert_equal(tmp_path / "run", wholes[ranks])


def vectors_from_the_checkpoint(run: Path, table: str, num_ids: int) -> np.ndarray:
    """A table's vectors by Python's integers and numpy's float64: two stored rows in 4 bits each, two hashes."""
    tensors = {name.rpartition(".")[2]: value for name, value in saved(run).items() if f".{table}__" in name}
    weights = [
        next(value for name, value in saved(run).items() if name.endswith(f".{table}__p{j}.weight")).double().numpy()
        for j in range(4)
    ]
    stream = int.from_bytes(tensors[f"{table}__assignment"].numpy().tobytes(), "little")
    vectors = []
    for x in range(num_ids):
        stored = [stream >> 4 * (2 * x + part) & 15 for part in range(2)]
        hashed = [hashed_row(x, *key) for key in tensors[f"{table}__keys"].t().tolist()]
        parts = [weights[part][stored[part]] + weights[2 + part][hashed[part]] for part in range(2)]
        vectors.append(np.concatenate(parts))
    return np.array(vectors)


def hashed_row(value: int, before: int, after: int, modulus: int) -> int:
    assert modulus == 12
    state = splitmix64((splitmix64(value ^ before % 2**64) + after) % 2**64)
    if state >> 1 >= 2**63 - 2**63 % modulus:
        state = splitmix64(state)
    return (state >> 1) % modulus


@pytest.mark.distributed
@pytest.mark.thorough
def test_a_run_is_used_with_the_clusters_of_its_checkpoint(
    config: Path, wholes: dict[int, Path], tmp_path: Path
) -> None:
    run = wholes[1]
    expected = vectors_from_the_checkpoint(run, "C2", 400)
    call("materialise", run, "--table", "C2", "--output", tmp_path / "vectors")
    columns = pq.read_table(tmp_path / "vectors" / "C2.parquet")
    vectors = np.array(columns.column(columns.num_columns - 1).to_pylist())
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-7)
    evaluation = json.loads((run / "evaluation.json").read_text())
    again = json.loads(distembed("evaluate", run, "--json", ranks=2).stdout)
    assert again["logloss"] == pytest.approx(evaluation["logloss"], rel=1e-6)
    call("export", run, "--output", tmp_path / "model")  # which holds scores against the run's
    call("convert", run, "embedding.default.partition=naive", "--output", tmp_path / "full")
    assert yaml.safe_load((tmp_path / "full" / "config.yaml").read_text())["train"]["recluster"] is None
    full = json.loads(distembed("evaluate", tmp_path / "full", "--json").stdout)
    assert full["logloss"] == pytest.approx(evaluation["logloss"], rel=1e-5)
    # a run that starts from it has its clusters
    start = (*OVERRIDES, "train.recluster=null", f"train.init_from={run}", "train.max_steps=1")
    distembed("train", config, *start, "--run-dir", tmp_path / "next")
    first, second = saved(run), saved(tmp_path / "next", step=1)
    for name in first:
        if name.endswith(("__assignment", "__keys")):
            assert torch.equal(first[name], second[name])


def test_what_is_described_counts_the_stored_rows_and_what_cannot_be_clustered_is_refused(
    config: Path, tmp_path: Path
) -> None:
    tables = {own["name"]: own for own in json.loads(call("describe", config, *OVERRIDES, "--json"))["tables"]}
    # 2 rows an id in 4 bits, in words of 32 bits and one more, and two hashes of 24 bytes
    assert tables["C2"]["assignment_bytes"] == 4 * (400 * 2 * 4 // 32 + 1) + 2 * 24
    assert tables["C2"]["bytes"] == tables["C2"]["assignment_bytes"] + 4 * 12 * 4 * 4
    for more, problem in (
        ("embedding.default.composition=product", "composition 'product', which cannot be clustered.*concat_sum"),
        ("embedding.default.partition=multi_hash", "no table has the partition clustered"),
        ("train.recluster.until=9", "never clusters: every is 10, until is 9, and the run has 35 steps"),
    ):
        with pytest.raises(UserError, match=problem):
            call("train", config, *OVERRIDES, more, "--run-dir", tmp_path / "run")
