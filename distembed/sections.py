"""Sections of a config that have a ``default`` for every table, and under ``tables`` what differs for some."""

from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, Any]


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
