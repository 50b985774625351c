"""The config of a run: YAML and overrides, merged, then validated once, with every mistake in one error.

A file has the top keys ``data``, ``model``, ``embedding``, ``train``, ``plan``, ``sse`` and ``task``, each a frozen
dataclass beside the code that it configures. ``extends: other.yaml``, relative to the file, gives the missing keys.
``plugins`` names modules and files that are imported before anything is validated (:mod:`distembed.base.plugins`).
``dotted.key=value`` overrides are parsed as YAML. A dumped config reads back exactly.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import Field, TypeAdapter, model_validator

from distembed.base.errors import UserError
from distembed.base.files import read_regular_file
from distembed.base.lazy import NameTable
from distembed.base.names import STRICT
from distembed.base.plugins import import_plugins, is_file, plugin_files, refuse_code_in_run, with_absolute_files
from distembed.base.validation import MAX_BYTES, MAX_LEVELS, format_yaml, parse_yaml, shown, unwritable, validated
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.config import DataConfig
from distembed.embedding.settings import EmbeddingConfig
from distembed.models import MODELS, DLRMConfig, ESMMConfig, ModelSection
from distembed.models.config import DeclaringModelConfig, ItemModelConfig
from distembed.optim import OPTIMIZERS
from distembed.partitions import PARTITIONS
from distembed.planning import PlanConfig
from distembed.sse.config import SSEConfig
from distembed.tasks import TASKS, ClickConfig, MultiConfig, TaskSection
from distembed.tasks.config import DeclaringTaskConfig, ItemTaskConfig, RowTaskConfig
from distembed.training.train_config import TrainConfig


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Config:
    """The whole config of a run.

    Attributes:
        data: The dataset and its splits.
        model: The model and its sizes.
        embedding: The embedding tables and how they are compressed.
        train: Batches, optimizers, precision, checkpoints and the seed.
        plan: Limits of the planner.
        sse: How ids are replaced in training.
        task: The objective of the model.
        plugins: Modules and files (``.py``) that register models, tasks, optimizers and schemes of one's own. In a YAML
            file a relative path starts at that file, in an override at the working directory.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelSection = field(default_factory=DLRMConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sse: SSEConfig = field(default_factory=SSEConfig)
    task: TaskSection = field(default_factory=ClickConfig)
    plugins: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)

    @model_validator(mode="after")
    def _model_fits_task(self) -> "Config":
        """Refuses a model whose outputs the task does not take, where both declare them."""
        model, task = self.model, self.task
        if (
            isinstance(model, DeclaringModelConfig)
            and isinstance(task, DeclaringTaskConfig)
            and model.returns != task.takes
        ):
            models = [name for name, kind in MODELS.items() if getattr(kind, "returns", None) == task.takes]
            tasks = [name for name, kind in TASKS.items() if getattr(kind, "takes", None) == model.returns]
            raise ValueError(
                f"model.name is {model.name!r} and task.name is {task.name!r}, which do not go together; "
                f"the task takes the models {', '.join(models)}, and the model is for the tasks {', '.join(tasks)}"
            )
        return self

    @model_validator(mode="after")
    def _task_has_the_items_of_the_model(self) -> "Config":
        """Gives a task over a catalogue of items the features that the model's section calls the item's."""
        if isinstance(self.task, ItemTaskConfig):
            if not isinstance(self.model, ItemModelConfig):
                raise ValueError(
                    f"task.name is {self.task.name!r}, and the model {self.model.name!r} does not say which feature is "
                    "the item: its section needs item and item_features"
                )
            object.__setattr__(self, "task", self.task.for_model(self.model))  # the section itself is frozen
        return self

    @model_validator(mode="after")
    def _conversions_are_after_clicks(self) -> "Config":
        """Gives ESMM the label of clicks, which the conversion's ``after`` names; refuses labels without one.

        Without it, a conversion that is unknown without a click would be learned from clicked rows alone.
        """
        model, task = self.model, self.task
        if isinstance(model, ESMMConfig) and isinstance(task, MultiConfig):
            clicks = {label.after for label in task.labels.values()} - {None}
            if len(task.labels) != 2 or len(clicks) != 1 or not clicks <= task.labels.keys():
                raise ValueError(
                    "model.name is 'esmm', which learns a click and a conversion after it, and task.labels is "
                    f"{ {name: {'after': label.after} for name, label in task.labels.items()} }; give two labels of "
                    "which one is after the other, such as task.labels={click: {}, conversion: {after: click}}"
                )
            (click,) = clicks
            if model.click not in (None, click):
                raise ValueError(
                    f"model.click is {model.click!r}, and the label before the other one in task.labels is {click!r}; "
                    "leave model.click out"
                )
            object.__setattr__(self, "model", dataclasses.replace(model, click=click))
        return self

    @model_validator(mode="after")
    def _vectors_are_rounded_once(self) -> "Config":
        """Refuses codecs of vectors that are of half precision already, which they read as float32."""
        if self.embedding.output_dtype != "fp32" and self.train.quantized_comms.is_used:
            raise ValueError(
                f"embedding.output_dtype is {self.embedding.output_dtype!r}, in which vectors and gradients are sent, "
                "and train.quantized_comms rounds what is sent once more, from fp32 only; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _stream_has_a_length(self) -> "Config":
        """Refuses epochs of a stream, and learning rates that follow a number of steps which nobody knows."""
        train, stream = self.train, self.data.stream
        if stream is None:
            return self
        if train.half_life_days is not None:
            raise ValueError(
                f"train.half_life_days is {train.half_life_days:g}, and rows of a stream (data.stream) are trained "
                "once, as they arrive; leave it out"
            )
        if train.epochs > 1:
            raise ValueError(f"train.epochs is {train.epochs}, and a stream (data.stream) is read once; leave it out")
        for name in ("dense_optimizer", "sparse_optimizer"):
            if getattr(train, name).schedule.depends_on_length and not (stream.max_rows or train.max_steps):
                raise ValueError(
                    f"train.{name}.schedule follows the number of steps, which a stream (data.stream) does not have; "
                    f"set 'train.{name}.schedule={{warmup: 0, decay: none}}', data.stream.max_rows or train.max_steps"
                )
        return self

    @model_validator(mode="after")
    def _rows_have_times(self) -> "Config":
        """Refuses weights by age, and metrics by day, for a task that does not take single rows."""
        if self.train.half_life_days is not None and not isinstance(self.task, RowTaskConfig):
            raise ValueError(
                f"train.half_life_days is {self.train.half_life_days:g}, and the task {self.task.name!r} has no loss "
                "of single rows with weights; leave it out"
            )
        stream = self.data.stream
        if stream is not None and stream.metrics_by is not None and not isinstance(self.task, RowTaskConfig):
            raise ValueError(
                f"data.stream.metrics_by is {stream.metrics_by!r}, and the task {self.task.name!r} has no metrics of "
                "single rows; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_to_compare(self) -> "Config":
        """Refuses a comparison of evaluations where there are none."""
        if self.train.compares_evaluations and self.data.validation is None:
            raise ValueError(
                "train.keep_best and train.stop_after_evaluations compare evaluations on the validation split, and "
                "data.validation is null; name a split, or leave both out"
            )
        return self

    def to_yaml(self) -> str:
        """Returns YAML that :func:`load_config` reads back to an equal config."""
        values = dataclasses.asdict(self)
        plugins = values.pop("plugins")
        return format_yaml({"plugins": plugins, **values} if plugins else values)


_ADAPTER = TypeAdapter(Config)
_PATHS = frozenset({"path", "assignments", "graph", "init_from", "source", "kafka_properties"})
"""Keys of files and folders that a relative path names from the working directory; URLs are left as they are."""
_MOST_FILES = 20
"""Most files in a chain of ``extends``."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``dotted.key=value`` overrides and validates the result.

    Raises:
        UserError: The config is wrong; the error lists the path of every mistake and the nearest name of unknown keys.
    """
    is_run = path is not None and path.name == "config.yaml" and (path.parent / "run.json").exists()
    values = _read_extended(path, path.parent if is_run else None) if path is not None else {}
    if path is not None and is_run:
        _find_assignments(values, path.parent)
    if sum(map(len, overrides)) > MAX_BYTES:
        raise UserError(f"the overrides have more than {MAX_BYTES:,} characters; write such settings into a file.")
    for override in overrides:
        _apply(values, override)
    values = with_absolute_files(values, Path.cwd())
    return validate(values, str(path) if path is not None else "the overrides")


def run_file(run: Path, path: str) -> str:
    """Returns the absolute path of a file that a run's folder holds under a relative path; else the path as it is."""
    return path if Path(path).is_absolute() or not (run / path).is_file() else str((run / path).absolute())


def relative_path(path: str, run: Path) -> str:
    """Returns the path of a file from its run's folder; the path as it is for a file elsewhere."""
    absolute, folder = Path(path).absolute(), run.absolute()
    return str(absolute.relative_to(folder)) if absolute.is_relative_to(folder) else path


def relative_to_run(config: Config, run: Path) -> Config:
    """Returns the config with the assignments that a run's folder holds relative to it, so that it may be moved."""
    tables = {
        name: table
        if table.assignments is None
        else dataclasses.replace(table, assignments=relative_path(table.assignments, run))
        for name, table in config.embedding.tables.items()
    }
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tables=tables))


def _find_assignments(values: Mapping[str, Any], run: Path) -> None:
    """Makes the paths absolute of assignments that a run's folder holds, in the nested values of its config."""
    embedding = values.get("embedding")
    tables = embedding.get("tables") if isinstance(embedding, dict) else None
    for table in tables.values() if isinstance(tables, dict) else ():
        if isinstance(table, dict) and isinstance(table.get("assignments"), str):
            table["assignments"] = run_file(run, table["assignments"])


def with_absolute_paths(config: Config) -> Config:
    """Returns the config with absolute paths, for a process that works in another folder."""

    def absolute(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {inner: absolute(inner, content) for inner, content in value.items()}
        return str(Path(value).absolute()) if _is_path(key, value) else value

    return validate(absolute("", dataclasses.asdict(config)), "the config with absolute paths")


def input_paths(config: Config) -> list[str]:
    """Returns the files and folders that training reads, each once."""

    def paths(key: str, value: Any) -> list[str]:
        if isinstance(value, dict):
            return [path for inner, content in value.items() for path in paths(inner, content)]
        return [value] if _is_path(key, value) else []

    read_paths = paths("", dataclasses.asdict(config)) + [plugin for plugin in config.plugins if is_file(plugin)]
    return list(dict.fromkeys(read_paths))


def require_plugins(config: Config) -> None:
    """Refuses a model, task or other name that the ranks of a job will not know, as no plugin registers it.

    For example, a script registers a model and then calls distembed's ``main``: the ranks do not run that script. A
    name is a plugin's if it was added while the plugin's file ran, be it as an import or as this process's script.

    Raises:
        UserError: The ranks would not know a name.
    """
    files = plugin_files(config.plugins)
    tables = [config.embedding.default, *config.embedding.tables.values()]
    used: list[tuple[NameTable[Any], str]] = [
        (MODELS, config.model.name),
        (TASKS, config.task.name),
        (OPTIMIZERS, config.train.dense_optimizer.name),
        (OPTIMIZERS, config.train.sparse_optimizer.name),
        *((PARTITIONS, table.partition) for table in tables),
        *((COMPOSITIONS, table.composition) for table in tables),
    ]
    for names, name in used:
        if name in names.added and names.added[name] is None and files.isdisjoint(names.added_by_files[name]):
            script = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "mine.py")
            plugins = ", ".join([*config.plugins, script if script.endswith(".py") else "mine.py"])
            raise UserError(
                f"{name!r} is registered in this process alone, and the ranks of a job are others: name the file or "
                f"module that registers it, such as plugins=[{plugins}]."
            )


def _is_path(key: str, value: Any) -> bool:
    """Returns whether a setting is the path of a file or a folder."""
    return key in _PATHS and isinstance(value, str) and "://" not in value


def validate(values: Mapping[str, Any], source: str) -> Config:
    """Returns the config of nested plain values; ``source`` names their place in errors.

    Raises:
        UserError: A plugin cannot be imported, or the values are wrong; the error lists every mistake.
    """
    import_plugins(values.get("plugins"), source)
    return validated(_ADAPTER, Config, values, source)


def _apply(values: dict[str, Any], override: str) -> None:
    """Sets the value of an override ``dotted.key=value`` in nested ``values``; makes missing or null sections."""
    key, separator, text = override.partition("=")
    path, source = key.split("."), f"override {shown(override)}"
    if not separator or not all(path):
        raise UserError(f"{source} is not of the form dotted.key=value, such as train.batch_size=2048.")
    if len(path) > MAX_LEVELS:
        raise UserError(f"{source} names a key within {len(path)} sections; a config has fewer than {MAX_LEVELS}.")
    section = values
    for depth, key_part in enumerate(path[:-1], start=1):
        inner = section.setdefault(key_part, {})
        if inner is None:
            inner = section[key_part] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{source}: {'.'.join(path[:depth])} is {shown(inner)} in the config, which has no keys.")
        section = inner
    section[path[-1]] = parse_yaml(text, source)


def _read_extended(path: Path, run: Path | None, followed: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the values of a file, merged into the values of the file that its key ``extends`` names.

    Paths become absolute, each from the folder of its file. A chain of files that is a circle or too long is refused.

    Args:
        path: The file.
        run: Folder of the run if the file is a run's ``config.yaml``, which may not name code to run; else None.
        followed: The files that extend this one, from the first on.
    """
    values = _read_yaml(path)
    if run is not None:
        refuse_code_in_run(values, path, run)
    values = with_absolute_files(values, path.parent)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{path}: extends is {base!r}; give the path of a YAML file, relative to this one.")
    followed = (*followed, Path(os.path.realpath(path)))
    for mistake in unwritable(base, "extends"):
        raise UserError(f"{path}: {mistake}")
    if Path(os.path.realpath(path.parent / base)) in followed:
        raise UserError(f"{path}: extends {base!r}, which in turn extends this file; break the circle.")
    if len(followed) == _MOST_FILES:
        raise UserError(f"{path}: extends {base!r}, but {_MOST_FILES} files extend one another already; merge some.")
    return _merge(_read_extended(path.parent / base, run, followed), values)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with ``changes``, key by key; a section of another ``name`` is replaced, as its keys differ."""
    if "name" in changes and "name" in base and changes["name"] != base["name"]:
        return changes
    merged = {**base, **changes}
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value)
    return merged


def _read_yaml(path: Path) -> dict[str, Any]:
    """Returns the keys of a file, which may be empty."""
    try:
        text = read_regular_file(path, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:  # ValueErrors are other encodings, and a path that no file can have
        raise UserError(f"the config {path} cannot be read: {error}") from error
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"the config {path} holds a {type(values).__name__}; it must hold keys such as `train:`.")
    return values
