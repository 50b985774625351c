"""What is said of an assessment: columns of its tables, and sentences below them.

The terminal (:mod:`distembed.capacity.terminal`) and the page (:mod:`distembed.capacity.page`) show the same texts.
They are plain: what shows them escapes them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from distembed.capacity.assessment import AssessedRank, AssessedTable, Assessment
from distembed.planning.cluster import Cluster
from distembed.planning.workload import pipeline_depth
from distembed.units import enumerate_names, format_bytes

_MAX_REASON_CHARACTERS = 300

LineT = TypeVar("LineT")


@dataclass(frozen=True)
class MemoryItem:
    """Something that takes memory on a device.

    Attributes:
        name: Name for the reader.
        bytes_on: Returns its bytes on one rank.
        is_rare: Whether it is left out where no rank has any of it.
    """

    name: str
    bytes_on: Callable[[AssessedRank], int]
    is_rare: bool = False


def _network_bytes(rank: AssessedRank) -> int:
    """Returns what the networks and their optimizer keep on a rank."""
    network = rank.memory.network
    return network.parameters + network.buffers + network.optimizer_state


MEMORY_ITEMS = (
    MemoryItem("tables", lambda rank: rank.storage.weights + rank.memory.plain_tables),
    MemoryItem("optimizer", lambda rank: rank.storage.optimizer_state),
    MemoryItem("cache", lambda rank: rank.storage.cache, is_rare=True),
    MemoryItem("SSE graphs", lambda rank: rank.memory.graph_bytes, is_rare=True),
    MemoryItem("networks", _network_bytes),
    MemoryItem("gradients", lambda rank: rank.memory.step.gradients),
    MemoryItem("step buffers", lambda rank: rank.memory.step.inputs + rank.memory.step.outputs),
    MemoryItem("lookups", lambda rank: rank.memory.step.lookups),
    MemoryItem("activations", lambda rank: rank.memory.step.activations),
    MemoryItem("allocator", lambda rank: rank.allocator_bytes),
)
"""Items that add up to a rank's total, in the order in which they are stacked."""


@dataclass(frozen=True)
class PlanColumn(Generic[LineT]):
    """A column of a table that is shown.

    Attributes:
        heading: Text above the column.
        text: Returns the cell of one line.
        is_number: Whether the cells stand to the right.
    """

    heading: str
    text: Callable[[LineT], str]
    is_number: bool = True


def shown_items(assessment: Assessment) -> list[MemoryItem]:
    """Returns the items that are shown, in the order in which they are stacked."""
    return [item for item in MEMORY_ITEMS if not item.is_rare or any(map(item.bytes_on, assessment.ranks))]


def table_columns(assessment: Assessment) -> list[PlanColumn[AssessedTable]]:
    """Returns the columns of the table by table.

    Where there is no plan they say sizes alone; host memory is a column only where some table lies there.
    """
    columns = [
        PlanColumn[AssessedTable]("table", lambda table: table.name, is_number=False),
        PlanColumn[AssessedTable]("scheme", lambda table: table.scheme, is_number=False),
        PlanColumn[AssessedTable]("rows", lambda table: " + ".join(f"{rows:,}" for rows in table.num_rows)),
    ]
    if not assessment.ranks:
        return [*columns, PlanColumn("memory, one copy", lambda table: format_bytes(table.one_copy.total))]
    world_size = assessment.cluster.world_size
    columns += [
        PlanColumn("placed", _sharding_text, is_number=False),
        PlanColumn("ranks", lambda table: _ranks_text(table, world_size), is_number=False),
        PlanColumn("memory, all ranks", lambda table: format_bytes(table.storage.total)),
    ]
    if any(map(is_in_host_memory, assessment.tables)):
        columns.append(PlanColumn("host memory", lambda table: _bytes_or_dash(table.storage.host)))
        columns.append(PlanColumn("cache", lambda table: _bytes_or_dash(table.storage.cache)))
    return [*columns, PlanColumn("why", _reason, is_number=False)]


def step_columns(assessment: Assessment) -> list[PlanColumn[AssessedRank]]:
    """Returns the columns of the table by rank that stand beside its items.

    Host memory is a column only where some table lies there.
    """
    columns = [
        PlanColumn[AssessedRank]("ms a step", lambda rank: _format_milliseconds(rank.times.total)),
        PlanColumn[AssessedRank]("sent a step", lambda rank: format_bytes(_sent_bytes(rank))),
    ]
    if any(rank.storage.host for rank in assessment.ranks):
        columns.insert(0, PlanColumn("host memory", lambda rank: _bytes_or_dash(rank.storage.host)))
    return columns


def is_in_host_memory(table: AssessedTable) -> bool:
    """Returns whether a table, or part of it, lies in host memory beside a device."""
    return table.storage.host > 0


def shown_ranks(assessment: Assessment, max_ranks: int) -> tuple[list[AssessedRank], str]:
    """Returns the ranks to show, and what to say of those that are left out.

    All ranks are shown by their number where they are not too many; else the fullest and the emptiest, from the fullest
    to the emptiest.
    """
    ranks = list(assessment.ranks)
    if len(ranks) <= max_ranks:
        return ranks, ""
    ranks.sort(key=lambda rank: -rank.total_bytes)
    num_left_out = len(ranks) - max_ranks
    text = f"the fullest and the emptiest; {num_left_out:,} ranks between them are left out"
    return ranks[: max_ranks - max_ranks // 2] + ranks[-(max_ranks // 2) :], text


def verdict(assessment: Assessment) -> str:
    """Returns such as ``fits: 1 x 8 h100-80gb (79.65 GiB a rank)``."""
    memory = f"({format_bytes(assessment.cluster.rank_bytes)} a rank)"
    return f"{'fits' if assessment.fits else 'does not fit'}: {cluster_text(assessment.cluster)} {memory}"


def cluster_text(cluster: Cluster) -> str:
    """Returns such as ``1 x 8 h100-80gb``."""
    return f"{cluster.nodes} x {cluster.ranks_per_node} {cluster.device.name}"


def step_lines(assessment: Assessment) -> list[str]:
    """Returns the fullest rank, the slowest rank, and what a step is taken to be; [] where there is no plan."""
    if not assessment.ranks:
        return []
    fullest = max(assessment.ranks, key=lambda rank: rank.total_bytes)
    slowest = max(assessment.ranks, key=lambda rank: rank.times.total)
    parts = dataclasses.asdict(slowest.times)
    times = ", ".join(f"{name.replace('_', '-')} {_format_milliseconds(part)}" for name, part in parts.items())
    cluster = assessment.cluster
    depth = pipeline_depth(cluster.device.kind, cluster.world_size)
    return [
        f"fullest: rank {fullest.rank}, {format_bytes(fullest.total_bytes)} of {format_bytes(fullest.capacity_bytes)}; "
        f"fullest moment of its step: {fullest.memory.step.moment}",
        f"slowest: rank {slowest.rank}, {_format_milliseconds(slowest.times.total)} ms a step ({times})",
        f"a step has {assessment.workload.batch_size:,} rows on all ranks, and {depth} batch(es) are on a "
        "device at once; times are estimates, without what starting kernels takes",
    ]


def host_lines(assessment: Assessment) -> list[str]:
    """Returns which tables lie in host memory, with their bytes there; [] where none does."""
    tables = list(filter(is_in_host_memory, assessment.tables))
    if not tables:
        return []
    host_bytes = sum(table.storage.host for table in tables)
    cache_bytes = sum(table.storage.cache for table in tables)
    cache = f"{format_bytes(cache_bytes)} of" if cache_bytes else "no"
    names = enumerate_names([table.name for table in tables])
    return [f"in host memory: {names}: {format_bytes(host_bytes)}, with {cache} cache on the devices"]


def reason_lines(assessment: Assessment) -> list[str]:
    """Returns a line for each reason why tables are placed as they are, with their names."""
    names_by_reason: dict[str, list[str]] = {}
    for table in assessment.tables:
        if reason := _reason(table):
            names_by_reason.setdefault(reason, []).append(table.name)
    num_tables = len(assessment.tables)
    return [
        f"why ({'all tables' if len(names) == num_tables else enumerate_names(names)}): {reason}"
        for reason, names in names_by_reason.items()
    ]


def shortage_lines(assessment: Assessment) -> list[str]:
    """Returns what is short, in bytes, and what the planner says; [] where the config fits."""
    if assessment.fits:
        return []
    if sum(assessment.bytes_beside_tables.values()) > assessment.cluster.rank_bytes:
        # then tables have no part in it, whatever the planner says
        return [_shortage_without_tables(assessment)]
    reason = assessment.planner_error.strip()
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason.splitlines()[0]
    planner = [f"the planner: {' '.join(reason.split())}"] if reason else []
    return [_table_demand(assessment), *_overfull_ranks(assessment), *planner]


def _shortage_without_tables(assessment: Assessment) -> str:
    """Returns by how much each rank lacks memory before it has any tables."""
    beside, capacity = sum(assessment.bytes_beside_tables.values()), assessment.cluster.rank_bytes
    return (
        f"without any tables each rank needs {format_bytes(beside)}, {format_bytes(beside - capacity)} more "
        f"than it has: {_items_beside_tables(assessment)}"
    )


def _items_beside_tables(assessment: Assessment) -> str:
    """Returns what each rank needs beside tables, item by item, the largest first."""
    items = sorted(assessment.bytes_beside_tables.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(count)}" for name, count in items if count)


def _table_demand(assessment: Assessment) -> str:
    """Returns what all tables take, and what is left for them."""
    world_size, left = assessment.cluster.world_size, assessment.bytes_left_for_tables
    largest = max(assessment.tables, key=lambda table: table.one_copy.total)
    host_bytes = assessment.cluster.host_bytes_per_rank * world_size
    host = f", and {format_bytes(host_bytes)} of host memory" if host_bytes else ""
    needed = assessment.one_copy
    return (
        f"tables with their optimizer take {format_bytes(needed.total + needed.host)}, the largest ({largest.name}) "
        f"{format_bytes(largest.one_copy.total)}; {format_bytes(left)} are left for them on {world_size} rank(s)"
        f"{host}, beside on each: {_items_beside_tables(assessment)}; what a step looks up and exchanges comes on top"
    )


def _overfull_ranks(assessment: Assessment) -> list[str]:
    """Returns a line for the memory of devices, and one for host memory, where some rank has too little of it."""
    lines = []
    over = [rank for rank in assessment.ranks if rank.total_bytes > rank.capacity_bytes]
    if over:
        fullest = max(over, key=lambda rank: rank.total_bytes - rank.capacity_bytes)
        items = sorted(shown_items(assessment), key=lambda item: -item.bytes_on(fullest))[:3]
        largest = ", ".join(f"{item.name} {format_bytes(item.bytes_on(fullest))}" for item in items)
        shortage = _shortage(fullest, fullest.total_bytes, fullest.capacity_bytes, "memory", len(over) - 1)
        lines.append(f"{shortage}; most: {largest}")
    over = [rank for rank in assessment.ranks if rank.storage.host > rank.host_capacity_bytes]
    if over:
        fullest = max(over, key=lambda rank: rank.storage.host - rank.host_capacity_bytes)
        used, capacity = fullest.storage.host, fullest.host_capacity_bytes
        lines.append(_shortage(fullest, used, capacity, "host memory", len(over) - 1))
    return lines


def _shortage(rank: AssessedRank, used_bytes: int, capacity_bytes: int, memory: str, num_others: int) -> str:
    """Returns by how much a rank lacks a kind of memory, and how many others do."""
    others = f" (and {num_others:,} other rank(s) by less or as much)" if num_others else ""
    return (
        f"rank {rank.rank} needs {format_bytes(used_bytes)} of {memory}, {format_bytes(used_bytes - capacity_bytes)} "
        f"more than the {format_bytes(capacity_bytes)} it has{others}"
    )


def _sharding_text(table: AssessedTable) -> str:
    """Returns the sharding type, with the kernel where that is not the usual one."""
    placement = table.placement
    if placement is None:
        return ""
    kernel = "" if placement.compute_kernel == "fused" else f" ({placement.compute_kernel})"
    return f"{placement.sharding_type}{kernel}"


def _ranks_text(table: AssessedTable, world_size: int) -> str:
    """Returns the ranks that hold a table, or how many they are."""
    ranks = sorted(set(table.placement.ranks)) if table.placement is not None else []
    if not ranks:
        return "all"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks):,} of {world_size:,}"


def _reason(table: AssessedTable) -> str:
    """Returns why a table is placed as it is; empty where there is no plan."""
    return "" if table.placement is None else table.placement.reason


def _sent_bytes(rank: AssessedRank) -> int:
    """Returns what a rank sends to others in a step."""
    return sum(dataclasses.astuple(rank.memory.sent))


def _format_milliseconds(milliseconds: float) -> str:
    """Returns the number with at least three digits."""
    return f"{milliseconds:,.{1 if milliseconds >= 100 else 2 if milliseconds >= 10 else 3}f}"


def _bytes_or_dash(num_bytes: int) -> str:
    """Returns a size, and a dash for none."""
    return format_bytes(num_bytes) if num_bytes else "-"
