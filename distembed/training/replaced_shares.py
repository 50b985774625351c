"""The share of ids that were replaced in training, by table."""

import torch
from torch import nn

from distembed.ranks import Ranks
from distembed.sse import take_counts


def replaced_shares(model: nn.Module, ranks: Ranks) -> dict[str, float]:
    """Returns which share of each table's ids, on all ranks since the last call, was replaced; all ranks call it.

    A pipeline that works ahead has counted its next batches already.

    Returns:
        The share in [0, 1] by table, without tables that had no ids, on rank 0; an empty dict on other ranks.
    """
    counts = take_counts(model)
    totals = ranks.sum(torch.tensor(list(counts.values()), dtype=torch.long).reshape(-1, 2))
    if not ranks.is_first:
        return {}
    return {table: replaced / seen for table, (replaced, seen) in zip(counts, totals.tolist(), strict=True) if seen}
