"""Whether the columns of a Parquet file are what a schema says."""

from __future__ import annotations

import pyarrow as pa

from distembed.base.errors import UserError
from distembed.data.dataset.schema import Schema


def check_columns(path: str, columns: pa.Schema, schema: Schema) -> None:
    """Makes sure that a file has a schema's columns, and that their types fit their roles.

    Args:
        path: Path or URL of the file, for errors.
        columns: Columns of the file.
        schema: What they should be.

    Raises:
        UserError: A column is missing, or its type does not fit its role.
    """
    missing = [name for name in schema.columns if name not in columns.names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)}: it has {', '.join(columns.names)}")
    numeric = [name for name in (schema.label, schema.weight, *schema.dense) if name is not None]
    roles = [(name, False, _is_numeric, "a label, weight or dense column is numeric") for name in numeric]
    roles += [(name, True, _is_numeric, "a dense sequence is a list of numbers") for name in schema.dense_sequences]
    for feature in schema.categorical:
        law = f"multi_hot={feature.multi_hot} needs {'a list of integers' if feature.multi_hot else 'integer'}"
        roles.append((feature.name, feature.multi_hot, pa.types.is_integer, law))
    for name, is_list, fits, law in roles:
        kind = columns.field(name).type
        if _is_list(kind) != is_list or not fits(kind.value_type if is_list else kind):
            raise UserError(f"{path}, column {name!r}: its type is {kind}; {law}")


def _is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_numeric(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))
