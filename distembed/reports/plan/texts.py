"""Columns of the tables of an assessment, and sentences below them, as the terminal and the page show them.

The texts are plain: a renderer escapes them.
"""

from collections.abc import Callable

from distembed.base.units import enumerate_names, format_bytes, format_ranges
from distembed.planning.devices import Cluster
from distembed.planning.other_placements import Alternative
from distembed.planning.request import pipeline_depth
from distembed.reports.plan.assessment import AssessedTable, Assessment
from distembed.reports.plan.by_rank import (
    PlanColumn,
    RankGroup,
    RankQuantity,
    bytes_or_dash,
    format_milliseconds,
    group_text,
    memory_by_rank,
    percent_at_most,
)

ALTERNATIVES_LEGEND = (
    "instead: other placements of a table while all other tables stay, with their differences: milliseconds of the "
    "slowest rank's step, bytes of the fullest rank, bytes that all ranks send in a step"
)
_MAX_LINES, _MAX_REASON_CHARACTERS = 32, 300
_ROUNDING, _LEAST_MS = 1e-9, 0.0005  # shorter times are written as 0
_NO_ALTERNATIVES = "none"


def table_columns(assessment: Assessment) -> list[PlanColumn[AssessedTable]]:
    """Returns the columns of the table by table; where there is no plan they say sizes alone."""
    columns = [
        PlanColumn[AssessedTable]("table", lambda table: table.name, is_number=False, least_width=8),
        PlanColumn[AssessedTable]("scheme", lambda table: table.scheme, is_number=False, dispensable=2),
        PlanColumn[AssessedTable]("rows", lambda table: " + ".join(f"{n:,}" for n in table.num_rows), dispensable=3),
    ]
    if not assessment.ranks:
        return [*columns, PlanColumn("memory, one copy", lambda table: format_bytes(table.one_copy.total))]

    def ranks_text(table: AssessedTable) -> str:
        ranks = sorted(set(table.ranks))
        return "all" if not ranks or len(ranks) == assessment.cluster.world_size > 1 else format_ranges(ranks)

    columns += [
        PlanColumn("placed", _sharding_text, is_number=False, least_width=20),
        PlanColumn("ranks", ranks_text, is_number=False, least_width=12),
        PlanColumn("memory, all ranks", lambda table: format_bytes(table.storage.total)),
    ]
    if any(map(is_in_host_memory, assessment.tables)):
        columns.append(PlanColumn("host memory", lambda table: bytes_or_dash(table.storage.host)))
        columns.append(PlanColumn("cache", lambda table: bytes_or_dash(table.storage.cache), dispensable=4))
    columns.append(PlanColumn("why", lambda table: table.why, is_number=False, dispensable=1))
    if any(table.alternatives for table in assessment.tables):
        columns.append(PlanColumn("instead", lambda table: _alternatives_text(table) or _NO_ALTERNATIVES, False, 0))
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
    fullest, speed = memory.sorted_groups[0], assessment.rows_per_second
    depth = pipeline_depth(assessment.cluster.device.kind, assessment.cluster.world_size)
    return [
        f"fullest: {_ranks(fullest)}, {format_bytes(fullest[0].total_bytes)} of "
        f"{format_bytes(fullest[0].capacity_bytes)}; fullest moment of its step: {fullest[0].moment}",
        _slowest_line(time),
        f"a step has {assessment.workload.batch_size:,} rows on all ranks"
        + ("" if speed is None else f", {speed:,.0f} rows (samples) a second")
        + f", and {depth} batch(es) are on a device at once; times are estimates",
        *_bound_lines(assessment),
    ]


def _slowest_line(time: RankQuantity) -> str:
    """Returns the slowest rank, the parts of its step, the bytes it sends, and how long the others wait for it."""
    group, *others = time.sorted_groups
    slowest, num_others = group[0], sum(map(len, others))
    total, sent = slowest.times.total, slowest.sent
    parts = sorted(((item.amount(slowest), item.name) for item in time.items), reverse=True)
    shown = ", ".join(f"{name} {time.text(amount)}" for amount, name in parts if amount)
    largest, name = parts[0]
    line = f"slowest: {_ranks(group)}, {time.text(total)} ms a step"
    line += f", {largest / total:.0%} of it {name} ({shown})" if total else ""
    if sent.total:
        kinds = sorted(((num_bytes, kind) for kind, num_bytes in vars(sent).items() if num_bytes), reverse=True)
        by_kind = ", ".join(f"{kind.replace('_', '-')} {format_bytes(num_bytes)}" for num_bytes, kind in kinds)
        line += f"; {'it' if len(group) == 1 else 'each'} sends {format_bytes(sent.total)} ({by_kind})"
    waits = sum(len(other) * (total - other[0].times.total) for other in others)
    wait = waits / (num_others or 1)
    return line if wait < _LEAST_MS else f"{line}; the others wait {format_milliseconds(wait)} ms on average"


def _ranks(group: RankGroup) -> str:
    """Returns the ranks in a sentence: ``rank 7``, or ``ranks 0-3, 8 (5)``."""
    return f"{'rank' if len(group) == 1 else 'ranks'} {group_text(group)}"


def _bound_lines(assessment: Assessment) -> list[str]:
    """Returns how far a plan that fits is from the fastest one there can be, and whether the search was stopped."""
    if not assessment.fits:
        return []
    slowest, bound = max(rank.times.total for rank in assessment.ranks), assessment.lower_bound_ms or 0.0
    if 0 < slowest <= bound * (1 + _ROUNDING):
        return ["bound: no plan that fits is faster"]
    lines = []
    if bound > 0:
        lines.append(
            f"bound: no plan that fits takes less than {format_milliseconds(bound, is_least=True)} ms; this one is at "
            f"most {percent_at_most(slowest / bound - 1)} above what any plan could reach"
        )
    if not assessment.is_search_complete:
        lines.append("the search was stopped early, after its last allowed try; a faster plan may be there")
    return lines


def lines_by_text(assessment: Assessment, column: PlanColumn[AssessedTable]) -> list[str]:
    """Returns such as ``why (C1, C2): whole: fastest``, a line for each text; of too many texts the first ones."""
    names_by_text: dict[str, list[str]] = {}
    for table in assessment.tables:
        if (own := column.text(table)) not in ("", _NO_ALTERNATIVES):
            names_by_text.setdefault(own.replace("\n", "; "), []).append(table.name)
    num_tables = len(assessment.tables)
    lines = [
        f"{column.heading} ({'all tables' if 1 < num_tables == len(names) else enumerate_names(names)}): {shared}"
        for shared, names in names_by_text.items()
    ]
    num_unshown = sum(len(names) for names in list(names_by_text.values())[_MAX_LINES:])
    rest = [f"{column.heading} ({num_unshown:,} more tables): --report and --json say it"] if num_unshown else []
    return lines[:_MAX_LINES] + rest


def _alternatives_text(table: AssessedTable) -> str:
    """Returns a line for each: ``row_wise in 2 shards +0.125 ms, +1.50 MiB, +12.00 MiB sent, does not fit``."""

    def signed(difference: float, text: Callable[[int], str]) -> str:
        return f"{'-' if difference < 0 else '+'}{text(abs(difference))}"  # type: ignore[arg-type]

    lines = []
    for own in table.alternatives:
        shards = f" in {own.num_shards:,} shards" if own.num_shards > 1 else ""
        sent = f", {signed(own.added_sent_bytes, format_bytes)} sent" if own.added_sent_bytes else ""
        is_zero = abs(own.added_milliseconds) < _LEAST_MS
        added = "+0" if is_zero else signed(own.added_milliseconds, format_milliseconds)
        lines.append(
            f"{_sharding_text(own)}{shards} {added} ms, "
            f"{signed(own.added_memory_bytes, format_bytes)}{sent}{'' if own.fits else ', does not fit'}"
        )
    return "\n".join(lines)


def _sharding_text(placed: AssessedTable | Alternative) -> str:
    """Returns a sharding type, with the kernel where that is not the usual one; of replicated tables it is torch's."""
    is_usual = placed.compute_kernel == "fused" or placed.sharding_type == "data_parallel"
    return f"{placed.sharding_type}{'' if is_usual else f' ({placed.compute_kernel})'}"


def host_lines(assessment: Assessment) -> list[str]:
    """Returns the tables in host memory, with their bytes there; [] where none lies there."""
    tables = list(filter(is_in_host_memory, assessment.tables))
    if not tables:
        return []
    host_bytes, cache_bytes = (sum(getattr(own.storage, name) for own in tables) for name in ("host", "cache"))
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
    if (num_bytes := sum(beside.values())) > capacity:
        # then tables have no part in it, whatever the planner says
        return [
            f"without any tables each rank needs {format_bytes(num_bytes)}, {format_bytes(num_bytes - capacity)} more "
            f"than it has: {items}"
        ]
    reason = assessment.planner_error.strip()
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason.splitlines()[0]
    planner = [f"the planner: {' '.join(reason.split())}"] if reason else []
    world_size, needed = assessment.cluster.world_size, assessment.one_copy
    largest = max(assessment.tables, key=lambda table: table.one_copy.total)
    host_bytes = assessment.cluster.host_bytes_per_rank * world_size
    host = f", and {format_bytes(host_bytes)} of host memory" if host_bytes else ""
    demand = (
        f"tables with their optimizer take {format_bytes(needed.total + needed.host)}, the largest ({largest.name}) "
        f"{format_bytes(largest.one_copy.total)}; {format_bytes(assessment.bytes_left_for_tables)} are left for them "
        f"on {world_size} rank(s){host}, beside on each: {items}; a step's lookups and exchanges need more"
    )
    return [demand, *_overfull_ranks(assessment), *planner]


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
