"""Reads pairs of a user and an item from the rows of a dataset, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.dataset.row_groups import RowGroup
from distembed.data.dataset.schema import ITEM, USER


@dataclass(frozen=True)
class PairColumns:
    """The columns of a dataset that have pairs of a user and an item.

    Attributes:
        user: The feature of users; None where only the items are read.
        item: The feature of items, one a row or a list.
        label: The column of labels; rows whose label is 0 have no pair. None where all rows have one.
    """

    user: str | None = USER
    item: str = ITEM
    label: str | None = None

    def read(self, group: RowGroup) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the user and the item of each pair of a row group; without a user feature users are 0."""
        names = [name for name in (self.user, self.item, self.label) if name is not None]
        table = group.read(names)
        if self.label is not None:
            table = table.filter(pc.not_equal(table.column(self.label), 0))
        items = table.column(self.item).combine_chunks()
        users = np.zeros(len(table), np.int64) if self.user is None else int64_array(table.column(self.user))
        if not (pa.types.is_list(items.type) or pa.types.is_large_list(items.type)):
            return users, int64_array(items)
        lengths = int64_array(pc.fill_null(pc.list_value_length(items), 0))
        return np.repeat(users, lengths), int64_array(pc.list_flatten(items))


def int64_array(values: Any) -> NDArray[np.int64]:
    """Returns the integers of an Arrow array as int64."""
    return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)
