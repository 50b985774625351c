"""A column of lists, of which batches take rows.

::

    row         0    1    2
    lists      3 9   -    5
    values     3 9        5
    offsets    0     2    2    3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Jagged:
    """One column of lists."""

    values: NDArray[Any]  # ids, int64, or numbers, float32, of all rows, end to end
    offsets: NDArray[np.int64]  # where the values of each row begin, and where the last ones end [num_rows + 1]

    @classmethod
    def from_lengths(cls, values: NDArray[Any], lengths: NDArray[np.int64]) -> Jagged:
        """Returns a column from the number of values of each row."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of values of each row."""
        return np.diff(self.offsets)

    def gather(self, rows: NDArray[np.int64]) -> Jagged:
        """Returns these rows, in this order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Jagged.from_lengths(self.values[shift + np.arange(len(shift))], lengths)

    @classmethod
    def concatenate(cls, columns: Sequence[Jagged]) -> Jagged:
        """Returns the rows of all columns, of which there is at least one, end to end."""
        values = np.concatenate([column.values for column in columns])
        return cls.from_lengths(values, np.concatenate([column.lengths for column in columns]))
