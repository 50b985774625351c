"""The memory of each rank by item, and how much of the device it is."""

from functools import cached_property

from distembed.capacity.assessment import AssessedRank
from distembed.capacity.number_texts import bytes_or_dash, percent_at_most
from distembed.capacity.rank_quantity import PlanColumn, RankItem, RankQuantity
from distembed.units import format_bytes

_NEARLY_EMPTY = 0.4  # of the capacity; what is used is drawn as large as there is room where it is less


def _network_bytes(rank: AssessedRank) -> int:
    """Returns what the networks and their optimizer keep on a rank."""
    network = rank.memory.network
    return network.parameters + network.buffers + network.optimizer_state


_ALLOCATOR = RankItem("allocator", lambda rank: rank.allocator_bytes)


class MemoryByRank(RankQuantity):
    """The memory of each rank at the fullest moment of a step, in bytes."""

    name, unit = "memory", ""
    extremes = "fullest", "emptiest"
    _all_items = (
        RankItem("tables", lambda rank: rank.storage.weights),
        RankItem("optimizer", lambda rank: rank.storage.optimizer_state),
        RankItem("cache", lambda rank: rank.storage.cache, is_rare=True),
        RankItem("SSE graphs", lambda rank: rank.memory.graph_bytes, is_rare=True),
        RankItem("networks", _network_bytes),
        RankItem("gradients", lambda rank: rank.memory.step.gradients),
        RankItem("step buffers", lambda rank: rank.memory.step.inputs + rank.memory.step.outputs),
        RankItem("lookups", lambda rank: rank.memory.step.lookups),
        RankItem("activations", lambda rank: rank.memory.step.activations),
        _ALLOCATOR,
    )

    @property
    def capacity(self) -> int:
        """Bytes of a rank's memory."""
        return self.assessment.cluster.rank_bytes

    @cached_property
    def is_nearly_empty(self) -> bool:
        """Whether bars up to the capacity would be so low that what is used is drawn larger instead."""
        used = max(rank.memory.total for rank in self.ranks)
        return 0 < used < _NEARLY_EMPTY * self.capacity

    @cached_property
    def bar_items(self) -> list[RankItem]:
        """All items, but for what is kept free where a plan is nearly empty."""
        return [item for item in self.items if not (self.is_nearly_empty and item is _ALLOCATOR)]

    @cached_property
    def full_bar(self) -> float:
        """The capacity; where a plan is nearly empty, what the fullest rank uses."""
        return max(map(self.bar, self.ranks)) if self.is_nearly_empty else self.capacity

    @property
    def bar_heading(self) -> str:
        """Text above the bars."""
        return f"of {format_bytes(round(self.full_bar))}{' used' if self.is_nearly_empty else ''}"

    @property
    def limit(self) -> float | None:
        """The capacity, unless it is far above all bars."""
        return None if self.is_nearly_empty else self.capacity

    @property
    def caption(self) -> str:
        """What of the capacity is drawn."""
        if not self.is_nearly_empty:
            return f"The dashed line is the device's capacity, {format_bytes(self.capacity)}."
        share = max(map(self.bar, self.ranks)) / self.capacity
        return (
            f"What is used, at most {percent_at_most(share)} of the device's {format_bytes(self.capacity)}; "
            f"{format_bytes(self.assessment.allocator_bytes)} of the rest are kept free for the allocator."
        )

    @property
    def total_heading(self) -> str:
        """Text above the totals."""
        return "total"

    @cached_property
    def columns_beside(self) -> list[PlanColumn[AssessedRank]]:
        """Host memory, where some table lies there."""
        has_host = any(rank.storage.host for rank in self.ranks)
        return [PlanColumn("host memory", lambda rank: bytes_or_dash(rank.storage.host))] * has_host

    @property
    def remarks(self) -> list[PlanColumn[AssessedRank]]:
        """The fullest moment."""
        return [PlanColumn("fullest moment", lambda rank: rank.memory.step.moment, is_number=False)]

    def total(self, rank: AssessedRank) -> float:
        """Returns the bytes in use or kept free."""
        return rank.total_bytes

    def text(self, amount: float) -> str:
        """Returns such as ``1.50 GiB``."""
        return format_bytes(round(amount))

    def is_too_much(self, rank: AssessedRank) -> bool:
        """Returns whether a rank has more than its device's memory."""
        return rank.total_bytes > rank.capacity_bytes
