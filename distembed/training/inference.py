"""Runs the model of a trained run over the rows of a split once, on all ranks: to evaluate them or to predict them.

Each rank decodes and scores consecutive rows (:mod:`distembed.data.reader.order`), so that the ranks' rows, one rank
after the other, are in the order of the split. A run that still trains may remove the checkpoint while it is read.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.files import whole_file
from distembed.base.ranks import Collectives, Ranks, process_group
from distembed.checkpoints import load_checkpoint
from distembed.checkpoints.store import CheckpointStore, place_and_name, storage_errors
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.periods import SECONDS, PeriodKind, period_name
from distembed.data.dataset.row_groups import read_times
from distembed.data.reader import Batch, read_share
from distembed.models import Model
from distembed.optim.config import SparseOptimizerConfig
from distembed.tasks.base import Outputs, Rows
from distembed.training.build import Blueprint, TrainingState, build_training_state
from distembed.training.config import Config
from distembed.training.metric_rows import MetricRows
from distembed.training.pipeline import prepared_batch
from distembed.training.prediction_columns import PredictionColumns, RankOrder, recommended_values
from distembed.training.resume import find_checkpoint
from distembed.training.trained_run import PREDICTION_FORMATS, TrainedRun

T = TypeVar("T")
_TRIES = 5


def read_newest(
    run_dir: Path,
    config: Config,
    read: Callable[[str], T],
    collectives: Collectives | None = None,
    choice: str | None = None,
) -> T:
    """Returns the result of ``read``, called with the path or URL of a run's checkpoint on all ranks.

    The checkpoint is the ``choice``, or else the best one if the run keeps it, or else the newest. A run that still
    trains may remove the checkpoint while it is read: then the search is repeated, ``_TRIES`` times at most. All ranks
    call it, and an error on any rank is an error on all of them.

    Raises:
        UserError: The run has no checkpoint, it cannot be read, or each was removed while it was read.
    """
    collectives = collectives or Collectives()
    for _ in range(_TRIES):
        checkpoint = collectives.on_first(lambda: find_checkpoint(run_dir, config, choice))
        failure: UserError | RunError | None = None
        try:
            returned = read(checkpoint)
        except DamagedCheckpoint as error:
            failure = UserError(f"{error} `distembed train --resume` sets it aside and goes on from the one before.")
        except (UserError, RunError) as error:
            failure = error
        if not any(collectives.gather(failure is not None)):
            return returned
        removed = collectives.on_first(lambda path=checkpoint: is_removed(path))  # type: ignore[misc]
        if not removed:
            raise failure or UserError(f"{checkpoint} could not be read by another rank.")
    raise removed_meanwhile(checkpoint)


def is_removed(checkpoint: str) -> bool:
    """Returns whether a checkpoint, which was whole, is missing or incomplete now.

    Raises:
        UserError: The place cannot be reached.
    """
    place, name = place_and_name(checkpoint)
    with storage_errors(place):
        return not CheckpointStore(place).is_whole(name)


def removed_meanwhile(checkpoint: str) -> UserError:
    """Returns the error of a checkpoint that its run has removed while it was read."""
    return UserError(
        f"{checkpoint} was removed while it was read, since its run trains on and keeps the newest ones only; try "
        "again, wait for the run to end, or train with more train.keep_checkpoints."
    )


EVALUATION_BATCH_SIZE = 8192
"""Rows of a batch on each rank; more than in training, since nothing is stored for a backward pass."""


def score_split(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Rows:
    """Returns, on rank 0, the outputs of all rows of a split that the task's metrics take, in the rows' order, by name.

    Other ranks get the same names without rows. All ranks call it.
    """
    rows = MetricRows(state.task)
    for outputs in score_batches(state, dataset, split, ranks):
        rows.add(outputs)
    return rows.gathered(ranks)


def score_batches(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> Iterator[Outputs]:
    """Yields the task's outputs of this rank's batches, which are equally many on every rank; all ranks call it."""
    return score_prepared(state, _batches(state, dataset, split, ranks))


def score_prepared(state: TrainingState, batches: Generator[Batch, None, None]) -> Iterator[Outputs]:
    """Yields the task's outputs, on the CPU, of prepared batches, equally many on every rank; all ranks call it.

    The model is in evaluation mode until the iterator ends or is closed, which also closes ``batches``.
    """
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
    task_batches = state.task.evaluation_batches(split, EVALUATION_BATCH_SIZE)
    if task_batches is not None:
        yield from task_batches
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


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """The model of a run's checkpoint, that checkpoint's path or URL, the dataset to use it on, and this rank."""

    state: TrainingState
    checkpoint: str
    dataset: str
    ranks: Ranks

    @property
    def model(self) -> Model:
        """The model, whose embedding collections are sharded over the ranks."""
        model: Model = self.state.model.module.model
        return model


@contextmanager
def open_run(run: TrainedRun) -> Iterator[LoadedRun]:
    """Loads a run within the block on the devices that there are, in a process group; all ranks call it.

    Raises:
        UserError: The run has no checkpoint, or the dataset has other tables than the run was trained on.
    """
    with process_group("auto") as ranks:
        state, checkpoint = load_training_state(run.folder, run.dataset, run.config, ranks, run.checkpoint_choice)
        yield LoadedRun(state, checkpoint, run.dataset, ranks)


def load_training_state(
    run_dir: Path, dataset: str, config: Config, ranks: Ranks, checkpoint: str | None = None
) -> tuple[TrainingState, str]:
    """Returns the model of a run's checkpoint, shaped for the given dataset, and the checkpoint's path or URL.

    All ranks call it. Unless a ``checkpoint`` is chosen, it is the run's best or newest.

    Raises:
        UserError: The run has no checkpoint, or the dataset has other tables than the run was trained on.
    """
    # Nothing is trained: the optimizer is one that every device has, and averages are read as weights. A task reads
    # statistics of the dataset that the run was trained on, such as the mean label, from the part that the run keeps.
    train = dataclasses.replace(config.train, sparse_optimizer=SparseOptimizerConfig(name="sgd"), ema=None)
    kept_folder = kept_dataset(run_dir)
    data = config.data if kept_folder is None else dataclasses.replace(config.data, path=str(kept_folder))
    config = dataclasses.replace(config, train=train, data=data)
    blueprint = Blueprint.for_ranks(config, Manifest.load(dataset).schema, ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=1)
    state.task.start(blueprint.task_context(dataset, ranks))

    def load(checkpoint: str) -> str:
        load_checkpoint(checkpoint, state.model)
        return checkpoint

    return state, read_newest(run_dir, config, load, choice=checkpoint)


def evaluate_by_period(
    state: TrainingState, dataset: str, split: str, ranks: Ranks, kind: PeriodKind
) -> dict[str, Any]:
    """Returns, on rank 0, the metrics of the rows of each day or hour of a split, by its name, in the order of time.

    Other ranks get nothing. All ranks call it. The task is of single rows, and the dataset has times.
    """
    rows = score_split(state, dataset, split, ranks)
    if not ranks.is_first:
        return {}
    periods, metrics = read_times(dataset, split) // SECONDS[kind], {}
    for number in np.unique(periods).tolist():
        own = {name: values[periods == number] for name, values in rows.items()}
        metrics[period_name(number, kind)] = state.task.metrics(own)
    return metrics


def evaluate_split(state: TrainingState, dataset: str, split: str, ranks: Ranks) -> dict[str, Any]:
    """Returns a split's name and metrics on rank 0, and nothing on other ranks; all ranks call it."""
    rows = score_split(state, dataset, split, ranks)
    return {"split": split, **state.task.metrics(rows)} if ranks.is_first else {}


def describe_metrics(state: TrainingState, metrics: dict[str, Any]) -> str:
    """Returns the metrics that :func:`evaluate_split` returned as one line."""
    return f"{metrics['split']}: {state.task.describe(metrics)}"


def predict_split(
    state: TrainingState, dataset: str, split: str, output: Path, ranks: Ranks, raw_values: bool = True
) -> int:
    """Writes the task's prediction of each row, in the order of the split; all ranks call it.

    Users and items are written as raw values, with ``raw_values`` and where the dataset's vocabularies have them, else
    as ids. Returns the number of rows on rank 0, and 0 on other ranks.

    Raises:
        RunError: The file cannot be written.
    """
    task = state.task
    if not ranks.is_first:
        for outputs in score_batches(state, dataset, split, ranks):
            gather_outputs(outputs, ranks)
        return 0
    columns = PredictionColumns(task, recommended_values(dataset, task) if raw_values and task.id_columns else {})
    with (
        whole_file(output) as temporary,
        PREDICTION_FORMATS[output.suffix](temporary, columns.schema) as writer,
        RankOrder(columns.schema, ranks.world_size, output.parent) as in_order,
    ):
        for outputs in score_batches(state, dataset, split, ranks):
            rows = gather_outputs(outputs, ranks)
            tables = [columns.table(task.predictions(rank_rows)) for rank_rows in rows]
            in_order.write(tables, writer.write_table)
        return in_order.finish(writer.write_table)


def gather_outputs(outputs: Outputs, ranks: Ranks) -> list[Rows]:
    """Returns each rank's outputs of a step on rank 0, and nothing on other ranks; all ranks call it."""
    values_by_name = {name: ranks.gather_parts(values) for name, values in outputs.items()}
    by_rank = zip(*values_by_name.values(), strict=True)
    return [dict(zip(values_by_name, rank_values, strict=True)) for rank_values in by_rank]
