"""The share of ids that were replaced in training, by table."""

import torch
from torch import Tensor, nn

from distembed.base.ranks import Ranks
from distembed.sse import take_counts


def replaced_counts(model: nn.Module, until_step: int) -> dict[str, Tensor]:
    """Returns how many ids of each table were replaced on this rank, and how many there were, since the last call.

    Args:
        model: The model.
        until_step: Number of steps done; what a pipeline has prepared for later ones is left for the next call.

    Returns:
        int64 ``[2]`` by table.
    """
    return {table: torch.tensor(counts) for table, counts in take_counts(model, until_step).items()}


def replaced_shares(counts: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """Returns which share of each table's ids, on all ranks, was replaced; all ranks call it.

    Args:
        counts: What :func:`replaced_counts` returned on this rank.
        ranks: This rank among all.

    Returns:
        The share in [0, 1] by table, without tables that had no ids, on rank 0; an empty dict on other ranks.
    """
    totals = ranks.sum(torch.stack([*counts.values(), torch.zeros(2, dtype=torch.long)]))
    if not ranks.is_first:
        return {}
    by_table = zip(counts, totals.tolist(), strict=False)  # but the last, which is there for models without tables
    return {table: replaced / seen for table, (replaced, seen) in by_table if seen}
