"""A run that is used after its training, and the checks of that use that need no model: dataset, outputs and ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pyarrow.parquet as pq

from distembed.base.errors import UserError
from distembed.base.files import require_file
from distembed.base.names import one_of
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.periods import SECONDS, PeriodKind
from distembed.tasks.config import RowTaskConfig
from distembed.training.config import Config
from distembed.training.resume import choose_dataset, find_checkpoint, is_of_same_ids, load_run_config
from distembed.training.start import require_labels, require_splits

PREDICTION_FORMATS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}
"""Writer class by the suffix of a file of predictions."""


@dataclass(frozen=True)
class TrainedRun:
    """A run with a checkpoint, the choice among its checkpoints, and a dataset to use it on."""

    folder: Path
    config: Config
    dataset: str
    manifest: Manifest
    checkpoint_choice: str | None = None


def find_trained_run(
    folder: Path, data: str | None, split: str | None = None, checkpoint: str | None = None
) -> TrainedRun:
    """Finds a run, and refuses one that cannot be used, before torch is loaded.

    Args:
        folder: The run's folder.
        data: Folder of another dataset, whose ids have to stand for the same values; None for the run's own.
        split: The split to read; None for none: then the part of the dataset that the run keeps is enough.
        checkpoint: ``best``, ``newest`` or a step, in place of the run's best or newest checkpoint.

    Raises:
        UserError: The folder holds no run or lacks the checkpoint, or the dataset is missing, is not like the run's
            own, or lacks the split.
    """
    config = load_run_config(folder)
    dataset = choose_dataset(folder, config, data, needs_rows=split is not None)
    manifest = Manifest.load(dataset)
    if split is not None:
        require_splits(dataset, {"--split": split})
        require_labels(config.task, dataset, [split])
    find_checkpoint(folder, config, checkpoint)
    return TrainedRun(folder, config, dataset, manifest, checkpoint)


def period_kind(name: str, run: TrainedRun) -> PeriodKind:
    """Returns the periods of a name, ``day`` or ``hour``, by which a run can be evaluated.

    Raises:
        UserError: The name is another one, the dataset has no times of rows, or the task has no metrics of single rows.
    """
    kinds: dict[str, PeriodKind] = {kind: kind for kind in SECONDS}
    kind = kinds[one_of("--by", name, kinds)]
    if run.manifest.schema.time is None:
        raise UserError(
            f"--by {name}: the dataset {run.dataset} has no times of rows; prepare it with `time: {{column: ...}}` in "
            "the schema, or leave --by out."
        )
    if not isinstance(run.config.task, RowTaskConfig):
        raise UserError(
            f"--by {name}: the task {run.config.task.name!r} has no metrics of single rows; leave --by out."
        )
    return kind


def whole_dataset(run: TrainedRun, config: Config) -> tuple[str, Manifest]:
    """Returns the dataset that describes a run to be made of another one: its folder and its manifest.

    It is the dataset that was given for the other run, or else ``data.path`` of the new run's config, which has the
    rows too. Where that is not here, or was prepared anew with other ids, it is the part that the other run keeps.

    Args:
        run: The other run.
        config: The new run's config.

    Raises:
        UserError: The new config names another dataset, whose ids stand for other values.
    """
    kept_folder = kept_dataset(run.folder)
    if kept_folder is None or Path(run.dataset) != kept_folder:
        return run.dataset, run.manifest
    path = config.data.require_path()
    if Path(path).exists() and is_of_same_ids(run.folder, path):
        return path, Manifest.load(path)
    if Path(path).exists() and path != run.config.data.path:
        raise UserError(
            f"data.path is {path}, whose ids stand for other values than those of the dataset that {run.folder} was "
            "trained on; name a dataset with the same tables, vocabularies and hash."
        )
    return run.dataset, run.manifest


def require_prediction_file(output: Path, overwrite: bool) -> None:
    """Refuses a file that predictions cannot be written to, before they are computed.

    Raises:
        UserError: The file's suffix is neither ``.parquet`` nor ``.csv``, it cannot be a file, or it exists.
        RunError: No file can be made in its folder.
    """
    if output.suffix not in PREDICTION_FORMATS:
        raise UserError(f"--output {output} ends in {output.suffix!r}; known: {', '.join(PREDICTION_FORMATS)}.")
    require_file("--output", output, overwrite)


def id_column(path: Path) -> str:
    """Returns the name of the column ``id``, or of the only column of integers.

    Raises:
        UserError: The file cannot be read, or which column holds the ids is not clear.
    """
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    integers = [field.name for field in schema if pa.types.is_integer(field.type)]
    if "id" in integers:
        return "id"
    if len(integers) != 1:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UserError(f"--ids {path} needs a column 'id' of integers, or one such column only; it has {columns}.")
    return integers[0]


def read_ids(path: Path, column: str) -> Iterator[int]:
    """Yields the ids of a column.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> UserError:
    """Returns the error of a file of ids that is no Parquet file."""
    return UserError(f"--ids {path} cannot be read as a Parquet file: {error}")
