"""Where each table goes: TorchRec's planner, told the memory that this machine really has.

Left to itself TorchRec's ``Topology`` takes 32 GB of device and 128 GB of host memory for granted.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.errors import RunError, UserError
from distembed.planning.config import PlanConfig
from distembed.planning.estimator import TableOptimizers
from distembed.planning.search import Search

RESERVED_SHARE = 0.15
"""Share of the memory left to the networks, activations and buffers."""


def make_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    *,
    device: torch.device,
    world_size: int,
    local_world_size: int,
    batch_size: int,
    config: PlanConfig | None = None,
    fused: bool = True,
    sparse_optimizer: str = "row_wise_adagrad",
    dense_optimizer: str = "adagrad",
) -> ShardingPlan:
    """Plans on rank 0 and gives every rank the same plan; all ranks call it.

    Args:
        model: holds the tables, on the meta device.
        sharders: of the modules to place.
        device: of this rank.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        batch_size: rows of a step on one rank.
        config: how tables may be placed.
        fused: whether the tables' optimizer is fused; else they have dense kernels.
        sparse_optimizer: name of the one that trains vectors, whose state takes memory too.
        dense_optimizer: name of the one that trains functions of path-based tables.

    Raises:
        RunError: where the tables do not fit.
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()
    topology = topology_of(device.type, memory, world_size, local_world_size)
    # rank 0 plans, and tells the others of a failure too, which would else wait for a plan for ever
    answer: list[ShardingPlan | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [
                find_plan(
                    model,
                    sharders,
                    topology,
                    batch_size,
                    config,
                    fused,
                    sparse_optimizer=sparse_optimizer,
                    dense_optimizer=dense_optimizer,
                )
            ]
        except (RunError, UserError) as error:
            answer = [error]
    if world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    (plan,) = answer
    if isinstance(plan, Exception):
        raise plan
    assert plan is not None
    return plan


def topology_of(kind: str, memory_bytes: int, world_size: int, local_world_size: int) -> Topology:
    """The devices to plan for.

    Args:
        kind: ``cuda`` or ``cpu``.
        memory_bytes: of a CUDA device; on the CPU of a machine, which its ranks share.
        world_size: number of ranks.
        local_world_size: number of ranks on a machine.
    """
    return Topology(
        world_size=world_size,
        compute_device=kind,
        local_world_size=local_world_size,
        hbm_cap=memory_bytes if kind == "cuda" else 0,
        ddr_cap=(host_memory_bytes() if kind == "cuda" else memory_bytes) // local_world_size,
    )


def find_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    batch_size: int,
    config: PlanConfig | None = None,
    fused: bool = True,
    *,
    sparse_optimizer: str = "row_wise_adagrad",
    dense_optimizer: str = "adagrad",
) -> ShardingPlan:
    """Plans for any devices, without them and without other ranks; arguments as those of :func:`make_plan`.

    Raises:
        RunError: where the tables do not fit.
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """
    config = config if config is not None else PlanConfig()
    optimizers = TableOptimizers(sparse_optimizer, dense_optimizer, fused)
    plan = Search(model, sharders, topology, max(1, batch_size), config, optimizers, RESERVED_SHARE).best()
    if isinstance(plan, Exception):
        raise _explained(plan, topology.world_size) from plan
    if not fused:
        for module_plan in plan.plan.values():
            for sharding in module_plan.values():
                sharding.compute_kernel = "dense"
    return plan


def _explained(failure: Exception, world_size: int) -> RunError:
    """What became of planning, with the remedy."""
    if isinstance(failure, PlannerError) and failure.error_type == PlannerErrorType.INSUFFICIENT_STORAGE:
        return RunError(
            f"The embedding tables do not fit in the memory of {world_size} rank(s): {failure}\n"
            "Raise embedding.default.collisions, lower embedding.default.embedding_dim, or use more ranks."
        )
    return RunError(
        f"TorchRec's planner finds no plan: {type(failure).__name__}: {failure}\n"
        "Allow more sharding types or a smaller min_partition under plan, or leave it out."
    )


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([physical, *[int(text) for text in texts if text.isdigit()]])


def plan_as_json(plan: ShardingPlan) -> dict[str, dict[str, Any]]:
    """``{module: {table: {sharding_type, compute_kernel, ranks, shards}}}``.

    A shard is ``{rank, offset, size}``, rows and columns of the table as one unit.
    """
    return {
        path: {
            table: {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": list(sharding.ranks or []),
                "shards": [
                    {"rank": shard.placement.rank(), "offset": shard.shard_offsets, "size": shard.shard_sizes}
                    for shard in (sharding.sharding_spec.shards if sharding.sharding_spec is not None else [])
                ],
            }
            for table, sharding in module_plan.items()
        }
        for path, module_plan in plan.plan.items()
    }


def describe_plan(plan: ShardingPlan) -> str:
    """One line: how many tables are placed in each way, and how many shards each rank has."""
    shardings = [sharding for module_plan in plan.plan.values() for sharding in module_plan.values()]
    kinds = Counter(sharding.sharding_type for sharding in shardings)
    ranks = Counter(rank for sharding in shardings for rank in sharding.ranks or [])
    tables = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{tables}; shards by rank: {', '.join(f'{rank}: {ranks[rank]}' for rank in sorted(ranks))}"
