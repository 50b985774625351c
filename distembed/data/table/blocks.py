"""Blocks of parsed rows: the columns of the well-formed rows, and the malformed rows.

::

    numbers    labels int8, weight float32, time int64, dense float32 ...     [num_rows] each; missing values are NaN
               for lists: one number for each value of the lists beside
    ids        codes 1 0 2 1, keys [-, k1, k2]                                row i has keys[codes[i]]; 0: none
               for lists: codes of all rows end to end, and the number of values of each row

The :class:`BlockLayout` says the role of each column, and how its values become numbers or ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

NumberRole = Literal["label", "weight", "time", "dense", "bins"]
NumberTransform = Literal["none", "standardize", "quantile_bins"]
KeyRole = Literal["feature", "split"]
KeyKind = Literal["hexadecimal", "integer", "string"]


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers of every block."""

    name: str  # of the dataset's column
    role: NumberRole  # ``bins`` makes a categorical feature of the numbers
    dtype: np.dtype[Any]  # in blocks: int8 for a label that no row lacks, 0 or 1; int64 for times; float32 for others
    transform: NumberTransform = "none"  # learnt of the training rows; the parser applies all others
    num_bins: int = 0  # of ``quantile_bins``
    keeps_missing: bool = False  # else missing dense numbers become 0 (after ``standardize``: the mean)
    # The feature of lists with a number for each value, of columns of lists: a block has the numbers of all rows end to
    # end, and the feature's lengths are theirs. None for one number a row.
    beside: str | None = None
    written_as: np.dtype[Any] | None = None  # type in the dataset's files; None for ``dtype``

    @property
    def file_dtype(self) -> np.dtype[Any]:
        return self.dtype if self.written_as is None else self.written_as


@dataclass(frozen=True)
class KeyColumn:
    """A column of values that get ids; keys are uint32 digits, int64 values, or uint64 hashes of texts."""

    name: str  # of the dataset's column
    role: KeyRole  # the values of ``split`` say which split a row belongs to, and are not written
    kind: KeyKind
    is_list: bool = False  # whether a row has any number of values
    min_count: int = 1  # values seen fewer times in the training rows share the out-of-vocabulary id
    hash_size: int | None = None  # of the table that values are hashed into; None builds a vocabulary
    hash_seed: int = 0
    max_length: int | None = None  # of a list, as the parser has cut it; None where there is no bound
    # The feature whose vocabulary or hash, and table, this one shares; None for its own. That feature is of the same
    # kind, shares none itself, and has the same ``min_count`` and hash settings.
    vocabulary: str | None = None

    @property
    def key_dtype(self) -> np.dtype[Any]:
        return np.dtype({"hexadecimal": np.uint32, "integer": np.int64, "string": np.uint64}[self.kind])


@dataclass(frozen=True)
class BlockLayout:
    """The columns of every block, in order."""

    numbers: tuple[NumberColumn, ...]  # labels, weight and time where there are any, dense ones, then ``bins``
    ids: tuple[KeyColumn, ...]
    features: tuple[str, ...]  # the dataset's categorical features in order, each a column of ``ids`` or ``bins``

    @cached_property
    def arrays(self) -> dict[tuple[str, int], int]:
        """Position of each array in a spooled block (``spool.py``), keyed by (kind of array, index of its column)."""
        names = [("numbers", index) for index in range(len(self.numbers))]
        for index, column in enumerate(self.ids):
            texts = ["offsets", "texts"] if column.kind == "string" else []
            names += [(kind, index) for kind in (*["lengths"] * column.is_list, "codes", "keys", *texts)]
        return {name: position for position, name in enumerate(names)}

    @cached_property
    def feature_keys(self) -> dict[str, tuple[int, KeyColumn]]:
        return {column.name: (index, column) for index, column in enumerate(self.ids) if column.role == "feature"}


@dataclass(frozen=True)
class RejectedRow:
    """Locates a malformed row in its block, with the reason and the text for ``rejected.tsv``."""

    line: int  # in the block, from 0; of rows that are not lines, the number of the row
    reason: str  # one of the source's
    text: bytes  # of the line
    column: str = ""  # whose value is malformed, where that is known


@dataclass(frozen=True)
class IdColumn:
    """Values of one column: value i has the key ``keys[codes[i]]``; code 0 is a missing value, ``keys[0]`` is unused.

    Rows and values are the same unless the column holds lists: ``codes`` then has the lists end to end.
    """

    codes: NDArray[Any]  # of the smallest unsigned type that holds them
    keys: NDArray[Any]  # the distinct ones of the block
    texts: pa.Array | None = None  # of keys that are hashes, as Arrow's string; ``texts[0]`` is empty
    lengths: NDArray[np.int32] | None = None  # number of values of each row, of lists


@dataclass(frozen=True)
class ParsedBlock:
    """The well-formed rows of a block by column, in the order of the layout, and the malformed rows in order."""

    num_lines: int  # malformed ones included
    num_rows: int  # well-formed ones
    numbers: tuple[NDArray[Any], ...]
    ids: tuple[IdColumn, ...]
    rejected: tuple[RejectedRow, ...] = ()


def code_dtype(num_keys: int) -> np.dtype[Any]:
    """Returns the smallest unsigned type for codes below ``num_keys``."""
    return np.min_scalar_type(max(num_keys - 1, 0))
