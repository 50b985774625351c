"""Evaluation on a split: every row once, over all ranks, with exact metrics on rank 0."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from distembed.data.reader import BatchOrder, BatchReader
from distembed.ranks import Ranks
from distembed.tasks.binary_metrics import BinaryMetrics, calibration_bins
from distembed.training.build import TrainingState

EVALUATION_BATCH_SIZE = 8192
"""Rows a rank; larger than a training batch, since nothing is kept for a backward pass."""


@dataclass(frozen=True)
class Scores:
    """Logits [N] and labels [N] of a split's rows, gathered on rank 0 and empty elsewhere."""

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]

    def metrics(self) -> BinaryMetrics:
        """All metrics of the rows."""
        return BinaryMetrics.of(self.logits, self.labels)

    def calibration_bins(self) -> list[dict[str, float]]:
        """The reliability diagram's points."""
        return calibration_bins(self.logits, self.labels)


def score_split(training_state: TrainingState, dataset: str, split: str, processes: Ranks) -> Scores:
    """Scores of all rows of a split, in no particular order; all ranks call it."""
    logits, labels = [torch.empty(0)], [torch.empty(0)]
    for batch_logits, batch_labels in score_batches(training_state, dataset, split, processes):
        logits.append(batch_logits)
        labels.append(batch_labels)
    return Scores(gather_rows(torch.cat(logits), processes), gather_rows(torch.cat(labels), processes))


def score_batches(
    training_state: TrainingState, dataset: str, split: str, processes: Ranks
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's logits and labels of each global batch, in file order; all ranks call it."""
    reader = BatchReader(
        dataset,
        split,
        BatchOrder(EVALUATION_BATCH_SIZE * processes.world_size, shuffle=False),
        rank=processes.rank,
        world_size=processes.world_size,
    )
    was_training = training_state.model.training
    training_state.model.eval()
    try:
        with torch.no_grad():
            for _, logits, labels in training_state.pipeline.outputs(iter(reader)):
                yield logits.cpu(), labels.cpu()
    finally:
        training_state.model.train(was_training)
        reader.close()


def gather_rows(rows: Tensor, processes: Ranks) -> npt.NDArray[np.float32]:
    """Rows [n] of all ranks, rank after rank, on rank 0, which may be unequally many; all ranks call it."""
    if processes.world_size == 1:
        return rows.cpu().numpy()
    rows = rows.to(processes.device)
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(processes.world_size)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(count.item() for count in counts))
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows))])
    gathered = [torch.empty_like(padded) for _ in counts] if processes.is_first else None
    dist.gather(padded, gathered, dst=0)
    if gathered is None:
        return np.empty(0, np.float32)
    return torch.cat([part[: int(n)] for part, n in zip(gathered, counts, strict=True)]).cpu().numpy()
