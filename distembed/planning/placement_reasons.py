"""Why a table is placed as it is: one line that the figures of its other placements bear out."""

from collections.abc import Sequence
from dataclasses import dataclass

from distembed.planning.alternatives import Alternative
from distembed.planning.costs import Layout, PlacementCost
from distembed.planning.lookups import is_on_every_rank
from distembed.planning.transfers import is_divided_within_nodes
from distembed.units import format_bytes

_ROUNDING_MS = 1e-9
"""Milliseconds up to which two times are the same."""


@dataclass(frozen=True)
class TriedPlacement:
    """Another placement of a table that was tried, all other tables staying where they are.

    Attributes:
        layout: How the table would be divided.
        cost: What it would cost.
        alternative: The difference that it would make.
        is_slowest: Whether a rank with one of its shards would be the slowest.
    """

    layout: Layout
    cost: PlacementCost
    alternative: Alternative
    is_slowest: bool


@dataclass(frozen=True)
class ChosenPlacement:
    """The placement of a table in a plan.

    Attributes:
        layout: How the table is divided.
        cost: What it costs.
        gradient_bytes: Bytes of the gradients of all its parameters.
        allowed_ms: Milliseconds by which the plan may be slower, to have fewer bytes on the fullest rank.
    """

    layout: Layout
    cost: PlacementCost
    gradient_bytes: int
    allowed_ms: float

    def reason(self, tried: Sequence[TriedPlacement]) -> str:
        """Returns such as ``in 4 ranges of columns: whole it would not fit``.

        Args:
            tried: Other placements of the table, one that leaves it whole among them if there is one.
        """
        return f"{_in_words(self.layout)}: {self._because(tried)}"

    def _because(self, tried: Sequence[TriedPlacement]) -> str:
        others, whole = [own.alternative for own in tried], self._whole(tried)
        if not others:
            return "nothing else is possible"
        faster = [other for other in others if other.milliseconds < -_ROUNDING_MS]
        if possible := [other for other in faster if other.fits]:
            return self._although_faster(possible)
        if whole is not None and not whole.alternative.fits:
            return "whole it would not fit"
        if faster:
            return "others that are faster do not fit"
        if whole is not None and whole.alternative.milliseconds > _ROUNDING_MS:
            return "whole its rank would be the slowest" if whole.is_slowest else "whole the step would take longer"
        return self._instead_of_exchange(tried) or _fastest(others)

    def _whole(self, tried: Sequence[TriedPlacement]) -> TriedPlacement | None:
        """Returns the table as a whole for the same kernel, where ranks have parts of it."""
        if is_whole(self.layout) or self.layout.sharding_type == "data_parallel":
            return None
        kernel = self.layout.compute_kernel
        return next((own for own in tried if is_whole(own.layout) and own.layout.compute_kernel == kernel), None)

    def _although_faster(self, others: Sequence[Alternative]) -> str:
        """Returns why others were not taken that are faster and fit."""
        if all(-other.milliseconds <= self.allowed_ms and other.memory_bytes > 0 for other in others):
            return "hardly slower than others, with fewer bytes on the fullest rank"
        return "fastest that was found"

    def _instead_of_exchange(self, tried: Sequence[TriedPlacement]) -> str:
        """Returns what replicating a table saves; empty where that is not its exchange."""
        is_replicated = self.layout.sharding_type == "data_parallel"
        if not is_replicated or self.cost.all_reduce_ms >= min(_exchange_ms(own.cost) for own in tried):
            return ""
        return f"{format_bytes(self.gradient_bytes)} of gradients cost less than its exchange"


def is_whole(layout: Layout) -> bool:
    """Returns whether one rank has the whole table."""
    return (
        len(layout.columns) == 1
        and not is_on_every_rank(layout.sharding_type)
        and not is_divided_within_nodes(layout.sharding_type)
    )


def _fastest(others: Sequence[Alternative]) -> str:
    """Returns what is true of a placement that is as fast as any other that was tried, or faster."""
    fitting = [other for other in others if other.fits]
    if not fitting:
        return "others do not fit"
    equal = [other for other in fitting if other.milliseconds <= _ROUNDING_MS]
    if not equal:
        return "fastest"
    if all(other.memory_bytes > 0 for other in equal):
        return "as fast as others, with fewer bytes on the fullest rank"
    return "no other is faster"


def _exchange_ms(cost: PlacementCost) -> float:
    """Returns the milliseconds that a rank with a shard of a table exchanges ids, vectors and gradients for it."""
    everywhere = [cost.everywhere] if cost.everywhere is not None else []
    shards = (*cost.shards, *everywhere)
    return max(sum(transfer.owner_ms for transfer in shard.transfers.values()) for shard in shards)


def _in_words(layout: Layout) -> str:
    """Returns how a table is divided."""
    if layout.sharding_type == "data_parallel":
        return "replicated"
    if is_on_every_rank(layout.sharding_type):
        return "by rows"
    if is_whole(layout):
        return "whole"
    ranges = [f"in {len(layout.columns)} ranges of columns"] if len(layout.columns) > 1 else []
    return ", ".join([*ranges, *(["by rows within a node"] if is_divided_within_nodes(layout.sharding_type) else [])])
