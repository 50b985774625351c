"""Columns of few rows, as of one that is scored by itself, are parsed end to end: each step costs more than its values.

::

    C1  a b        hexadecimal
    C2  c a        hexadecimal    ->    a b | c a | b b    parsed once, and divided again
    C3  b b        hexadecimal
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

FEW_ROWS = 1024
"""From here on a column by itself, whose distinct values fit the cache, is parsed as fast."""


def grouped(columns: Sequence[tuple[str, pa.Array]], num_rows: int) -> Iterator[tuple[str, list[int], pa.Array]]:
    """Yields the columns that are parsed as one: what they are, their places in the given order, and their values.

    Args:
        columns: What each column is parsed as, and its values.
        num_rows: The number of rows; of more than a few each column is a group of its own.
    """
    if num_rows > FEW_ROWS:
        for place, (kind, array) in enumerate(columns):
            yield kind, [place], array
        return
    groups: dict[tuple[str, pa.DataType], list[int]] = {}
    for place, (kind, array) in enumerate(columns):
        groups.setdefault((kind, array.type), []).append(place)
    for (kind, _), places in groups.items():
        arrays = [columns[place][1] for place in places]
        yield kind, places, pa.concat_arrays(arrays) if len(arrays) > 1 else arrays[0]


def parts(num_columns: int, num_rows: int) -> list[slice]:
    """Returns where the rows of each column of a group are."""
    return [slice(start, start + num_rows) for start in range(0, num_columns * num_rows, num_rows or 1)] or [
        slice(0, 0)
    ] * num_columns
