"""The backward pass of the fused lookup on CUDA: which kernels run, in which order, and the memory they take.

A partition's gradients are summed row by row, in one of two ways:

- *in slices*, where each table has few rows: each program adds up the ids of a slice, and a second kernel the slices;
- *sorted*, where a table has many: all ids are sorted by key, and the runs of equal keys are added up.

In a product, gradients of one partition's rows depend on the rows of the others. So the sums of all partitions but the
largest sorted one are made before any row is updated: in slices, or in a buffer with a place for each key, or for each
id where ids are fewer. Rows of the largest, whose sums would take most memory, are updated as soon as their gradients
are added up::

    partition 1 (few rows) -> sums of slices ------------------------------> slices added, partition 1 updated
    partition 2 (largest) --> sorted ----> sums, and partition 2 updated at once ----^
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distembed.kernels.layout import FLOAT_BYTES
from distembed.kernels.tables import OPTIMIZERS, Storage
from distembed.kernels.triton_tables import (
    LEAST_SLICE,
    MOST_SLICE,
    OPTIONS,
    TILE_NUMBERS,
    DeviceTables,
    TritonBatch,
    ids_of_slice,
    key_type,
    launch,
    num_blocks,
    num_lanes,
    num_slices,
    power_of_two,
)

CHUNK = 8
"""Number of sorted ids that a lane walks."""
_JOINED_CHUNKS = 16
"""Number of chunks in which a program looks for runs that continue in later chunks."""
JOINED_NUMBERS = 4096
"""Number of numbers of long runs' pieces that are read at once."""
_OWNER_BYTES, _ORDER_BYTES = 4, 8
"""Bytes of an id's owner (:class:`TritonBatch`), and of its place before keys are sorted."""
_WRITE_GRADIENT, _WRITE_AT_KEY, _WRITE_AT_PLACE = 3, 4, 5


def update_tables(
    tables: DeviceTables, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor
) -> list[Tensor | None]:
    """Updates FBGEMM's rows of a batch's ids, and sums the gradients of replicated weights, in the module's order.

    Args:
        tables: The tables.
        batch: The ids.
        storages: Where each partition's rows lie.
        gradients: Gradients of the composed vectors, float32 and contiguous.

    Returns:
        One entry for each weight of each storage: the gradient of a replicated weight, None for FBGEMM's.
    """
    dense = {  # gradients of replicated weights, by partition
        j: torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for j, (storage, rows) in enumerate(zip(storages, batch.rows, strict=True))
        if storage.optimizer is None
    }
    if batch.num_ids > 0 and gradients.numel() > 0:
        step = _Backward(tables, batch, gradients)
        # a rank may have no row of a partition, as where a table of few rows is divided by rows
        updated = [j for j, own in enumerate(storages) if own.optimizer is not None and tables.num_keys[j] > 0]
        # In a product, a row's gradient reads the rows of the other partitions: sums are made before any update. Sums
        # of the largest sorted partition would take most memory: it is summed last, and updated row by row.
        unsliced = [j for j in updated if tables.slice_ids[j] is None]
        largest = max(unsliced, key=lambda j: tables.num_keys[j], default=-1)
        summed_first = [j for j in updated if j != largest] if tables.formula.is_product else []
        sums = [step.sum_rows(j) for j in summed_first]
        for j, gradient in dense.items():
            if len(gradient) > 0:
                step.reduce(j, _Target(gradient, _WRITE_GRADIENT))
        for j in updated:
            if j not in summed_first:
                step.reduce(j, _Target.of_update(batch.rows[j], storages[j]))
        for row_sums in sums:
            step.update_by(row_sums, _Target.of_update(batch.rows[row_sums.j], storages[row_sums.j]))
    return [gradient for j, storage in enumerate(storages) for gradient in _gradients_of_weights(storage, dense.get(j))]


def saved_bytes(num_ids: int, num_keys: Sequence[int]) -> int:
    """Returns the bytes of the keys and owners of ids, which are kept for the backward pass; ``num_keys`` as below."""
    return num_ids * (_OWNER_BYTES + sum(key_type(number).itemsize for number in num_keys))


class PartitionSizes(NamedTuple):
    """The sizes of a partition; its memory follows from them."""

    num_keys: int  # rows of all tables; a key numbers them
    most_rows: int  # largest number of rows of a table
    num_columns: int


def update_bytes(num_ids: int, num_features: int, partitions: Sequence[PartitionSizes]) -> int:
    """Returns the bytes that a backward pass takes at most, without its input and output gradients.

    Args:
        num_ids: Number of ids of all features.
        num_features: Number of features of all tables.
        partitions: The sizes of each partition.
    """
    numbers, unsliced = 0, list[PartitionSizes]()
    for own in partitions:
        slice_ids = ids_of_slice(own.most_rows, own.num_columns)
        if slice_ids is None:
            unsliced.append(own)
        else:
            numbers += num_slices(num_ids, num_features, slice_ids) * own.most_rows * own.num_columns
    if not unsliced:
        return numbers * FLOAT_BYTES
    key_bytes = [key_type(own.num_keys).itemsize for own in unsliced]
    sorted_bytes = num_ids * sum(itemsize + _ORDER_BYTES for itemsize in key_bytes)
    sort_bytes = num_ids * (max(key_bytes) + 2 * _ORDER_BYTES)  # working memory of torch's sort
    # runs of equal keys are summed chunk by chunk; each may leave pieces of two runs that reach beyond it
    partial_sum_bytes = 2 * num_blocks(num_ids, CHUNK) * max(own.num_columns for own in unsliced) * FLOAT_BYTES
    unsliced.remove(max(unsliced))  # the largest is updated row by row
    numbers += sum(min(own.num_keys, num_ids) * own.num_columns for own in unsliced)
    return numbers * FLOAT_BYTES + sorted_bytes + max(sort_bytes, partial_sum_bytes)


def _gradients_of_weights(storage: Storage, dense: Tensor | None) -> list[Tensor | None]:
    """Splits the gradient of all rows of a partition into the gradients of its weights."""
    if dense is None:
        return [None] * len(storage.weights)
    if storage.gradient_scale > 1:
        dense.mul_(storage.gradient_scale)
    gradients = dense.split([len(weight) for weight in storage.weights])
    return [gradient.to(weight.dtype) for gradient, weight in zip(gradients, storage.weights, strict=True)]


@dataclass(frozen=True)
class _Target:
    """The target of sums of gradients."""

    numbers: Tensor  # the rows, or where sums are written
    action: int  # a number of triton_update
    states: Tensor | None = None
    learning_rate: float = 0.0
    eps: float = 0.0
    seed: int | None = None  # of float16 rows that are rounded at random; None rounds to the nearest

    @classmethod
    def of_update(cls, rows: Tensor, storage: Storage) -> "_Target":
        """Returns a target that updates the rows."""
        assert storage.optimizer is not None
        rounds = storage.rounding_seed is not None and rows.dtype == torch.float16
        seed = storage.rounding_seed() if rounds and storage.rounding_seed is not None else None
        return cls(rows, OPTIMIZERS[storage.optimizer], storage.states, storage.learning_rate, storage.eps, seed)

    @property
    def optimizer_arguments(self) -> tuple[Any, ...]:
        """The optimizer's arguments of kernels; without states they get another tensor to ignore."""
        states = self.numbers if self.states is None else self.states
        return states, float(self.learning_rate), float(self.eps), self.seed or 0


@dataclass(frozen=True)
class _Sorted:
    """Keys of one partition in order, and the places of their ids."""

    keys: Tensor
    order: Tensor


@dataclass(frozen=True)
class _Sums:
    """Sums of the gradients of a partition's rows, which wait for their update."""

    j: int
    numbers: Tensor
    slice_ids: int | None = None  # number of ids of a slice, of sums of slices
    order: _Sorted | None = None  # of sums at places among sorted ids; None where each sum is at its row's key


@dataclass(frozen=True)
class _Backward:
    """Runs the kernels of one backward pass."""

    tables: DeviceTables
    batch: TritonBatch
    gradients: Tensor

    @property
    def parts(self) -> Tensor:
        """The numbers of all parts."""
        return self.tables.parts(self.gradients.device)

    def sum_rows(self, j: int) -> _Sums:
        """Adds up the gradients of each row of a partition, or of each slice."""
        num_ids, num_keys = self.batch.num_ids, self.tables.num_keys[j]
        slice_ids = self.tables.slice_ids[j]
        if slice_ids is not None:
            return self._sum_slices(j, slice_ids)
        at_key, columns = num_keys <= num_ids, len(self.tables.formula.columns[j])
        make = torch.zeros if at_key else torch.empty
        sums = make(min(num_keys, num_ids), columns, dtype=torch.float32, device=self.gradients.device)
        order = self._reduce_sorted(j, _Target(sums, _WRITE_AT_KEY if at_key else _WRITE_AT_PLACE))
        return _Sums(j, sums, order=None if at_key else order)

    def reduce(self, j: int, target: _Target) -> None:
        """Sums the gradients of each row of a partition, and sends the sums to a target."""
        if self.tables.slice_ids[j] is None:
            self._reduce_sorted(j, target)
        else:
            self.update_by(self.sum_rows(j), target)

    def update_by(self, sums: _Sums, target: _Target) -> None:
        """Updates the rows of a partition by sums that were made before."""
        if sums.slice_ids is None:
            self._update_rows(sums, target)
        else:
            self._add_slices(sums, sums.slice_ids, target)

    def _sum_slices(self, j: int, slice_ids: int) -> _Sums:
        """Adds up the gradients of each row of a partition of few rows, slice by slice."""
        tables, formula, columns = self.tables, self.tables.formula, self.tables.formula.columns[j]
        slices, padded = num_slices(self.batch.num_ids, tables.num_features, slice_ids), power_of_two(len(columns))
        shape = (slices, tables.most_rows[j], len(columns))
        partial_sums = torch.empty(shape, dtype=torch.float32, device=self.gradients.device)
        launch(
            "sum_slices",
            slices,
            self.batch.owners,
            self.batch.keys,
            self.batch.weights,
            self.gradients,
            self.parts,
            self.batch.rows,
            self.batch.feature_starts,
            partial_sums,
            tables.num_features,
            tables.most_rows[j],
            J=j,
            WIDTH=formula.width,
            COLUMN_START=columns.start,
            NUM_COLUMNS=len(columns),
            PADDED=padded,
            MULTIPLES=tables.multiples,
            IS_PRODUCT=formula.is_product,
            POOLS=formula.pools,
            SLICE=slice_ids,
            ZEROS=min(power_of_two(tables.most_rows[j] * len(columns)), TILE_NUMBERS),
            FEATURE_BITS=(tables.num_features - 1).bit_length(),
            LANES=min(num_lanes(padded, TILE_NUMBERS // 2), slice_ids),
            num_warps=1 if slice_ids < MOST_SLICE else 2,  # a scan within a warp needs no shared memory
            **OPTIONS,
        )
        return _Sums(j, partial_sums, slice_ids)

    def _add_slices(self, sums: _Sums, slice_ids: int, target: _Target) -> None:
        """Adds the sums of slices up, and updates the rows."""
        settings, num_warps = (
            self._settings(sums.j, target),
            4 if slice_ids == LEAST_SLICE else 1,
        )  # few rows have many slices
        launch(
            "add_slices",
            self.tables.num_keys[sums.j],
            self.batch.feature_starts,
            sums.numbers,
            self.parts,
            target.numbers,
            self.tables.num_features,
            self.tables.most_rows[sums.j],
            *target.optimizer_arguments,
            NUM_PARTITIONS=len(self.batch.keys),
            SLICE=slice_ids,
            LANES=num_lanes(settings["PADDED"], TILE_NUMBERS * num_warps),
            num_warps=num_warps,
            FEATURE_BITS=(self.tables.num_features - 1).bit_length(),
            **settings,
        )

    def _reduce_sorted(self, j: int, target: _Target) -> _Sorted:
        """Sorts the ids by their keys, sums each row's gradients, and sends the sums to a target; returns the order."""
        tables, num_ids, formula = self.tables, self.batch.num_ids, self.tables.formula
        by_key = _Sorted(*torch.sort(self.batch.keys[j], stable=True))
        columns = formula.columns[j]
        num_chunks, padded = num_blocks(num_ids, CHUNK), power_of_two(len(columns))
        partial_sums = torch.empty(
            2, num_chunks, len(columns), dtype=torch.float32, device=self.gradients.device
        ).unbind()
        lanes = num_lanes(padded)
        ends = (target.numbers, *partial_sums, num_ids, tables.num_features, *target.optimizer_arguments)
        settings = self._settings(j, target)
        launch(
            "sum_runs",
            num_blocks(num_chunks, lanes),
            by_key.keys,
            by_key.order,
            self.batch.owners,
            self.batch.keys,
            self.batch.weights,
            self.gradients,
            self.parts,
            self.batch.rows,
            *ends,
            WIDTH=formula.width,
            COLUMN_START=columns.start,
            IS_PRODUCT=formula.is_product,
            POOLS=formula.pools,
            CHUNK=CHUNK,
            LANES=lanes,
            **settings,
        )
        launch(
            "join_runs",
            num_blocks(num_chunks, _JOINED_CHUNKS),
            by_key.keys,
            by_key.order,
            self.batch.owners,
            self.parts,
            *ends,
            NUM_PARTITIONS=len(self.batch.keys),
            POOLS=formula.pools,
            CHUNK=CHUNK,
            JOINED_CHUNKS=_JOINED_CHUNKS,
            LANES=num_lanes(padded, JOINED_NUMBERS),
            **settings,
        )
        return by_key

    def _update_rows(self, sums: _Sums, target: _Target) -> None:
        """Updates the rows of a partition by a sum for each row."""
        settings, at_key, owners = self._settings(sums.j, target), sums.order is None, self.batch.owners
        lanes = num_lanes(settings["PADDED"])
        order = sums.order or _Sorted(owners, owners)  # which is not read
        num_lanes_used = len(sums.numbers) if at_key else self.batch.num_ids
        launch(
            "update_rows",
            num_blocks(num_lanes_used, lanes),
            order.keys,
            order.order,
            owners,
            self.parts,
            sums.numbers,
            target.numbers,
            self.batch.num_ids,
            self.tables.num_keys[sums.j],
            self.tables.num_features,
            *target.optimizer_arguments,
            NUM_PARTITIONS=len(self.batch.keys),
            POOLS=self.tables.formula.pools,
            AT_KEY=at_key,
            CHUNK=CHUNK,
            LANES=lanes,
            FEATURE_BITS=(self.tables.num_features - 1).bit_length(),
            **settings,
        )

    def _settings(self, j: int, target: _Target) -> dict[str, Any]:
        num_columns = len(self.tables.formula.columns[j])
        return {
            "J": j,
            "NUM_COLUMNS": num_columns,
            "PADDED": power_of_two(num_columns),
            "MULTIPLES": self.tables.multiples,
            "STATE_MULTIPLE": self.tables.state_multiples[j],
            "ACTION": target.action,
            "ROUNDS_AT_RANDOM": target.seed is not None,
            **OPTIONS,
        }
