"""Reads YAML from whoever wrote it: plain values alone, nothing executed, and nothing that grows beyond its text.

A text of a few hundred bytes can stand for more values than any machine holds, by aliases of aliases, or nest deeper
than any reader goes. Values are therefore counted as aliases repeat them, and levels as they open, before any is made.
"""

import re
from typing import Any

import yaml

from distembed.base.errors import UserError

MAX_VALUES = 100_000
"""Values, keys and levels of a text, an alias counted as all that it stands for."""
MAX_LEVELS = 50
MAX_BYTES = 256 << 10
"""Size of the largest text; PyYAML takes seconds for so much of short values."""
_MAX_NUMBER_CHARACTERS = 1000


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
    except ValueError as error:  # an escape that names no character
        raise UserError(f"{source} has a value that cannot be read: {error}") from error


def format_yaml(value: Any) -> str:
    """Returns YAML that :func:`parse_yaml` reads back to an equal value."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Returns the value of a node; a number that is too long, and a date that there is none of, are mistakes."""
        if node.tag in (_INT, _FLOAT) and len(node.value) > _MAX_NUMBER_CHARACTERS:
            raise _mistake(
                f"a number has {len(node.value):,} characters; give one of at most {_MAX_NUMBER_CHARACTERS:,}", node
            )
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise _mistake(f"a value that cannot be read: {error}", node) from error

    def _count(self, num_values: int, event: yaml.Event) -> None:
        self._num_values += num_values
        if self._num_values > MAX_VALUES:
            raise _mistake(f"it stands for more than {MAX_VALUES:,} values", event)


def _mistake(text: str, place: yaml.Event | yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, place.start_mark)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {
    # YAML 1.1 takes 1e-3 for a string, since it wants a dot
    _FLOAT: r"[-+]?([0-9][0-9_]*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.(inf|Inf|INF))"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(nan|NaN|NAN)",
    _INT: r"[-+]?(0b[0-1_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
}
"""What a number looks like: as in YAML 1.1, whose numbers to the base 60, as 1:30 is one, are left out.

A long one takes a time that is quadratic in its length, and nobody who writes 1:30 means 90.
"""

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), list("-+.0123456789"))


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


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would take for numbers."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)
