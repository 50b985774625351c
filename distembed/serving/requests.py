"""A request to score raw rows with a run, checked before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.remote import is_url
from distembed.data.table.encoder import raw_schema
from distembed.tasks.next_item_config import NextItemConfig
from distembed.tasks.ranking_config import RankingConfig
from distembed.tasks.retrieval_config import RetrievalConfig
from distembed.training.resume import load_run_config
from distembed.training.trained_run import TrainedRun, find_trained_run

if TYPE_CHECKING:
    from distembed.models import Model
    from distembed.serving.raw_predictions import RawInputs
    from distembed.serving.rows.decoder import RowDecoder


def find_run_for_rows(folder: Path, data: str | None, checkpoint: str | None = None) -> TrainedRun:
    """Finds a run to score raw rows with; the run's copy of its dataset's vocabularies is enough.

    A run that ranks items for users reads its dataset if it still exists, to leave out items that users have, and for
    items with features to read the catalogue. ``data`` is the folder of another dataset, whose ids must stand for the
    same values.
    """
    if data is None:
        config = load_run_config(folder)
        path = config.data.require_path()
        data = path if config.task.name in ("ranking", "retrieval") and Path(path).exists() else None
    return find_trained_run(folder, data, checkpoint=checkpoint)


def seen_items_note(run: TrainedRun) -> str | None:
    """Returns a warning if ``task.exclude_seen`` is set but the dataset with users' items is gone; otherwise None."""
    task = run.config.task
    if not (isinstance(task, RankingConfig) and task.excludes_seen and run.manifest.is_without_rows):
        return None
    return (
        f"the dataset {run.config.data.path} is not here, so items that users have are recommended to them, although "
        "task.exclude_seen leaves them out in evaluations; say where the dataset is with --data, or data= of load()"
    )


def row_decoder(run: TrainedRun, model: Model) -> RowDecoder:
    """Returns the decoder of the raw rows that a run's task predicts; rows have the lists that its ``model`` reads.

    For items with features, rows have the features of users, and unknown users are decoded as unknown values.
    """
    from distembed.serving.rows.sequence_rows import SequenceRowDecoder
    from distembed.serving.rows.table_rows import TableRowDecoder, features_read
    from distembed.serving.rows.user_rows import UserRowDecoder

    task, folder, schema = run.config.task, Path(run.dataset), run.manifest.schema
    if isinstance(task, RankingConfig):
        return UserRowDecoder(folder, run.manifest)
    if isinstance(task, NextItemConfig):
        return SequenceRowDecoder(folder, run.manifest, model.lists_read(schema))
    if isinstance(task, RetrievalConfig):
        return TableRowDecoder(folder, run.manifest, features=task.user_side(schema))
    return TableRowDecoder(folder, run.manifest, features=features_read(schema, model.lists_read(schema)))


@dataclass(frozen=True)
class RawRequest:
    """Raw rows to score.

    Attributes:
        inputs: Files, folders, patterns, URLs and pipes.
        keys: Names of columns to keep beside the predictions.
        max_rejected: Largest share of malformed rows that is no error.
    """

    inputs: Sequence[str]
    keys: Sequence[str] = ()
    max_rejected: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.max_rejected <= 1:
            raise UserError(f"--max-rejected is {self.max_rejected}: it is a share of the rows, between 0 and 1")

    def require_usable(self, manifest: Manifest, output: Path) -> None:
        """Checks, on rank 0, that raw rows fit the dataset, the inputs exist, and ``output`` replaces none of them."""
        if os.environ.get("RANK", "0") == "0":
            raw_schema(manifest)
            for table_input in find_inputs(self.inputs):
                if output.exists() and not is_url(table_input.place) and output.samefile(table_input.place):
                    raise UserError(f"--output {output} is an input, which it would replace; name another file.")

    def open(self, run: TrainedRun, model: Model) -> RawInputs:
        """Opens the inputs; their rows may lack labels, and lists that the model does not read."""
        from distembed.serving.raw_predictions import RawInputs

        decoder = row_decoder(run, model)
        source = TableSource(
            find_inputs(self.inputs),
            decoder.schema,
            others=tuple(dict.fromkeys(self.keys)),
            may_lack={label.column for label in raw_schema(run.manifest).all_labels.values()},
        )
        return RawInputs(source, decoder, self.keys, self.max_rejected)
