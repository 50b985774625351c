"""The fused lookup on CUDA, by Triton's kernels; tables and results as in :mod:`distembed.kernels.operation`.

The backward pass reads the rows again, as on a CPU, so that only the ids are kept for it. The host waits for nothing:
constants are copied to the device in the first step.

Backward: keys of all ids, a sort for each partition, sums of gradients over runs of equal keys, updates. In a product,
gradients of one partition's rows depend on the rows of the others. So the sums of all partitions but the largest are
made before any row is updated, in a buffer with a place for each key, or for each id where ids are fewer. Rows of the
largest partition, whose sums would take most memory, are updated as soon as their gradients are added up::

    sort by keys of partition 1 -> sums of partition 1 ----------------------------------> update partition 1
    sort by keys of partition 2 (largest) -> sums, and update partition 2 at once ----^
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.base.errors import UserError
from distembed.kernels.layout import FLOAT_BYTES
from distembed.kernels.tables import INTEGERS, OPTIMIZERS, Formula, Storage, TablePart, Updates, as_operand, checks_rows
from distembed.kernels.triton_tables import (
    DeviceTables,
    TritonBatch,
    key_type,
    num_blocks,
    num_lanes,
    power_of_two,
    triton_kernels,
)


class TritonLookup:
    """Looks the ids of a group of tables up; arguments as :class:`distembed.kernels.operation.FusedLookup`."""

    def __init__(
        self,
        formula: Formula,
        feature_parts: Sequence[Sequence[TablePart]],
        features_per_table: Sequence[int],
        storages: Sequence[Storage],
    ) -> None:
        triton_kernels()  # a missing Triton is an error here, and not in the first step
        self._tables, self.updates = DeviceTables(formula, feature_parts, features_per_table, storages), Updates()

    def __call__(
        self,
        ids: Int64[Tensor, " ids"],
        offsets: Int[Tensor, " bags_plus_1"],
        weights: Float[Tensor, " ids"] | None,
        storages: Sequence[Storage],
    ) -> Float[Tensor, "..."]:
        """Returns composed vectors, ``[bags, features * width]``, or ``[ids, width]`` of sequences."""
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "The weights of ids need a gradient, which lookups in one pass do not have on a GPU; detach them, or "
                "give the tables kernel='fbgemm'."
            )
        rows = tuple(_rows(storage) for storage in storages)
        all_weights = [weight for storage in storages for weight in storage.weights]
        # FBGEMM's weights on CUDA need no gradient; autograd calls a backward pass only if some argument needs one
        placeholder = torch.empty(0, requires_grad=any(storage.optimizer is not None for storage in storages))
        step = _Step(self, self._tables.num_features, rows, storages, self.updates.so_far(storages))
        batch = (
            as_operand(ids, ids.device, torch.int64),
            as_operand(offsets, ids.device, *INTEGERS),
            None if weights is None else as_operand(weights.float(), ids.device, torch.float32),
        )
        return _Fused.apply(step, placeholder, *batch, *all_weights)  # type: ignore[no-untyped-call]

    @property
    def formula(self) -> Formula:
        """The formula of all tables."""
        return self._tables.formula

    def compose(self, batch: TritonBatch) -> Tensor:
        """Returns the composed vectors of a batch."""
        tables, formula = self._tables, self._tables.formula
        shape = (
            (batch.num_bags, tables.num_features * formula.width) if formula.pools else (len(batch.ids), formula.width)
        )
        outputs = torch.empty(shape, dtype=torch.float32, device=batch.ids.device)
        num_vectors = batch.num_vectors(formula.pools)
        if num_vectors == 0:
            return outputs
        if checks_rows():
            self._require_rows(batch)
        groups = tables.column_groups()
        lanes = num_lanes(max(groups[4::5]))
        triton_kernels().compose[(num_blocks(num_vectors, lanes),)](
            batch.ids,
            batch.offsets,
            batch.ids if batch.weights is None else batch.weights,
            tables.parts(batch.ids.device),
            batch.rows,
            outputs,
            len(batch.ids),
            batch.num_bags,
            tables.num_features,
            WIDTH=formula.width,
            GROUPS=groups,
            NUM_GROUPS=len(groups) // 5,
            RULES=tables.rules,
            IS_PRODUCT=formula.is_product,
            HAS_WEIGHTS=batch.weights is not None,
            POOLS=formula.pools,
            LANES=lanes,
            PADDED_FEATURES=power_of_two(tables.num_features),
        )
        return outputs

    def _require_rows(self, batch: TritonBatch) -> None:
        """Raises an :class:`IndexError` where the row of an id is not on this rank; waits for the device."""
        keys, _ = find_keys(self._tables, batch)
        for j, partition_keys in enumerate(keys):
            missing = (partition_keys[: int(batch.offsets[-1])] < 0).nonzero()
            if len(missing) > 0:
                position = int(missing[0])
                raise IndexError(
                    f"id {int(batch.ids[position])} at position {position} of a fused lookup has a row in partition "
                    f"{j} that is not on this rank; the id lies outside of its table, or was sent to a rank that does "
                    "not have its row."
                )

    def update(self, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor) -> list[Tensor | None]:
        """Counts the update and runs :func:`update_tables`."""
        if any(storage.optimizer is not None for storage in storages):
            self.updates.count()
        return update_tables(self._tables, batch, storages, gradients)


@dataclass(frozen=True)
class _Step:
    """One lookup, as its backward pass needs it again, without the batch."""

    lookup: TritonLookup
    num_features: int
    rows: tuple[Tensor, ...]
    storages: Sequence[Storage]
    updates: tuple[int, ...]

    def batch(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> TritonBatch:
        """Returns the batch of these ids."""
        return TritonBatch(ids, offsets, weights, self.num_features, self.rows)


class _Fused(torch.autograd.Function):
    """The autograd function of :class:`TritonLookup`; the weights are its arguments so that gradients come back."""

    @staticmethod
    def forward(
        ctx: Any,
        step: _Step,
        placeholder: Tensor,
        ids: Tensor,
        offsets: Tensor,
        id_weights: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(ids, offsets, id_weights)
        return step.lookup.compose(step.batch(ids, offsets, id_weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        step: _Step = ctx.step
        batch, lookup = step.batch(*ctx.saved_tensors), step.lookup
        if lookup.formula.needs_rows:
            lookup.updates.require(step.updates, step.storages)
        return None, None, None, None, None, *lookup.update(batch, step.storages, gradient.float().contiguous())


def _rows(storage: Storage) -> Tensor:
    """Returns all rows of a partition; weights that every rank has are stacked."""
    if len(storage.weights) == 1:
        return storage.weights[0].detach().contiguous()
    return torch.cat([weight.detach() for weight in storage.weights])


CHUNK = 8
"""Number of sorted ids that a lane walks."""
JOINED_NUMBERS = 4096
"""Number of numbers of long runs' pieces that are read at once."""
_KEY_LANES = 128
"""Number of bags, or ids, whose keys a program writes."""
_OWNER_BYTES, _ORDER_BYTES = 4, 8
"""Bytes of an id's owner (:func:`find_keys`), and of its place before keys are sorted."""
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
    if len(batch.ids) > 0 and batch.num_bags > 0:
        step = _Backward.of(tables, batch, gradients)
        updated = [j for j, storage in enumerate(storages) if storage.optimizer is not None]
        # In a product, a row's gradient reads the rows of the other partitions. So sums are made before any update, but
        # for the largest partition, whose sums would take most memory: it is summed last, and updated row by row.
        largest = max(updated, key=lambda j: tables.num_keys[j], default=-1)
        summed_first = [j for j in updated if j != largest] if tables.formula.is_product else []
        sums = {j: step.sum_rows(j) for j in summed_first}
        for j, gradient in dense.items():
            step.reduce(j, _Target(gradient, _WRITE_GRADIENT))
        for j in updated:
            if j not in summed_first:
                step.reduce(j, _Target.of_update(batch.rows[j], storages[j]))
        for j, row_sums in sums.items():
            step.update_by(row_sums, _Target.of_update(batch.rows[j], storages[j]))
    return [gradient for j, storage in enumerate(storages) for gradient in _gradients_of_weights(storage, dense.get(j))]


def find_keys(tables: DeviceTables, batch: TritonBatch) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns the key of each id in each partition, -1 where its row is not on this rank; and each id's owner.

    The owner is the number of its bag's vector, or of its feature where ids are not pooled.
    """
    ids, pools = batch.ids, tables.formula.pools
    keys = tuple(torch.empty(len(ids), dtype=tables.key_type(j), device=ids.device) for j in range(len(batch.rows)))
    owners = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
    triton_kernels().write_keys[(num_blocks(batch.num_vectors(pools), _KEY_LANES),)](
        ids,
        batch.offsets,
        tables.parts(ids.device),
        keys,
        owners,
        len(ids),
        batch.num_bags,
        tables.num_features,
        RULES=tables.rules,
        POOLS=pools,
        LANES=_KEY_LANES,
        PADDED_FEATURES=power_of_two(tables.num_features),
    )
    return keys, owners


def update_bytes(num_ids: int, num_keys: Sequence[int], num_columns: Sequence[int]) -> int:
    """Returns the bytes that a backward pass takes at most, without its input and output gradients.

    Args:
        num_ids: Number of ids of all features.
        num_keys: Number of rows of all tables, in each partition; a key numbers these rows.
        num_columns: Number of columns of each partition.
    """
    key_bytes = [key_type(number).itemsize for number in num_keys]
    key_and_owner_bytes = num_ids * (_OWNER_BYTES + sum(key_bytes))
    sorted_bytes = num_ids * sum(itemsize + _ORDER_BYTES for itemsize in key_bytes)
    sort_bytes = num_ids * (max(key_bytes) + 2 * _ORDER_BYTES)  # working memory of torch's sort
    # runs of equal keys are summed chunk by chunk; each may leave pieces of two runs that reach beyond it
    partial_sum_bytes = 2 * num_blocks(num_ids, CHUNK) * max(num_columns) * FLOAT_BYTES
    row_sum_bytes = [
        min(keys, num_ids) * columns * FLOAT_BYTES for keys, columns in zip(num_keys, num_columns, strict=True)
    ]
    del row_sum_bytes[num_keys.index(max(num_keys))]  # the largest partition is updated row by row
    return key_and_owner_bytes + sorted_bytes + max(sort_bytes, partial_sum_bytes) + sum(row_sum_bytes)


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
    at_key: bool  # whether each sum is at its row's key, and not at a place among sorted ids
    sorted: _Sorted


@dataclass(frozen=True)
class _Backward:
    """Runs the kernels of one backward pass."""

    tables: DeviceTables
    batch: TritonBatch
    gradients: Tensor
    parts: Tensor
    keys: tuple[Tensor, ...]
    owners: Tensor  # number of each id's vector or, where each id has its own, of its feature

    @classmethod
    def of(cls, tables: DeviceTables, batch: TritonBatch, gradients: Tensor) -> "_Backward":
        """Writes the keys of all ids."""
        keys, owners = find_keys(tables, batch)
        return cls(tables, batch, gradients, tables.parts(batch.ids.device), keys, owners)

    def sum_rows(self, j: int) -> _Sums:
        """Adds up the gradients of each row of a partition."""
        num_ids, num_keys = len(self.batch.ids), self.tables.num_keys[j]
        at_key, columns = num_keys <= num_ids, len(self.tables.formula.columns[j])
        sums = torch.empty(min(num_keys, num_ids), columns, dtype=torch.float32, device=self.gradients.device)
        return _Sums(j, sums, at_key, self.reduce(j, _Target(sums, _WRITE_AT_KEY if at_key else _WRITE_AT_PLACE)))

    def reduce(self, j: int, target: _Target) -> _Sorted:
        """Sorts the ids by their keys, sums each row's gradients, and sends the sums to a target; returns the order."""
        tables, num_ids, formula = self.tables, len(self.batch.ids), self.tables.formula
        by_key = _Sorted(*torch.sort(self.keys[j], stable=True))
        columns = formula.columns[j]
        num_chunks, padded = num_blocks(num_ids, CHUNK), power_of_two(len(columns))
        partial_sums = torch.empty(
            2, num_chunks, len(columns), dtype=torch.float32, device=self.gradients.device
        ).unbind()
        lanes = num_lanes(padded)
        ends = (target.numbers, *partial_sums, num_ids, tables.num_features, *target.optimizer_arguments)
        settings = self._settings(j, target)
        triton_kernels().sum_runs[(num_blocks(num_chunks, lanes),)](
            by_key.keys,
            by_key.order,
            self.owners,
            self.keys,
            self.batch.ids if self.batch.weights is None else self.batch.weights,
            self.gradients,
            self.parts,
            self.batch.rows,
            *ends,
            WIDTH=formula.width,
            COLUMN_START=columns.start,
            IS_PRODUCT=formula.is_product,
            HAS_WEIGHTS=self.batch.weights is not None,
            LANES=lanes,
            **settings,
        )
        triton_kernels().join_runs[(num_chunks,)](
            by_key.keys,
            by_key.order,
            self.owners,
            self.parts,
            *ends,
            NUM_PARTITIONS=len(self.keys),
            LANES=num_lanes(padded, JOINED_NUMBERS),
            **settings,
        )
        return by_key

    def update_by(self, sums: _Sums, target: _Target) -> None:
        """Updates the rows of a partition by sums that were made before."""
        num_ids, settings = len(self.batch.ids), self._settings(sums.j, target)
        lanes = num_lanes(settings["PADDED"])
        triton_kernels().update_rows[(num_blocks(num_ids, lanes),)](
            sums.sorted.keys,
            sums.sorted.order,
            self.owners,
            self.parts,
            sums.numbers,
            target.numbers,
            num_ids,
            self.tables.num_features,
            *target.optimizer_arguments,
            NUM_PARTITIONS=len(self.keys),
            AT_KEY=sums.at_key,
            LANES=lanes,
            **settings,
        )

    def _settings(self, j: int, target: _Target) -> dict[str, Any]:
        num_columns = len(self.tables.formula.columns[j])
        return {
            "J": j,
            "NUM_COLUMNS": num_columns,
            "PADDED": power_of_two(num_columns),
            "POOLS": self.tables.formula.pools,
            "ACTION": target.action,
            "ROUNDS_AT_RANDOM": target.seed is not None,
            "CHUNK": CHUNK,
        }
