"""Whether the columns of a Parquet file are what a schema says."""

from __future__ import annotations

import pyarrow as pa

from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.errors import UserError


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
    for name in [each for each in (schema.label, schema.weight, *schema.dense) if each is not None]:
        kind = columns.field(name).type
        if not _is_numeric(kind):
            raise UserError(f"{path}, column {name!r}: its type is {kind}; a label, weight or dense column is numeric")
    for name in schema.dense_sequences:
        kind = columns.field(name).type
        if not (_is_list(kind) and _is_numeric(kind.value_type)):
            raise UserError(f"{path}, column {name!r}: its type is {kind}; a dense sequence is a list of numbers")
    for feature in schema.categorical:
        _check_ids(path, feature, columns.field(feature.name).type)


def _check_ids(path: str, feature: CategoricalFeature, kind: pa.DataType) -> None:
    is_list = _is_list(kind)
    wanted = "a list of integers" if feature.multi_hot else "integer"
    if is_list != feature.multi_hot or not pa.types.is_integer(kind.value_type if is_list else kind):
        raise UserError(
            f"{path}, column {feature.name!r}: its type is {kind}, but multi_hot={feature.multi_hot} needs {wanted}"
        )


def _is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_numeric(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))
