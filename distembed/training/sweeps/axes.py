"""The settings that vary in a sweep, and the runs that are their product.

``key=v1,v2`` and ``key=[v1, v2]`` give a setting several values, each as YAML has it: names with commas are quoted,
``key='"a,b",c'``, and the values of a list are lists, ``key=[512,256],[256]``. One list that a setting takes as a
whole, such as ``model.top=[512,256]``, is one value.

A run is named after the settings that vary, by as much of their keys as tells them apart, the seed last::

    embedding.default.partition=naive,quotient_remainder train.seed=0,1
    partition=naive,seed=0    partition=naive,seed=1    partition=quotient_remainder,seed=0    ...
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.base.validation import parse_yaml

MOST_RUNS = 10_000
"""Number of runs from which on a sweep is taken for a mistake."""
SEED = "train.seed"
_ONLY_RUN = "run"
"""What a run is called of which no setting varies, and the recipe of runs of which the seed alone does."""
_MOST_VALUE_CHARACTERS, _MOST_NAME_CHARACTERS = 60, 200


@dataclass(frozen=True)
class Axis:
    """A setting with the values that it takes in turn.

    Attributes:
        key: The setting, such as ``train.seed``.
        overrides: The setting with each of its values, as ``distembed train`` takes them: ``train.seed=0``.
        names: What each value is called in the name of a run.
    """

    key: str
    overrides: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class NamedRun:
    """One combination of values.

    Attributes:
        name: Its name, which is that of its folder and of no other run of the sweep.
        recipe: The name without the seed, which runs have in common that differ in it alone.
        varied: The settings that vary, with its values.
        overrides: All settings beside the config file's, in the order in which they were given.
    """

    name: str
    recipe: str
    varied: tuple[str, ...]
    overrides: tuple[str, ...]


def parse_axes(settings: Sequence[str], is_valid: Callable[[Sequence[str]], bool]) -> list[Axis]:
    """Returns each setting with its values, in the order in which they were given.

    Args:
        settings: What the user gave: ``key=value``, or ``key=`` and several values.
        is_valid: Whether a config with some settings is; it decides whether a list is one value or several.

    Raises:
        UserError: A setting has no values, has one twice, or is given twice.
    """
    keys = [setting.partition("=")[0] for setting in settings]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise UserError(f"{', '.join(repeated)} is given more than once; give all values of a setting at once.")
    parsed = [_values(setting) for setting in settings]
    overrides: list[tuple[str, ...]] = []
    for index, values in enumerate(parsed):
        others = [each[0] for each in overrides] + [each[0] for each in map(_overrides, parsed[index + 1 :])]
        is_one_value = values.is_list and is_valid([*others, values.setting])
        overrides.append((values.setting,) if is_one_value else _overrides(values))
    return [Axis(key, own, _value_names(own)) for key, own in zip(keys, overrides, strict=True)]


def named_runs(axes: Sequence[Axis]) -> list[NamedRun]:
    """Returns a run for each combination of values; the last setting varies fastest.

    Raises:
        UserError: There are more than :data:`MOST_RUNS`.
    """
    count = 1
    for axis in axes:
        count *= len(axis.overrides)
    if count > MOST_RUNS:
        raise UserError(f"these values make {count:,} runs; a sweep has {MOST_RUNS:,} at most: give fewer values.")
    varied = [axis for axis in axes if len(axis.overrides) > 1]
    short = _short_keys([axis.key for axis in varied])
    runs = []
    for places in itertools.product(*(range(len(axis.overrides)) for axis in axes)):
        place = {axis.key: index for axis, index in zip(axes, places, strict=True)}
        parts = {axis.key: f"{short[axis.key]}={axis.names[place[axis.key]]}" for axis in varied}
        seed = parts.pop(SEED, None)
        recipe = _shortened(",".join(parts.values()))
        name = ",".join(part for part in (recipe, seed) if part) or _ONLY_RUN
        overrides = tuple(axis.overrides[place[axis.key]] for axis in axes)
        runs.append(NamedRun(name, recipe or _ONLY_RUN, tuple(a.overrides[place[a.key]] for a in varied), overrides))
    return runs


@dataclass(frozen=True)
class _Values:
    """A setting as it was given, and the values that its text lists.

    Attributes:
        setting: What the user gave.
        values: Its values; the text itself is the only one where it lists none.
        is_list: Whether the text is one list in brackets, which may be a value itself.
    """

    setting: str
    values: tuple[Any, ...]
    is_list: bool


def _values(setting: str) -> _Values:
    key, separator, text = setting.partition("=")
    if not separator:  # which the config refuses in its own words
        return _Values(setting, (), False)
    listed = parse_yaml(f"[{text}\n]", f"the values of {key or setting!r}") if text.strip() else []
    is_list = len(listed) == 1 and isinstance(listed[0], list)
    values = listed[0] if is_list else listed
    if not values:
        raise UserError(f"{setting} has no values; give some, such as {key or 'train.seed'}=0,1,2.")
    texts = [_text(value) for value in values]
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise UserError(f"{key} has {enumerate_names(twice)} more than once; give each value once.")
    return _Values(setting, tuple(values) if is_list or len(values) > 1 else (), is_list)


def _overrides(values: _Values) -> tuple[str, ...]:
    """Returns a setting with each of its values."""
    key = values.setting.partition("=")[0]
    return tuple(f"{key}={_text(value)}" for value in values.values) or (values.setting,)


def _text(value: Any) -> str:
    """Returns a value as text that is read back to the same value, a plain word as it is."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value) and _is_itself(value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _is_itself(text: str) -> bool:
    """Returns whether YAML takes a word for a text: not such as ``no`` and ``null``."""
    return bool(parse_yaml(text, text) == text)


def _value_names(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns what each value is called in a file's name: its letters, digits and some signs; all are different."""
    texts = [override.partition("=")[2] for override in overrides]
    names = ["-".join(re.findall(r"[A-Za-z0-9.+_-]+", text)) for text in texts]
    return tuple(
        name
        if name and len(name) <= _MOST_VALUE_CHARACTERS and [each.lower() for each in names].count(name.lower()) == 1
        else f"{name[:_MOST_VALUE_CHARACTERS]}-{_digest(text)}".lstrip("-")
        for name, text in zip(names, texts, strict=True)
    )


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Returns the shortest end of each key that no other has, in whole parts."""
    short = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        short[key] = next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), key)
    return short


def _shortened(name: str) -> str:
    """Returns a name that a file can have: a long one with a checksum in place of its end."""
    return name if len(name) <= _MOST_NAME_CHARACTERS else f"{name[:_MOST_NAME_CHARACTERS]}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
