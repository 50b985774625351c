"""The memory and the time of each rank by item: the terminal, the page, the chart and the texts go over these lists.

Ranks whose numbers read alike are one group, so that 1,024 ranks with equal shards are one line.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from distembed.base.units import format_bytes, format_ranges
from distembed.planning.storage import PlannedRank
from distembed.reports.plan.assessment import Assessment

LineT = TypeVar("LineT")
_NEARLY_EMPTY = 0.4  # share of the capacity below which bars are drawn relative to the fullest rank
_GREY = "#9a9a9a"


@dataclass(frozen=True)
class PlanColumn(Generic[LineT]):
    """A column of a table that is shown."""

    heading: str
    text: Callable[[LineT], str]  # returns the cell of one line
    is_number: bool = True  # whether the cells stand to the right
    dispensable: int | None = None  # a narrow terminal leaves out the column with the lowest number first
    least_width: int | None = None  # characters to which a narrow terminal folds the cells


@dataclass(frozen=True)
class RankItem:
    """Something that takes a rank's memory, or its time."""

    name: str
    keys: tuple[str, ...]  # of a rank's memory or times, which are added up
    colour: int | str  # its number in the colours of pages, or a colour of its own
    dispensable: int  # a narrow terminal leaves out the item with the lowest number first
    is_rare: bool = False  # whether it is left out where no rank has any of it

    def amount(self, rank: PlannedRank) -> float:
        """Returns the bytes, or the milliseconds a step, on one rank."""
        values = rank.memory if self.keys[0] in rank.memory else vars(rank.times)
        return sum(values[key] for key in self.keys)


_ALLOCATOR = RankItem("allocator", ("allocator",), _GREY, 0)
MEMORY_ITEMS = (
    RankItem("tables", ("table_weights",), 0, 10),
    RankItem("optimizer", ("table_optimizer_state",), 1, 7),
    RankItem("cache", ("table_cache",), 3, 9, is_rare=True),
    RankItem("SSE graphs", ("sse_graphs",), "#7f9a3a", 5, is_rare=True),
    RankItem("networks", ("network_weights", "network_optimizer_state"), 2, 6),
    RankItem("gradients", ("gradients",), 4, 1),
    RankItem("step buffers", ("inputs", "outputs"), 6, 3),
    RankItem("lookups", ("lookups",), 7, 2),
    RankItem("activations", ("activations",), 5, 4),
    _ALLOCATOR,
)
"""What takes a rank's memory, in the order in which it is stacked; times that go with it have its colours."""
TIME_ITEMS = (
    RankItem("lookup", ("lookup",), 7, 5),
    RankItem("exchange", ("exchange",), 6, 6, is_rare=True),
    RankItem("all-reduce", ("all_reduce",), 4, 3, is_rare=True),
    RankItem("networks", ("networks",), 2, 0),
    RankItem("starts", ("starts",), 3, 2, is_rare=True),
    RankItem("waiting for cores", ("waiting",), _GREY, 1, is_rare=True),
)


RankGroup = tuple[PlannedRank, ...]  # ranks whose numbers read alike; the first stands for all


def group_text(group: RankGroup) -> str:
    """Returns the ranks' numbers: ``7``, or ``0-3, 8 (5)`` with how many they are."""
    numbers = format_ranges([rank.rank for rank in group])
    return numbers if len(group) == 1 else f"{numbers} ({len(group):,})"


@dataclass(frozen=True)
class RankQuantity:
    """Memory or time of all ranks of an assessment that has a plan."""

    name: str
    unit: str  # follows a number where no heading says it; empty for bytes, whose text has it
    ranks: Sequence[PlannedRank]
    all_items: Sequence[RankItem]
    total: Callable[[PlannedRank], float]  # returns the sum of all items
    text: Callable[[float], str]  # returns an amount as it is shown
    extremes: tuple[str, str]  # names of the ranks with most and with least
    caption: str  # says what bars show
    total_heading: str
    columns_beside: Sequence[PlanColumn[PlannedRank]]  # after the total
    remarks: Sequence[PlanColumn[PlannedRank]] = ()  # after these, on the page alone
    undrawn: Sequence[RankItem] = ()  # items that bars leave out
    limit: float | None = None  # no rank may be above it; bars are drawn up to it
    has_room: Callable[[PlannedRank], bool] = lambda rank: True

    @cached_property
    def items(self) -> list[RankItem]:
        return [item for item in self.all_items if not item.is_rare or any(map(item.amount, self.ranks))]

    @cached_property
    def bar_items(self) -> list[RankItem]:
        return [item for item in self.items if item not in self.undrawn]

    def bar(self, rank: PlannedRank) -> float:
        return sum(item.amount(rank) for item in self.bar_items)

    @property
    def heading(self) -> str:
        return f"{self.name.capitalize()} by rank"

    @cached_property
    def groups(self) -> list[RankGroup]:
        """Ranks that read alike, in the order of the first of each group."""
        columns, by_texts = [*self._rank_columns(), *self.remarks], dict[tuple[str, ...], list[PlannedRank]]()
        for rank in self.ranks:
            by_texts.setdefault(tuple(own.text(rank) for own in columns), []).append(rank)
        return list(map(tuple, by_texts.values()))

    @cached_property
    def sorted_groups(self) -> list[RankGroup]:
        """The groups, from the ranks with the most memory or time to the ranks with the least."""
        return sorted(self.groups, key=lambda group: -self.total(group[0]))

    def shown_groups(self, max_lines: int) -> tuple[list[RankGroup], str]:
        """Returns the groups to show, and a text that counts the ranks that are left out.

        More groups than ``max_lines`` are cut to the groups with the most and the groups with the least, sorted.
        """
        if len(self.groups) <= max_lines:
            return self.groups, ""
        groups, most, least = self.sorted_groups, max_lines - max_lines // 2, len(self.groups) - max_lines // 2
        num_ranks = sum(map(len, groups[most:least]))
        text = f"the {self.extremes[0]} and the {self.extremes[1]}; {num_ranks:,} ranks between them are left out"
        return groups[:most] + groups[least:], text

    def columns(self, left_out: Collection[str] = ()) -> list[PlanColumn[RankGroup]]:
        """Returns the columns of groups but for remarks; left-out items are added up, unless all are."""
        ranks = PlanColumn[RankGroup]("rank", group_text, is_number=False, least_width=10)
        return [ranks, *map(of_first, self._rank_columns(left_out))]

    def _rank_columns(self, left_out: Collection[str] = ()) -> list[PlanColumn[PlannedRank]]:
        def amounts(heading: str, items: Sequence[RankItem], dispensable: int | None = None) -> PlanColumn[PlannedRank]:
            def text(rank: PlannedRank) -> str:
                return self.text(sum(item.amount(rank) for item in items))

            return PlanColumn(heading, text, dispensable=dispensable)

        others = [item for item in self.items if item.name in left_out]
        used = [item for item in self.items if any(map(item.amount, self.ranks))]
        columns = []
        for item in self.items:
            if item not in others:  # an item that is zero on every rank is left out first
                columns.append(amounts(item.name, [item], item.dispensable if item in used else -1))
        if columns and any(item in used for item in others):
            columns.append(amounts("others", others))
        columns.append(PlanColumn(self.total_heading, lambda rank: self.text(self.total(rank))))
        return columns + [own for own in self.columns_beside if own.heading not in left_out]


def of_first(column: PlanColumn[PlannedRank]) -> PlanColumn[RankGroup]:
    """Returns a column of ranks as one of groups."""
    return PlanColumn(column.heading, lambda group: column.text(group[0]), column.is_number, column.dispensable)


def memory_by_rank(assessment: Assessment) -> RankQuantity:
    """Returns the memory of each rank at the fullest moment of a step, in bytes."""
    ranks, capacity = assessment.ranks, assessment.cluster.rank_bytes
    most_used = max(rank.total_bytes - rank.memory["allocator"] for rank in ranks)
    is_nearly_empty = 0 < most_used < _NEARLY_EMPTY * capacity
    has_host = any(rank.storage.host for rank in ranks)
    caption = (
        f"Memory in use, at most {percent_at_most(most_used / capacity)} of the device's {format_bytes(capacity)}; "
        f"{format_bytes(assessment.allocator_bytes)} of the rest are kept free for the allocator."
        if is_nearly_empty
        else f"The dashed line is the device's capacity, {format_bytes(capacity)}."
    )
    host_memory = PlanColumn[PlannedRank]("host memory", lambda rank: bytes_or_dash(rank.storage.host), dispensable=8)
    return RankQuantity(
        name="memory",
        unit="",
        ranks=ranks,
        all_items=MEMORY_ITEMS,
        total=lambda rank: rank.total_bytes,
        text=lambda amount: format_bytes(round(amount)),
        extremes=("fullest", "emptiest"),
        caption=caption,
        total_heading="total",
        columns_beside=[host_memory] * has_host,
        remarks=[PlanColumn("fullest moment", lambda rank: rank.moment, is_number=False)],
        undrawn=[_ALLOCATOR] * is_nearly_empty,
        limit=None if is_nearly_empty else capacity,
        has_room=lambda rank: rank.total_bytes <= rank.capacity_bytes,
    )


def time_by_rank(assessment: Assessment) -> RankQuantity:
    """Returns the time of a step on each rank, in milliseconds, and the bytes that the rank sends meanwhile."""
    has_others = len(assessment.ranks) > 1
    sent = PlanColumn[PlannedRank]("sent a step", lambda rank: format_bytes(rank.sent.total), dispensable=4)
    return RankQuantity(
        name="time",
        unit=" ms",
        ranks=assessment.ranks,
        all_items=TIME_ITEMS,
        total=lambda rank: rank.times.total,
        text=format_milliseconds,
        extremes=("slowest", "fastest"),
        caption=f"Estimated milliseconds of a step{'; all ranks wait for the slowest' * has_others}.",
        total_heading="ms a step",
        columns_beside=[sent] * has_others,
    )


def bytes_or_dash(num_bytes: int) -> str:
    """Returns a size, and a dash for none."""
    return format_bytes(num_bytes) if num_bytes else "-"


def format_milliseconds(milliseconds: float, is_least: bool = False) -> str:
    """Returns the number with at least three digits, without the unit; a least time is rounded down."""
    decimals = 1 if milliseconds >= 100 else 2 if milliseconds >= 10 else 3
    if is_least:
        milliseconds = math.floor(milliseconds * 10**decimals) / 10**decimals
    return f"{milliseconds:,.{decimals}f}"


def percent_at_most(share: float) -> str:
    """Returns a share in percent, rounded up, such as ``2.5%``; without digits after the point from 10% on."""
    decimals = 1 if share < 0.1 else 0
    return f"{math.ceil(round(100 * share * 10**decimals, 6)) / 10**decimals:,.{decimals}f}%"
