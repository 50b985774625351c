"""Reads a user's YAML and validates it: configs of runs, and schemas of tables.

An error lists every mistake with its path and the nearest known name. YAML holds plain values alone. By aliases of
aliases a text of a few hundred bytes can expand to more values than fit into memory, or nest too deep to be read.
Values are therefore counted as aliases repeat them, and levels as they open, before any is made.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import yaml
from annotated_types import Ge, Gt, Le, Len, Lt

from distembed.base.errors import UserError
from distembed.base.names import ByValues, nearest

if typing.TYPE_CHECKING:  # this module is imported where pydantic is not needed yet
    from pydantic import TypeAdapter

T = TypeVar("T")

# The largest numbers that settings take: beyond them sizes overflow, and no machine could do the work.
Count = Annotated[int, Gt(0), Lt(2**31)]
"""A number of rows, steps or epochs."""
Interval = Annotated[int, Ge(0), Lt(2**31)]
"""A number of steps between two events; 0 where it has another meaning."""
Width = Annotated[int, Gt(0), Le(2**20)]
"""Number of values in a vector, or of outputs of a layer."""
Widths = Annotated[list[Width], Len(1, 1000)]
"""Widths of successive layers."""
MAX_TABLE_BYTES = 2**60
"""The bytes of a partition's weights; with four times as many for an optimizer's states they fit 64 bits."""
MAX_VALUES = 100_000
"""Values, keys and levels of a text, where an alias counts with all of its values."""
MAX_LEVELS = 50
MAX_BYTES = 256 << 10
"""Size of the largest text; PyYAML takes seconds for a text of short values of this size."""
_MAX_NUMBER_CHARACTERS = 1000

_MOST_SHOWN = 80
"""Characters of a wrong value that an error shows."""


def validated(adapter: "TypeAdapter[T]", kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """Returns an instance of the dataclass ``kind``, validated by ``adapter``, from nested plain values.

    A UserError lists every mistake; ``source`` names the file of the values in it.
    """
    from pydantic import ValidationError

    mistakes = list(unwritable(values, ""))
    if not mistakes:
        try:
            # strictness lets a section be given as a mapping only where the input is JSON
            return adapter.validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            lines = [_describe(mistake, kind, values) for mistake in _once(error.errors(include_url=False))]
            mistakes = [line for mistake in lines for line in mistake.split("\n")]  # a section may find several itself
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    listed = "\n".join(f"  {mistake}" for mistake in mistakes)
    raise UserError(f"{count} in {source}:\n{listed}")


def unwritable(values: Any, where: str) -> Iterator[str]:
    """Yields an error line for each text that UTF-8 cannot hold, text with a NUL, and integer beyond 64 bits.

    ``where`` is the dotted path of ``values`` in the config.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from unwritable(key, f"the key {key!r}")
            yield from unwritable(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from unwritable(value, f"{where}.{index}")
    elif isinstance(values, str):
        odd = next((c for c in values if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if odd is not None:
            yield f"{where}: {shown(values)} has the character {odd!r}; give text that can be written in UTF-8"
    elif isinstance(values, int) and not -(2**63) <= values < 2**63:
        yield f"{where}: the number has {values.bit_length()} bits; give one below 2**63"


def shown(value: Any) -> str:
    """Returns a value as an error shows it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _once(mistakes: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns mistakes without the ones that a table only inherits from its section's ``default``.

    Before the validation the default's settings were copied into each table (``names.complete_tables``).
    """

    # loc is (section, "default", setting, ...), of 2 + n keys, or (section, "tables", table's name, setting, ...)
    def identity(mistake: Any, depth: int) -> Any:
        # equal keys and inputs are one mistake; a mistake of a whole table is known by its message, as inputs differ
        path = mistake["loc"][depth:]
        return mistake["loc"][0], path, mistake["input"] if path else mistake["msg"]

    default_mistakes = [identity(mistake, 2) for mistake in mistakes if mistake["loc"][1:2] == ("default",)]
    inherits = [mistake["loc"][1:2] == ("tables",) and identity(mistake, 3) in default_mistakes for mistake in mistakes]
    return [mistake for mistake, inherited in zip(mistakes, inherits, strict=True) if not inherited]


def _describe(mistake: dict[str, Any], kind: type, values: Mapping[str, Any]) -> str:
    """Returns the error text of one mistake that pydantic found: its dotted path, the error and a near name.

    A mistake of the whole config has no path; its own text may have several lines.
    """
    path = [str(key) for key in mistake["loc"]]
    if not path:  # a mistake of the config as a whole, which says where it is
        return str(mistake.get("ctx", {}).get("error") or mistake["msg"])
    where = ".".join(path)
    if mistake["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        keys = _keys_at(path[:-1], kind, values)
        guess = nearest(path[-1], keys)
        hint = f"did you mean {'.'.join([*path[:-1], guess])}?" if guess else f"known here: {', '.join(keys)}"
        return f"{where}: unknown key; {hint}"
    if mistake["type"] == "unknown_name":
        return f"{where}.name: {mistake['msg']}"
    message = str(mistake.get("ctx", {}).get("error") or mistake["msg"])
    if mistake["type"] == "literal_error":
        guess = nearest(str(mistake["input"]), re.findall(r"'([^']*)'", message))
        message += f" (did you mean {guess!r}?)" if guess else ""
    if mistake["type"] == "value_error":
        return where + message.removeprefix(path[-1]) if message.startswith(path[-1]) else f"{where}: {message}"
    return f"{where}: {message}; got {shown(mistake['input'])} ({type(mistake['input']).__name__})"


def _keys_at(path: Sequence[str], kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Returns the keys that the section at ``path`` may have; its values decide among several dataclasses."""
    section: Any = values
    for key in path:
        section = section.get(key) if isinstance(section, Mapping) else None
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind, include_extras=True).get(key)
        else:
            kind = typing.get_args(kind)[-1] if typing.get_origin(kind) is dict else None
        kind = _section(kind, section)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _section(kind: Any, values: Any) -> Any:
    """Returns the type of a section, whose annotation may name several."""
    if typing.get_origin(kind) is typing.Annotated:
        kind, *marks = typing.get_args(kind)
        kind = next((mark.class_of(values) for mark in marks if isinstance(mark, ByValues)), kind)
    if isinstance(kind, types.UnionType):
        return next(arg for arg in typing.get_args(kind) if arg is not type(None))
    return kind


def parse_yaml(text: str, source: str) -> Any:
    """Returns the value of a YAML text without tags; ``source`` names its file in the UserError."""
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
        """Composes the next value, and counts it with all values inside it; too many values or levels are mistakes."""
        # `*name` repeats an anchored value without parsing it again: it counts as many values as the anchor had
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._sizes:
                raise _mistake(f"*{event.anchor} refers to a value that contains it", event)
            self._count(self._sizes[event.anchor], event)
            return super().compose_node(parent, index)
        # "!" alone is PyYAML's tag of any quoted text
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
        """Returns the value of a node; a number that is too long, and a date of no calendar, are mistakes."""
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


def _mistake(text: str, position: yaml.Event | yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, position.start_mark)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {
    # YAML 1.1 takes 1e-3 for a string, since it wants a dot
    _FLOAT: r"[-+]?([0-9][0-9_]*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.(inf|Inf|INF))"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(nan|NaN|NAN)",
    _INT: r"[-+]?(0b[0-1_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
}
"""Patterns of numbers as in YAML 1.1, but 1:30 is no number to the base 60: a long one takes quadratic time."""

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), list("-+.0123456789"))


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Returns a mapping whose keys are names, each given once."""
    keys = set()
    loader.flatten_mapping(node)  # resolves `<<: *anchor`
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no name", key_node.start_mark)
        if key in keys:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        keys.add(key)
    return loader.construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would take for numbers."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)
