"""Explicit: partitions given as arrays, like the make, year and type of a car (Shi et al., KDD 2020, section 3.1).

``p_j(x) = a_j[x]``, where assignment ``a_j`` holds the row of every id. Trade-off: ids that share a property share a
row, so that rare ids learn from similar ones; but k numbers an id are stored, in the bits that they need
(:mod:`distembed.partitions.packed`), and only a look at every id tells whether the partitions are complementary: each
id's rows become one key, and keys are sorted (16 bytes an id).

A Parquet file is read column by column, in batches and twice: first its distinct values are collected, then numbered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pydantic.dataclasses
from jaxtyping import Int64
from numpy.typing import NDArray
from pydantic import Field

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import STRICT, one_of
from distembed.partitions.base import MAX_NUM_EMBEDDINGS, Partition, require_positive
from distembed.partitions.packed import PackedRows
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from torch import Tensor

_UNPACKED_AS = {8: "uint8", 15: "int16", 31: "int32", 63: "int64"}
"""The dtype of unpacked rows, by the most bits of a row."""
_CHUNK_IDS = 2**14
"""The number of ids that the inverse compares at once, few enough for the processor's cache."""
_BATCH_ROWS = 2**20


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ExplicitSettings(SchemeSettings):
    """The settings of ``explicit``."""

    # the Parquet file with a row for each id; a relative path starts at the working directory
    assignments: str | None = None
    columns: Annotated[list[str], Field(min_length=1)] | None = None  # the columns of that file; each is a partition
    allow_collisions: bool = False  # whether ids may have the same rows


class Explicit(Partition):
    """``p_j(x) = a_j[x]``.

    Args:
        num_embeddings: The number of ids, n.
        assignments: Integer arrays (numpy or torch) of length n, one for each partition; entry x is the row of id x.
            They are copied, in the bits that their largest row needs.
        num_rows: The number of rows of each assignment; unless given, one above its largest row.
        allow_collisions: Whether ids may have the same rows, as in a hashed table.

    Raises:
        UserError: An assignment has a wrong type, length or row; or two ids have the same rows, which
            ``allow_collisions`` forbids. The error names position and value, or both ids.
    """

    name = "explicit"
    settings = ExplicitSettings

    def __init__(
        self,
        num_embeddings: int,
        assignments: Sequence[Any] = (),
        num_rows: Sequence[int] | None = None,
        allow_collisions: bool = False,
    ) -> None:
        super().__init__(num_embeddings)
        if len(assignments) == 0:
            raise UserError("explicit was given no assignments; give one integer array for each partition.")
        if num_rows is not None and len(num_rows) != len(assignments):
            raise UserError(
                f"explicit was given {len(assignments)} assignments and {len(num_rows)} numbers in num_rows; "
                "give as many of both, or leave num_rows out."
            )
        bounds: Sequence[int | None] = num_rows or [None] * len(assignments)
        stored = [
            _checked_copy(f"assignments[{j}]", rows, self.num_embeddings, f"num_rows[{j}]", bound)
            for j, (rows, bound) in enumerate(zip(assignments, bounds, strict=True))
        ]
        self.num_rows = tuple(bound for _, bound in stored)
        self._packed = tuple(rows for rows, _ in stored)
        self._copies = {torch.device("cpu"): self._packed}
        if not allow_collisions:
            self._require_complementary()

    def _identity(self) -> dict[str, Any]:
        """Returns the assignments, without copies on other devices and cached collisions."""
        packed = [(rows.bits, rows.num_codes, rows.words) for rows in self._packed]
        return {"num_embeddings": self.num_embeddings, "packed": packed, "num_rows": self.num_rows}

    @property
    def assignments(self) -> tuple[Tensor, ...]:
        """The row of every id in each partition, unpacked, in the smallest integer dtype."""
        return tuple(
            rows.first(self.num_embeddings, _unpacked_dtype(bound))
            for rows, bound in zip(self._packed, self.num_rows, strict=True)
        )

    @property
    def assignment_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self._packed)

    @classmethod
    def from_parquet(
        cls, num_embeddings: int, path: str | Path, columns: Sequence[str], allow_collisions: bool = False
    ) -> Explicit:
        """Builds one partition for each column of a Parquet file, whose row x describes id x.

        Ids with the same value of the column share a row; null is a value too. Rows are numbered by ascending value,
        null last.

        Raises:
            UserError: The file or a column is missing or cannot be used, or the constructor raises it.
        """
        num_embeddings = require_positive("num_embeddings", num_embeddings, "Give the number of distinct ids.")
        assignments, num_rows = read_assignments(path, columns, num_embeddings)
        return cls(num_embeddings, assignments, num_rows, allow_collisions)

    @classmethod
    def from_settings(cls, num_embeddings: int, settings: Any) -> Explicit:
        """Builds the partitions of the settings' Parquet file; each version of a file is read once."""
        if settings.assignments is None or settings.columns is None:
            raise UserError("partition explicit needs assignments, a Parquet file, and columns, its columns.")
        path = Path(settings.assignments)
        modified_ns = path.stat().st_mtime_ns if path.exists() else 0
        return _read(num_embeddings, path, tuple(settings.columns), settings.allow_collisions, modified_ns)

    @property
    def description(self) -> str:
        equations = ", ".join(f"p_{j}(x) = a_{j}[x] of {bound} rows" for j, bound in enumerate(self.num_rows, start=1))
        shared = "" if self.is_complementary() else f", about {self.ids_per_row:.1f} ids a row (not complementary)"
        return equations + shared

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Raises a :class:`UserError` for more ids, whose rows follow from no rule."""
        if num_embeddings > self.num_embeddings:
            raise UserError(
                f"{self.name} has assignments of {self.num_embeddings} ids, and cannot grow to {num_embeddings} by "
                "itself; give assignments of all ids, in which those of the known ones are the same."
            )
        return {"assignments": self.assignments, "num_rows": self.num_rows, "allow_collisions": True}

    def first_changed_id(self, before: Explicit) -> int | None:
        """Returns the first id of an earlier scheme that has other rows here; None where all ids keep their rows."""
        if len(before.num_rows) != len(self.num_rows) or before.num_embeddings > self.num_embeddings:
            raise UserError(
                f"explicit has {len(self.num_rows)} partitions of {self.num_embeddings} ids, and had "
                f"{len(before.num_rows)} of {before.num_embeddings}; give as many partitions, and no fewer ids."
            )
        changed = torch.zeros(before.num_embeddings, dtype=torch.bool)
        for now, then in zip(self.assignments, before.assignments, strict=True):
            changed |= now[: len(then)] != then
        return int(changed.byte().argmax()) if changed.any() else None

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        if not isinstance(ids, torch.Tensor):  # torch.fx traces it
            return torch.stack([rows.take(ids) for rows in self._packed])
        if ids.device not in self._copies:
            self._copies[ids.device] = tuple(rows.to(ids.device) for rows in self._packed)
        return torch.stack([rows.take(ids) for rows in self._copies[ids.device]])

    def colliding_ids(self) -> tuple[int, int] | None:
        return self._collision

    @property
    def ids_per_row(self) -> float:
        return self.num_embeddings / self._num_tuples

    @cached_property
    def _collision(self) -> tuple[int, int] | None:
        # by the pigeonhole principle, the first ids hold a collision already where there are more ids than tuples
        num_ids = min(self.num_embeddings, math.prod(self.num_rows) + 1)
        keys = _keys([rows.first(num_ids) for rows in self._packed], self.num_rows)
        in_order = np.sort(keys)
        repeats = in_order[1:][in_order[1:] == in_order[:-1]]
        if not len(repeats):
            return None
        first, second, *_ = np.flatnonzero(keys == repeats[0]).tolist()
        return first, second

    @cached_property
    def _num_tuples(self) -> int:
        if self.is_complementary():
            return self.num_embeddings
        return len(np.unique(_keys(self.assignments, self.num_rows)))

    def _require_complementary(self) -> None:
        pair = self.colliding_ids()
        if pair is not None:
            rows = tuple(self.rows(torch.tensor(pair[0])).tolist())
            raise UserError(
                f"explicit: the assignments of {' x '.join(map(str, self.num_rows))} rows are not complementary for "
                f"num_embeddings={self.num_embeddings}: ids {pair[0]} and {pair[1]} have the same rows, {rows}. Add an "
                "assignment in which they differ, or accept shared embeddings with allow_collisions=True."
            )

    def _candidates(self, rows: Int64[Tensor, "k *shape"]) -> Int64[Tensor, "*shape"]:
        """Compares all ids with the wanted tuples, in one pass over the ids: an index of all ids would take memory."""
        row_tuples = rows.reshape(len(self.num_rows), -1).cpu()
        # Wanted tuples are paths in a tree. Node t of level j stands for one distinct prefix of j + 1 rows, by its key
        # parent node * num_rows[j] + row; a level's keys are sorted, so ids find their node by bisection or drop out.
        levels = []
        node = torch.zeros(row_tuples.shape[1], dtype=torch.int64)
        for row, bound in zip(row_tuples, self.num_rows, strict=True):
            prefixes, node = (node * bound + row.clamp(0, bound - 1)).unique(return_inverse=True)
            levels.append(prefixes)
        node_ids = torch.full((len(levels[-1]),), -1)
        for start in range(0, self.num_embeddings if row_tuples.numel() else 0, _CHUNK_IDS):
            stop = min(start + _CHUNK_IDS, self.num_embeddings)
            ids, nodes = torch.arange(start, stop), torch.zeros(stop - start, dtype=torch.int64)
            for assigned, bound, prefixes in zip(self._packed, self.num_rows, levels, strict=True):
                keys = nodes * bound + assigned.take(ids)
                nodes = torch.searchsorted(prefixes, keys).clamp(max=len(prefixes) - 1)
                has_prefix = prefixes[nodes] == keys
                ids, nodes = ids[has_prefix], nodes[has_prefix]
            node_ids[nodes] = ids
        return node_ids[node].view(rows.shape[1:]).to(rows.device)


def _keys(assignments: Sequence[Tensor], num_rows: Sequence[int]) -> NDArray[np.int64]:
    """Returns a key for each id, its rows as digits of a mixed radix: keys are equal exactly where all rows are."""
    keys, count = np.zeros(len(assignments[0]), np.int64), 1
    for assigned, bound in zip(assignments, num_rows, strict=True):
        rows: NDArray[np.integer] = assigned.numpy()
        # before keys exceed 63 bits, keys and rows are numbered without gaps: both are then below the number of ids
        if count * bound > MAX_NUM_EMBEDDINGS:
            distinct_keys, keys = np.unique(keys, return_inverse=True)
            distinct_rows, rows = np.unique(rows, return_inverse=True)
            count, bound = len(distinct_keys), len(distinct_rows)
        keys, count = keys * bound + rows, count * bound
    return keys


def forget_files() -> None:
    """Frees the schemes of files that :meth:`Explicit.from_settings` has read and no model uses."""
    _read.cache_clear()


@lru_cache(maxsize=64)
def _read(
    num_embeddings: int, path: Path, columns: tuple[str, ...], allow_collisions: bool, modified_ns: int
) -> Explicit:
    """Builds the scheme of a file; the cache rereads a file only after its time of modification has changed."""
    return Explicit.from_parquet(num_embeddings, path, columns, allow_collisions)


def _checked_copy(
    field: str, rows: Any, num_embeddings: int, bound_field: str, bound: int | None
) -> tuple[PackedRows, int]:
    """Returns a packed copy of an assignment, and its number of rows.

    A UserError, in which ``field`` and ``bound_field`` name both, refuses other types, lengths and rows.
    """
    values = _integer_array(field, rows)
    if values.shape != (num_embeddings,):
        raise UserError(
            f"{field} has the shape {values.shape}; it must be ({num_embeddings},): one row for each of "
            f"num_embeddings={num_embeddings} ids."
        )
    if bound is None:
        bound = max(int(values.max()), 0) + 1
    bound = require_positive(bound_field, bound, f"It is the number of rows of {field}.")
    if int(values.min()) < 0 or int(values.max()) >= bound:
        position = int(((values < 0) | (values >= bound)).argmax())
        raise UserError(
            f"{field}[{position}] is {int(values[position])}; rows lie between 0 and {bound - 1} "
            f"({bound_field}={bound})."
        )
    return PackedRows.of(values), bound


def _unpacked_dtype(num_rows: int) -> torch.dtype:
    name = next(name for bits, name in _UNPACKED_AS.items() if (num_rows - 1).bit_length() <= bits)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _integer_array(field: str, rows: Any) -> NDArray[Any]:
    values = rows.cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    if not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"{field} holds values of type {values.dtype}; it must be an array of integers.")
    return values


def read_assignments(
    path: str | Path, columns: Sequence[str], num_embeddings: int
) -> tuple[list[NDArray[np.integer]], list[int]]:
    """Returns the row of every id in each column, and each column's number of rows, as :meth:`Explicit.from_parquet`.

    A UserError refuses a file of another length than ``num_embeddings``, and unusable columns.
    """
    if isinstance(columns, str) or len(columns) == 0:
        raise UserError(f"columns is {columns!r}; give a list of one column name or more.")
    file = _open(path)
    with file:
        if file.metadata.num_rows != num_embeddings:
            raise UserError(
                f"{path} has {file.metadata.num_rows} rows, for num_embeddings={num_embeddings}; row x describes id x, "
                "so there must be one row an id."
            )
        for position, column in enumerate(columns):
            _require_usable(file, column, list(columns[:position]))
        numbered = [_number_values(file, path, column) for column in columns]
    return [rows for rows, _ in numbered], [count for _, count in numbered]


def _open(path: str | Path) -> pq.ParquetFile:
    if not Path(path).is_file():
        raise UserError(f"{str(path)!r} is no file; give the path of a Parquet file.")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read as a Parquet file: {error}") from error


def _require_usable(file: pq.ParquetFile, column: str, before: Sequence[str]) -> None:
    """Makes sure that a column exists once, has plain values and is not among ``before``."""
    one_of("column", column, file.schema_arrow.names)
    if column in before:
        raise UserError(f"columns holds {column!r} twice; the same partition again tells no more ids apart.")
    if file.schema_arrow.names.count(column) > 1:
        raise UserError(f"the file has several columns named {column!r}; rename them.")
    kind = file.schema_arrow.field(column).type
    if pa.types.is_nested(kind):
        raise UserError(f"column {column!r} has the nested type {kind}; use a column of plain values.")


def _number_values(file: pq.ParquetFile, path: str | Path, column: str) -> tuple[NDArray[np.integer], int]:
    """Returns each id's row, the place of its value in the column's distinct values, and how many values there are."""
    values = _distinct_values(file, path, column)
    rows = np.empty(file.metadata.num_rows, dtype=np.min_scalar_type(len(values)))
    start = 0
    for batch in _batches(file, path, column):
        rows[start : start + len(batch)] = pc.index_in(batch, value_set=values).to_numpy()
        start += len(batch)
    return rows, len(values)


def _distinct_values(file: pq.ParquetFile, path: str | Path, column: str) -> pa.Array:
    """Returns the distinct values of a column, ascending, null last."""
    values = pa.chunked_array([batch.unique() for batch in _batches(file, path, column)]).unique()
    try:
        return values.take(pc.sort_indices(values))
    except pa.ArrowNotImplementedError as error:
        raise UserError(f"column {column!r} has the type {values.type}, whose values have no order.") from error


def _batches(file: pq.ParquetFile, path: str | Path, column: str) -> Iterator[pa.Array]:
    """Yields the values of a column, batch by batch; dictionaries are decoded."""
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            values = batch.column(0)
            yield values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{str(path)!r}: column {column!r} cannot be read, the file may be damaged; write it anew: {error}"
        ) from error
