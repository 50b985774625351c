"""Where each table goes: TorchRec's planner, told the memory that this machine really has.

Left to itself TorchRec's ``Topology`` takes 32 GB of device and 128 GB of host memory for granted.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.errors import RunError, UserError
from distembed.names import one_of
from distembed.planning.config import PlanConfig, TablePlanConfig
from distembed.sharding.placement import can_be_placed, width

RESERVED_SHARE = 0.15
"""Share of the memory left to the networks, activations and buffers."""
_MIN_PARTITION = 128
"""TorchRec's."""
_FIRST = ("table_wise", "column_wise")
_WHERE_IT_DOES_NOT_FIT = (*_FIRST, "row_wise")


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
            answer = [find_plan(model, sharders, topology, batch_size, config, fused)]
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
) -> ShardingPlan:
    """Plans for any devices, without them and without other ranks; arguments as those of :func:`make_plan`.

    Raises:
        RunError: where the tables do not fit.
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """
    config = config if config is not None else PlanConfig()
    tables = [
        table for module in model.modules() if isinstance(module, CompositionalTables) for table in module.tables()
    ]
    attempts = [
        _constraints(tables, config, default)
        for default in ((_FIRST,) if topology.world_size == 1 else (_FIRST, _WHERE_IT_DOES_NOT_FIT))
    ]
    plan = _first_that_fits(model, sharders, topology, max(1, batch_size), attempts)
    if isinstance(plan, Exception):
        raise _explained(plan, topology.world_size) from plan
    if not fused:
        for module_plan in plan.plan.values():
            for sharding in module_plan.values():
                sharding.compute_kernel = "dense"
    return plan


def _first_that_fits(
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    batch_size: int,
    attempts: Sequence[dict[str, ParameterConstraints]],
) -> ShardingPlan | Exception:
    """A plan, or why there is none."""
    failure: Exception = RunError("there is nothing to plan")
    for constraints in attempts:
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(RESERVED_SHARE),
        )
        try:
            return planner.plan(model, sharders)
        except Exception as error:
            failure = error
    return failure


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


def _constraints(
    tables: Sequence[CompositionalEmbeddingConfig], config: PlanConfig, default: Sequence[str]
) -> dict[str, ParameterConstraints]:
    """What the planner may do with each table."""
    names = [table.name for table in tables]
    for name in config.tables:
        one_of("plan.tables", name, names)
    constraints = {}
    for table in tables:
        own = config.tables.get(table.name, TablePlanConfig())
        min_partition = own.min_partition or config.min_partition
        allowed: Sequence[str] | None = own.sharding_types or config.sharding_types
        if allowed is None:
            # where all columns are one range, column-wise is table-wise by another name
            is_one_range = width(table) <= (min_partition or _MIN_PARTITION)
            allowed = [kind for kind in default if not (is_one_range and kind == "column_wise")]
        possible = [kind for kind in allowed if can_be_placed(table, kind)]
        if not possible:
            raise UserError(
                f"plan: table {table.name!r} may only be placed {', '.join(allowed)}, but it cannot be: a "
                "path needs all columns on one rank, a maximum all ids of a bag, and FBGEMM vectors of a multiple of 4 "
                f"numbers. Allow table_wise or data_parallel in plan.tables.{table.name}.sharding_types."
            )
        constraints[table.name] = ParameterConstraints(sharding_types=possible, min_partition=min_partition)
    return constraints


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
