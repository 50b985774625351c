"""Assessments as ``distembed plan`` makes them, invented: every number is one that no other place holds."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.types import ShardingPlan

from distembed.capacity.assessment import AssessedRank, AssessedTable, Assessment, TablePlacement
from distembed.capacity.remedies import Remedies
from distembed.capacity.report import CapacityReport
from distembed.planning.buffers import SentBytes, StepBuffers
from distembed.planning.cluster import Cluster
from distembed.planning.devices import find_device
from distembed.planning.memory import RankMemory
from distembed.planning.networks import NetworkEstimate
from distembed.planning.plan_inputs import PlanInputs
from distembed.planning.storage import TableStorage
from distembed.planning.times import StepTime
from distembed.planning.workload import Workload

GIB, MIB = 2**30, 2**20
CAPACITY, ALLOCATOR = 81_559 * MIB, 4 * GIB


def plan_assessment(
    nodes: int = 1, gpus: int = 2, num_tables: int = 4, host_memory: bool = False, seed: int = 0
) -> Assessment:
    """A plan that fits; one copy of its tables has 5 GiB of weights, 3 of optimizer state and 1 of gradients."""
    draw = random.Random(seed)
    ranks = [_rank(rank, draw, host_memory) for rank in range(nodes * gpus)]
    tables = [_table(f"C{i + 1}", nodes * gpus, draw) for i in range(num_tables - 1)]
    rest = TableStorage(5 * GIB, 3 * GIB, GIB) - sum((table.one_copy for table in tables), TableStorage())
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
        found = with_placement(found, -1, storage=storage, compute_kernel="fused_uvm_caching")
    return found


def without_plan(found: Assessment, planner_error: str = "no room for a shard\nproposal 1\n") -> CapacityReport:
    """The same, where the planner found none, with remedies; 6 GiB of all ranks are left for tables."""
    peak = CAPACITY - GIB - ALLOCATOR - 6 * GIB // found.cluster.world_size
    workload = dataclasses.replace(found.workload, network=NetworkEstimate(parameters=GIB, peak=peak))
    tables = tuple(dataclasses.replace(table, placement=None) for table in found.tables)
    found = dataclasses.replace(
        found, workload=workload, tables=tables, ranks=(), plan=None, planner_error=planner_error
    )
    return CapacityReport(found, Remedies(("--nodes 2", "--gpu b200-180gb")))


def overfull(found: Assessment, rank: int, by: int) -> Assessment:
    """The same with one rank over its capacity by so many bytes, for its activations."""
    own = found.ranks[rank]
    activations = own.memory.step.activations + own.capacity_bytes + by - own.total_bytes
    step = dataclasses.replace(own.memory.step, activations=activations)
    return with_rank(found, rank, memory=dataclasses.replace(own.memory, step=step))


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


def with_placement(found: Assessment, index: int, **changes: Any) -> Assessment:
    """The same with one table placed in another way."""
    placement = found.tables[index].placement
    assert placement is not None
    return with_table(found, index, placement=dataclasses.replace(placement, **changes))


def with_device(found: Assessment, **changes: Any) -> Assessment:
    """The same for other devices."""
    device = dataclasses.replace(found.cluster.device, **changes)
    return dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, device=device))


def mostly_free(rank: AssessedRank) -> AssessedRank:
    """The same rank with a 99th in use, beside the allocator's reserve."""

    def divided(values: Sequence[int]) -> list[int]:
        return [value // 99 for value in values]

    memory = rank.memory
    moment, *step_buffers = dataclasses.astuple(memory.step)
    network = memory.network
    parameters, buffers, optimizer_state = divided([network.parameters, network.buffers, network.optimizer_state])
    memory = dataclasses.replace(
        memory,
        tables={name: TableStorage(*divided(dataclasses.astuple(own))) for name, own in memory.tables.items()},
        network=NetworkEstimate(parameters, buffers, optimizer_state=optimizer_state),
        step=StepBuffers(moment, *divided(step_buffers)),
    )
    return dataclasses.replace(rank, memory=memory)


def memory_values(rank: AssessedRank) -> dict[str, int]:
    """Bytes of a rank by item, as the JSON has them."""
    return {**rank.memory.items(), "allocator": rank.allocator_bytes}


def sent_bytes(rank: AssessedRank) -> int:
    """Of a step, to other ranks."""
    return sum(vars(rank.memory.sent).values())


def milliseconds(time: float) -> str:
    """As they are shown: with at least two digits after the point below 100, three below 10."""
    return f"{time:.3f}" if time < 10 else f"{time:.2f}"


def times(rank: AssessedRank) -> list[str]:
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


def reason(table: AssessedTable) -> str:
    """Why a table of a plan is placed as it is."""
    assert table.placement is not None
    return table.placement.reason


def _rank(rank: int, draw: random.Random, host_memory: bool) -> AssessedRank:
    def size() -> int:
        return draw.randrange(GIB // 4, 5 * GIB)

    host = (draw.randrange(GIB, 9 * GIB), draw.randrange(GIB, 9 * GIB)) if host_memory else (0, 0)
    memory = RankMemory(
        tables={"C1": TableStorage(size() + size(), size(), 0, size() if host_memory else 0, *host)},
        network=NetworkEstimate(parameters=size(), buffers=size(), optimizer_state=size()),
        graph_bytes=0,
        step=StepBuffers("output gradients", size(), size(), size(), size(), size()),
        sent=SentBytes(*(draw.randrange(MIB, GIB) for _ in range(4))),
    )
    times = StepTime(**{field.name: draw.uniform(0.1, 9) for field in dataclasses.fields(StepTime)})
    return AssessedRank(rank, memory, ALLOCATOR, CAPACITY, 200 * GIB if host_memory else 0, times)


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
        placement=TablePlacement(
            sharding_type="table_wise",
            compute_kernel="fused",
            ranks=(draw.randrange(world_size),),
            columns=((0, 16),),
            storage=TableStorage(draw.randrange(MIB, GIB)),
            reason="as TorchRec's planner finds fastest",
        ),
    )
