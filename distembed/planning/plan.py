"""Where each table goes: TorchRec's planner, told the memory that a cluster really has, and what a step takes of it.

Left to itself TorchRec's ``Topology`` takes 32 GB of device and 128 GB of host memory for granted.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.embedding.tables import CompositionalTables
from distembed.errors import RunError, UserError
from distembed.planning.cluster import Cluster
from distembed.planning.config import PlanConfig
from distembed.planning.devices import device_here
from distembed.planning.estimator import tables_of
from distembed.planning.memory import RankMemory, rank_memories
from distembed.planning.networks import NetworkEstimate
from distembed.planning.optimizer_states import IS_ROW_WISE, TableOptimizers, declared_optimizers
from distembed.planning.search import Found, Search
from distembed.planning.storage import IN_HOST_MEMORY, function_storage
from distembed.planning.times import StepTime, step_times
from distembed.planning.workload import Workload
from distembed.sharding.placement import Placement, place

_UNKNOWN_NETWORKS = 0.1
"""Share of the memory left to networks and activations of which nothing is known."""
_TRIES = 3


@dataclass(frozen=True)
class Planned:
    """A plan and what it takes.

    Attributes:
        plan: for TorchRec.
        why: each table is placed so.
        memory: of each rank.
        times: of each rank.
    """

    plan: ShardingPlan
    why: Mapping[str, str]
    memory: list[RankMemory]
    times: list[StepTime]

    def excess(self, capacity: int) -> int:
        """Bytes that the fullest rank lacks; negative where it has room.

        Args:
            capacity: of a rank, in bytes, without what is kept free.
        """
        return max(memory.total for memory in self.memory) - capacity


def make_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    *,
    device: torch.device,
    world_size: int,
    local_world_size: int,
    workload: Workload,
    config: PlanConfig | None = None,
    optimizers: TableOptimizers | None = None,
) -> ShardingPlan:
    """Plans on rank 0 and gives every rank the same plan; all ranks call it.

    Args:
        model: holds the tables, on the meta device.
        sharders: of the modules to place.
        device: of this rank.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        workload: what a step brings along.
        config: how tables may be placed.
        optimizers: what trains the tables; None for what they declare.

    Raises:
        RunError: where the tables do not fit.
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """
    # rank 0 plans, and tells the others of a failure too, which would else wait for a plan for ever
    answer: list[ShardingPlan | Exception | None] = [None]
    if dist.get_rank() == 0:
        cluster = cluster_here(device, world_size, local_world_size)
        try:
            answer = [find_plan(model, sharders, cluster, workload, config, optimizers).plan]
        except (RunError, UserError) as error:
            answer = [error]
    if world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    (plan,) = answer
    if isinstance(plan, Exception):
        raise plan
    assert plan is not None
    return plan


def cluster_here(device: torch.device, world_size: int, local_world_size: int) -> Cluster:
    """The cluster that this process is part of, as if all machines were like this one."""
    host = host_memory_bytes()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    # machines of unequally many ranks are none to TorchRec
    gpus = local_world_size if world_size % local_world_size == 0 else 1
    own = device_here(device, memory // (1 if device.type == "cuda" else local_world_size // gpus))
    return Cluster(own, world_size // gpus, gpus, host)


def find_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    cluster: Cluster,
    workload: Workload,
    config: PlanConfig | None = None,
    optimizers: TableOptimizers | None = None,
) -> Planned:
    """Plans for any devices, without them and without other ranks; arguments as those of :func:`make_plan`.

    The planner counts buffers of each shard by itself. Where all of a rank's take more than that leaves, it is asked
    again with less memory; where that does not help, its first plan is given, which does not fit.

    Args:
        model: as there.
        sharders: as there.
        cluster: to plan for.
        workload: as there.
        config: as there.
        optimizers: as there.

    Raises:
        RunError: where the tables do not fit.
        UserError: for a table that does not exist, or that cannot be placed in any way that is allowed.
    """
    config = config if config is not None else PlanConfig()
    optimizers = optimizers if optimizers is not None else _declared(model, sharders)
    share = reserved_share(config, workload)
    capacity = cluster.rank_bytes - round(share * cluster.rank_bytes)
    reserved, first = _known_bytes(workload, cluster.world_size), None
    for _ in range(_TRIES):
        found = Search(model, sharders, cluster, workload, config, optimizers, share, reserved).best()
        if isinstance(found.answer, Exception):
            if first is None:
                raise _explained(found.answer, cluster.world_size) from found.answer
            break
        planned = _measured(model, found, cluster, workload, optimizers)
        if planned.excess(capacity) <= 0:
            return planned
        first = first or planned
        reserved = _beside_shards(planned, found, model, optimizers, capacity)
    assert first is not None
    return first


def reserved_share(config: PlanConfig, workload: Workload) -> float:
    """Share of a device's memory that nothing is planned into."""
    return min(config.reserve + (_UNKNOWN_NETWORKS if workload.network is None else 0.0), 1.0)


def placements_of(model: nn.Module, plan: ShardingPlan, world_size: int) -> list[Placement]:
    """Where the parameters of all compositional tables of a model go."""
    modules = {path: module for path, module in model.named_modules() if isinstance(module, CompositionalTables)}
    units: Mapping[str, Any] = plan.plan
    return [
        place(table, units[path][table.name], world_size)
        for path, module in modules.items()
        for table in module.tables()
    ]


def _measured(
    model: nn.Module, found: Found, cluster: Cluster, workload: Workload, optimizers: TableOptimizers
) -> Planned:
    plan = found.answer
    assert isinstance(plan, ShardingPlan)
    if not optimizers.is_fused:
        for module_plan in plan.plan.values():
            for sharding in module_plan.values():
                sharding.compute_kernel = "dense"
    placements = placements_of(model, plan, cluster.world_size)
    memory = rank_memories(placements, cluster.world_size, workload, optimizers, cluster.device.kind)
    times = step_times(found.options, [rank.sent for rank in memory], workload, cluster.device, cluster.gpus)
    why = {
        placement.table.name: found.why[placement.table.name] + _in_host_memory(placement) for placement in placements
    }
    return Planned(plan, why, memory, times)


def _in_host_memory(placement: Placement) -> str:
    """What to say of a table that plan.host_memory lets lie there, after why it is placed so."""
    return "; host memory: no device has room" if placement.unit.compute_kernel in IN_HOST_MEMORY else ""


def _beside_shards(planned: Planned, found: Found, model: nn.Module, optimizers: TableOptimizers, capacity: int) -> int:
    """What the ranks that lack room have beside what the planner counts of shards and of functions, at most."""
    counted = Counter[int]()
    for shard in (shard for option in found.options for shard in option.shards):
        assert shard.storage is not None and shard.rank is not None
        counted[shard.rank] += shard.storage.hbm or shard.storage.ddr
    functions = sum(function_storage(table, optimizers.dense).total for table in tables_of(model))
    totals = enumerate(memory.total for memory in planned.memory)
    return max(total - counted[rank] for rank, total in totals if total > capacity) - functions


def _declared(model: nn.Module, sharders: list[ModuleSharder[Any]]) -> TableOptimizers:
    """What the tables say themselves; of several the one that keeps most, so that nothing is forgotten."""
    names = {"sgd", *(name or "sgd" for name in declared_optimizers(model, sharders).values())}
    return TableOptimizers(max(names, key=lambda name: sum(0.01 if row else 1 for row in IS_ROW_WISE[name].values())))


def _known_bytes(workload: Workload, world_size: int) -> int:
    """What every rank has beside tables and their exchange."""
    network = workload.network or NetworkEstimate()
    gradients = network.gradients if world_size > 1 else 0  # on one rank they are in the peak
    kept = network.parameters + network.buffers + network.optimizer_state
    return kept + gradients + network.peak + sum(workload.graph_bytes.values())


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
