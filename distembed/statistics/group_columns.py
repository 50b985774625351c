"""The columns of a row group as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.row_groups import RowGroup
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.errors import UserError


class GroupColumns:
    """Columns of a row group.

    Args:
        group: The row group.
        schema: Columns of the dataset.
        names: Names of the columns to read.

    Raises:
        UserError: The row group is damaged.
    """

    def __init__(self, group: RowGroup, schema: Schema, names: Sequence[str]) -> None:
        self._group, self._schema = group, schema
        self._table = group.read(names)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._table)

    def ids(self, feature: CategoricalFeature) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids of a feature, row after row, and how many each row has; no lengths where each has one.

        Raises:
            UserError: A row has no id where it needs one, or an id is outside its table.
        """
        values, lengths = self._values(feature.name)
        if values.null_count:
            raise UserError(f"{self._group}, column {feature.name!r}: {values.null_count} rows have no id")
        ids: NDArray[np.int64] = values.to_numpy(zero_copy_only=False).astype(np.int64)
        wrong = (ids < 0) | (ids >= feature.num_embeddings)
        if wrong.any():
            found = ids[int(np.argmax(wrong))]
            raise UserError(
                f"{self._group}, column {feature.name!r} has the id {found}: ids are in [0, {feature.num_embeddings})"
            )
        return ids, lengths

    def numbers(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns numbers, NaN where there are none, and how many each row has; no lengths where each has one."""
        values, lengths = self._values(name)
        return pc.cast(values, pa.float32(), safe=False).to_numpy(zero_copy_only=False), lengths

    def labels(self) -> NDArray[np.float64]:
        """Returns the label of each row; none where rows have no labels."""
        return self._doubles(self._schema.label, np.zeros(0))

    def weights(self) -> NDArray[np.float64]:
        """Returns the weight of each row, which is 1 where rows have none."""
        return self._doubles(self._schema.weight, np.ones(self.num_rows))

    def days(self) -> NDArray[np.int64]:
        """Returns the day of each row, counted from 1970; none where rows have no times."""
        if self._schema.time is None:
            return np.zeros(0, np.int64)
        seconds = self._values(self._schema.time)[0].to_numpy(zero_copy_only=False)
        return seconds.astype(np.int64) // 86_400

    def _doubles(self, name: str | None, default: NDArray[np.float64]) -> NDArray[np.float64]:
        return default if name is None else self.numbers(name)[0].astype(np.float64)

    def _values(self, name: str) -> tuple[pa.Array, NDArray[np.int64]]:
        column = self._table[name].combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return column, np.zeros(0, np.int64)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return column.flatten(), lengths.astype(np.int64)
