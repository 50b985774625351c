"""What is said of an assessment: columns of its tables, and sentences below them.

The terminal (:mod:`distembed.capacity.terminal`) and the page (:mod:`distembed.capacity.page`) show the same texts.
They are plain: what shows them escapes them.
"""

from distembed.capacity.assessment import AssessedRank, AssessedTable, Assessment
from distembed.capacity.memory_by_rank import MemoryByRank
from distembed.capacity.number_texts import bytes_or_dash, format_milliseconds
from distembed.capacity.rank_quantity import PlanColumn
from distembed.capacity.reasons import alternatives_text, reason, sharding_text
from distembed.capacity.time_by_rank import TimeByRank, sent_bytes
from distembed.planning.buffers import SentBytes
from distembed.planning.cluster import Cluster
from distembed.planning.workload import pipeline_depth
from distembed.units import enumerate_names, format_bytes, format_ranges

_MAX_REASON_CHARACTERS = 300


def quantities_by_rank(assessment: Assessment) -> tuple[MemoryByRank, TimeByRank]:
    """Returns what is shown of each rank of an assessment that has a plan."""
    return MemoryByRank(assessment), TimeByRank(assessment)


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
        PlanColumn("placed", _placed_text, is_number=False),
        PlanColumn("ranks", lambda table: _ranks_text(table, world_size), is_number=False),
        PlanColumn("memory, all ranks", lambda table: format_bytes(table.storage.total)),
    ]
    if any(map(is_in_host_memory, assessment.tables)):
        columns.append(PlanColumn("host memory", lambda table: bytes_or_dash(table.storage.host)))
        columns.append(PlanColumn("cache", lambda table: bytes_or_dash(table.storage.cache)))
    columns.append(PlanColumn("why", reason, is_number=False))
    if any(map(alternatives_text, assessment.tables)):
        columns.append(PlanColumn("instead", lambda table: alternatives_text(table) or "none", is_number=False))
    return columns


def is_in_host_memory(table: AssessedTable) -> bool:
    """Returns whether a table, or part of it, lies in host memory beside a device."""
    return table.storage.host > 0


def verdict(assessment: Assessment) -> str:
    """Returns such as ``fits: 1 x 8 h100-80gb (79.65 GiB a rank)``."""
    memory = f"({format_bytes(assessment.cluster.rank_bytes)} a rank)"
    return f"{'fits' if assessment.fits else 'does not fit'}: {cluster_text(assessment.cluster)} {memory}"


def cluster_text(cluster: Cluster) -> str:
    """Returns such as ``1 x 8 h100-80gb``."""
    return f"{cluster.nodes} x {cluster.ranks_per_node} {cluster.device.name}"


def step_lines(memory: MemoryByRank, time: TimeByRank) -> list[str]:
    """Returns the fullest rank, the slowest rank, and what a step is taken to be."""
    cluster, workload = memory.assessment.cluster, memory.assessment.workload
    fullest = memory.most.first
    depth = pipeline_depth(cluster.device.kind, cluster.world_size)
    return [
        f"fullest: {memory.most.sentence_text}, {format_bytes(fullest.total_bytes)} of "
        f"{format_bytes(fullest.capacity_bytes)}; fullest moment of its step: {fullest.memory.step.moment}",
        _slowest_line(time),
        f"a step has {workload.batch_size:,} rows on all ranks, and {depth} batch(es) are on a "
        "device at once; times are estimates",
    ]


def _slowest_line(time: TimeByRank) -> str:
    """Returns the slowest rank, what its step is made of, what it sends, and how long the others wait for it."""
    slowest, total = time.most.first, time.full_bar
    parts = sorted(((item.amount(slowest), item.name) for item in time.items), reverse=True)
    shown = ", ".join(f"{name} {time.text(amount)}" for amount, name in parts if amount)
    largest, name = parts[0]
    line = f"slowest: {time.most.sentence_text}, {time.text(total)} ms a step"
    line += f", {largest / total:.0%} of it {name} ({shown})" if total else ""
    if sent_bytes(slowest):
        who = "it" if len(time.most.ranks) == 1 else "each"
        line += f"; {who} sends {format_bytes(sent_bytes(slowest))} ({_sent_text(slowest.memory.sent)})"
    wait = format_milliseconds(_mean_wait_ms(time))
    return line if float(wait.replace(",", "")) == 0 else f"{line}; the others wait {wait} ms on average"


def _mean_wait_ms(time: TimeByRank) -> float:
    """Returns how long ranks wait for the slowest ones, on average over all but these; 0 where all are alike."""
    others = time.sorted_groups[1:]
    waits = (len(group.ranks) * (time.full_bar - time.total(group.first)) for group in others)
    return sum(waits) / (sum(len(group.ranks) for group in others) or 1)


def _sent_text(sent: SentBytes) -> str:
    """Returns the bytes that a rank sends, by kind, the most first."""
    kinds = sorted(((num_bytes, kind) for kind, num_bytes in vars(sent).items() if num_bytes), reverse=True)
    return ", ".join(f"{kind.replace('_', '-')} {format_bytes(num_bytes)}" for num_bytes, kind in kinds)


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
        memory = MemoryByRank(assessment)
        items = sorted(memory.items, key=lambda item: -item.amount(fullest))[:3]
        largest = ", ".join(f"{item.name} {memory.text(item.amount(fullest))}" for item in items)
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


def _placed_text(table: AssessedTable) -> str:
    """Returns how a table is divided; empty where there is no plan."""
    placement = table.placement
    return "" if placement is None else sharding_text(placement.sharding_type, placement.compute_kernel)


def _ranks_text(table: AssessedTable, world_size: int) -> str:
    """Returns the ranks that hold a table."""
    ranks = sorted(set(table.placement.ranks)) if table.placement is not None else []
    if not ranks:
        return "all"
    return "all" if len(ranks) == world_size > 1 else format_ranges(ranks)
