"""Bytes to serve and to train tables: described, planned, and allocated by a run, to the byte."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import yaml
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from distembed.base.ranks import Ranks
from distembed.planning.devices import Cluster, find_device
from distembed.reports.plan.assessment import Assessment, assess_capacity
from distembed.reports.plan.report import assessment_as_json
from distembed.training.build import Blueprint, TrainingState, build_training_state
from distembed.training.config import load_config
from distembed.training.describe import describe
from distembed.training.managed_ids import managed_tables
from distembed.training.pipeline import prepared_batch, split_reader
from tests.layouts import replicated_leaves
from tests.ranks import run_cases
from tests.small_runs import SIZES, config_values, write_dataset

CPU = torch.device("cpu")


def write_config(folder: Path) -> Path:
    """Writes a dataset, and a config with stored rows, importance weights, functions and several partitions."""
    shelves = np.random.default_rng(0).permutation(SIZES["C3"])
    columns = {"shelf": shelves // 32, "place": shelves % 32}
    pq.write_table(pa.table(columns), folder / "assignments.parquet")
    stored = {"partition": "explicit", "assignments": str(folder / "assignments.parquet"), "columns": list(columns)}
    tables = {
        "C2": {"partition": "multi_hash", "composition": "weighted_sum"},
        "C3": {**stored, "composition": "concat"},
        "M": {"composition": "path_mlp", "hidden": [8], "force": True},
    }
    values = config_values(write_dataset(folder / "dataset"))
    values["embedding"]["tables"] = tables
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def memory_behind(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, of which several may be views of one block."""
    blocks = {own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in tensors}
    return sum(blocks.values())


def local_tensors(value: object) -> list[Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, Tensor) else []


def allocated(state: TrainingState) -> tuple[int, int]:
    """Bytes of the weights and stored rows of this rank's tables, and of their optimizers' states."""
    weights = [value for name, value in state.model.state_dict().items() if "__p" in name]
    live = [own for leaf in replicated_leaves(state.optimizers.combined) for own in leaf.live.values()]
    states = [own for name, own in state.optimizers.combined.state_dict()["state"].items() if "__p" in name]
    tensors = [tensor for own in (*live, *states) for value in own.values() for tensor in local_tensors(value)]
    tbes: list[Any] = [own for own in state.model.modules() if isinstance(own, SplitTableBatchedEmbeddingBagsCodegen)]
    for tbe in tbes:
        tensors += [getattr(tbe, "momentum1_host", torch.empty(0))]
        weights += [tbe.weights_host]
    return memory_behind(tensor for value in weights for tensor in local_tensors(value)), memory_behind(tensors)


def check(rank: int, world_size: int, path: Path, overrides: list[str]) -> None:
    config, ranks = load_config(path, overrides), Ranks(rank, world_size, world_size, CPU)
    described = describe(config)
    planned = assess_capacity(config, Cluster(find_device("cpu-256gb"), 1, world_size))
    assert {table.name: table.size for table in planned.tables} == {
        table.config.name: table.size for table in described.tables
    }
    values = assessment_as_json(planned)["kept_by_tables"]
    assert values["training_bytes"] == described.as_json()["embedding_training_bytes"]

    reader = split_reader(config, ranks, prefetch_batches=0)
    state = build_training_state(Blueprint.for_ranks(config, reader.schema, ranks, {}), ranks, num_steps=1)
    batches = (prepared_batch(state.task, batch, None, CPU) for batch in islice(iter(reader), 1))
    assert len(list(state.pipeline.outputs(batches))) == 1  # torch makes its states in the first step
    found = torch.tensor(allocated(state))
    dist.all_reduce(found)
    stored = sum(table.config.scheme.assignment_bytes for table in described.tables)
    packed = [rows.words.nbytes for table in described.tables for rows in getattr(table.config.scheme, "_packed", ())]
    assert stored == sum(packed)
    weights, states = found.tolist()
    size = described.size
    assert (weights + sum(packed), states) == (size.serving, size.training - size.serving)


CASES: list[list[str]] = [
    ["train.sparse_optimizer.name=adagrad"],
    ["train.sparse_optimizer.name=row_wise_adagrad", "train.dense_optimizer.name=adam"],
    ["train.sparse_optimizer.name=amsgrad", "train.dense_optimizer.name=adam"],
    ["train.sparse_optimizer.name=row_wise_adagrad", "embedding.default.data_type=fp16"],
    ["train.sparse_optimizer.name=sgd"],
]
WHOLE = ["plan.sharding_types=[table_wise]", "embedding.tables.M={}"]  # functions would be on both ranks


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_described_and_planned_bytes_are_the_bytes_that_a_run_allocates(world_size: int, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    run_cases(world_size, check, [(path, case + (WHOLE if world_size > 1 else [])) for case in CASES])


def check_managed(rank: int, world_size: int, path: Path) -> None:
    """All slots are filled by force: an evaluation copies the ids that have slots."""
    config, ranks = load_config(path), Ranks(rank, world_size, world_size, CPU)
    planned = assess_capacity(config, Cluster(find_device("cpu-256gb"), 1, world_size))
    reader = split_reader(config, ranks, prefetch_batches=0)
    state = build_training_state(Blueprint.for_ranks(config, reader.schema, ranks, {}), ranks, num_steps=1)
    found = training = 0
    for _, table, managed in managed_tables(state.model):
        ids = np.arange(1, 4 * table.num_embeddings)
        managed.admit(ids[managed.owners_of(ids) == rank])
        managed.lookup(torch.tensor([1]))
        own = [*managed.state.values(), torch.from_numpy(managed._places)]
        training += sum(tensor.nbytes for tensor in own)
        found += sum(tensor.nbytes for copies in managed._copies.values() for tensor in (*own, *copies))
    assert found == planned.ranks[rank].memory["managed_ids"]
    assert sum(planned.ranks[rank].memory.values()) == planned.ranks[rank].total_bytes
    total = torch.tensor(training)
    dist.all_reduce(total)
    identities = sum(table.managed.sizes.serving_bytes for _, table, _ in managed_tables(state.model) if table.managed)
    without = sum(table.one_copy.weights + table.one_copy.optimizer_state for table in planned.tables)
    assert (planned.size.serving, planned.size.training) == (
        sum(table.one_copy.weights for table in planned.tables) + identities,
        without + int(total),
    )
    on_gpus = assess_capacity(config, Cluster(find_device("h100-80gb"), 1, world_size, host_memory_bytes=2**30))
    assert on_gpus.ranks[rank].memory["managed_ids"] == found - training
    assert on_gpus.ranks[rank].host_capacity_bytes == 2**30 // world_size - training


@pytest.mark.parametrize("device", ["cpu-256gb", "h100-80gb"])
def test_managed_ids_without_room_are_an_item_of_the_need(device: str, tmp_path: Path) -> None:
    values = config_values(write_dataset(tmp_path / "dataset"))
    ids = {"size": 1_500_000_000, "admission": {"candidates": 1000}}
    values["embedding"]["tables"] = {"C2": {"ids": {"size": 40}}, "C3": {"ids": ids}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    config, is_cpu = load_config(tmp_path / "config.yaml"), device.startswith("cpu")
    memory_bytes = 2**35 if is_cpu else 2**40

    def assessed(host_memory: int) -> Assessment:
        return assess_capacity(
            config, Cluster(replace(find_device(device), memory_bytes=memory_bytes), 1, 2, host_memory)
        )

    # half of 64 buckets on each rank: 16 bytes an entry, 4 bytes a place of its hash table, 16 bytes a slot to evaluate
    slots, candidates = (1_500_000_000 - 2) // 64, 16
    needed = 32 * ((slots + candidates) * 16 + 2 ** int(np.ceil(np.log2(2 * slots + 32))) * 4 + 16 * slots * is_cpu)
    said = assessed(2**33).planner_error
    (found,) = re.findall(r"managed_ids ([\d,]+)" if is_cpu else r"need ([\d,]+) bytes of host memory", said)
    assert int(found.replace(",", "")) == pytest.approx(needed, rel=1e-6)  # C2 takes little more
    assert "embedding.tables.C3.ids.size or ids.admission.candidates" in said and not re.search(r"-\d", said)
    if not is_cpu:
        assert f"up to {needed / 2**30:.2f} GiB of host memory on each rank" in " ".join(assessed(0).notes)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_planned_bytes_of_managed_ids_are_allocated_on_each_rank(world_size: int, tmp_path: Path) -> None:
    values = config_values(write_dataset(tmp_path / "dataset"))
    candidates = {"admission": {"candidates": 1000}}
    sizes = {"C2": 262_146, "C3": 131_075, "M": 40}  # 4, 2 and 1 buckets
    values["embedding"]["tables"] = {name: {"ids": {"size": size, **candidates}} for name, size in sizes.items()}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    run_cases(world_size, check_managed, [(tmp_path / "config.yaml",)])
