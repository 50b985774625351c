"""Where each table goes: TorchRec's planner, told the memory that this machine really has.

Left to itself TorchRec's ``Topology`` takes 32 GB of device and 128 GB of host memory for granted.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.errors import RunError

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
) -> ShardingPlan:
    """Plans on rank 0 and gives every rank the same plan; all ranks call it.

    Args:
        model: holds the tables, on the meta device.
        sharders: of the modules to place.
        device: of this rank.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        batch_size: rows of a step on one rank.

    Raises:
        RunError: where the tables do not fit.
    """
    topology = Topology(
        world_size=world_size,
        compute_device=device.type,
        local_world_size=local_world_size,
        hbm_cap=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        ddr_cap=host_memory_bytes() // local_world_size,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=max(1, batch_size),
        storage_reservation=FixedPercentageStorageReservation(RESERVED_SHARE),
    )
    assert dist.group.WORLD is not None
    try:
        return planner.collective_plan(model, sharders, dist.group.WORLD)
    except PlannerError as error:
        raise RunError(
            f"The embedding tables do not fit in the memory of {world_size} rank(s): {error}\n"
            "Raise embedding.default.collisions, lower embedding.default.embedding_dim, or use more ranks."
        ) from error


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([physical, *[int(text) for text in texts if text.isdigit()]])


def plan_as_json(plan: ShardingPlan) -> dict[str, dict[str, Any]]:
    """``{module: {table: {sharding_type, compute_kernel, ranks}}}``."""
    return {
        path: {
            table: {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": list(sharding.ranks or []),
            }
            for table, sharding in module_plan.items()
        }
        for path, module_plan in plan.plan.items()
    }
