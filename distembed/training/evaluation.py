"""Runs a model over every row of a split once, on all ranks, and gathers the outputs of its task on rank 0."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from distembed.data.reader import BatchOrder, BatchReader
from distembed.ranks import Ranks
from distembed.tasks.base import Outputs, Rows
from distembed.training.build import TrainingState

EVALUATION_BATCH_SIZE = 8192
"""Rows of a batch on each rank; more than in training, since nothing is stored for a backward pass."""


def score_split(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Rows:
    """Returns the task's outputs of all rows of a split, in no particular order; all ranks call it.

    Returns:
        Each output by its name, with all rows on rank 0 and none on other ranks.
    """
    outputs: dict[str, list[Tensor]] = {name: [torch.empty(0)] for name in state.task.outputs}
    for batch_outputs in score_batches(state, dataset, split, ranks):
        for name, values in batch_outputs.items():
            outputs[name].append(values)
    return {name: gather_rows(torch.cat(values), ranks) for name, values in outputs.items()}


def score_batches(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Iterator[Outputs]:
    """Yields the task's outputs of this rank's rows of each global batch, in the file's order; all ranks call it."""
    reader = BatchReader(
        dataset,
        split,
        BatchOrder(EVALUATION_BATCH_SIZE * ranks.world_size, shuffle=False),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    was_training = state.model.training
    state.model.eval()
    try:
        with torch.no_grad():
            for _, outputs in state.pipeline.outputs(iter(reader)):
                yield {name: values.cpu() for name, values in outputs.items()}
    finally:
        state.model.train(was_training)
        reader.close()


def gather_rows(rows: Tensor, ranks: Ranks) -> npt.NDArray[np.float32]:
    """Gathers rows [n, ...] of all ranks, which may be unequally many, rank after rank; all ranks call it.

    Returns:
        All rows on rank 0, and none on other ranks.
    """
    if ranks.world_size == 1:
        return rows.cpu().numpy()
    rows = rows.to(ranks.device)
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(ranks.world_size)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(count.item() for count in counts))
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in counts] if ranks.is_first else None
    dist.gather(padded, gathered, dst=0)
    if gathered is None:
        return np.empty((0, *rows.shape[1:]), np.float32)
    return torch.cat([part[: int(n)] for part, n in zip(gathered, counts, strict=True)]).cpu().numpy()
