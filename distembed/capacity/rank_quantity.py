"""What each rank has of memory or of time, in items that add up: what the terminal, the page and the chart show alike.

Ranks whose numbers read the same are one group, so that 1,024 ranks with the same shards are one line. The quantities
are in :mod:`~distembed.capacity.memory_by_rank` and :mod:`~distembed.capacity.time_by_rank`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

from distembed.capacity.assessment import AssessedRank, Assessment
from distembed.units import format_ranges

LineT = TypeVar("LineT")


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


@dataclass(frozen=True)
class RankItem:
    """Something that takes a rank's memory, or its time.

    Attributes:
        name: Name for the reader.
        amount: Returns its bytes, or its milliseconds a step, on one rank.
        is_rare: Whether it is left out where no rank has any of it.
    """

    name: str
    amount: Callable[[AssessedRank], float]
    is_rare: bool = False


@dataclass(frozen=True)
class RankGroup:
    """Ranks whose numbers read the same.

    Attributes:
        ranks: The ranks, by their number.
    """

    ranks: tuple[AssessedRank, ...]

    @property
    def first(self) -> AssessedRank:
        """The rank that stands for all."""
        return self.ranks[0]

    @property
    def text(self) -> str:
        """The ranks' numbers: ``7``, or ``0-3, 8 (5)`` with how many they are."""
        numbers = format_ranges([rank.rank for rank in self.ranks])
        return numbers if len(self.ranks) == 1 else f"{numbers} ({len(self.ranks):,})"

    @property
    def sentence_text(self) -> str:
        """The same for a sentence: ``rank 7``, or ``ranks 0-3, 8 (5)``."""
        return f"{'rank' if len(self.ranks) == 1 else 'ranks'} {self.text}"


class RankQuantity(ABC):
    """Memory or time of all ranks of an assessment that has a plan.

    Attributes:
        name: Name of the quantity.
        unit: What stands behind :meth:`text` where no heading says the unit.
        extremes: What the rank with most of it is called, and the one with least.
        assessment: The assessment.
        ranks: Its ranks.

    Args:
        assessment: Assessment with a plan.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    extremes: ClassVar[tuple[str, str]]
    _all_items: ClassVar[tuple[RankItem, ...]]

    def __init__(self, assessment: Assessment) -> None:
        self.assessment = assessment
        self.ranks: Sequence[AssessedRank] = assessment.ranks

    @cached_property
    def items(self) -> list[RankItem]:
        """Items that are shown, in the order in which they are stacked; they add up to :meth:`total`."""
        return [item for item in self._all_items if not item.is_rare or any(map(item.amount, self.ranks))]

    @cached_property
    def bar_items(self) -> list[RankItem]:
        """Items that bars are made of."""
        return self.items

    @cached_property
    @abstractmethod
    def full_bar(self) -> float:
        """Amount at which a bar is full."""

    @property
    @abstractmethod
    def bar_heading(self) -> str:
        """Text above the bars, with the amount at which they are full."""

    @property
    @abstractmethod
    def limit(self) -> float | None:
        """Amount that no rank may be above, where bars are drawn up to it."""

    @property
    @abstractmethod
    def caption(self) -> str:
        """What bars show, as a sentence."""

    @property
    @abstractmethod
    def total_heading(self) -> str:
        """Text above the column of totals."""

    @cached_property
    @abstractmethod
    def columns_beside(self) -> list[PlanColumn[AssessedRank]]:
        """Columns that stand behind the total."""

    @property
    def remarks(self) -> list[PlanColumn[AssessedRank]]:
        """Columns behind these, where there is much room."""
        return []

    @property
    def heading(self) -> str:
        """Text above all that is shown of the quantity."""
        return f"{self.name.capitalize()} by rank"

    @abstractmethod
    def total(self, rank: AssessedRank) -> float:
        """Returns the sum of all items on a rank."""

    @abstractmethod
    def text(self, amount: float) -> str:
        """Returns an amount as it is shown."""

    @abstractmethod
    def is_too_much(self, rank: AssessedRank) -> bool:
        """Returns whether a rank has more than it may."""

    def bar(self, rank: AssessedRank) -> float:
        """Returns the amount that a rank's bar stands for."""
        return sum(item.amount(rank) for item in self.bar_items)

    @cached_property
    def groups(self) -> list[RankGroup]:
        """Ranks that read the same, in the order of the first of each group."""
        by_texts: dict[tuple[str, ...], list[AssessedRank]] = {}
        for rank in self.ranks:
            by_texts.setdefault(tuple(self._texts(rank)), []).append(rank)
        return [RankGroup(tuple(ranks)) for ranks in by_texts.values()]

    @cached_property
    def sorted_groups(self) -> list[RankGroup]:
        """The same, from the ranks that have most to those that have least."""
        return sorted(self.groups, key=lambda group: -self.total(group.first))

    @property
    def most(self) -> RankGroup:
        """The ranks that have most."""
        return self.sorted_groups[0]

    def shown_groups(self, max_lines: int) -> tuple[list[RankGroup], str]:
        """Returns the groups to show, and what to say of those that are left out.

        All are shown where they are not too many; else those with most and those with least, from most to least.
        """
        if len(self.groups) <= max_lines:
            return self.groups, ""
        groups, num_most = self.sorted_groups, max_lines - max_lines // 2
        left_out = groups[num_most : len(groups) - max_lines // 2]
        num_ranks = sum(len(group.ranks) for group in left_out)
        text = f"the {self.extremes[0]} and the {self.extremes[1]}; {num_ranks:,} ranks between them are left out"
        return groups[:num_most] + groups[len(groups) - max_lines // 2 :], text

    def _texts(self, rank: AssessedRank) -> list[str]:
        """Returns all that is shown of a rank."""
        numbers = (self.text(item.amount(rank)) for item in self.items)
        columns = [*self.columns_beside, *self.remarks]
        return [*numbers, self.text(self.total(rank)), *(column.text(rank) for column in columns)]
