"""Making a plan for the memory that a cluster really has, and for what a training step takes of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.machine import host_memory_bytes
from distembed.base.ranks import Collectives, Ranks
from distembed.optim.declared import TableOptimizers
from distembed.planning.config import PlanConfig
from distembed.planning.devices import Cluster, device_here, find_device
from distembed.planning.request import PlanRequest, Workload
from distembed.planning.search import EstimatedPlan, Search


def make_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    ranks: Ranks,
    workload: Workload | Callable[[], Workload],
    config: PlanConfig | None = None,
    optimizers: TableOptimizers | None = None,
) -> ShardingPlan:
    """Plans on rank 0 and returns the same plan, or raises the same error, on every rank; all ranks call it.

    Args:
        model: Module that holds the collections, on the meta device.
        sharders: TorchRec's sharders of the collections to place.
        ranks: This rank among those that are planned for.
        workload: Rows, ids and networks of a training step, or what finds them out, which rank 0 alone calls.
        config: Ways in which tables may be placed; the default config's unless given.
        optimizers: Optimizers of the compositional tables; what the tables declare unless given.

    Raises:
        InsufficientMemory: The tables, or the step that trains them, do not fit.
        UserError: The config names a table that does not exist or allows no way for one that does, or two tables have
            one name; or its device is none.
    """

    def plan_here() -> ShardingPlan:
        own_config = config or PlanConfig()
        cluster = cluster_here(ranks, own_config.device)
        step = workload if isinstance(workload, Workload) else workload()
        estimated = find_plan(PlanRequest(model, sharders, cluster, step, own_config, optimizers))
        if not estimated.fits:
            raise step_does_not_fit(estimated)
        return estimated.plan

    return Collectives().on_first(plan_here)


def cluster_here(ranks: Ranks, device_name: str | None = None) -> Cluster:
    """Returns the cluster that this process is part of, as if all its machines were like this one.

    A device of the catalogue, or of a device file, that is named computes in the place of each rank's, with the memory
    of the rank's own; without a name the catalogue's that is most like it does.
    """
    host, is_cuda = host_memory_bytes(), ranks.device.type == "cuda"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory if is_cuda else host
    # machines of unequally many ranks are none to TorchRec
    ranks_per_node = ranks.local_world_size if ranks.world_size % ranks.local_world_size == 0 else 1
    own_memory = memory // (1 if is_cuda else ranks.local_world_size // ranks_per_node)
    device = device_here(ranks.device, own_memory)
    if device_name is not None:
        named = find_device(device_name, "plan.device")
        if named.kind != device.kind:
            raise UserError(
                f"plan.device is {device_name!r}, which is a {named.kind} device, and the ranks are on {device.kind}; "
                "name one of their kind, or leave it out."
            )
        device = dataclasses.replace(named, memory_bytes=own_memory)
    return Cluster(device, ranks.world_size // ranks_per_node, ranks_per_node, host)


def find_plan(request: PlanRequest) -> EstimatedPlan:
    """Plans for any cluster, without its devices and without other ranks.

    Where no plan that fits is found, one with few bytes on the fullest rank is returned, which does not fit.

    Raises:
        InsufficientMemory: The tables do not fit, or a rank has no room beside them.
        UserError: The config names a table that does not exist, or allows no way for one that does.
    """
    return Search(request).best()


def require_room(request: PlanRequest) -> None:
    """Raises what :func:`find_plan` does where the bytes that stay from step to step do not fit, without a search."""
    Search(request).require_room()


def step_does_not_fit(estimated: EstimatedPlan) -> InsufficientMemory:
    """Returns the error of a plan whose tables have room and whose step has not, with the remedy."""
    fullest = max(estimated.ranks, key=lambda rank: rank.total_bytes)
    by_size = sorted(fullest.memory.items(), key=lambda item: -item[1])
    items = ", ".join([f"{name} {num_bytes:,}" for name, num_bytes in by_size if name != "allocator"][:3])
    excess, host_excess = map(max, zip(*(rank.excess_bytes for rank in estimated.ranks), strict=True))
    lacking = [f"{excess:,} bytes of memory"] * (excess > 0)
    lacking += [f"{host_excess:,} bytes of host memory"] * (host_excess > 0)
    return InsufficientMemory(
        f"A step does not fit: rank {fullest.rank} lacks {' and '.join(lacking)} (most: {items}; in bytes). Take "
        "fewer rows a step (train.batch_size of a config), compress tables further (embedding.default.collisions), "
        "use more ranks, or keep less free with plan.reserve; `distembed plan` shows each rank."
    )
