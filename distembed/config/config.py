"""The config of a run: YAML and overrides, merged, then validated once, with every mistake in one error.

A file has the top keys ``data``, ``model``, ``embedding``, ``train``, ``plan``, ``sse`` and ``task``, each a frozen
dataclass beside the code that it configures. ``extends: other.yaml``, beside the file, gives what the file leaves out.
``dotted.key=value`` overrides are parsed as YAML. What is dumped reads back exactly.
"""

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import pydantic.dataclasses
from pydantic import TypeAdapter, ValidationError, model_validator

from distembed.config.train import TrainConfig
from distembed.data.dataset.config import DataConfig
from distembed.embedding.settings import EmbeddingConfig
from distembed.errors import UserError
from distembed.files import read_regular_file
from distembed.models import MODELS, DLRMConfig, ModelSection
from distembed.models.config import DeclaringModelConfig
from distembed.names import STRICT, ByName, nearest
from distembed.planning import PlanConfig
from distembed.sse.config import SSEConfig
from distembed.tasks import TASKS, ClickConfig, TaskSection
from distembed.tasks.config import DeclaringTaskConfig
from distembed.yaml_text import MAX_BYTES, MAX_LEVELS, format_yaml, parse_yaml


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Config:
    """Everything that a run depends on.

    Attributes:
        data: The dataset and its splits.
        model: The model and its sizes.
        embedding: The embedding tables and how they are compressed.
        train: Batches, optimizers, precision, checkpoints and the seed.
        plan: What the planner may do to place tables.
        sse: How ids are replaced in training.
        task: What the model learns.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelSection = field(default_factory=DLRMConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sse: SSEConfig = field(default_factory=SSEConfig)
    task: TaskSection = field(default_factory=ClickConfig)

    @model_validator(mode="after")
    def _model_fits_task(self) -> "Config":
        """Refuses a model that returns something else than what the task takes, where both say what that is."""
        model, task = self.model, self.task
        if (
            isinstance(model, DeclaringModelConfig)
            and isinstance(task, DeclaringTaskConfig)
            and model.returns != task.takes
        ):
            models = [each for each, known in MODELS.items() if getattr(known, "returns", None) == task.takes]
            tasks = [each for each, known in TASKS.items() if getattr(known, "takes", None) == model.returns]
            raise ValueError(
                f"model.name is {model.name!r} and task.name is {task.name!r}, which do not go together; "
                f"the task takes the models {', '.join(models)}, and the model is for the tasks {', '.join(tasks)}"
            )
        return self

    def to_yaml(self) -> str:
        """Returns YAML that :func:`load_config` reads back to an equal config."""
        return format_yaml(dataclasses.asdict(self))


_ADAPTER = TypeAdapter(Config)
_PATHS = frozenset({"path", "assignments", "graph"})
"""Keys of files and folders that a relative path names from the working directory."""
_MOST_FILES = 20
"""Number of files of which each extends the next."""
_MOST_SHOWN = 80
"""Characters of a wrong value that an error shows."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``dotted.key=value`` overrides and validates the result.

    Raises:
        UserError: The config is wrong; the error lists the path of every mistake and the nearest name of unknown keys.
    """
    values = _read_extended(path) if path is not None else {}
    if sum(map(len, overrides)) > MAX_BYTES:
        raise UserError(f"the overrides have more than {MAX_BYTES:,} characters; write such settings into a file.")
    for override in overrides:
        _apply(values, override)
    return validate(values, str(path) if path is not None else "the overrides")


def with_absolute_paths(config: Config) -> Config:
    """Returns the config with absolute paths, for a process that works in another folder."""

    def absolute(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {inner: absolute(inner, own) for inner, own in value.items()}
        return str(Path(value).absolute()) if key in _PATHS and isinstance(value, str) else value

    return validate(absolute("", dataclasses.asdict(config)), "the config with absolute paths")


def input_paths(config: Config) -> list[str]:
    """Returns the files and folders that training reads, each once."""

    def paths(key: str, value: Any) -> list[str]:
        if isinstance(value, dict):
            return [path for inner, own in value.items() for path in paths(inner, own)]
        return [value] if key in _PATHS and isinstance(value, str) else []

    return list(dict.fromkeys(paths("", dataclasses.asdict(config))))


def validate(values: Mapping[str, Any], source: str) -> Config:
    """Returns the config of nested plain values.

    Args:
        values: The sections of the config, by name.
        source: Where the values are from, for the error.

    Raises:
        UserError: The values are wrong; the error lists every mistake.
    """
    mistakes = list(_unwritable(values, ""))
    if not mistakes:
        try:
            # strictness lets a section be given as a mapping only where the input is JSON
            return _ADAPTER.validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            mistakes = [_describe(mistake, values) for mistake in _once(error.errors(include_url=False))]
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    listed = "\n".join(f"  {mistake}" for mistake in mistakes)
    raise UserError(f"{count} in {source}:\n{listed}")


def _unwritable(values: Any, where: str) -> Iterator[str]:
    """Yields a line for each value that neither a file nor a path can hold, whatever the setting."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _unwritable(key, f"the key {key!r}")
            yield from _unwritable(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _unwritable(value, f"{where}.{index}")
    elif isinstance(values, str):
        odd = next((c for c in values if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if odd is not None:
            yield f"{where}: {_shown(values)} has the character {odd!r}; give text that can be written in UTF-8"
    elif isinstance(values, int) and not -(2**63) <= values < 2**63:
        yield f"{where}: the number has {values.bit_length()} bits; give one below 2**63"


def _shown(value: Any) -> str:
    """Returns a value as an error shows it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _once(mistakes: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns mistakes without those that a table under ``tables`` only inherits from its section's ``default``."""

    def identity(mistake: Any, depth: int) -> Any:
        # what is wrong with a table as a whole has as its input all that the table says
        place = mistake["loc"][depth:]
        return mistake["loc"][0], place, mistake["input"] if place else mistake["msg"]

    default_mistakes = [identity(m, 2) for m in mistakes if m["loc"][1:2] == ("default",)]
    inherits = [m["loc"][1:2] == ("tables",) and identity(m, 3) in default_mistakes for m in mistakes]
    return [mistake for mistake, inherited in zip(mistakes, inherits, strict=True) if not inherited]


def _describe(mistake: dict[str, Any], values: Mapping[str, Any]) -> str:
    """Returns a mistake that pydantic found as a line: its path, what is wrong and what is close to it."""
    path = [str(part) for part in mistake["loc"]]
    if not path:  # a mistake of the config as a whole, which says where it is
        return str(mistake.get("ctx", {}).get("error") or mistake["msg"])
    where = ".".join(path)
    if mistake["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys_at(path[:-1], values)
        guess = nearest(path[-1], known)
        hint = f"did you mean {'.'.join([*path[:-1], guess])}?" if guess else f"known here: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if mistake["type"] == "unknown_name":
        return f"{where}.name: {mistake['msg']}"
    message = str(mistake.get("ctx", {}).get("error") or mistake["msg"])
    if mistake["type"] == "literal_error":
        guess = nearest(str(mistake["input"]), re.findall(r"'([^']*)'", message))
        message += f" (did you mean {guess!r}?)" if guess else ""
    if mistake["type"] == "value_error":
        return where + message.removeprefix(path[-1]) if message.startswith(path[-1]) else f"{where}: {message}"
    return f"{where}: {message}; got {_shown(mistake['input'])} ({type(mistake['input']).__name__})"


def _keys_at(path: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Returns the keys that are valid within the section at ``path`` of these values."""
    kind: Any = Config
    for part in path:
        if not dataclasses.is_dataclass(kind):
            kind = typing.get_args(kind)[-1] if typing.get_origin(kind) is dict else None
            continue
        kind = _section(typing.get_type_hints(kind, include_extras=True).get(part), values.get(part))
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _section(kind: Any, values: Any) -> Any:
    """Returns the type of a section, whose annotation may name several."""
    if typing.get_origin(kind) is typing.Annotated:
        kind, *marks = typing.get_args(kind)
        kind = next((mark.class_of(values) for mark in marks if isinstance(mark, ByName)), kind)
    if isinstance(kind, types.UnionType):
        return next(arg for arg in typing.get_args(kind) if arg is not type(None))
    return kind


def _apply(values: dict[str, Any], override: str) -> None:
    """Sets the value of an override, making sections that are not there."""
    key, separator, text = override.partition("=")
    path, source = key.split("."), f"override {_shown(override)}"
    if not separator or not all(path):
        raise UserError(f"{source} is not of the form dotted.key=value, such as train.batch_size=2048.")
    if len(path) > MAX_LEVELS:
        raise UserError(f"{source} names a key within {len(path)} sections; a config has fewer than {MAX_LEVELS}.")
    section = values
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{source}: {'.'.join(path[:depth])} is {_shown(inner)} in the config, which has no keys.")
        section = inner
    section[path[-1]] = parse_yaml(text, source)


def _read_extended(path: Path, followed: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the values of a file, and those of the file that it extends where it has none."""
    values = _read_yaml(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{path}: extends is {base!r}; give the path of a YAML file, relative to this one.")
    followed = (*followed, Path(os.path.realpath(path)))
    for mistake in _unwritable(base, "extends"):
        raise UserError(f"{path}: {mistake}")
    if Path(os.path.realpath(path.parent / base)) in followed:
        raise UserError(f"{path}: extends {base!r}, which in turn extends this file; break the circle.")
    if len(followed) == _MOST_FILES:
        raise UserError(f"{path}: extends {base!r}, but {_MOST_FILES} files extend one another already; merge some.")
    return _merge(_read_extended(path.parent / base, followed), values)


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
