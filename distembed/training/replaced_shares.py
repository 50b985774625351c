"""How many of the ids were replaced in training, by table."""

import torch
import torch.distributed as dist
from torch import nn

from distembed.ranks import Ranks
from distembed.sse import take_counts


def replaced_shares(model: nn.Module, processes: Ranks) -> dict[str, float]:
    """For each table the share of the ids of all ranks since the last call; all ranks call it.

    A pipeline that works ahead has counted its next batches already. Tables without ids are left out.

    Returns:
        The shares by table on rank 0, and nothing elsewhere.
    """
    counts = take_counts(model)
    totals = torch.tensor(list(counts.values()), dtype=torch.long).reshape(-1, 2).to(processes.device)
    if counts and processes.world_size > 1:
        dist.reduce(totals, dst=0)
    if not processes.is_first:
        return {}
    return {table: replaced / seen for table, (replaced, seen) in zip(counts, totals.tolist(), strict=True) if seen}
