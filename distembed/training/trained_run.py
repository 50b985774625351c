"""A run that is used after its training: what can be known of it, and of what is asked for, without its model."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet

from distembed.base.errors import UserError
from distembed.base.files import require_file
from distembed.data.dataset.manifest import Manifest
from distembed.training.config import Config
from distembed.training.resume import choose_dataset, find_checkpoint, load_run_config
from distembed.training.start_checks import require_labels, require_splits

PREDICTION_FORMATS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}
"""Writer class by the suffix of a file of predictions."""


@dataclass(frozen=True)
class TrainedRun:
    """A run with a checkpoint, and a dataset to use it on.

    Attributes:
        folder: The run's folder.
        config: The run's config.
        dataset: The dataset's folder.
        manifest: The dataset's manifest.
        checkpoint_choice: Which checkpoint to use in place of the run's best or newest; None for these.
    """

    folder: Path
    config: Config
    dataset: str
    manifest: Manifest
    checkpoint_choice: str | None = None


def find_trained_run(
    folder: Path, data: str | None, split: str | None = None, checkpoint: str | None = None
) -> TrainedRun:
    """Finds a run, and refuses one that cannot be used, without torch.

    Args:
        folder: The run's folder.
        data: The folder of another dataset, whose ids have to stand for the same values; None for the run's own.
        split: The split of the dataset that is to be read; None for none: then what the run keeps of its own is enough.
        checkpoint: Another checkpoint than the run's best or newest, as for
            :func:`~distembed.training.resume.find_checkpoint`.

    Raises:
        UserError: The folder holds no run or no such checkpoint, or the dataset is not there, is not like the run's
            own, or has no such split that is whole.
    """
    config = load_run_config(folder)
    dataset = choose_dataset(folder, config, data, needs_rows=split is not None)
    manifest = Manifest.load(dataset)
    if split is not None:
        require_splits(dataset, {"--split": split})
        require_labels(config.task, dataset, [split])
    find_checkpoint(folder, config, checkpoint)
    return TrainedRun(folder, config, dataset, manifest, checkpoint)


def require_prediction_file(output: Path, overwrite: bool) -> None:
    """Refuses a file that predictions cannot be written to, before there are any.

    Args:
        output: The file.
        overwrite: Whether one that is there may be replaced.

    Raises:
        UserError: The file's suffix is neither ``.parquet`` nor ``.csv``, it cannot be a file, or it is there already.
        RunError: No file can be made in its folder.
    """
    if output.suffix not in PREDICTION_FORMATS:
        raise UserError(f"--output {output} ends in {output.suffix!r}; known: {', '.join(PREDICTION_FORMATS)}.")
    require_file("--output", output, overwrite)
