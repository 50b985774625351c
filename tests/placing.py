"""Places tables in given ways by TorchRec's planner, and shards the model so; all ranks call it together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

Kinds = Mapping[str, str | Sequence[str]]
"""The sharding type of each table, or several that the planner may choose from."""


def plan_as(
    model: nn.Module, sharders: Sequence[Any], kinds: Kinds, min_partition: int | None = 4, **constraints: Any
) -> ShardingPlan:
    """The planner's plan; tables that are divided have at least ``min_partition`` columns a rank."""
    world = dist.get_world_size()
    types = {name: [kind] if isinstance(kind, str) else list(kind) for name, kind in kinds.items()}
    by_table = {
        name: ParameterConstraints(
            sharding_types=own, min_partition=None if own == ["table_wise"] else min_partition, **constraints
        )
        for name, own in types.items()
    }
    topology = Topology(world_size=world, local_world_size=get_local_size(world), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=by_table)
    return planner.collective_plan(model, list(sharders), dist.group.WORLD)


def shard_as(
    model: nn.Module,
    sharders: Sequence[Any],
    kinds: Kinds,
    kernel: str | None = None,
    min_partition: int | None = 4,
    **constraints: Any,
) -> DistributedModelParallel:
    """The sharded model; ``kernel`` takes the place of all compute kernels that were planned."""
    plan = plan_as(model, sharders, kinds, min_partition, **constraints)
    for units in plan.plan.values() if kernel is not None else ():
        for placed in units.values():
            placed.compute_kernel = kernel
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=list(sharders))
