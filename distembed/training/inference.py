"""A trained run, read back: evaluated on a split, or used to predict one."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from torch import Tensor

from distembed.checkpoints import load_checkpoint
from distembed.checkpoints.run_checkpoints import newest_checkpoint
from distembed.config.train import TrainConfig
from distembed.data.dataset.manifest import Manifest
from distembed.embedding import EmbeddingConfig
from distembed.errors import UserError
from distembed.files import whole_file
from distembed.models.config import DCNConfig, DLRMConfig
from distembed.optim.config import SparseOptimizerConfig
from distembed.planning import PlanConfig
from distembed.ranks import Ranks
from distembed.tasks.binary_metrics import sigmoid
from distembed.training.build import TrainingState, build_training_state
from distembed.training.evaluation import gather_rows, score_batches

PREDICTION_FORMATS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}
"""Writer class by the output file's suffix."""

_COLUMNS = pa.schema([("prediction", pa.float32()), ("label", pa.float32())])


def load_training_state(
    run_dir: Path,
    dataset: str,
    model: DLRMConfig | DCNConfig,
    embedding: EmbeddingConfig,
    train: TrainConfig,
    plan: PlanConfig,
    processes: Ranks,
) -> TrainingState:
    """The model of a run's newest checkpoint, shaped for the given dataset; all ranks call it.

    Raises:
        UserError: where the run has no checkpoint, or the dataset has other tables than the run was trained on.
    """
    checkpoint = newest_checkpoint(run_dir, train.checkpoint_dir)
    # nothing is trained: any optimizer will do that every device has
    train = dataclasses.replace(train, sparse_optimizer=SparseOptimizerConfig(name="sgd"))
    training_state = build_training_state(
        model, embedding, train, plan, Manifest.load(dataset).schema, processes, num_steps=1
    )
    load_checkpoint(checkpoint, training_state.model)
    return training_state


def predict_split(training_state: TrainingState, dataset: str, split: str, output: Path, processes: Ranks) -> int:
    """Writes a row a sample, in the split's order: probability of a click, and the label; all ranks call it.

    Returns:
        The number of rows, on rank 0.

    Raises:
        UserError: for a file suffix other than ``.parquet`` and ``.csv``.
        RunError: where the file cannot be written.
    """
    if output.suffix not in PREDICTION_FORMATS:
        raise UserError(f"--output {output} ends in {output.suffix!r}; known: {', '.join(PREDICTION_FORMATS)}.")
    if not processes.is_first:
        for logits, labels in score_batches(training_state, dataset, split, processes):
            _gather(logits, labels, processes)
        return 0
    num_rows = 0
    with whole_file(output) as temporary, PREDICTION_FORMATS[output.suffix](temporary, _COLUMNS) as writer:
        for logits, labels in score_batches(training_state, dataset, split, processes):
            columns = _gather(logits, labels, processes)
            num_rows += len(columns["label"])
            writer.write_table(pa.table(dict(columns), schema=_COLUMNS))
    return num_rows


def _gather(logits: Tensor, labels: Tensor, processes: Ranks) -> Mapping[str, Any]:
    # ranks hold neighbouring slices of a batch, so rank after rank is the file's order
    logits_of_all, labels_of_all = gather_rows(logits, processes), gather_rows(labels, processes)
    return {"prediction": sigmoid(logits_of_all).astype(np.float32), "label": labels_of_all}
