"""Look-ups by name: a name among the known ones, with an error that suggests the nearest; a table's settings.

Sections of a config have a ``default`` for every table, and under ``tables`` what differs for some.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from distembed.errors import UserError

T = TypeVar("T")
Values = Mapping[str, Any]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None where none is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def one_of(field: str, value: T, known: Iterable[T]) -> T:
    """Returns ``value`` if it is among ``known``.

    Raises:
        UserError: that names the field, the value, the nearest known name, and all known ones.
    """
    known = list(known)
    if value in known:
        return value
    names = [str(k) for k in known]
    guess = nearest(str(value), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise UserError(f"{field} is {value!r}, which is not known.{hint} Known: {', '.join(names)}.")


def over_default(default: Values, table: Values) -> dict[str, Any]:
    """A table's own settings over the default's."""
    return {**default, **table}


def complete_tables(values: Any, complete: Callable[[Values, Values], dict[str, Any]] = over_default) -> Any:
    """Fills every table's settings up from the default's; what is no such section is left to the validation.

    Args:
        values: of the section, as the file gives them.
        complete: of the default and of one table.
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
