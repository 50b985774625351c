"""Tables and sentences of a plan, as the terminal and the page show them. Texts are plain: a renderer escapes them.

Ranks with equal texts in all columns are one group, so that 1,024 ranks with equal shards are one line.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from distembed.base.units import enumerate_names, format_bytes, format_ranges
from distembed.planning.devices import Cluster
from distembed.planning.other_placements import Alternative
from distembed.planning.request import pipeline_depth
from distembed.planning.storage import PlannedRank
from distembed.reports.plan.assessment import AssessedTable, Assessment

ALTERNATIVES_LEGEND = (
    "instead: other placements of a table while all other tables stay, with their differences: milliseconds of the "
    "slowest rank's step, bytes of the fullest rank, bytes that all ranks send in a step"
)
_MAX_LINES, _MAX_REASON_CHARACTERS = 32, 300
_ROUNDING, _LEAST_MS = 1e-9, 0.0005  # shorter times are written as 0
_NO_ALTERNATIVES = "none"
_GREY = "#9a9a9a"

LineT = TypeVar("LineT")
RankGroup = tuple[PlannedRank, ...]  # ranks with equal texts in all columns; the first stands for all


@dataclass(frozen=True)
class PlanColumn(Generic[LineT]):
    """A column of a printed table, whose lines are ranks, groups of ranks or embedding tables."""

    heading: str
    text: Callable[[LineT], str]  # returns the cell of one line
    is_number: bool = True  # whether the cells are aligned to the right


@dataclass(frozen=True)
class RankItem:
    """A part of a rank's memory or time: one colour of a bar, one column of numbers."""

    name: str
    keys: tuple[str, ...]  # items of PlannedRank.memory, or fields of its times, that are added up
    colour: int | str  # a number in the colours of pages, or a colour
    is_rare: bool = False  # whether it is left out where it is zero on all ranks

    def amount(self, rank: PlannedRank) -> float:
        """Returns the bytes, or the milliseconds a step, on one rank."""
        values = rank.memory if self.keys[0] in rank.memory else vars(rank.times)
        return sum(values[key] for key in self.keys)


# in the order in which bars are stacked; times have the colours of the memory that goes with them
_ALLOCATOR = RankItem("allocator", ("allocator",), _GREY)
MEMORY_ITEMS = (
    RankItem("tables", ("table_weights",), 0),
    RankItem("optimizer", ("table_optimizer_state",), 1),
    RankItem("cache", ("table_cache",), 3, is_rare=True),
    RankItem("SSE graphs", ("sse_graphs",), "#7f9a3a", is_rare=True),
    RankItem("managed ids", ("managed_ids",), "#3a9a7f", is_rare=True),
    RankItem("networks", ("network_weights", "network_optimizer_state"), 2),
    RankItem("gradients", ("gradients",), 4),
    RankItem("step buffers", ("inputs", "outputs"), 6),
    RankItem("lookups", ("lookups",), 7),
    RankItem("activations", ("activations",), 5),
    _ALLOCATOR,
)
TIME_ITEMS = (
    RankItem("lookup", ("lookup",), 7),
    RankItem("exchange", ("exchange",), 6, is_rare=True),
    RankItem("all-reduce", ("all_reduce",), 4, is_rare=True),
    RankItem("networks", ("networks",), 2),
    RankItem("starts", ("starts",), 3, is_rare=True),
    RankItem("waiting for cores", ("waiting",), _GREY, is_rare=True),
)


@dataclass(frozen=True)
class RankQuantity:
    """The memory or the time of all ranks under a plan, with all that its chart and its table show."""

    name: str
    ranks: Sequence[PlannedRank]
    all_items: Sequence[RankItem]
    total: Callable[[PlannedRank], float]  # returns the sum of all items
    text: Callable[[float], str]  # returns an amount as it is shown
    extremes: tuple[str, str]  # names of the ranks with most and with least
    caption: str  # explains the bars
    total_heading: str
    columns_beside: Sequence[PlanColumn[PlannedRank]]  # after the total
    remarks: Sequence[PlanColumn[PlannedRank]] = ()  # last columns, which the terminal leaves out
    limit: float | None = None  # amount at which charts draw a line: the memory that a plan may fill
    has_room: Callable[[PlannedRank], bool] = lambda rank: True

    @cached_property
    def items(self) -> list[RankItem]:
        return [item for item in self.all_items if not item.is_rare or any(map(item.amount, self.ranks))]

    @cached_property
    def bar_items(self) -> list[RankItem]:
        """The items that bars show: all but the allocator's bytes, which are kept free."""
        return [item for item in self.items if item is not _ALLOCATOR]

    def bar(self, rank: PlannedRank) -> float:
        return sum(item.amount(rank) for item in self.bar_items)

    @property
    def heading(self) -> str:
        return f"{self.name.capitalize()} by rank"

    @cached_property
    def _rank_columns(self) -> list[PlanColumn[PlannedRank]]:
        def amounts(item: RankItem) -> PlanColumn[PlannedRank]:
            return PlanColumn(item.name, lambda rank: self.text(item.amount(rank)))

        total = PlanColumn[PlannedRank](self.total_heading, lambda rank: self.text(self.total(rank)))
        return [*map(amounts, self.items), total, *self.columns_beside, *self.remarks]

    @property
    def columns(self) -> list[PlanColumn[RankGroup]]:
        """The columns of the table of groups: ranks, items, total, further columns, and remarks last."""

        def first_rank_column(column: PlanColumn[PlannedRank]) -> PlanColumn[RankGroup]:
            return PlanColumn(column.heading, lambda group: column.text(group[0]), column.is_number)

        return [PlanColumn("rank", group_text, is_number=False), *map(first_rank_column, self._rank_columns)]

    @cached_property
    def groups(self) -> list[RankGroup]:
        """The ranks in groups with equal texts, in the order of each group's first rank."""
        by_texts = dict[tuple[str, ...], list[PlannedRank]]()
        for rank in self.ranks:
            by_texts.setdefault(tuple(column.text(rank) for column in self._rank_columns), []).append(rank)
        return list(map(tuple, by_texts.values()))

    @cached_property
    def sorted_groups(self) -> list[RankGroup]:
        """The groups, from the ranks with the most memory or time to the ranks with the least."""
        return sorted(self.groups, key=lambda group: -self.total(group[0]))

    def shown_groups(self, max_lines: int) -> tuple[list[RankGroup], list[str]]:
        """Returns at most ``max_lines`` groups, and no or one line that counts the ranks left out.

        Of more groups, half have the most and half the least, sorted by amount; otherwise all in rank order.
        """
        if len(self.groups) <= max_lines:
            return self.groups, []
        groups, most, least = self.sorted_groups, max_lines - max_lines // 2, len(self.groups) - max_lines // 2
        num_ranks = sum(map(len, groups[most:least]))
        text = f"the {self.extremes[0]} and the {self.extremes[1]}; {num_ranks:,} ranks between them are left out"
        return groups[:most] + groups[least:], [text]


def group_text(group: RankGroup) -> str:
    """Returns the numbers of a group's ranks: ``7``, or ``0-3, 8 (5)`` with their count in parentheses."""
    numbers = format_ranges([rank.rank for rank in group])
    return numbers if len(group) == 1 else f"{numbers} ({len(group):,})"


def memory_by_rank(assessment: Assessment) -> RankQuantity:
    """Returns the memory of each rank at the fullest moment of a step, in bytes."""
    ranks, capacity, reserved = assessment.ranks, assessment.cluster.rank_bytes, assessment.allocator_bytes
    host_memory = PlanColumn[PlannedRank]("host memory", lambda rank: _bytes_or_dash(rank.storage.host))
    moment = PlanColumn[PlannedRank]("fullest moment", lambda rank: rank.moment, is_number=False)
    return RankQuantity(
        name="memory",
        ranks=ranks,
        all_items=MEMORY_ITEMS,
        total=lambda rank: rank.total_bytes,
        text=lambda amount: format_bytes(round(amount)),
        extremes=("fullest", "emptiest"),
        caption=f"Memory in use, of the device's {format_bytes(capacity)} less {format_bytes(reserved)} for the "
        "allocator.",
        total_heading="total",
        columns_beside=[host_memory] * any(rank.storage.host for rank in ranks),
        remarks=[moment],
        limit=capacity - reserved,
        has_room=lambda rank: rank.total_bytes <= rank.capacity_bytes,
    )


def time_by_rank(assessment: Assessment) -> RankQuantity:
    """Returns the time of a step on each rank, in milliseconds, and the bytes that the rank sends meanwhile."""
    has_others = len(assessment.ranks) > 1
    sent = PlanColumn[PlannedRank]("sent a step", lambda rank: format_bytes(rank.sent.total))
    return RankQuantity(
        name="time",
        ranks=assessment.ranks,
        all_items=TIME_ITEMS,
        total=lambda rank: rank.times.total,
        text=format_milliseconds,
        extremes=("slowest", "fastest"),
        caption=f"Estimated milliseconds of a step{'; all ranks wait for the slowest' * has_others}.",
        total_heading="ms a step",
        columns_beside=[sent] * has_others,
    )


def _bytes_or_dash(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def format_milliseconds(milliseconds: float, is_least: bool = False) -> str:
    """Returns the number with at least three digits, without the unit; a least time is rounded down."""
    decimals = 1 if milliseconds >= 100 else 2 if milliseconds >= 10 else 3
    if is_least:
        milliseconds = math.floor(milliseconds * 10**decimals) / 10**decimals
    return f"{milliseconds:,.{decimals}f}"


def _percent_at_most(share: float) -> str:
    """Returns a share in percent, rounded up, like ``2.5%``; without digits after the point from 10% on."""
    decimals = 1 if share < 0.1 else 0
    return f"{math.ceil(round(100 * share * 10**decimals, 6)) / 10**decimals:,.{decimals}f}%"


def table_columns(assessment: Assessment) -> list[PlanColumn[AssessedTable]]:
    """Returns the columns of the list of embedding tables: sizes, and places if there is a plan."""
    columns = [
        PlanColumn[AssessedTable]("table", lambda table: table.name, is_number=False),
        PlanColumn[AssessedTable]("scheme", lambda table: table.scheme, is_number=False),
        PlanColumn[AssessedTable]("rows", lambda table: " + ".join(f"{n:,}" for n in table.num_rows)),
    ]
    if not assessment.ranks:
        return [*columns, PlanColumn("memory, one copy", lambda table: format_bytes(table.one_copy.total))]

    def ranks_text(table: AssessedTable) -> str:
        ranks = sorted(set(table.ranks))
        return "all" if not ranks or len(ranks) == assessment.cluster.world_size > 1 else format_ranges(ranks)

    columns += [
        PlanColumn("placed", _sharding_text, is_number=False),
        PlanColumn("ranks", ranks_text, is_number=False),
        PlanColumn("memory, all ranks", lambda table: format_bytes(table.storage.total)),
    ]
    if any(map(is_in_host_memory, assessment.tables)):
        columns.append(PlanColumn("host memory", lambda table: _bytes_or_dash(table.storage.host)))
        columns.append(PlanColumn("cache", lambda table: _bytes_or_dash(table.storage.cache)))
    return columns


def reason_columns(assessment: Assessment) -> list[PlanColumn[AssessedTable]]:
    """Returns the long columns ``why`` and ``instead`` (other placements); none where there is no plan."""
    if not assessment.ranks:
        return []
    why = PlanColumn[AssessedTable]("why", lambda table: table.why, is_number=False)
    instead = PlanColumn[AssessedTable]("instead", lambda table: _alternatives_text(table) or _NO_ALTERNATIVES, False)
    return [why, instead] if any(table.alternatives for table in assessment.tables) else [why]


def reason_lines(assessment: Assessment) -> list[str]:
    """Returns a line for each distinct text of the long columns, like ``why (C1, C2): whole: fastest``.

    Only the first 32 texts of a column are listed; one more line counts the tables left out.
    """
    lines, num_tables = list[str](), len(assessment.tables)
    for column in reason_columns(assessment):
        names_by_text: dict[str, list[str]] = {}
        for table in assessment.tables:
            if (text := column.text(table)) not in ("", _NO_ALTERNATIVES):
                names_by_text.setdefault(text.replace("\n", "; "), []).append(table.name)
        listed = [
            f"{column.heading} ({'all tables' if 1 < num_tables == len(names) else enumerate_names(names)}): {shared}"
            for shared, names in names_by_text.items()
        ]
        num_untold = sum(len(names) for names in list(names_by_text.values())[_MAX_LINES:])
        further = [f"{column.heading} ({num_untold:,} more tables): --report and --json say it"] if num_untold else []
        lines += listed[:_MAX_LINES] + further
    return lines


def is_in_host_memory(table: AssessedTable) -> bool:
    """Returns whether a table, or part of it, lies in host memory."""
    return table.storage.host > 0


def _alternatives_text(table: AssessedTable) -> str:
    """Returns a line for each alternative: ``row_wise in 2 shards +0.125 ms, +1.50 MiB, +12.00 MiB sent``."""

    def signed(difference: float, text: Callable[[int], str]) -> str:
        return f"{'-' if difference < 0 else '+'}{text(abs(difference))}"  # type: ignore[arg-type]

    lines = []
    for other in table.alternatives:
        shards = f" in {other.num_shards:,} shards" if other.num_shards > 1 else ""
        sent = f", {signed(other.added_sent_bytes, format_bytes)} sent" if other.added_sent_bytes else ""
        is_zero = abs(other.added_milliseconds) < _LEAST_MS
        added = "+0" if is_zero else signed(other.added_milliseconds, format_milliseconds)
        lines.append(
            f"{_sharding_text(other)}{shards} {added} ms, "
            f"{signed(other.added_memory_bytes, format_bytes)}{sent}{'' if other.fits else ', does not fit'}"
        )
    return "\n".join(lines)


def _sharding_text(placed: AssessedTable | Alternative) -> str:
    """Returns a sharding type, with its kernel unless that is ``fused`` or the table is replicated (torch's kernel)."""
    is_usual = placed.compute_kernel == "fused" or placed.sharding_type == "data_parallel"
    return f"{placed.sharding_type}{'' if is_usual else f' ({placed.compute_kernel})'}"


def verdict(assessment: Assessment) -> str:
    """Returns text like ``fits: 1 x 8 h100-80gb (79.65 GiB a rank)``."""
    sizes = sorted({min(assessment.cluster.bytes_by_rank), assessment.cluster.rank_bytes})
    memory = f"({' to '.join(map(format_bytes, sizes))} a rank)"
    return f"{'fits' if assessment.fits else 'does not fit'}: {cluster_text(assessment.cluster)} {memory}"


def cluster_text(cluster: Cluster) -> str:
    """Returns text like ``1 x 8 h100-80gb``."""
    return f"{cluster.nodes} x {cluster.ranks_per_node} {cluster.device.name}"


def step_lines(assessment: Assessment, memory: RankQuantity, time: RankQuantity) -> list[str]:
    """Returns lines on the tables' bytes, the fullest and the slowest rank, and a step's rows and least time."""
    fullest, rows_per_second = memory.sorted_groups[0], assessment.rows_per_second
    depth = pipeline_depth(assessment.cluster.device.kind, assessment.cluster.world_size)
    return [
        f"tables, one copy: {assessment.size.text}",
        f"fullest: {_ranks(fullest)}, {format_bytes(fullest[0].total_bytes)} of "
        f"{format_bytes(fullest[0].capacity_bytes)}; fullest moment of its step: {fullest[0].moment}",
        _slowest_line(time),
        f"a step has {assessment.workload.batch_size:,} rows on all ranks"
        + ("" if rows_per_second is None else f", {rows_per_second:,.0f} rows (samples) a second")
        + f", and {depth} batch(es) are on a device at once; times are estimates",
        *_bound_lines(assessment),
    ]


def _slowest_line(time: RankQuantity) -> str:
    """Returns the slowest rank, the parts of its step, the bytes it sends, and how long other ranks wait for it."""
    group, *faster_groups = time.sorted_groups
    slowest, num_others = group[0], sum(map(len, faster_groups))
    total, sent = slowest.times.total, slowest.sent
    amounts = sorted(((item.amount(slowest), item.name) for item in time.items), reverse=True)
    shown = ", ".join(f"{name} {time.text(amount)}" for amount, name in amounts if amount)
    largest, name = amounts[0]
    line = f"slowest: {_ranks(group)}, {time.text(total)} ms a step"
    line += f", {largest / total:.0%} of it {name} ({shown})" if total else ""
    if sent.total:
        kinds = sorted(((num_bytes, kind) for kind, num_bytes in vars(sent).items() if num_bytes), reverse=True)
        by_kind = ", ".join(f"{kind.replace('_', '-')} {format_bytes(num_bytes)}" for num_bytes, kind in kinds)
        line += f"; {'it' if len(group) == 1 else 'each'} sends {format_bytes(sent.total)} ({by_kind})"
    total_wait_ms = sum(len(faster) * (total - faster[0].times.total) for faster in faster_groups)
    mean_wait_ms = total_wait_ms / (num_others or 1)
    return (
        line
        if mean_wait_ms < _LEAST_MS
        else f"{line}; the others wait {format_milliseconds(mean_wait_ms)} ms on average"
    )


def _ranks(group: RankGroup) -> str:
    """Returns the ranks in a sentence: ``rank 7``, or ``ranks 0-3, 8 (5)``."""
    return f"{'rank' if len(group) == 1 else 'ranks'} {group_text(group)}"


def _bound_lines(assessment: Assessment) -> list[str]:
    """Returns lines on the gap between the plan's time and the lower bound; none for a plan that does not fit."""
    if not assessment.fits:
        return []
    slowest, bound = max(rank.times.total for rank in assessment.ranks), assessment.lower_bound_ms or 0.0
    if 0 < slowest <= bound * (1 + _ROUNDING):
        return ["bound: no plan that fits is faster"]
    lines = []
    if bound > 0:
        lines.append(
            f"bound: no plan that fits takes less than {format_milliseconds(bound, is_least=True)} ms; this one is at "
            f"most {_percent_at_most(slowest / bound - 1)} above what any plan could reach"
        )
    if not assessment.is_search_complete:
        lines.append("the search was stopped early, after its last allowed try; a faster plan may be there")
    return lines


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
    """Returns lines on the missing bytes, each overfull rank and the planner's error; [] where the config fits."""
    if assessment.fits:
        return []
    beside, capacity = assessment.bytes_beside_tables, assessment.cluster.rank_bytes
    by_size = sorted(beside.items(), key=lambda item: -item[1])
    items = ", ".join(f"{name.replace('_', ' ')} {format_bytes(count)}" for name, count in by_size if count)
    reason = assessment.planner_error.strip()
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason.splitlines()[0]
    planner = [f"the planner: {' '.join(reason.split())}"] if reason else []
    if (num_bytes := sum(beside.values())) > capacity:
        # the networks' step alone does not fit: the planner's error about tables would mislead
        return [
            f"without any tables each rank needs {format_bytes(num_bytes)}, {format_bytes(num_bytes - capacity)} more "
            f"than it has: {items}",
            *(planner if assessment.managed_bytes else []),  # which names the settings of managed ids
        ]
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
    """Returns a line on the rank that lacks most device memory, and one on host memory; none where all have room."""
    lines = []
    for number, memory in enumerate(("memory", "host memory")):
        over = [rank for rank in assessment.ranks if rank.excess_bytes[number] > 0]
        if not over:
            continue
        rank = max(over, key=lambda rank: rank.excess_bytes[number])
        used, excess = (rank.total_bytes, rank.storage.host)[number], rank.excess_bytes[number]
        more = f" (and {len(over) - 1:,} other rank(s) by less or as much)" if over[1:] else ""
        line = f"rank {rank.rank} needs {format_bytes(used)} of {memory}, {format_bytes(excess)} more than the "
        line += f"{format_bytes(used - excess)} it has{more}"
        if memory == "memory":
            items = sorted(memory_by_rank(assessment).items, key=lambda item: -item.amount(rank))[:3]
            line += f"; most: {', '.join(f'{own.name} {format_bytes(round(own.amount(rank)))}' for own in items)}"
        lines.append(line)
    return lines
