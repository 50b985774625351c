"""Names in configs: errors suggest the nearest known name, and tables inherit the settings under ``default``.

A section of a config has settings for every table under ``default``, and other settings of single tables under
``tables``.
"""

import difflib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from distembed.base.errors import UserError

if TYPE_CHECKING:  # this module is needed where pydantic is not
    from pydantic import ConfigDict

STRICT: "ConfigDict" = {"extra": "forbid", "strict": True}
"""Pydantic's settings for every section of a config: unknown keys and values of other types are refused."""

T = TypeVar("T")
Values = Mapping[str, Any]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the name in ``known`` that is most similar to ``name``, or None if no name is similar enough."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def one_of(field: str, value: T, known: Iterable[T]) -> T:
    """Returns ``value`` if it is among ``known``; the UserError names the option or setting, ``field``."""
    known = list(known)
    if value in known:
        return value
    names = [str(k) for k in known]
    guess = nearest(str(value), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise UserError(f"{field} is {value!r}, which is not known.{hint} Known: {', '.join(names)}.")


def pair(field: str, text: str, form: str, example: str) -> tuple[str, str]:
    """Returns both sides of the option ``field``'s ``LEFT=RIGHT``; the UserError shows its form and an example."""
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise UserError(f"{field} is {text!r}; give {form}, such as {example}.")
    return left, right


def over_default(default: Values, table: Values) -> dict[str, Any]:
    """Returns the default's settings, replaced by the table's own where it has some."""
    return {**default, **table}


def complete_tables(values: Any, complete: Callable[[Values, Values], dict[str, Any]] = over_default) -> Any:
    """Returns a section whose tables have the settings under ``default`` where they have none of their own.

    ``complete(default, table)`` merges the two. Values of another form are returned for the validation to refuse.
    """
    if not isinstance(values, Mapping):
        return values
    default, tables = values.get("default"), values.get("tables")
    if not isinstance(default, Mapping) or not isinstance(tables, Mapping):
        return values
    completed = {
        name: complete(default, table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    return {**values, "tables": completed}


def require_mapping(section: Any) -> None:
    """Refuses a section that is no mapping."""
    from pydantic_core import PydanticCustomError

    if not isinstance(section, Mapping):
        raise PydanticCustomError("section_type", "Input should be an object")


class ByValues(ABC):
    """Marks a section of a config whose dataclass depends on its values: ``Annotated[TaskConfig, ByName(...)]``."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema  # this module is needed where pydantic is not

        return core_schema.no_info_plain_validator_function(self.validate)

    @abstractmethod
    def class_of(self, section: Any) -> Any:
        """Returns the dataclass that a section's values select, with all keys that it may have; None without one."""

    @abstractmethod
    def validate(self, section: Any) -> Any:
        """Returns a section as an instance of its dataclass, from plain values or from an instance."""


class ByName(ByValues):
    """Marks a section of a config that is one of several dataclasses, told apart by its key ``name``.

    Args:
        known: Pydantic dataclass by name; the table may grow until a config is validated.
        kind: Kind of the dataclasses, for the error.
        default: Name where the section gives none.
    """

    def __init__(self, known: Mapping[str, Any], kind: str, default: str) -> None:
        self.known, self.kind, self.default = known, kind, default

    def class_of(self, section: Any) -> Any:
        """Returns the dataclass that a section's key ``name``, or the default name, selects; None for another name."""
        name = section.get("name", self.default) if isinstance(section, Mapping) else self.default
        return self.known.get(name) if isinstance(name, str) else None

    def validate(self, section: Any) -> Any:
        """Returns the section as an instance of the dataclass of its name."""
        from pydantic import TypeAdapter
        from pydantic_core import PydanticCustomError

        if type(section) in self.known.values():
            return section
        require_mapping(section)
        chosen = self.class_of(section)
        if chosen is None:
            names = ", ".join(self.known)
            text = f"{section.get('name')!r} is not a {self.kind}; known: {names}, and names that `plugins` register"
            raise PydanticCustomError("unknown_name", "{text}", {"text": text})
        # strictness lets a section be given as a mapping only where the input is JSON
        return TypeAdapter(chosen).validate_json(json.dumps({"name": self.default, **section}, default=str))
