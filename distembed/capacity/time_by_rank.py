"""The time of each rank's step by item, and what it sends meanwhile."""

from dataclasses import astuple
from functools import cached_property

from distembed.capacity.assessment import AssessedRank
from distembed.capacity.number_texts import format_milliseconds
from distembed.capacity.rank_quantity import PlanColumn, RankItem, RankQuantity
from distembed.units import format_bytes


class TimeByRank(RankQuantity):
    """The time of a step on each rank, in milliseconds, and what the rank sends meanwhile.

    A rank of a CPU waits for cores that other ranks of its node use.
    """

    name, unit = "time", " ms"
    extremes = "slowest", "fastest"
    _all_items = (
        RankItem("lookup", lambda rank: rank.times.lookup),
        RankItem("exchange", lambda rank: rank.times.exchange, is_rare=True),
        RankItem("all-reduce", lambda rank: rank.times.all_reduce, is_rare=True),
        RankItem("networks", lambda rank: rank.times.networks),
        RankItem("starts", lambda rank: rank.times.starts, is_rare=True),
        RankItem("waiting for cores", lambda rank: rank.times.waiting, is_rare=True),
    )

    @cached_property
    def full_bar(self) -> float:
        """The time of the slowest rank."""
        return self.total(self.most.first)

    @property
    def bar_heading(self) -> str:
        """Text above the bars."""
        return f"of {format_milliseconds(self.full_bar)} ms"

    @property
    def limit(self) -> float | None:
        """There is none: time has no capacity."""
        return None

    @property
    def caption(self) -> str:
        """What the milliseconds are."""
        return f"Estimated milliseconds of a step{'; all ranks wait for the slowest' * (len(self.ranks) > 1)}."

    @property
    def total_heading(self) -> str:
        """Text above the totals."""
        return "ms a step"

    @cached_property
    def columns_beside(self) -> list[PlanColumn[AssessedRank]]:
        """Bytes to other ranks, where there are others."""
        return [PlanColumn("sent a step", lambda rank: format_bytes(sent_bytes(rank)))] * (len(self.ranks) > 1)

    def total(self, rank: AssessedRank) -> float:
        """Returns the milliseconds of a step."""
        return rank.times.total

    def text(self, amount: float) -> str:
        """Returns such as ``0.125``, without the unit."""
        return format_milliseconds(amount)

    def is_too_much(self, rank: AssessedRank) -> bool:
        """Returns False: time has no capacity."""
        return False


def sent_bytes(rank: AssessedRank) -> int:
    """Returns what a rank sends to others in a step."""
    return sum(astuple(rank.memory.sent))
