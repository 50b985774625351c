"""The settings that vary in a sweep, and the runs that are their product.

``key=v1,v2`` and ``key=[v1, v2]`` give a setting several values, each as YAML has it: names with commas are quoted,
``key='"a,b",c'``, and the values of a list are lists, ``key=[512,256],[256]``. One list that a setting takes as a
whole, for example ``model.top=[512,256]``, is one value.

A run is named after the settings that vary, by as much of their keys as tells them apart, the seed last::

    embedding.default.partition=naive,quotient_remainder train.seed=0,1
    partition=naive,seed=0    partition=naive,seed=1    partition=quotient_remainder,seed=0    ...
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.base.validation import parse_yaml

MOST_RUNS = 10_000
"""Most runs of a sweep; more are taken for a mistake."""
SEED = "train.seed"
_ONLY_RUN = "run"
"""Name of the only run where no setting varies, and the recipe of all runs where only the seed varies."""
_MOST_VALUE_CHARACTERS, _MOST_NAME_CHARACTERS = 60, 200


@dataclass(frozen=True)
class Axis:
    """A setting with the values that it takes in turn.

    Attributes:
        key: The setting, for example ``train.seed``.
        overrides: The setting with each of its values, as ``distembed train`` takes them: ``train.seed=0``.
        names: The name of each value in the name of a run.
    """

    key: str
    overrides: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class NamedRun:
    """One combination of values.

    Attributes:
        name: Its name and that of its folder, unique within the sweep.
        recipe: The name without the seed, shared by runs that differ in the seed alone.
        varied: The settings that vary, with the run's values.
        overrides: All settings given beside the config file, in the order of the command line.
    """

    name: str
    recipe: str
    varied: tuple[str, ...]
    overrides: tuple[str, ...]


def parse_axes(settings: Sequence[str], is_valid: Callable[[Sequence[str]], bool]) -> list[Axis]:
    """Returns each setting with its values, in the order in which they were given.

    Args:
        settings: ``key=value``, or ``key=`` and several values.
        is_valid: Whether a config with these settings is valid; it decides whether a list is one value or several.

    Raises:
        UserError: A setting has no values, has one twice, or is given twice.
    """
    keys = [setting.partition("=")[0] for setting in settings]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise UserError(f"{', '.join(repeated)} is given more than once; give all values of a setting at once.")
    parsed = [_parse_setting(setting) for setting in settings]
    axes: list[Axis] = []
    for index, (key, (overrides, is_list)) in enumerate(zip(keys, parsed, strict=True)):
        # ``[512, 256]`` is one value if the config accepts it as a whole, with the first value of each other setting
        other_settings = [*(axis.overrides[0] for axis in axes), *(later[0] for later, _ in parsed[index + 1 :])]
        if is_list and is_valid([*other_settings, settings[index]]):
            overrides = (settings[index],)
        axes.append(Axis(key, overrides, value_names(overrides)))
    return axes


def named_runs(axes: Sequence[Axis]) -> list[NamedRun]:
    """Returns a run for each combination of values; the last setting varies fastest.

    Raises:
        UserError: There are more than :data:`MOST_RUNS`.
    """
    count = math.prod(len(axis.overrides) for axis in axes)
    if count > MOST_RUNS:
        raise UserError(f"these values make {count:,} runs; a sweep has {MOST_RUNS:,} at most: give fewer values.")
    varied = [axis for axis in axes if len(axis.overrides) > 1]
    short = _short_keys([axis.key for axis in varied])
    runs = []
    for indices in itertools.product(*(range(len(axis.overrides)) for axis in axes)):
        index_of = {axis.key: index for axis, index in zip(axes, indices, strict=True)}
        name_parts = {axis.key: f"{short[axis.key]}={axis.names[index_of[axis.key]]}" for axis in varied}
        seed = name_parts.pop(SEED, None)
        recipe = ",".join(name_parts.values())
        if len(recipe) > _MOST_NAME_CHARACTERS:
            recipe = f"{recipe[:_MOST_NAME_CHARACTERS]}-{_digest(recipe)}"
        name = ",".join(name_part for name_part in (recipe, seed) if name_part) or _ONLY_RUN
        overrides = tuple(axis.overrides[index_of[axis.key]] for axis in axes)
        runs.append(NamedRun(name, recipe or _ONLY_RUN, tuple(a.overrides[index_of[a.key]] for a in varied), overrides))
    return runs


def _parse_setting(setting: str) -> tuple[tuple[str, ...], bool]:
    """Returns an override ``key=value`` for each value, and whether the text is one list, ``key=[v1, v2]``.

    The caller decides whether such a list is several values or one value.
    """
    key, separator, text = setting.partition("=")
    if not separator:  # the config refuses it with its own error
        return (setting,), False
    listed = parse_yaml(f"[{text}\n]", f"the values of {key or setting!r}") if text.strip() else []
    is_list = len(listed) == 1 and isinstance(listed[0], list)
    texts = [_value_text(value) for value in (listed[0] if is_list else listed)]
    if not texts:
        raise UserError(f"{setting} has no values; give some, such as {key or 'train.seed'}=0,1,2.")
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise UserError(f"{key} has {enumerate_names(twice)} more than once; give each value once.")
    if len(texts) == 1 and not is_list:
        return (setting,), False
    return tuple(f"{key}={text}" for text in texts), is_list


def _value_text(value: Any) -> str:
    """Returns text that YAML reads back to the value; a plain word stays as it is, unless YAML takes it for ``no``."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value):
        if parse_yaml(value, value) == value:
            return value
    return json.dumps(value, ensure_ascii=False, default=str)


def value_names(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns a distinct name for each value, of characters that a file's name can have.

    A name gets a hash of the value if it is cut, or empty, or equal to another name when case is ignored.
    """
    texts = [override.partition("=")[2] for override in overrides]
    names = ["-".join(re.findall(r"[A-Za-z0-9.+_-]+", text)) for text in texts]
    lowered = [name.lower() for name in names]
    return tuple(
        name
        if name and len(name) <= _MOST_VALUE_CHARACTERS and lowered.count(name.lower()) == 1
        else f"{name[:_MOST_VALUE_CHARACTERS]}-{_digest(text)}".lstrip("-")
        for name, text in zip(names, texts, strict=True)
    )


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Returns, by key, its shortest suffix of whole parts that no other key ends in: ``a.b.c`` -> ``c`` or ``b.c``."""
    short = {}
    for key in keys:
        key_parts = key.split(".")
        ends = [".".join(key_parts[-count:]) for count in range(1, len(key_parts) + 1)]
        others = tuple(f".{other_key}" for other_key in keys if other_key != key)
        short[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return short


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
