"""Rows of all ranks of a process group, side by side, where ranks may have unequally many."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Gathering:
    """Collectives over the ranks that share a table, or on this process alone.

    Attributes:
        group: The process group; None for this process alone.
    """

    group: dist.ProcessGroup | None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def most(self, number: int, device: torch.device) -> int:
        """Returns the largest number of any rank; all ranks call it."""
        if self.world_size == 1:
            return number
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return int(numbers.item())

    def sum(self, numbers: Tensor) -> Tensor:
        """Returns the sums of a tensor over all ranks, in place; all ranks call it with tensors of one shape."""
        if self.world_size > 1 and numbers.numel():
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def stack(self, rows: Tensor) -> Tensor:
        """Returns the tensors of all ranks, ``[ranks, *shape]``; all ranks call it with tensors of one shape."""
        if self.world_size == 1:
            return rows.unsqueeze(0)
        parts = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(parts, rows.contiguous(), group=self.group)
        return torch.stack(parts)

    def padded(self, rows: Tensor, length: int, padding: float) -> Tensor:
        """Returns the rows of all ranks, those of each filled up to a length; all ranks call it.

        Args:
            rows: This rank's rows, ``[n, *shape]``, at most ``length``.
            length: The length, which is the same on all ranks.
            padding: What fills up.

        Returns:
            All rows, ``[ranks * length, *shape]``; those of this rank begin at ``rank * length``.
        """
        filled = rows.new_full((length, *rows.shape[1:]), padding)
        filled[: len(rows)] = rows
        return self.stack(filled).flatten(0, 1)
