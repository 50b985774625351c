"""Where each table goes: TorchRec's planner, told the memory that a cluster really has, and what a step takes of it.

Left to itself TorchRec's ``Topology`` takes 32 GB of device and 128 GB of host memory for granted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from distembed.embedding.tables import CompositionalTables
from distembed.errors import RunError, UserError
from distembed.host_memory import host_memory_bytes
from distembed.optim.declared import TableOptimizers, declared_optimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.cluster import Cluster
from distembed.planning.config import PlanConfig
from distembed.planning.devices import device_here
from distembed.planning.estimator import tables_of
from distembed.planning.memory import RankMemory, rank_memories
from distembed.planning.search import Found, Search
from distembed.planning.storage import DEFAULT_CACHE_RATIO, IN_HOST_MEMORY, function_storage
from distembed.planning.times import StepTime, step_times
from distembed.planning.workload import Workload
from distembed.sharding.placement import Placement, place

_UNKNOWN_NETWORKS = 0.1
"""Share of the memory left to networks and activations of which nothing is known."""
_TRIES = 3


@dataclass(frozen=True)
class Planned:
    """A plan, what each rank holds under it, and how long it takes.

    Attributes:
        plan: for TorchRec.
        why: each table is placed so.
        memory: of each rank.
        times: of each rank.
        excess: bytes that the fullest rank lacks beside what is kept free; negative where it has room.
        host_excess: the same of its share of the machine's memory, beside a CUDA device.
    """

    plan: ShardingPlan
    why: Mapping[str, str]
    memory: list[RankMemory]
    times: list[StepTime]
    excess: int
    host_excess: int

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.excess <= 0 and self.host_excess <= 0


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
            planned = find_plan(model, sharders, cluster, workload, config, optimizers)
            answer = [planned.plan if planned.fits else _too_full(planned)]
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
    reserved, first = _beside_tables(workload, cluster.world_size, capacity), None
    for _ in range(_TRIES):
        found = Search(model, sharders, cluster, workload, config, optimizers, share, reserved).best()
        if isinstance(found.answer, Exception):
            if first is None:
                raise _explained(found.answer, cluster.world_size) from found.answer
            break
        planned = _measured(model, sharders, found, cluster, workload, optimizers, capacity)
        if planned.excess <= 0:
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
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    found: Found,
    cluster: Cluster,
    workload: Workload,
    optimizers: TableOptimizers,
    capacity: int,
) -> Planned:
    plan, world_size = found.answer, cluster.world_size
    assert isinstance(plan, ShardingPlan)
    own = {table.name for table in tables_of(model)}
    if not optimizers.is_fused:
        for module_plan in plan.plan.values():
            for name in module_plan.keys() & own:
                module_plan[name].compute_kernel = "dense"
    placements = placements_of(model, plan, world_size)
    memory = rank_memories(
        placements,
        world_size,
        workload,
        optimizers,
        cluster.device.kind,
        plain_tables=_counted_bytes([option for option in found.options if option.name not in own], world_size),
        cache_ratio=_cache_ratio(sharders),
    )
    times = step_times(found.options, [rank.sent for rank in memory], workload, cluster.device, cluster.gpus)
    why = {
        placement.table.name: found.why[placement.table.name] + _in_host_memory(placement) for placement in placements
    }
    excess = max(rank.total for rank in memory) - capacity
    return Planned(plan, why, memory, times, excess, max(rank.host for rank in memory) - cluster.host_bytes)


def _cache_ratio(sharders: list[ModuleSharder[Any]]) -> float:
    """Slots of a cache to rows of its table, as the sharder says."""
    of_sharders = [(getattr(sharder, "fused_params", None) or {}).get("cache_load_factor") for sharder in sharders]
    return next((ratio for ratio in of_sharders if ratio is not None), DEFAULT_CACHE_RATIO)


def _counted_bytes(options: Iterable[ShardingOption], world_size: int) -> list[int]:
    """What the planner counts of each rank's shards."""
    counted = [0] * world_size
    for shard in (shard for option in options for shard in option.shards):
        assert shard.storage is not None and shard.rank is not None
        counted[shard.rank] += shard.storage.hbm or shard.storage.ddr
    return counted


def _in_host_memory(placement: Placement) -> str:
    """What to say of a table that plan.host_memory lets lie there, after why it is placed so."""
    return "; host memory: no device has room" if placement.unit.compute_kernel in IN_HOST_MEMORY else ""


def _beside_tables(workload: Workload, world_size: int, capacity: int) -> int:
    """Bytes of each rank without any tables, where they are not more than it has."""
    kept = workload.kept_bytes(world_size)
    if sum(kept.values()) > capacity:
        items = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in kept.items() if num_bytes)
        raise RunError(
            f"No plan fits: beside tables each rank needs {sum(kept.values()):,} bytes ({items}); it has {capacity:,}. "
            "Lower train.batch_size, or use larger devices."
        )
    return sum(kept.values())


def _beside_shards(planned: Planned, found: Found, model: nn.Module, optimizers: TableOptimizers, capacity: int) -> int:
    """What the ranks that lack room have beside what the planner counts of shards and of functions, at most."""
    counted = _counted_bytes(found.options, len(planned.memory))
    functions = sum(function_storage(table, optimizers.dense).total for table in tables_of(model))
    totals = enumerate(memory.total for memory in planned.memory)
    return max(total - counted[rank] for rank, total in totals if total > capacity) - functions


def _declared(model: nn.Module, sharders: list[ModuleSharder[Any]]) -> TableOptimizers:
    """What the tables say themselves; of several the one that keeps most, so that nothing is forgotten."""
    names = {"sgd", *(name or "sgd" for name in declared_optimizers(model, sharders).values())}
    return TableOptimizers(max(names, key=lambda name: OPTIMIZERS[name].fused_state_bytes(1, 100)))


def _too_full(planned: Planned) -> RunError:
    """What a plan lacks whose tables have room, with the remedy."""
    rank, memory = max(enumerate(planned.memory), key=lambda it: it[1].total)
    largest = sorted(memory.items().items(), key=lambda it: -it[1])[:3]
    items = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in largest)
    short = [f"{planned.excess:,} bytes of memory"] * (planned.excess > 0)
    short += [f"{planned.host_excess:,} bytes of host memory"] * (planned.host_excess > 0)
    return RunError(
        f"A step does not fit: rank {rank} lacks {' and '.join(short)} (most: {items}; in bytes). Lower "
        "train.batch_size, raise embedding.default.collisions, use more ranks, or keep less free with plan.reserve; "
        "`distembed plan` shows each rank."
    )


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
