"""The config, dataset and plan of an earlier run, and the settings that may differ when it is resumed or used.

A resumed run has to give the weights that it would have given without the interruption. So its config may differ only
in settings that do not touch the weights: where files are, which evaluations are made, how often something is logged,
where tables are placed. Another device or another kernel of lookups changes the weights only by rounding, if the
networks compute in the same precision. The config may also train for longer, unless a learning rate depends on the
number of steps. A model may be evaluated on another dataset, if its ids stand for the same values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.checkpoints.store import checkpoint_names, checkpoint_place, chosen_checkpoint
from distembed.data.dataset.kept import has_same_ids, kept_dataset
from distembed.data.dataset.manifest import Manifest, id_fingerprint
from distembed.data.dataset.schema import Schema
from distembed.embedding import assignment_checksums
from distembed.planning.saved_plan import SavedPlan, read_saved_plan
from distembed.tasks import MultiConfig, batch_schema
from distembed.training.config import Config, load_config, run_file
from distembed.training.run_folder.record import read_json_object

_MAY_CHANGE = {
    "plugins",
    "data.path",
    "data.schema",
    "data.validation",
    "data.test",
    "data.decode_threads",
    "data.skip_unreadable",
    "data.cache_dir",
    "data.cache_bytes",
    "data.stream",
    "data.stream.source",
    "data.stream.until_idle",
    "data.stream.max_rejected",
    "data.stream.max_bad_files",
    "data.stream.metrics_by",
    "data.stream.poll_seconds",
    "data.stream.kafka_properties",
    "embedding.kernel",
    "train.device",
    "train.log_every",
    "train.loggers",
    "train.evaluate_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.checkpoint_dir",
}
"""Settings that do not touch the weights; the reader checks by itself that the rows are the same."""
_EVALUATIONS = ("data.validation", "train.evaluate_every")
"""Settings of ``_MAY_CHANGE`` that decide which evaluation is the best: fixed in a run that compares evaluations."""
_LENGTHS = ("train.epochs", "train.max_steps", "data.stream.max_rows")
"""Settings of how long a run is, which may only grow."""


def load_run_config(run: Path) -> Config:
    """Returns the config that a run was started with.

    Raises:
        UserError: The folder holds no run, or a file of explicit assignments has changed since.
    """
    for name in ("config.yaml", "run.json"):
        if not (run / name).is_file():
            raise UserError(f"{run} is no run: it has no {name}. Give a folder that `distembed train` made.")
    config = load_config(run / "config.yaml")
    if config.data.path is None:
        raise UserError(f"{run / 'config.yaml'} names no dataset; the run folder is damaged.")
    trained_on = {run_file(run, path): checksum for path, checksum in _recorded(run, "assignments").items()}
    for path, checksum in assignment_checksums(config.embedding).items():
        if trained_on.get(path) != checksum:
            raise UserError(
                f"{path}, which says which rows the ids of an explicit table have, is not the file that {run} was "
                "trained with; put that one back."
            )
    return config


def find_checkpoint(run_dir: Path, config: Config, choice: str | None = None) -> str:
    """Returns the path or URL of a run's checkpoint: the chosen one, the best where the run keeps it, or the newest.

    Raises:
        UserError: The run lacks the checkpoint, or the place cannot be reached.
    """
    return chosen_checkpoint(run_dir, config.train.checkpoint_dir, choice, config.train.keep_best)


def choose_dataset(run: Path, config: Config, data: str | None, needs_rows: bool = True) -> str:
    """Returns the folder of the dataset to use a run's model on.

    Args:
        run: The run's folder.
        config: The run's config.
        data: Folder or URL of another dataset, whose ids have to stand for the same values; None for the run's own.
        needs_rows: Whether rows of the dataset are read; else the part that the run keeps of it is enough.

    Raises:
        UserError: The dataset is not there, or its ids stand for other values.
    """
    kept_folder = kept_dataset(run)
    if data is None and kept_folder is not None and not needs_rows:
        return str(kept_folder)
    dataset = config.data.require_path() if data is None else config.data.local_folder(data)
    if not Path(dataset).exists():
        raise UserError(f"the dataset {dataset} of {run} is not here; say where it is with --data.")
    if not is_of_same_ids(run, dataset):
        raise UserError(
            f"the ids of {dataset} stand for other values than those of the dataset that {run} was trained on, so its "
            "predictions would mean nothing. Use the dataset it was trained on, or one with the same tables, "
            "vocabularies and hash."
        )
    if isinstance(config.task, MultiConfig) and kept_folder is not None:
        before, now = (batch_schema(config.task, Manifest.load(each).schema) for each in (kept_folder, dataset))
        require_same_labels(before, now, run)
    return dataset


def require_same_labels(before: Schema, now: Schema, folder: Path) -> None:
    """Refuses other labels than a run's, or another order: a model's outputs are by the labels' places.

    Args:
        before: The columns of the run's batches.
        now: The columns of batches of another dataset or run.
        folder: The run's folder.
    """
    old, new = (", ".join(f"{label.name} ({label.kind})" for label in each.all_labels) for each in (before, now))
    if old != new:
        raise UserError(
            f"the labels of the task would be {new}, and {folder} was trained on {old}; choose the same by "
            "task.labels, from a dataset that has them in the same order."
        )


def is_of_same_ids(run: Path, dataset: str) -> bool:
    """Returns whether a dataset's ids stand for the values that a run was trained on."""
    kept_folder = kept_dataset(run)
    trained_on, manifest = read_json_object(run / "run.json").get("id_fingerprint"), Manifest.load(dataset)
    if trained_on is None or id_fingerprint(dataset, manifest) == trained_on:
        return True
    # the fingerprint also covers mean list lengths, which other rows change: compare the dataset that the run keeps
    return kept_folder is not None and has_same_ids(kept_folder, Manifest.load(kept_folder), dataset, manifest)


def require_same_config(folder: Path, config: Config) -> None:
    """Makes sure that a run is resumed with a config that gives the same weights.

    Raises:
        UserError: Settings differ that may not, all of which the error lists, or a changed ``train.checkpoint_dir``
            lacks the run's newest checkpoint.
    """
    started_with = load_run_config(folder)
    if (started_with.data.stream is None) != (config.data.stream is None):
        has, do = ("a stream", "give --follow") if config.data.stream is None else ("no stream", "leave --follow out")
        raise UserError(f"--resume: {folder} was trained on {has}; {do} (data.stream).")
    before, now = _flat(started_with), _flat(config)
    if now["train.precision"] == read_json_object(folder / "run.json").get("precision"):
        before["train.precision"] = now["train.precision"]  # the run had auto, and used the precision that is set now
    differences = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in before | now
        if before.get(key) != now.get(key) and not _may_change_on_resume(key, config)
    ]
    differences += _changed_lengths(started_with, config)
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(
            f"--resume: the config differs from the one that {folder} was started with, in what decides the weights:"
            f"\n  {listed}"
        )
    _require_moved_checkpoints(folder, started_with.train.checkpoint_dir, config.train.checkpoint_dir)


def require_same_precision(folder: Path, precision: str) -> None:
    """Makes sure that the networks of a resumed run compute as before; ``auto`` may choose another precision here."""
    before = read_json_object(folder / "run.json").get("precision", precision)
    if before != precision:
        raise UserError(
            f"--resume: the networks of {folder} were trained in {before}, and train.precision=auto chooses "
            f"{precision} on these ranks' devices, which gives other weights; set train.precision={before}."
        )


def _require_moved_checkpoints(folder: Path, before: str | None, now: str | None) -> None:
    """Makes sure that a changed place for checkpoints holds the run's newest one."""
    old_place, new_place = checkpoint_place(folder, before), checkpoint_place(folder, now)
    if old_place == new_place:
        return
    old_newest, new_newest = (max(checkpoint_names(place), default="") for place in (old_place, new_place))
    if new_newest < old_newest:
        newest_text = f"the newest checkpoint is {new_newest}" if new_newest else "no checkpoint is"
        raise UserError(
            f"--resume: train.checkpoint_dir is {now!r}, where {newest_text}; the run's newest is {old_newest} in "
            f"{old_place}. Move its checkpoints there first, or leave train.checkpoint_dir as it was."
        )


def _changed_lengths(before: Config, now: Config) -> list[str]:
    """Returns an error line for each changed setting of a run's length, unless the change only lengthens the run.

    Where a learning rate's schedule depends on the length, any change is an error.
    """
    scheduled = [
        f"train.{name}.schedule"
        for name in ("dense_optimizer", "sparse_optimizer")
        if getattr(before.train, name).schedule.depends_on_length
    ]
    lines, old_values, new_values = [], _flat(before), _flat(now)
    for key in _LENGTHS:
        old, new = old_values.get(key), new_values.get(key)
        # None is no limit, which is longer than any number
        if new == old or (new is None or (old is not None and new > old)) and not scheduled:
            continue
        reason = f"{scheduled[0]} follows the number of steps" if scheduled else "a run may only become longer"
        lines.append(f"{key}: {old!r} before, {new!r} now, but {reason}")
    return lines


def require_same_graphs(folder: Path, graphs: Mapping[str, str]) -> None:
    """Makes sure that a run is resumed with the same graphs, given their fingerprints by table."""
    before = _recorded(folder, "graphs")
    for table in {**before, **graphs}:
        if before.get(table) != graphs.get(table):
            raise UserError(
                f"--resume: the graph of table {table!r} is not the one that {folder} was started with; put that one "
                "back."
            )


def _recorded(run: Path, key: str) -> Mapping[str, Any]:
    """Returns the object under ``key`` in ``run.json``, empty if the key is missing; refuses any other type."""
    value = read_json_object(run / "run.json").get(key, {})
    if not isinstance(value, Mapping):
        raise UserError(f"{run / 'run.json'}: {key} is {value!r} instead of an object; the run folder is damaged.")
    return value


def load_run_plan(folder: Path, config: Config, say: Callable[[str], None]) -> SavedPlan | None:
    """Returns the saved plan of a resumed run; None if it has none yet.

    It is also None, and ``say`` prints why, if the config's ``plan`` section has changed.

    Raises:
        UserError: The plan cannot be read.
    """
    file = folder / "plan.json"
    if not file.exists():
        return None
    if load_run_config(folder).plan != config.plan:
        say("planned anew, since the config's plan section has changed")
        return None
    try:
        return read_saved_plan(file)
    except UserError as error:
        raise UserError(f"--resume: {error} Or remove it, and where tables go is planned anew.") from error


def _may_change_on_resume(key: str, config: Config) -> bool:
    """Returns whether a setting, given by its dotted path, may differ; :func:`_changed_lengths` checks the lengths."""
    if config.train.compares_evaluations and key in _EVALUATIONS:
        return False
    # require_same_graphs compares graphs by their contents, so their paths may change
    is_graph = key.startswith("sse.") and key.endswith(".graph")
    return key in _MAY_CHANGE or key in _LENGTHS or key.startswith("plan.") or is_graph


def _flat(config: Config) -> dict[str, Any]:
    """Returns every setting of a config by its dotted path: ``{"train.seed": 0, ...}``."""

    def walk(prefix: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {prefix: value}
        return {path: leaf for key, inner in value.items() for path, leaf in walk(f"{prefix}.{key}", inner).items()}

    flat = walk("", dataclasses.asdict(config))
    return {path.removeprefix("."): value for path, value in flat.items()}
