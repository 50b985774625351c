"""The fused lookup on CUDA, by Triton's kernels; tables and results as in :mod:`distembed.kernels.operation`.

The forward pass writes the keys of all ids first, and keeps them. The backward pass reads the rows again, as on a CPU.
The host waits for nothing: constants are copied to the device in the first step. A batch's first bag begins at id 0.

Backward: a sort for each partition, sums of gradients over runs of equal keys, updates. In a product, gradients of one
partition's rows depend on the rows of the others. So the sums of all partitions but the largest are made before any row
is updated, in a buffer with a place for each key, or for each id where ids are fewer. Rows of the largest partition,
whose sums would take most memory, are updated as soon as their gradients are added up::

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
        step = _Step(self, rows, storages, self.updates.so_far(storages))
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

    def find_keys(self, ids: Tensor, offsets: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns the keys and owners of a :class:`TritonBatch`.

        Raises:
            UserError: There are more ids or bags than an int32 can count.
        """
        tables, pools = self._tables, self.formula.pools
        num_vectors, longest = tables.num_vectors(len(ids), offsets), max(len(ids), len(offsets) - 1)
        if longest > _MOST:
            raise UserError(
                f"a lookup in one pass has {len(ids)} ids in {len(offsets) - 1} bags, and at most {_MOST} of each on a "
                "GPU; take smaller batches, or give the tables kernel='fbgemm'."
            )
        keys = tuple(
            torch.empty(len(ids), dtype=tables.key_type(j), device=ids.device) for j in range(tables.num_partitions)
        )
        owners = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
        if num_vectors > 0:
            triton_kernels().write_keys[(num_blocks(num_vectors, _KEY_LANES),)](
                ids,
                offsets,
                tables.parts(ids.device),
                keys,
                owners,
                len(ids),
                (len(offsets) - 1) // tables.num_features,
                tables.num_features,
                RULES=tables.rules,
                POOLS=pools,
                LANES=_KEY_LANES,
                FEATURE_BITS=(tables.num_features - 1).bit_length(),
                **_OPTIONS,
            )
        if checks_rows():
            _require_rows(ids, offsets, keys)
        return keys, owners

    def compose(self, batch: TritonBatch, offsets: Tensor) -> Tensor:
        """Returns the composed vectors of a batch, whose bags begin and end at ``offsets``."""
        tables, formula = self._tables, self._tables.formula
        num_bags = (len(offsets) - 1) // tables.num_features
        shape = (num_bags, tables.num_features * formula.width) if formula.pools else (batch.num_ids, formula.width)
        outputs = torch.empty(shape, dtype=torch.float32, device=batch.owners.device)
        num_vectors = tables.num_vectors(batch.num_ids, offsets)
        if num_vectors == 0:
            return outputs
        groups = tables.column_groups()
        lanes = num_lanes(max(groups[4::5]))
        triton_kernels().compose[(num_blocks(num_vectors, lanes),)](
            batch.keys,
            offsets,
            batch.owners if batch.weights is None else batch.weights,
            tables.parts(batch.owners.device),
            batch.rows,
            outputs,
            batch.num_ids,
            num_bags,
            tables.num_features,
            WIDTH=formula.width,
            GROUPS=groups,
            NUM_GROUPS=len(groups) // 5,
            MULTIPLES=tables.multiples,
            IS_PRODUCT=formula.is_product,
            HAS_WEIGHTS=batch.weights is not None,
            POOLS=formula.pools,
            LANES=lanes,
            FEATURE_BITS=(tables.num_features - 1).bit_length(),
            **_OPTIONS,
        )
        return outputs

    def update(self, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor) -> list[Tensor | None]:
        """Counts the update and runs :func:`update_tables`."""
        if any(storage.optimizer is not None for storage in storages):
            self.updates.count()
        return update_tables(self._tables, batch, storages, gradients)


@dataclass(frozen=True)
class _Step:
    """One lookup, as its backward pass needs it again, without the batch."""

    lookup: TritonLookup
    rows: tuple[Tensor, ...]
    storages: Sequence[Storage]
    updates: tuple[int, ...]


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
        keys, owners = step.lookup.find_keys(ids, offsets)
        ctx.save_for_backward(owners, id_weights, *keys)
        return step.lookup.compose(TritonBatch(keys, owners, id_weights, step.rows), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        step: _Step = ctx.step
        owners, id_weights, *keys = ctx.saved_tensors
        batch, lookup = TritonBatch(tuple(keys), owners, id_weights, step.rows), step.lookup
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
_JOINED_CHUNKS = 16
"""Number of chunks in which a program looks for runs that continue in later chunks."""
JOINED_NUMBERS = 4096
"""Number of numbers of long runs' pieces that are read at once."""
_KEY_LANES = 128
"""Number of bags, or ids, whose keys a program writes."""
_MOST = 2**31 - 1
_OPTIONS = {"enable_fp_fusion": True}
"""Options of Triton's compiler: products are added in one step; the default differs between versions of Triton."""
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


def _require_rows(ids: Tensor, offsets: Tensor, keys: Sequence[Tensor]) -> None:
    """Raises an :class:`IndexError` where the row of an id is not on this rank; waits for the device."""
    for j, partition_keys in enumerate(keys):
        missing = (partition_keys[: int(offsets[-1])] < 0).nonzero()
        if len(missing) > 0:
            position = int(missing[0])
            raise IndexError(
                f"id {int(ids[position])} at position {position} of a fused lookup has a row in partition {j} that is "
                "not on this rank; the id lies outside of its table, or was sent to a rank that does not have its row."
            )


def saved_bytes(num_ids: int, num_keys: Sequence[int]) -> int:
    """Returns the bytes of the keys and owners of ids, which are kept for the backward pass; ``num_keys`` as below."""
    return num_ids * (_OWNER_BYTES + sum(key_type(number).itemsize for number in num_keys))


def update_bytes(num_ids: int, num_keys: Sequence[int], num_columns: Sequence[int]) -> int:
    """Returns the bytes that a backward pass takes at most, without its input and output gradients.

    Args:
        num_ids: Number of ids of all features.
        num_keys: Number of rows of all tables, in each partition; a key numbers these rows.
        num_columns: Number of columns of each partition.
    """
    key_bytes = [key_type(number).itemsize for number in num_keys]
    sorted_bytes = num_ids * sum(itemsize + _ORDER_BYTES for itemsize in key_bytes)
    sort_bytes = num_ids * (max(key_bytes) + 2 * _ORDER_BYTES)  # working memory of torch's sort
    # runs of equal keys are summed chunk by chunk; each may leave pieces of two runs that reach beyond it
    partial_sum_bytes = 2 * num_blocks(num_ids, CHUNK) * max(num_columns) * FLOAT_BYTES
    row_sum_bytes = [
        min(keys, num_ids) * columns * FLOAT_BYTES for keys, columns in zip(num_keys, num_columns, strict=True)
    ]
    del row_sum_bytes[num_keys.index(max(num_keys))]  # the largest partition is updated row by row
    return sorted_bytes + max(sort_bytes, partial_sum_bytes) + sum(row_sum_bytes)


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
    order: _Sorted | None  # of sums at places among sorted ids; None where each sum is at its row's key


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
        """Adds up the gradients of each row of a partition."""
        num_ids, num_keys = self.batch.num_ids, self.tables.num_keys[j]
        at_key, columns = num_keys <= num_ids, len(self.tables.formula.columns[j])
        make = torch.zeros if at_key else torch.empty
        sums = make(min(num_keys, num_ids), columns, dtype=torch.float32, device=self.gradients.device)
        order = self.reduce(j, _Target(sums, _WRITE_AT_KEY if at_key else _WRITE_AT_PLACE))
        return _Sums(j, sums, None if at_key else order)

    def reduce(self, j: int, target: _Target) -> _Sorted:
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
        triton_kernels().sum_runs[(num_blocks(num_chunks, lanes),)](
            by_key.keys,
            by_key.order,
            self.batch.owners,
            self.batch.keys,
            self.batch.owners if self.batch.weights is None else self.batch.weights,
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
        triton_kernels().join_runs[(num_blocks(num_chunks, _JOINED_CHUNKS),)](
            by_key.keys,
            by_key.order,
            self.batch.owners,
            self.parts,
            *ends,
            NUM_PARTITIONS=len(self.batch.keys),
            JOINED_CHUNKS=_JOINED_CHUNKS,
            LANES=num_lanes(padded, JOINED_NUMBERS),
            **settings,
        )
        return by_key

    def update_by(self, sums: _Sums, target: _Target) -> None:
        """Updates the rows of a partition by sums that were made before."""
        settings, at_key, owners = self._settings(sums.j, target), sums.order is None, self.batch.owners
        lanes = num_lanes(settings["PADDED"])
        if len(sums.numbers) == 0:
            return
        order = sums.order or _Sorted(owners, owners)  # which is not read
        triton_kernels().update_rows[(num_blocks(len(sums.numbers) if at_key else self.batch.num_ids, lanes),)](
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
            AT_KEY=at_key,
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
            "POOLS": self.tables.formula.pools,
            "ACTION": target.action,
            "ROUNDS_AT_RANDOM": target.seed is not None,
            "CHUNK": CHUNK,
            **_OPTIONS,
        }
