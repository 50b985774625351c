"""Runs a model over every row of a split once, on all ranks, and gathers the outputs of its task on rank 0.

Each rank decodes and scores rows that follow each other (:mod:`distembed.data.reader.order`), so that rank after rank
is the order of the split.
"""

from collections.abc import Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor

from distembed.base.ranks import Ranks
from distembed.data.reader import Batch, read_share
from distembed.tasks.base import Outputs, Rows
from distembed.training.build import TrainingState
from distembed.training.reading import prepared_batch

EVALUATION_BATCH_SIZE = 8192
"""Rows of a batch on each rank; more than in training, since nothing is stored for a backward pass."""


def score_split(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Rows:
    """Returns the task's outputs of all rows of a split, in their order, by name; on ranks but 0 without rows.

    All ranks call it.
    """
    outputs: dict[str, list[Tensor]] = {name: [] for name in state.task.outputs}
    for batch_outputs in score_batches(state, dataset, split, ranks):
        for name, values in batch_outputs.items():
            outputs[name].append(values)
    # every rank has part in every batch, be it without rows: a split without rows has no batches on any rank
    rows = {name: torch.cat(values) if values else torch.empty(0) for name, values in outputs.items()}
    return {name: ranks.gather_rows(values) for name, values in rows.items()}


def score_batches(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Iterator[Outputs]:
    """Yields the task's outputs of this rank's batches, which are equally many on every rank; all ranks call it."""
    return score(state, _batches(state, dataset, split, ranks))


def score(state: TrainingState, batches: Generator[Batch, None, None]) -> Iterator[Outputs]:
    """Yields the task's outputs of batches that it has prepared, equally many on every rank; all ranks call it."""
    was_training = state.model.training
    state.model.eval()
    try:
        with torch.no_grad(), closing(batches):
            for _, outputs in state.pipeline.outputs(batches):
                yield {name: values.cpu() for name, values in outputs.items()}
    finally:
        state.model.train(was_training)


def _batches(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Generator[Batch, None, None]:
    """Yields this rank's batches of an evaluation: the task's own batches, or the rows of the split."""
    own = state.task.evaluation_batches(split, EVALUATION_BATCH_SIZE)
    if own is not None:
        yield from own
        return
    for batch in read_share(
        dataset,
        split,
        EVALUATION_BATCH_SIZE,
        rank=ranks.rank,
        world_size=ranks.world_size,
        decode_threads=state.decode_threads,
    ):
        yield prepared_batch(state.task, batch, None, ranks.device)
