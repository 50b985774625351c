"""Loads the model of a run from its newest checkpoint, to evaluate it on a split or to predict the rows of one."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distembed.base.files import whole_file
from distembed.base.ranks import Ranks, process_group
from distembed.checkpoints import load_checkpoint
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.optim.config import SparseOptimizerConfig
from distembed.tasks.base import Outputs, Rows
from distembed.training.build import Blueprint, TrainingState, build_training_state
from distembed.training.config import Config
from distembed.training.evaluation import score_batches, score_split
from distembed.training.newest import read_newest
from distembed.training.prediction_columns import PredictionColumns, RankOrder, recommended_values
from distembed.training.trained_run import PREDICTION_FORMATS, TrainedRun


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """The model of a run's checkpoint, that checkpoint's path or URL, the dataset to use it on, and this rank."""

    state: TrainingState
    checkpoint: str
    dataset: str
    ranks: Ranks


@contextmanager
def load_run(run: TrainedRun) -> Iterator[LoadedRun]:
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
    # nothing is trained: any optimizer will do that every device has
    train = dataclasses.replace(config.train, sparse_optimizer=SparseOptimizerConfig(name="sgd"))
    kept = kept_dataset(run_dir)
    data = config.data if kept is None else dataclasses.replace(config.data, path=str(kept))
    config = dataclasses.replace(config, train=train, data=data)
    blueprint = Blueprint.for_ranks(config, Manifest.load(dataset).schema, ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=1)
    state.task.start(blueprint.task_context(dataset, ranks))

    def load(checkpoint: str) -> str:
        load_checkpoint(checkpoint, state.model)
        return checkpoint

    return state, read_newest(run_dir, config, load, choice=checkpoint)


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
    columns = PredictionColumns(task, recommended_values(dataset) if raw_values and task.id_columns else {})
    with (
        whole_file(output) as temporary,
        PREDICTION_FORMATS[output.suffix](temporary, columns.schema) as writer,
        RankOrder(columns.schema, ranks.world_size, output.parent) as in_order,
    ):
        for outputs in score_batches(state, dataset, split, ranks):
            rows = gather_outputs(outputs, ranks)
            tables = [columns.table(task.predictions(own)) for own in rows]
            in_order.write(tables, writer.write_table)
        return in_order.finish(writer.write_table)


def gather_outputs(outputs: Outputs, ranks: Ranks) -> list[Rows]:
    """Returns each rank's outputs of a step on rank 0, and nothing on other ranks; all ranks call it."""
    parts = {name: ranks.gather_parts(values) for name, values in outputs.items()}
    return [dict(zip(parts, of_rank, strict=True)) for of_rank in zip(*parts.values(), strict=True)]
