"""Reads YAML from whoever wrote it: plain values alone, nothing executed, and nothing that grows beyond its text.

A text of a few hundred bytes can stand for more values than any machine holds, by aliases of aliases, or nest deeper
than any reader goes. Values are therefore counted as aliases repeat them, and levels as they open, before any is made.
"""

import re
from typing import Any

import yaml

from distembed.errors import UserError

MAX_VALUES = 100_000
"""Values, keys and levels of a text, an alias counted as all that it stands for."""
MAX_LEVELS = 50


def parse_yaml(text: str, source: str) -> Any:
    """Returns the value of a YAML text.

    Args:
        text: The text.
        source: Where it is from, for the error.

    Raises:
        UserError: The text is not YAML, has tags, or stands for too many values or levels.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not YAML that a config may hold: {error}") from error
    except ValueError as error:  # a date that there is none of, a number of too many digits
        raise UserError(f"{source} has a value that cannot be read: {error}") from error


class _Loader(yaml.SafeLoader):
    """Reads YAML as people mean it: ``1e-3`` is a number, and a key that is given twice is a mistake."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._num_values = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Returns the next value, which counts with all that is within it."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._sizes:
                raise _mistake(f"*{event.anchor} stands within what it stands for", event)
            self._count(self._sizes[event.anchor], event)
            return super().compose_node(parent, index)
        # "!" alone marks a quoted text, and is what PyYAML says of any
        if getattr(event, "tag", None) not in (None, "!"):
            raise _mistake(f"it has the tag {event.tag!r}; write plain values, without tags", event)
        self._level += 1
        if self._level > MAX_LEVELS:
            raise _mistake(f"it has more than {MAX_LEVELS} levels", event)
        before = self._num_values
        self._count(1, event)
        node = super().compose_node(parent, index)
        self._level -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._num_values - before
        return node

    def _count(self, num_values: int, event: yaml.Event) -> None:
        self._num_values += num_values
        if self._num_values > MAX_VALUES:
            raise _mistake(f"it stands for more than {MAX_VALUES:,} values", event)


def _mistake(text: str, event: yaml.Event) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, event.start_mark)


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
