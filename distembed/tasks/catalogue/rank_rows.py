"""Collectives on rows, for example queries, of which ranks may hold unequally many.

*All ranks' rows* are in rank order: the rows of rank 0, then those of rank 1, and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class SharedItems(Protocol):
    """Items that ranks share, for example a :class:`~distembed.embedding.share.TableShare`.

    Attributes:
        group: The ranks; None for a single process, and for the hypothetical ranks of a plan.
        world_size: Number of the ranks.
    """

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class RankRows:
    """The number of rows on each rank, and the collectives on rows that need these numbers.

    Attributes:
        counts: The number of rows of each rank.
        group: The ranks; None for a single process, and for the hypothetical ranks of a plan. Nothing is sent then, and
            every hypothetical rank has as many rows as this process.
    """

    counts: Sequence[int]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, count: int, device: torch.device, share: SharedItems) -> "RankRows":
        """Exchanges the ranks' numbers of rows; ``count`` is this rank's. All ranks call it."""
        group = share.group
        if group is None:
            return cls([count] * share.world_size, None)
        counts = torch.empty(group.size(), dtype=torch.int64, device=device)
        dist.all_gather(list(counts.split(1)), torch.tensor([count], device=device), group=group)
        return cls(counts.tolist(), group)

    def gather(self, rows: Tensor) -> Tensor:
        """Returns all ranks' rows on every rank, given this rank's rows ``rows``; all ranks call it."""
        if len(self.counts) == 1:
            return rows.contiguous()
        # all_gather needs equal shapes: rows are padded to the largest count, and the padding is cut off again
        most_rows = max(self.counts)
        padded = rows.new_zeros(most_rows, *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = rows.new_empty(len(self.counts), *padded.shape)
        if self.group is not None:
            dist.all_gather(list(gathered.unbind()), padded, group=self.group)
        return torch.cat([rank_rows[:count] for rank_rows, count in zip(gathered, self.counts, strict=True)])

    def own(self, rows: Tensor) -> Tensor:
        """Returns the slice of all ranks' ``rows`` that belongs to this rank; nothing is sent."""
        return rows.split(self.counts)[self._rank]

    def sum_own(self, rows: Tensor) -> Tensor:
        """Sums all ranks' ``rows`` over the ranks and returns this rank's slice (reduce-scatter); all ranks call it."""
        if len(self.counts) == 1:
            return rows
        most_rows, num_own = max(self.counts), self.counts[self._rank]
        padded = rows.new_zeros(len(self.counts), most_rows, *rows.shape[1:])
        for target, rank_rows in zip(padded, rows.split(self.counts), strict=True):
            target[: len(rank_rows)] = rank_rows
        summed = torch.empty_like(padded[0])
        if self.group is not None:
            dist.reduce_scatter_tensor(summed, padded.flatten(0, 1), group=self.group)
        return summed[:num_own]

    def sum_all(self, rows: Tensor) -> Tensor:
        """Sums all ranks' ``rows`` over the ranks, in place, and returns them (all-reduce); all ranks call it."""
        if self.group is not None and len(rows):
            dist.all_reduce(rows, group=self.group)
        return rows

    def own_of_all(self, rows: Tensor) -> Tensor:
        """Returns the numbers that each rank has for this rank's rows, ``[ranks, own rows, ...]`` (all-to-all).

        ``rows`` holds the numbers that this rank computed for all ranks' rows. All ranks call it.
        """
        received = rows.new_empty(len(self.counts), self.counts[self._rank], *rows.shape[1:])
        if self.group is None or not rows.numel():
            return received.copy_(rows.view_as(received))
        sizes = [self.counts[self._rank]] * len(self.counts)
        dist.all_to_all_single(received.flatten(0, 1), rows.contiguous(), sizes, list(self.counts), group=self.group)
        return received

    @property
    def own_place(self) -> slice:
        """The slice of this rank's rows among all ranks' rows."""
        first = sum(self.counts[: self._rank])
        return slice(first, first + self.counts[self._rank])

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else self.group.rank()


def gather_with_gradients(rows: Tensor, ranks: RankRows) -> Tensor:
    """Returns all ranks' rows on every rank as :meth:`RankRows.gather` does; all ranks call it, backward too.

    A rank's rows get the sum of the gradients that they have on all ranks.
    """
    if len(ranks.counts) == 1:
        return rows
    gathered: Tensor = _GatheredRows.apply(rows, ranks)  # type: ignore[no-untyped-call]
    return gathered


class _GatheredRows(torch.autograd.Function):
    """The rows of :func:`gather_with_gradients`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: RankRows) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return ctx.ranks.sum_own(gradients[0].contiguous()), None
