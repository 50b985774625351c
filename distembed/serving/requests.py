"""What is asked of a run with raw rows, checked before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import USER
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.remote import is_url
from distembed.data.table.encoder import raw_schema
from distembed.tasks.ranking_config import RankingConfig
from distembed.training.resume import load_run_config
from distembed.training.trained_run import TrainedRun, find_trained_run

if TYPE_CHECKING:
    from distembed.serving.raw_inputs import RawInputs
    from distembed.serving.row_decoder import RowDecoder


def find_run_for_rows(folder: Path, data: str | None, checkpoint: str | None = None) -> TrainedRun:
    """Finds a run to score raw rows with: what it keeps of its dataset is enough.

    A run that ranks items for users has its dataset where that is still there: items that users have may be left out.

    Args:
        folder: The run's folder.
        data: The folder of another dataset, whose ids have to stand for the same values; None for the run's own.
        checkpoint: Which checkpoint to use, as for :func:`~distembed.training.trained_run.find_trained_run`.

    Raises:
        UserError: The folder holds no run or no such checkpoint, or the dataset is not like the run's own.
    """
    if data is None:
        config = load_run_config(folder)
        path = config.data.require_path()
        data = path if config.task.name == "ranking" and Path(path).exists() else None
    return find_trained_run(folder, data, checkpoint=checkpoint)


def seen_items_note(run: TrainedRun) -> str | None:
    """Returns a note where the items that users have should be left out of their recommendations, but are not known."""
    task = run.config.task
    if not (isinstance(task, RankingConfig) and task.excludes_seen and run.manifest.is_without_rows):
        return None
    return (
        f"the dataset {run.config.data.path} is not here, so items that users have are recommended to them, although "
        "task.exclude_seen leaves them out in evaluations; say where the dataset is with --data, or data= of load()"
    )


def row_decoder(run: TrainedRun) -> RowDecoder:
    """Returns what makes batches of the raw rows that a run's task predicts.

    Raises:
        UserError: The dataset was made elsewhere, or a vocabulary is missing or damaged.
    """
    from distembed.serving.recommender_rows import SequenceRowDecoder, UserRowDecoder
    from distembed.serving.row_decoder import TableRowDecoder

    kinds: dict[str, Callable[[Path, Manifest], RowDecoder]]
    kinds = {"ranking": UserRowDecoder, "next_item": SequenceRowDecoder}
    return kinds.get(run.config.task.name, TableRowDecoder)(Path(run.dataset), run.manifest)


def unknown_columns(run: TrainedRun) -> tuple[str, ...]:
    """Returns the columns of a task's predictions that those of raw rows lack: the label, and whose a sequence is."""
    return ("label", USER) if run.config.task.name == "next_item" else ("label",)


@dataclass(frozen=True)
class RawRequest:
    """Raw rows to score.

    Attributes:
        inputs: Files, folders, patterns, URLs and pipes.
        keys: Names of columns to keep beside the predictions.
        max_rejected: Largest share of malformed rows that is no error.

    Raises:
        UserError: The share is none.
    """

    inputs: Sequence[str]
    keys: Sequence[str] = ()
    max_rejected: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.max_rejected <= 1:
            raise UserError(f"--max-rejected is {self.max_rejected}: it is a share of the rows, between 0 and 1")

    def require_usable(self, manifest: Manifest, output: Path) -> None:
        """Makes sure that the inputs are there and are raw rows of such a dataset; on the first rank.

        Args:
            manifest: The dataset's manifest.
            output: The file of predictions, which is none of the inputs.

        Raises:
            UserError: They are not.
        """
        if os.environ.get("RANK", "0") == "0":
            raw_schema(manifest)
            for each in find_inputs(self.inputs):
                if output.exists() and not is_url(each.place) and output.samefile(each.place):
                    raise UserError(f"--output {output} is an input, which it would replace; name another file.")

    def open(self, run: TrainedRun) -> RawInputs:
        """Opens the inputs.

        Raises:
            UserError: An input cannot be read or lacks a column, or a key has the name of a prediction.
        """
        from distembed.serving.raw_inputs import RawInputs

        decoder = row_decoder(run)
        label = raw_schema(run.manifest).label
        source = TableSource(
            find_inputs(self.inputs),
            decoder.schema,
            others=tuple(dict.fromkeys(self.keys)),
            may_lack=None if label is None else label.column,
        )
        return RawInputs(source, decoder, self.keys, self.max_rejected)
