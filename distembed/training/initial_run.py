"""The earlier run that a new one begins with: its weights, the ids of its tables, and the growth of these tables.

``train --init-from RUN`` begins with RUN's weights and optimizer states on the next day's rows, whose vocabulary is
RUN's or one grown from it. The config of the new run has the grown tables, so that the new run stands alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.checkpoints.store import LAST_FILE, CheckpointStore, place_and_name, storage_errors
from distembed.data.dataset.kept import kept_dataset, require_grown_from
from distembed.data.dataset.manifest import Manifest, id_fingerprint
from distembed.data.dataset.schema import Schema
from distembed.embedding import EmbeddingConfig
from distembed.embedding.build import grown_embedding, require_same_settings
from distembed.tasks import MultiConfig, batch_schema
from distembed.training.config import Config, validate
from distembed.training.resume import find_checkpoint, load_run_config, require_same_labels
from distembed.training.run_folder.folder import holds_run
from distembed.training.run_folder.record import read_json_object

RECORD = "init_from"
"""Key of ``run.json`` that records the earlier run."""
_GIVEN, _FIRST_GIVEN = "embedding", "first_embedding"
"""Keys of that record: the settings of tables given to the run, and to the first run of its chain."""


@dataclass(frozen=True)
class InitialRun:
    """A run that a new one begins with.

    Attributes:
        folder: The run's folder.
        checkpoint: Path or URL of the checkpoint to begin with.
        config: The run's config, with its tables as they are.
        schema: The columns of its dataset.
        given: The settings of tables in the config that the user gave it; ``config`` has them after growth.
        first_given: The settings that the user gave the first run of the chain, in which each run begins with the one
            before.
        run_id: The run's id; None where it is of an early version.
        fingerprint: Checksum of its dataset's ids.
    """

    folder: Path
    checkpoint: str
    config: Config
    schema: Schema
    given: EmbeddingConfig
    first_given: EmbeddingConfig
    run_id: str | None
    fingerprint: str

    def record(self, given: EmbeddingConfig) -> dict[str, Any]:
        """Returns the record of this run for the new run's ``run.json``; ``given`` are the new run's tables as set."""
        return {
            "path": str(self.folder),
            "checkpoint": self.checkpoint,
            "id": self.run_id,
            "id_fingerprint": self.fingerprint,
            _GIVEN: dataclasses.asdict(given),
            _FIRST_GIVEN: dataclasses.asdict(self.first_given),
        }


def find_initial_run(init_from: str, dataset: str, manifest: Manifest, checkpoint: str | None = None) -> InitialRun:
    """Finds a run to begin with, and makes sure that a dataset's vocabularies continue the run's.

    Args:
        init_from: Folder of a run, or folder or URL of one of its checkpoints.
        dataset: Folder of the dataset to train on.
        manifest: Its manifest.
        checkpoint: The checkpoint that an interrupted run began with; unless given, the one named by ``init_from``, or
            the run's best where it keeps that, or its newest.

    Raises:
        UserError: There is no run or checkpoint, its dataset has changed, or known values have other ids in the
            new dataset.
    """
    folder, named_checkpoint = _folder_and_checkpoint(init_from)
    config = load_run_config(folder)
    checkpoint = checkpoint or named_checkpoint or find_checkpoint(folder, config)
    earlier_dir = str(kept_dataset(folder) or config.data.require_path())
    earlier = Manifest.load(earlier_dir)
    info = read_json_object(folder / "run.json")
    fingerprint = id_fingerprint(earlier_dir, earlier)
    if info.get("id_fingerprint", fingerprint) != fingerprint:
        raise UserError(
            f"the ids of {earlier_dir} stand for other values than when {folder} was trained on it; put that dataset "
            "back."
        )
    require_grown_from(earlier_dir, earlier, dataset, manifest)
    given, first_given = (_recorded_embedding(folder, key) or config.embedding for key in (_GIVEN, _FIRST_GIVEN))
    return InitialRun(folder, checkpoint, config, earlier.schema, given, first_given, info.get("id"), fingerprint)


def grown_config(config: Config, initial: InitialRun, schema: Schema) -> Config:
    """Returns a config whose tables are an earlier run's, grown to the ids of a dataset with this schema.

    Raises:
        UserError: The model, the task or a table is set otherwise than in the earlier run, or a table cannot grow.
    """
    for section in ("model", "task"):
        old, new = (getattr(config_, section).name for config_ in (initial.config, config))
        if old != new:
            raise UserError(f"{section}.name is {new!r}, and {initial.folder} was trained with {old!r}; use the same.")
    columns, columns_before = batch_schema(config.task, schema), batch_schema(initial.config.task, initial.schema)
    if isinstance(config.task, MultiConfig):
        require_same_labels(columns_before, columns, initial.folder)
    old, new = (getattr(config_.model, "click", None) for config_ in (initial.config, config))
    if old != new:
        raise UserError(f"model.click is {new!r}, and {initial.folder} was trained with {old!r}; use the same.")
    features = columns.categorical
    embedding = grown_embedding(initial.config.embedding, columns_before.categorical, config.embedding, features)
    # the user may give the earlier run's settings, the first run's, or the grown ones (from the new run's own config)
    if config.embedding not in (initial.config.embedding, initial.first_given, embedding):
        require_same_settings(initial.given, config.embedding, features, str(initial.folder))
    assert config.train.init_from is not None
    train = dataclasses.replace(config.train, init_from=_absolute(config.train.init_from))
    return dataclasses.replace(config, embedding=embedding, train=train)


def begun_config(config: Config) -> Config:
    """Returns the config with which a new run starts: with ``train.init_from``, tables grown from the earlier run's."""
    if config.train.init_from is None:
        return config
    dataset = config.data.require_path()
    manifest = Manifest.load(dataset)
    return grown_config(config, find_initial_run(config.train.init_from, dataset, manifest), manifest.schema)


def resumed_config(config: Config, folder: Path) -> Config:
    """Returns the given config with everything that the run in ``folder`` decided when it started.

    ``task.exclude_seen: auto`` becomes the run's decision, and empty ``task.labels`` the run's labels. In a run with
    ``train.init_from``, that setting is taken from the run if it is missing, and table settings as the user gave them
    become the grown settings. Other settings stay as given, so that
    :func:`~distembed.training.resume.require_same_config` finds differences.
    """
    started_with = load_run_config(folder)
    if getattr(config.task, "exclude_seen", None) == "auto" and config.task.name == started_with.task.name:
        decided = started_with.task.exclude_seen  # type: ignore[attr-defined]
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, exclude_seen=decided))
    if isinstance(config.task, MultiConfig) and isinstance(started_with.task, MultiConfig) and not config.task.labels:
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, labels=started_with.task.labels))
    given_embedding = _recorded_embedding(folder, _GIVEN)
    if given_embedding is None:
        return config
    init_from = started_with.train.init_from if config.train.init_from is None else _absolute(config.train.init_from)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=init_from))
    if config.embedding == given_embedding:
        config = dataclasses.replace(config, embedding=started_with.embedding)
    return config


def recorded(folder: Path, key: str = RECORD) -> Mapping[str, Any] | None:
    """Returns an object of ``run.json``, by default the record of the earlier run; None where there is none."""
    record = read_json_object(folder / "run.json").get(key)
    return record if isinstance(record, Mapping) else None


def _recorded_embedding(folder: Path, key: str) -> EmbeddingConfig | None:
    """Returns the table settings under ``key`` in a run's ``init_from`` record; None for a run without that record."""
    record = recorded(folder)
    if record is None:
        return None
    return validate({"embedding": record.get(key)}, f"{RECORD}.{key} of {folder / 'run.json'}").embedding


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())


def _folder_and_checkpoint(init_from: str) -> tuple[Path, str | None]:
    """Returns the run of ``train.init_from``: its folder, and its checkpoint's path or URL, None if a run is named.

    A place for checkpoints outside of the run's folder names the run; else the checkpoint is ``RUN/checkpoints/NAME``.
    """
    folder = Path(init_from)
    if "://" not in init_from and holds_run(folder):
        return folder.absolute(), None
    checkpoint = _absolute(init_from.rstrip("/"))
    place, name = place_and_name(checkpoint)
    store = CheckpointStore(place)
    with storage_errors(place):
        owner = store.owner() if store.is_whole(name) else None
    if "://" not in init_from and (folder / LAST_FILE).is_file() and owner is None:
        owner = str(folder.absolute().parent.parent)
    if owner is None or not holds_run(Path(owner)):
        raise UserError(
            f"train.init_from is {init_from!r}, which is no run and no checkpoint of a run that is here; give the "
            "folder of a run that `distembed train` made, whose train.checkpoint_dir says where its checkpoints are."
        )
    return Path(owner), checkpoint
