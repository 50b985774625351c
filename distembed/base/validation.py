"""Validates what a user wrote as nested plain values, and says every mistake at once with its path and what is near it.

It is shared by all that is read from YAML: the configs of runs and the schemas of tables.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from distembed.base.errors import UserError
from distembed.base.names import ByValues, nearest

if typing.TYPE_CHECKING:  # this module is imported where pydantic is not needed yet
    from pydantic import TypeAdapter

T = TypeVar("T")

_MOST_SHOWN = 80
"""Characters of a wrong value that an error shows."""


def validated(adapter: "TypeAdapter[T]", kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """Returns the dataclass of nested plain values.

    Args:
        adapter: Pydantic's adapter of the dataclass.
        kind: The dataclass.
        values: Its values, sections by name.
        source: Where the values are from, for the error.

    Raises:
        UserError: The values are wrong; the error lists every mistake.
    """
    from pydantic import ValidationError

    mistakes = list(unwritable(values, ""))
    if not mistakes:
        try:
            # strictness lets a section be given as a mapping only where the input is JSON
            return adapter.validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            found = [_describe(mistake, kind, values) for mistake in _once(error.errors(include_url=False))]
            mistakes = [line for mistake in found for line in mistake.split("\n")]  # a section may find several itself
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    listed = "\n".join(f"  {mistake}" for mistake in mistakes)
    raise UserError(f"{count} in {source}:\n{listed}")


def unwritable(values: Any, where: str) -> Iterator[str]:
    """Yields a line for each value that neither a file nor a path can hold, whatever the setting."""
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
    """Returns mistakes without those that a table under ``tables`` only inherits from its section's ``default``."""

    def identity(mistake: Any, depth: int) -> Any:
        # what is wrong with a table as a whole has as its input all that the table says
        place = mistake["loc"][depth:]
        return mistake["loc"][0], place, mistake["input"] if place else mistake["msg"]

    default_mistakes = [identity(m, 2) for m in mistakes if m["loc"][1:2] == ("default",)]
    inherits = [m["loc"][1:2] == ("tables",) and identity(m, 3) in default_mistakes for m in mistakes]
    return [mistake for mistake, inherited in zip(mistakes, inherits, strict=True) if not inherited]


def _describe(mistake: dict[str, Any], kind: type, values: Mapping[str, Any]) -> str:
    """Returns a mistake that pydantic found as a line: its path, what is wrong and what is close to it."""
    path = [str(part) for part in mistake["loc"]]
    if not path:  # a mistake of the config as a whole, which says where it is
        return str(mistake.get("ctx", {}).get("error") or mistake["msg"])
    where = ".".join(path)
    if mistake["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys_at(path[:-1], kind, values)
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
    return f"{where}: {message}; got {shown(mistake['input'])} ({type(mistake['input']).__name__})"


def _keys_at(path: Sequence[str], kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Returns the keys that are valid within the section at ``path`` of these values."""
    section: Any = values
    for part in path:
        section = section.get(part) if isinstance(section, Mapping) else None
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind, include_extras=True).get(part)
        else:
            kind = typing.get_args(kind)[-1] if typing.get_origin(kind) is dict else None
        kind = _section(kind, section)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _section(kind: Any, values: Any) -> Any:
    """Returns the type of a section, whose annotation may name several."""
    if typing.get_origin(kind) is typing.Annotated:
        kind, *marks = typing.get_args(kind)
        kind = next((mark.class_of(values) for mark in marks if isinstance(mark, ByValues)), kind)
    if isinstance(kind, types.UnionType):
        return next(arg for arg in typing.get_args(kind) if arg is not type(None))
    return kind
