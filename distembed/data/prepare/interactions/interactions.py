"""Interactions of users with items, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class KeyColumn:
    """A column of raw values, each distinct one stored once.

    Attributes:
        codes: Place of each row's value in ``keys``, int32; -1 for a missing one.
        keys: Distinct values, texts.
    """

    codes: NDArray[np.int32]
    keys: pa.Array

    def take(self, rows: NDArray[Any]) -> KeyColumn:
        """Returns these rows, given by numbers or by a mask."""
        return KeyColumn(self.codes[rows], self.keys)

    def counts(self) -> NDArray[np.int64]:
        """Returns how often each of ``keys`` occurs."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.keys))


@dataclass(frozen=True, eq=False)
class Interactions:
    """Rows of a user and an item, and what is known of each.

    Attributes:
        users: Users; none is missing.
        items: Items; none is missing.
        parts: Number of each row's split, uint8, as far as it is known.
        ratings: Ratings, float32; None where there are none.
        times: Times, of which only the order counts; None where rows are in the order of time.
        categorical: Other values, by column.
        dense: Numbers by column, float32, NaN where missing.
    """

    users: KeyColumn
    items: KeyColumn
    parts: NDArray[np.uint8]
    ratings: NDArray[np.float32] | None
    times: NDArray[np.int64] | NDArray[np.float64] | None
    categorical: Mapping[str, KeyColumn]
    dense: Mapping[str, NDArray[np.float32]]

    @property
    def num_rows(self) -> int:
        """Number of interactions."""
        return len(self.parts)

    @property
    def key_columns(self) -> dict[str, KeyColumn]:
        """The columns that have a vocabulary, by their names in the dataset."""
        return {"user": self.users, "item": self.items, **self.categorical}

    def take(self, rows: NDArray[Any]) -> Interactions:
        """Returns these rows, given by numbers or by a mask."""
        return Interactions(
            self.users.take(rows),
            self.items.take(rows),
            self.parts[rows],
            None if self.ratings is None else self.ratings[rows],
            None if self.times is None else self.times[rows],
            {name: column.take(rows) for name, column in self.categorical.items()},
            {name: values[rows] for name, values in self.dense.items()},
        )

    def with_parts(self, parts: NDArray[np.uint8]) -> Interactions:
        """Returns the same rows in other splits."""
        return Interactions(self.users, self.items, parts, self.ratings, self.times, self.categorical, self.dense)
