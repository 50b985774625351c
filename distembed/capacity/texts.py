"""Columns of the tables of an assessment, and sentences below them, as the terminal and the page show them.

The texts are plain: a renderer escapes them.
"""

import math
from collections.abc import Callable

from distembed.capacity.assessment import AssessedTable, Assessment
from distembed.capacity.by_rank import (
    PlanColumn,
    RankQuantity,
    bytes_or_dash,
    format_milliseconds,
    memory_by_rank,
    milliseconds_decimals,
    percent_at_most,
)
from distembed.planning.cluster import Cluster
from distembed.planning.other_placements import Alternative
from distembed.planning.planned_rank import SentBytes
from distembed.planning.workload import pipeline_depth
from distembed.units import enumerate_names, format_bytes, format_ranges

ALTERNATIVES_LEGEND = (
    "instead: other placements of a table while all other tables stay, with their differences: milliseconds of the "
    "slowest rank's step, bytes of the fullest rank, bytes that all ranks send in a step"
)
_MAX_LINES, _MAX_REASON_CHARACTERS = 32, 300
_ROUNDING = 1e-9


def table_columns(assessment: Assessment) -> list[PlanColumn[AssessedTable]]:
    """Returns the columns of the table by table.

    Where there is no plan they say sizes alone; host memory is a column only where some table lies there.
    """
    columns = [
        PlanColumn[AssessedTable]("table", lambda table: table.name, is_number=False, least_width=8),
        PlanColumn[AssessedTable]("scheme", lambda table: table.scheme, is_number=False, dispensable=2),
        PlanColumn[AssessedTable]("rows", lambda table: " + ".join(f"{n:,}" for n in table.num_rows), dispensable=3),
    ]
    if not assessment.ranks:
        return [*columns, PlanColumn("memory, one copy", lambda table: format_bytes(table.one_copy.total))]
    world_size = assessment.cluster.world_size
    columns += [
        PlanColumn("placed", _placed_text, is_number=False, least_width=20),
        PlanColumn("ranks", lambda table: _ranks_text(table, world_size), is_number=False, least_width=12),
        PlanColumn("memory, all ranks", lambda table: format_bytes(table.storage.total)),
    ]
    if any(map(is_in_host_memory, assessment.tables)):
        columns.append(PlanColumn("host memory", lambda table: bytes_or_dash(table.storage.host)))
        columns.append(PlanColumn("cache", lambda table: bytes_or_dash(table.storage.cache), dispensable=4))
    columns.append(PlanColumn("why", lambda table: table.why, is_number=False, dispensable=1))
    if any(table.alternatives for table in assessment.tables):
        text = PlanColumn[AssessedTable]("instead", lambda table: alternatives_text(table) or "none", False, 0)
        columns.append(text)
    return columns


def is_in_host_memory(table: AssessedTable) -> bool:
    """Returns whether a table, or part of it, lies in host memory beside a device."""
    return table.storage.host > 0


def verdict(assessment: Assessment) -> str:
    """Returns such as ``fits: 1 x 8 h100-80gb (79.65 GiB a rank)``."""
    sizes = sorted({min(assessment.cluster.bytes_by_rank), assessment.cluster.rank_bytes})
    memory = f"({' to '.join(map(format_bytes, sizes))} a rank)"
    return f"{'fits' if assessment.fits else 'does not fit'}: {cluster_text(assessment.cluster)} {memory}"


def cluster_text(cluster: Cluster) -> str:
    """Returns such as ``1 x 8 h100-80gb``."""
    return f"{cluster.nodes} x {cluster.ranks_per_node} {cluster.device.name}"


def step_lines(assessment: Assessment, memory: RankQuantity, time: RankQuantity) -> list[str]:
    """Returns the fullest rank, the slowest rank, the size of a step, and how near the plan is to the fastest."""
    cluster, fullest = assessment.cluster, memory.most.first
    speed = assessment.rows_per_second
    depth = pipeline_depth(cluster.device.kind, cluster.world_size)
    return [
        f"fullest: {memory.most.sentence_text}, {format_bytes(fullest.total_bytes)} of "
        f"{format_bytes(fullest.capacity_bytes)}; fullest moment of its step: {fullest.moment}",
        _slowest_line(time),
        f"a step has {assessment.workload.batch_size:,} rows on all ranks"
        + ("" if speed is None else f", {speed:,.0f} rows (samples) a second")
        + f", and {depth} batch(es) are on a device at once; times are estimates",
        *_bound_lines(assessment),
    ]


def _slowest_line(time: RankQuantity) -> str:
    """Returns the slowest rank, the parts of its step, the bytes it sends, and how long the others wait for it."""
    slowest = time.most.first
    total, sent = slowest.times.total, slowest.sent
    parts = sorted(((item.amount(slowest), item.name) for item in time.items), reverse=True)
    shown = ", ".join(f"{name} {time.text(amount)}" for amount, name in parts if amount)
    largest, name = parts[0]
    line = f"slowest: {time.most.sentence_text}, {time.text(total)} ms a step"
    line += f", {largest / total:.0%} of it {name} ({shown})" if total else ""
    if sent.total:
        who = "it" if len(time.most.ranks) == 1 else "each"
        line += f"; {who} sends {format_bytes(sent.total)} ({_sent_text(sent)})"
    others = time.sorted_groups[1:]
    waits = sum(len(group.ranks) * (total - group.first.times.total) for group in others)
    wait = format_milliseconds(waits / (sum(len(group.ranks) for group in others) or 1))
    return line if float(wait.replace(",", "")) == 0 else f"{line}; the others wait {wait} ms on average"


def _sent_text(sent: SentBytes) -> str:
    """Returns the bytes that a rank sends, by kind, the most first."""
    kinds = sorted(((num_bytes, kind) for kind, num_bytes in vars(sent).items() if num_bytes), reverse=True)
    return ", ".join(f"{kind.replace('_', '-')} {format_bytes(num_bytes)}" for num_bytes, kind in kinds)


def _bound_lines(assessment: Assessment) -> list[str]:
    """Returns how far the plan is from the fastest one there can be, and whether the search was stopped early.

    Nothing is said where no plan fits, and of the bound where none is known.
    """
    if not assessment.fits:
        return []
    slowest, bound = max(rank.times.total for rank in assessment.ranks), assessment.lower_bound_ms or 0.0
    if 0 < slowest <= bound * (1 + _ROUNDING):
        return ["bound: no plan that fits is faster"]
    lines = []
    if bound > 0:
        scale = 10 ** milliseconds_decimals(bound)
        at_least = format_milliseconds(math.floor(bound * scale) / scale)
        lines.append(
            f"bound: no plan that fits takes less than {at_least} ms; this one is at most "
            f"{percent_at_most(slowest / bound - 1)} above what any plan could reach"
        )
    if not assessment.is_search_complete:
        lines.append("the search was stopped early, after its last allowed try; a faster plan may be there")
    return lines


def alternatives_text(table: AssessedTable) -> str:
    """Returns the other placements of a table with what they would cost, a line each; empty where there are none."""
    return "\n".join(map(_alternative_text, table.alternatives))


def reason_lines(assessment: Assessment) -> list[str]:
    """Returns a line for each reason why tables are placed as they are, with their names."""
    return _lines_by_text(assessment, "why", lambda table: table.why)


def alternative_lines(assessment: Assessment) -> list[str]:
    """Returns a line for all tables whose other placements would cost the same."""
    return _lines_by_text(assessment, "instead", lambda table: alternatives_text(table).replace("\n", "; "))


def _lines_by_text(assessment: Assessment, title: str, text: Callable[[AssessedTable], str]) -> list[str]:
    """Returns such as ``why (C1, C2): whole: fastest``, a line for each text; of too many texts the first ones."""
    names_by_text: dict[str, list[str]] = {}
    for table in assessment.tables:
        if own := text(table):
            names_by_text.setdefault(own, []).append(table.name)
    num_tables = len(assessment.tables)
    lines = [
        f"{title} ({'all tables' if 1 < num_tables == len(names) else enumerate_names(names)}): {shared}"
        for shared, names in names_by_text.items()
    ]
    num_unshown = sum(len(names) for names in list(names_by_text.values())[_MAX_LINES:])
    rest = [f"{title} ({num_unshown:,} more tables): --report and --json say it"] if num_unshown else []
    return lines[:_MAX_LINES] + rest


def _alternative_text(own: Alternative) -> str:
    """Returns such as ``column_wise in 2 shards +0.125 ms, +1.50 MiB, +12.00 MiB sent, does not fit``."""
    shards = f" in {own.num_shards:,} shards" if own.num_shards > 1 else ""
    sent = f", {_signed(own.added_sent_bytes, format_bytes)} sent" if own.added_sent_bytes else ""
    milliseconds = _signed(own.added_milliseconds, format_milliseconds)
    milliseconds = "+0" if float(milliseconds.replace(",", "")) == 0 else milliseconds
    return (
        f"{_sharding_text(own.sharding_type, own.compute_kernel)}{shards} {milliseconds} ms, "
        f"{_signed(own.added_memory_bytes, format_bytes)}{sent}{'' if own.fits else ', does not fit'}"
    )


def _signed(difference: float, text: Callable[[int], str]) -> str:
    """Returns a difference with its sign; plus for none."""
    return f"{'-' if difference < 0 else '+'}{text(abs(difference))}"  # type: ignore[arg-type]


def host_lines(assessment: Assessment) -> list[str]:
    """Returns the tables in host memory, with their bytes there; [] where none lies there."""
    tables = list(filter(is_in_host_memory, assessment.tables))
    if not tables:
        return []
    host_bytes = sum(table.storage.host for table in tables)
    cache_bytes = sum(table.storage.cache for table in tables)
    cache = f"{format_bytes(cache_bytes)} of" if cache_bytes else "no"
    names = enumerate_names([table.name for table in tables])
    return [f"in host memory: {names}: {format_bytes(host_bytes)}, with {cache} cache on the devices"]


def shortage_lines(assessment: Assessment) -> list[str]:
    """Returns what is short, in bytes, and the planner's message; [] where the config fits."""
    if assessment.fits:
        return []
    beside, capacity = assessment.bytes_beside_tables, assessment.cluster.rank_bytes
    by_size = sorted(beside.items(), key=lambda item: -item[1])
    items = ", ".join(f"{name.replace('_', ' ')} {format_bytes(count)}" for name, count in by_size if count)
    if sum(beside.values()) > capacity:
        # then tables have no part in it, whatever the planner says
        needed = sum(beside.values())
        return [
            f"without any tables each rank needs {format_bytes(needed)}, {format_bytes(needed - capacity)} more "
            f"than it has: {items}"
        ]
    reason = assessment.planner_error.strip()
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason.splitlines()[0]
    planner = [f"the planner: {' '.join(reason.split())}"] if reason else []
    return [_table_demand(assessment, items), *_overfull_ranks(assessment), *planner]


def _table_demand(assessment: Assessment, items_beside: str) -> str:
    """Returns the bytes of all tables, and those that are left for them."""
    world_size, left = assessment.cluster.world_size, assessment.bytes_left_for_tables
    largest = max(assessment.tables, key=lambda table: table.one_copy.total)
    host_bytes = assessment.cluster.host_bytes_per_rank * world_size
    host = f", and {format_bytes(host_bytes)} of host memory" if host_bytes else ""
    needed = assessment.one_copy
    return (
        f"tables with their optimizer take {format_bytes(needed.total + needed.host)}, the largest ({largest.name}) "
        f"{format_bytes(largest.one_copy.total)}; {format_bytes(left)} are left for them on {world_size} rank(s)"
        f"{host}, beside on each: {items_beside}; what a step looks up and exchanges comes on top"
    )


def _overfull_ranks(assessment: Assessment) -> list[str]:
    """Returns a line for the memory of devices, and one for host memory, where some rank has too little of it."""
    lines = []
    for number, memory in enumerate(("memory", "host memory")):
        over = [rank for rank in assessment.ranks if rank.excess_bytes[number] > 0]
        if not over:
            continue
        rank = max(over, key=lambda rank: rank.excess_bytes[number])
        used, excess = (rank.total_bytes, rank.storage.host)[number], rank.excess_bytes[number]
        others = f" (and {len(over) - 1:,} other rank(s) by less or as much)" if over[1:] else ""
        line = f"rank {rank.rank} needs {format_bytes(used)} of {memory}, {format_bytes(excess)} more than the "
        line += f"{format_bytes(used - excess)} it has{others}"
        if memory == "memory":
            items = sorted(memory_by_rank(assessment).items, key=lambda item: -item.amount(rank))[:3]
            line += f"; most: {', '.join(f'{own.name} {format_bytes(round(own.amount(rank)))}' for own in items)}"
        lines.append(line)
    return lines


def _sharding_text(sharding_type: str, compute_kernel: str | None) -> str:
    """Returns a sharding type, with the kernel where that is not the usual one; of replicated tables it is torch's."""
    is_usual = compute_kernel == "fused" or sharding_type == "data_parallel"
    return sharding_type if is_usual else f"{sharding_type} ({compute_kernel})"


def _placed_text(table: AssessedTable) -> str:
    """Returns how a table is divided; empty where there is no plan."""
    return "" if table.sharding_type is None else _sharding_text(table.sharding_type, table.compute_kernel)


def _ranks_text(table: AssessedTable, world_size: int) -> str:
    """Returns the ranks that hold a table."""
    ranks = sorted(set(table.ranks))
    return "all" if not ranks or len(ranks) == world_size > 1 else format_ranges(ranks)
