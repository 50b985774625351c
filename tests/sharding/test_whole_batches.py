"""Batches that are not whole: refused by the sharded modules on each rank, before anything is communicated."""

import pytest
import torch
from torch import nn
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
from tests.placing import shard_as
from tests.ranks import run_on_ranks

NAMES = ["f", "g"]


def bags(is_weighted: bool) -> nn.Module:
    tables = [CompositionalEmbeddingBagConfig(name, 10, 4, [name], pooling="mean") for name in NAMES]
    return CompositionalEmbeddingBagCollection(tables, device="meta", is_weighted=is_weighted)


def sequences() -> nn.Module:
    tables = [CompositionalEmbeddingConfig(name, 10, 4, [name], "quotient_remainder") for name in NAMES]
    return CompositionalEmbeddingCollection(tables, device="meta")


def shard(module: nn.Module, kind: str) -> nn.Module:
    """The sharded module, with its first table placed so and the second table-wise; all ranks call it."""
    sharders = [CompositionalEmbeddingBagCollectionSharder(), CompositionalEmbeddingCollectionSharder()]
    model = shard_as(nn.ModuleDict({"embeddings": module}), sharders, {"f": kind, "g": "table_wise"})
    return model.module["embeddings"] if isinstance(model.module, nn.ModuleDict) else model.module.module["embeddings"]


def check_refusals(rank: int, world_size: int) -> None:
    for kind in ("table_wise", "row_wise", "data_parallel"):
        for module in (bags(False), bags(True), sequences()):
            check_module(shard(module, kind), getattr(module, "_is_weighted", False))


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
