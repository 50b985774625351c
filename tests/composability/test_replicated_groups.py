"""TorchRec's ``DMPCollection`` (2D parallelism: groups of ranks that each hold the whole model, sharded).

It takes CUDA alone. What it does on each rank after it has sharded is asked of models that were sharded on the CPU: it
looks for the kernels whose weights and optimizer state it averages over the groups.
"""

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import DMPCollectionContext, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.composability.test_sharding import CPU, both, make_plan
from tests.ranks import run_on_ranks


def check_device(rank: int, world_size: int) -> None:
    for make, sharder, _ in both():
        model = make("meta")
        plan = make_plan(model, sharder)
        with pytest.raises(AssertionError, match="DMPCollection only supports CUDA or MTIA"):
            DMPCollection(model, CPU, plan, world_size, 1, dist.group.WORLD, sharders=[sharder])


def bytes_of(tensors: list[Tensor]) -> set[tuple[int, int]]:
    """Where each tensor with numbers lies."""
    return {(tensor.data_ptr(), tensor.numel()) for tensor in tensors if tensor.numel()}


def tensors_to_average(model: nn.Module, plan: ShardingPlan) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and optimizer states that ``DMPCollection.sync`` averages."""
    context = DMPCollectionContext(module=None, plan=plan, sharding_group_size=dist.get_world_size())
    groups = DMPCollection.__new__(DMPCollection)
    nn.Module.__init__(groups)
    groups._dmp_wrapped_module = model._dmp_wrapped_module
    groups._group_sharded_modules([context])
    groups._cache_sync_tensors([context])
    found = (context.weights_by_dtype, context.optimizer_tensors_by_dtype)
    return tuple([tensor for own in by_dtype.values() for tensor in own] for by_dtype in found)


def check_tensors(rank: int, world_size: int) -> None:
    for make, sharder, _ in both():
        model = make("meta")
        apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": 0.1})
        plan = make_plan(model, sharder)
        sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
        weights, states = tensors_to_average(sharded, plan)
        state_dict = sharded.state_dict()
        shards = [
            shard.tensor
            for value in state_dict.values()
            if hasattr(value, "local_shards")
            for shard in value.local_shards()
        ]
        assert bytes_of(weights) == bytes_of(shards)
        assert len(states) == len(weights)


@pytest.mark.distributed
def test_it_takes_cuda_alone() -> None:
    run_on_ranks(2, check_device)


@pytest.mark.distributed
def test_all_sharded_weights_are_averaged_over_groups() -> None:
    run_on_ranks(2, check_tensors)
