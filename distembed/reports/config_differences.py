"""What differs between the configs of runs, setting by setting."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distembed.base.errors import UserError
from distembed.base.validation import parse_yaml

MOST_SETTINGS = 16
"""Number of settings that a table has at most: whole sections that differ would make it endless."""
_MOST_CHARACTERS = 60


@dataclass(frozen=True)
class ConfigDifferences:
    """The settings in which configs differ.

    Attributes:
        keys: Dotted keys of the settings, in the order of the configs; at most :data:`MOST_SETTINGS`.
        values: The text of each setting, by config; empty where a config has none.
        num_others: Number of further settings that differ.
    """

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    num_others: int

    @classmethod
    def of(cls, configs: Sequence[str]) -> "ConfigDifferences":
        """Returns what differs between configs in YAML; one that cannot be read has no settings."""
        settings = [dict(_settings(config)) for config in configs]
        known = dict.fromkeys(key for own in settings for key in own)
        differ = [key for key in known if len({own.get(key) for own in settings}) > 1]
        shown = differ[:MOST_SETTINGS]
        values = tuple(tuple(own.get(key, "") for key in shown) for own in settings)
        return cls(tuple(shown), values, len(differ) - len(shown))


def _settings(config_yaml: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the text of every setting."""
    try:
        values = parse_yaml(config_yaml, "the config")
    except UserError:  # the report shows a damaged run as far as it can be read
        return
    if isinstance(values, Mapping):
        yield from _flat(values, "")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    """Returns a value in a line, of a long one the beginning."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
