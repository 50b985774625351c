"""Assessments as ``distembed plan`` makes them, invented: every number is one that no other place holds."""

import dataclasses
import random
from typing import Any

from torchrec.distributed.types import ShardingPlan

from distembed.optim.table_storage import TableStorage
from distembed.planning.devices import Cluster, find_device
from distembed.planning.networks import NetworkEstimate
from distembed.planning.request import Workload
from distembed.planning.saved_plan import PlanInputs
from distembed.planning.storage import PlannedRank, SentBytes, StepTime
from distembed.reports.plan.assessment import AssessedTable, Assessment
from distembed.reports.plan.remedies import Remedies
from distembed.reports.plan.report import CapacityReport

GIB, MIB = 2**30, 2**20
CAPACITY, ALLOCATOR = 81_559 * MIB, 4 * GIB
ONE_COPY = {"weights": 5 * GIB, "optimizer_state": 3 * GIB, "gradients": GIB}


def plan_assessment(
    nodes: int = 1, gpus: int = 2, num_tables: int = 4, host_memory: bool = False, seed: int = 0
) -> Assessment:
    """A plan that fits; one copy of its tables has 5 GiB of weights, 3 of optimizer state and 1 of gradients."""
    draw = random.Random(seed)
    ranks = [_rank(rank, draw, host_memory) for rank in range(nodes * gpus)]
    tables = [_table(f"C{i + 1}", nodes * gpus, draw) for i in range(num_tables - 1)]
    rest = TableStorage(*(size - sum(getattr(own.one_copy, item) for own in tables) for item, size in ONE_COPY.items()))
    tables.append(_table(f"C{num_tables}", nodes * gpus, draw, rest))
    found = Assessment(
        cluster=Cluster(find_device("h100-80gb"), nodes, gpus, 200 * GIB * gpus if host_memory else 0),
        workload=Workload(65_536, network=NetworkEstimate(parameters=GIB, peak=14 * GIB)),
        reserve=ALLOCATOR / CAPACITY,
        tables=tuple(tables),
        ranks=tuple(ranks),
        plan=ShardingPlan({}),
        planner_error="",
        plan_inputs=PlanInputs(nodes * gpus, gpus, "cuda", 65_536, {}, "adagrad", "adam", {}),
    )
    if host_memory:
        storage = TableStorage(draw.randrange(MIB, GIB), 0, 0, 2 * GIB, 10 * GIB, GIB)
        found = with_table(found, -1, storage=storage, compute_kernel="fused_uvm_caching")
    return found


def without_plan(found: Assessment, planner_error: str = "no room for a shard\nproposal 1\n") -> CapacityReport:
    """The same, where the planner found none, with remedies; 6 GiB of all ranks are left for tables."""
    peak = CAPACITY - GIB - ALLOCATOR - 6 * GIB // found.cluster.world_size
    workload = dataclasses.replace(found.workload, network=NetworkEstimate(parameters=GIB, peak=peak))
    tables = tuple(
        dataclasses.replace(table, storage=TableStorage(), sharding_type=None, ranks=(), alternatives=())
        for table in found.tables
    )
    found = dataclasses.replace(
        found, workload=workload, tables=tables, ranks=(), plan=None, planner_error=planner_error
    )
    return CapacityReport(found, Remedies(("--nodes 2", "--gpu b200-180gb")))


def overfull(found: Assessment, rank: int, by: int) -> Assessment:
    """The same with one rank over its capacity by so many bytes, for its activations."""
    own = found.ranks[rank]
    activations = own.memory["activations"] + own.capacity_bytes + by - own.total_bytes
    return with_rank(found, rank, memory={**own.memory, "activations": activations})


def with_rank(found: Assessment, index: int, **changes: Any) -> Assessment:
    """The same with one rank changed."""
    ranks = list(found.ranks)
    ranks[index] = dataclasses.replace(ranks[index], **changes)
    return dataclasses.replace(found, ranks=tuple(ranks))


def with_table(found: Assessment, index: int, **changes: Any) -> Assessment:
    """The same with one table changed."""
    tables = list(found.tables)
    tables[index] = dataclasses.replace(tables[index], **changes)
    return dataclasses.replace(found, tables=tuple(tables))


def with_device(found: Assessment, **changes: Any) -> Assessment:
    """The same for other devices."""
    device = dataclasses.replace(found.cluster.device, **changes)
    return dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, device=device))


def mostly_free(rank: PlannedRank) -> PlannedRank:
    """The same rank with a 99th in use, beside the allocator's reserve."""

    memory = {item: size if item == "allocator" else size // 99 for item, size in rank.memory.items()}
    return dataclasses.replace(rank, memory=memory)


def used_bytes(rank: PlannedRank) -> int:
    """Bytes of a rank beside the allocator's reserve."""
    return sum(num_bytes for item, num_bytes in rank.memory.items() if item != "allocator")


def milliseconds(time: float) -> str:
    """As they are shown: with at least two digits after the point below 100, three below 10."""
    return f"{time:.3f}" if time < 10 else f"{time:.2f}"


def times(rank: PlannedRank) -> list[str]:
    """Of a step, item by item, and their sum."""
    parts = rank.times
    amounts = [parts.lookup, parts.exchange, parts.all_reduce, parts.networks, parts.starts, parts.waiting]
    return list(map(milliseconds, [*amounts, sum(amounts)]))


def with_ranks_alike(found: Assessment, num_kinds: int) -> Assessment:
    """The same with ranks of so many kinds, which take turns."""
    ranks = tuple(
        dataclasses.replace(found.ranks[rank % num_kinds], rank=rank) for rank in range(found.cluster.world_size)
    )
    return dataclasses.replace(found, ranks=ranks)


def _rank(rank: int, draw: random.Random, host_memory: bool) -> PlannedRank:
    def size() -> int:
        return draw.randrange(GIB // 4, 5 * GIB)

    host = (draw.randrange(GIB, 9 * GIB), draw.randrange(GIB, 9 * GIB)) if host_memory else (0, 0)
    items = ("table_weights", "table_optimizer_state", "table_cache", "sse_graphs", "network_weights")
    items += ("network_optimizer_state", "gradients", "inputs", "outputs", "lookups", "activations")
    memory = {item: size() for item in items}
    memory["table_weights"] += 9 * GIB  # so that the rank is not nearly empty
    memory |= {"sse_graphs": 0, "managed_ids": 0, "allocator": ALLOCATOR} | ({} if host_memory else {"table_cache": 0})
    storage = TableStorage(memory["table_weights"], memory["table_optimizer_state"], 0, memory["table_cache"], *host)
    return PlannedRank(
        rank=rank,
        tables={"C1": storage},
        memory=memory,
        moment="output gradients",
        sent=SentBytes(*(draw.randrange(MIB, GIB) for _ in range(4))),
        times=StepTime(**{field.name: draw.uniform(0.1, 9) for field in dataclasses.fields(StepTime)}),
        capacity_bytes=CAPACITY,
        host_capacity_bytes=200 * GIB if host_memory else 0,
    )


def _table(name: str, world_size: int, draw: random.Random, one_copy: TableStorage | None = None) -> AssessedTable:
    if one_copy is None:
        one_copy = TableStorage(*(draw.randrange(MIB, most * MIB) for most in (150, 90, 30)))
    return AssessedTable(
        name=name,
        scheme="quotient_remainder",
        composition="product",
        num_embeddings=1460,
        num_rows=(draw.randrange(100, 99_999), 4),
        ids_per_row=1.0,
        one_copy=one_copy,
        storage=TableStorage(draw.randrange(MIB, GIB)),
        sharding_type="table_wise",
        compute_kernel="fused",
        ranks=(draw.randrange(world_size),),
        columns=((0, 16),),
        why="as TorchRec's planner finds fastest",
    )
