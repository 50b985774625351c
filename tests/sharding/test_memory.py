"""Memory of building a sharded model: that of the rank's own shards, and never a whole table that it has a part of."""

import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, Workload, make_plan
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.ranks import run_cases

DIM, COLLISIONS = 16, 4
NUM_ROWS = 3_000_000
FULL_BYTES = 4 * DIM * NUM_ROWS
"""Of the large partition, 192 MB; the other one has 4 rows."""
BLOCK_BYTES = 4 * 2**22
"""Initial weights are drawn in blocks of so many numbers, of all columns."""
SLACK_BYTES = 2**21
"""Python's own and page tables: a rank that owns nothing grows by up to half a megabyte."""


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that anything returns; those on the meta device have none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in tree_iter(returned):
            if isinstance(value, Tensor) and not value.is_meta:
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return returned


def memory_bytes(name: str) -> int:
    """``VmRSS``, what this process has now, or ``VmHWM``, the most since the last :func:`forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")


def build(kind: str, composition: str, optimizer: type[torch.optim.Optimizer], num_rows: int) -> Any:
    """Makes what constructs the sharded model of one table."""
    scheme = QuotientRemainder(COLLISIONS * num_rows, collisions=COLLISIONS)
    table = CompositionalEmbeddingBagConfig("t", COLLISIONS * num_rows, DIM, ["t"], scheme, composition)
    model = nn.ModuleDict({"embeddings": CompositionalEmbeddingBagCollection([table], device="meta")})
    apply_optimizer_in_backward(optimizer, model["embeddings"].embedding_bags.parameters(), {"lr": 0.1})
    world_size, cpu = dist.get_world_size(), torch.device("cpu")
    sharders = [CompositionalEmbeddingBagCollectionSharder()]
    plan = make_plan(
        model,
        sharders,
        Ranks(dist.get_rank(), world_size, world_size, cpu),
        Workload(8 * world_size),
        # of two vectors an id has 32 columns
        config=PlanConfig([kind], min_partition=DIM if composition == "feature" else DIM // 2),
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return lambda: DistributedModelParallel(model, env=env, device=cpu, plan=plan, sharders=sharders)


def tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        yield from [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]


def num_bytes(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(values))


def expected_bytes(kind: str, composition: str) -> list[int]:
    """Weights on the ranks, in ascending order."""
    small = 4 * DIM * COLLISIONS
    if kind == "table_wise":
        return [0, FULL_BYTES + small]
    if kind == "row_wise":
        return [FULL_BYTES // 2 + small] * 2
    # of two vectors an id each rank has one: the large partition, or the small one
    return [small, FULL_BYTES] if composition == "feature" else [(FULL_BYTES + small) // 2] * 2


def check_build(
    rank: int, world_size: int, kind: str, composition: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    build(kind, composition, optimizer, num_rows=1000)()  # loads what is loaded on first use
    construct = build(kind, composition, optimizer, NUM_ROWS)
    dist.barrier()
    forget_peak()
    before = memory_bytes("VmRSS")
    with LargestTensor() as largest:
        model = construct()
    grown = memory_bytes("VmHWM") - before
    weights = num_bytes(model.state_dict().values())
    state = num_bytes(
        value for of_weight in model.fused_optimizer.state_dict()["state"].values() for value in of_weight.values()
    )
    for_ranks: list[Any] = [None, None]
    dist.all_gather_object(for_ranks, weights)
    assert sorted(for_ranks) == expected_bytes(kind, composition)
    assert grown <= 1.2 * (weights + state) + SLACK_BYTES, (
        f"grew by {grown / 1e6:.1f} MB for {weights / 1e6:.1f} MB of weights and {state / 1e6:.1f} MB of state"
    )
    assert largest.bytes <= max(weights, BLOCK_BYTES)


CASES = [("table_wise", "product", RowWiseAdagrad), ("column_wise", "product", torch.optim.Adagrad)]
CASES += [("row_wise", "sum", torch.optim.SGD), ("column_wise", "feature", RowWiseAdagrad)]


@pytest.mark.thorough
@pytest.mark.distributed
def test_building_takes_no_more_than_the_shards() -> None:
    run_cases(2, check_build, CASES)
