"""Whether columns become the same values as in the dataset whose ids and learnt transforms are applied to them."""

from __future__ import annotations

from collections.abc import Iterator

from distembed.data.prepare.base import Base
from distembed.data.table.schema import CRITEO, TABLE, TableSchema
from distembed.errors import UserError
from distembed.units import enumerate_names

_MOST_SAID = 5


def require_same_values(schema: TableSchema, base: Base) -> None:
    """Makes sure that columns become what they became in the dataset whose ids are applied.

    Where they are in the table, and how often values have to be seen, may differ.

    Args:
        schema: The rows' schema; of Criteo's rows, the shipped one with the command's options.
        base: The dataset; one that was made of other files has no schema, and nothing is compared.

    Raises:
        UserError: A number is transformed otherwise, or a value is of another kind.
    """
    if base.manifest.preparation.get("source") not in (TABLE, CRITEO):
        return
    differing = sorted(_differing(schema, TableSchema.of_manifest(base.manifest)))
    if differing:
        raise UserError(
            f"columns become other values than in the dataset {base.named} (--vocabulary), whose ids and means are of "
            f"its own: {enumerate_names(differing, _MOST_SAID)}. Give the schema and the options with which it was "
            "prepared, such as --missing"
        )


def _differing(schema: TableSchema, known: TableSchema) -> Iterator[str]:
    """Yields what a schema makes otherwise of a column than another does."""
    for name in schema.dense.keys() & known.dense.keys():
        for what in ("transform", "missing"):
            own, its = getattr(schema.dense[name], what), getattr(known.dense[name], what)
            if own != its:
                yield f"dense.{name}.{what} is {own!r} and was {its!r}"
    for name in schema.categorical.keys() & known.categorical.keys():
        value, before = schema.categorical[name], known.categorical[name]
        if value.kind != before.kind:
            yield f"categorical.{name}.kind is {value.kind!r} and was {before.kind!r}"
        if (value.cross is None) != (before.cross is None):
            yield f"categorical.{name} is {_crossed(value.cross)} and was {_crossed(before.cross)}"


def _crossed(cross: list[str] | None) -> str:
    return "a column" if cross is None else f"a cross of {' and '.join(cross)}"
