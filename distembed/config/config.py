"""The config of a run: YAML and overrides, merged, then validated once, with every mistake in one error.

A file has the top keys ``data``, ``model``, ``embedding``, ``train``, ``plan``, ``sse`` and ``task``, each a frozen
dataclass beside the code that it configures. ``extends: other.yaml``, beside the file, gives what the file leaves out.
``dotted.key=value`` overrides are parsed as YAML. What is dumped reads back exactly.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import pydantic.dataclasses
import yaml
from pydantic import TypeAdapter, ValidationError

from distembed.config.train import TrainConfig
from distembed.data.dataset.config import DataConfig
from distembed.embedding.settings import EmbeddingConfig
from distembed.errors import UserError
from distembed.models import DLRMConfig, ModelSection
from distembed.names import STRICT, ByName, nearest
from distembed.planning import PlanConfig
from distembed.sse.config import SSEConfig
from distembed.tasks import ClickConfig, TaskSection


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

    def to_yaml(self) -> str:
        """Returns YAML that :func:`load_config` reads back to an equal config."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)


_ADAPTER = TypeAdapter(Config)
_PATHS = frozenset({"path", "assignments", "graph"})
"""Keys of files and folders that a relative path names from the working directory."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``dotted.key=value`` overrides and validates the result.

    Raises:
        UserError: The config is wrong; the error lists the path of every mistake and the nearest name of unknown keys.
    """
    values = _read_extended(path) if path is not None else {}
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
    try:
        # strictness lets a section be given as a mapping only where the input is JSON
        return _ADAPTER.validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        mistakes = [_describe(mistake, values) for mistake in _once(error.errors(include_url=False))]
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        listed = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise UserError(f"{count} in {source}:\n{listed}") from None


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
    return f"{where}: {message}; got {mistake['input']!r} ({type(mistake['input']).__name__})"


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
    path = key.split(".")
    if not separator or not all(path):
        raise UserError(f"override {override!r} is not of the form dotted.key=value, such as train.batch_size=2048.")
    section = values
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise UserError(
                f"override {override!r}: {'.'.join(path[:depth])} is {inner!r} in the config, which has no keys."
            )
        section = inner
    section[path[-1]] = _parse_yaml(text, f"override {override!r}")


def _read_extended(path: Path, followed: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the values of a file, and those of the file that it extends where it has none."""
    values = _read_yaml(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{path}: extends is {base!r}; give the path of a YAML file, relative to this one.")
    followed = (*followed, path.resolve())
    if (path.parent / base).resolve() in followed:
        raise UserError(f"{path}: extends {base!r}, which in turn extends this file; break the circle.")
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the config {path} cannot be read: {error}") from error
    values = _parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"the config {path} holds a {type(values).__name__}; it must hold keys such as `train:`.")
    return values


class _Loader(yaml.SafeLoader):
    """Reads YAML as people mean it: ``1e-3`` is a number, and a key that is given twice is a mistake."""


# YAML 1.1 takes 1e-3 for a string, since it wants a dot
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Returns a mapping whose keys are names, each given once."""
    seen = set()
    loader.flatten_mapping(node)  # what `<<: *anchor` stands for
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no name", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def _parse_yaml(text: str, source: str) -> Any:
    """Returns the value of a YAML text; ``source`` is where it is from, for the error."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not YAML: {error}") from error
