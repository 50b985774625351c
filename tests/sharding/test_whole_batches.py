"""Batches that are not whole: refused by the sharded modules on each rank, before anything is communicated."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from tests.embedding.test_batches import BAD_BATCHES
from tests.ranks import run_on_ranks

NAMES = ["f", "g"]


def bags(is_weighted: bool) -> nn.Module:
    tables = [CompositionalEmbeddingBagConfig(name, 10, 4, [name], pooling="mean") for name in NAMES]
    return CompositionalEmbeddingBagCollection(tables, device="meta", is_weighted=is_weighted)


def sequences() -> nn.Module:
    tables = [CompositionalEmbeddingConfig(name, 10, 4, [name], "quotient_remainder") for name in NAMES]
    return CompositionalEmbeddingCollection(tables, device="meta")


def shard(module: nn.Module, placed: Any) -> nn.Module:
    """The sharded module, with its first table placed so and the second table-wise; all ranks call it."""
    fused = EmbeddingComputeKernel.FUSED.value
    makers = {"f": placed, "g": table_wise(rank=1, compute_kernel=fused)}
    is_pooled = isinstance(module, CompositionalEmbeddingBagCollection)
    sharder: Any = (
        CompositionalEmbeddingBagCollectionSharder() if is_pooled else CompositionalEmbeddingCollectionSharder()
    )
    plan = construct_module_sharding_plan(module, makers, sharder, dist.get_world_size(), dist.get_world_size(), "cpu")
    model = DistributedModelParallel(
        nn.ModuleDict({"embeddings": module}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
    )
    return model.module["embeddings"] if isinstance(model.module, nn.ModuleDict) else model.module.module["embeddings"]


def check_refusals(rank: int, world_size: int) -> None:
    fused = EmbeddingComputeKernel.FUSED.value
    for placed in (table_wise(rank=0, compute_kernel=fused), row_wise(compute_kernel=fused), data_parallel()):
        for module in (bags(False), bags(True), sequences()):
            check_module(shard(module, placed), getattr(module, "_is_weighted", False))


def check_module(module: nn.Module, is_weighted: bool) -> None:
    """Each batch is refused, whether it is the first one or not, and the ranks are in step behind it."""
    whole = KeyedJaggedTensor(NAMES, torch.tensor([1, 2]), weights=torch.ones(2), lengths=torch.ones(2).int())
    for name, (make, message) in BAD_BATCHES.items():
        batch = make()
        if is_weighted and batch.weights_or_none() is None:
            batch._weights = torch.ones(batch.values().shape)
        with pytest.raises(UserError, match=message):
            pytest.fail(f"{name}: {module(batch)}")
        output = module(whole)
        vectors = output.values() if hasattr(output, "to_dict") else torch.cat([o.values() for o in output.values()])
        assert vectors.any()


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_batch_that_is_not_whole_is_refused_on_each_rank() -> None:
    run_on_ranks(2, check_refusals)
