"""The order of the backward pass on CUDA: keys, a sort for each partition, sums of gradients, and updates.

Rows are read for the gradients of others where they are multiplied. So the sums of all partitions but the largest are
made before any row is updated, and wait at their keys, or at places among sorted ids where these are fewer. Rows of the
largest partition, whose sums would take most memory, are updated as soon as their gradients are added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from distembed.fused.operation import Storage
from distembed.fused.triton_tables import DeviceTables, TritonBatch, num_blocks, num_lanes, power_of_two

CHUNK = 8
"""How many sorted ids a lane walks."""
JOINED_NUMBERS = 4096
"""How many numbers of pieces of long runs are read at once."""
_ACTIONS = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 2}
_WRITE_GRADIENT, _WRITE_AT_KEY, _WRITE_AT_PLACE = 3, 4, 5


def update(
    tables: DeviceTables, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor
) -> list[Tensor | None]:
    """Updates the rows of a batch's ids; returns the gradients of rows that are not updated here.

    Args:
        tables: The tables.
        batch: The ids.
        storages: Where each partition's rows lie.
        gradients: Gradients of the composed vectors, float32 and contiguous.
    """
    returned = [torch.zeros_like(own.weights) if own.optimizer is None else None for own in storages]
    if len(batch.ids) == 0 or batch.num_bags == 0:
        return returned
    step = _Backward.of(tables, batch, storages, gradients)
    updated = [j for j, own in enumerate(storages) if own.optimizer is not None]
    largest = max(updated, key=lambda j: tables.num_keys[j], default=-1)
    waiting = [j for j in updated if j != largest] if tables.formula.is_product else []
    sums = {j: step.sum_rows(j) for j in waiting}
    for j, gradient in enumerate(returned):
        if gradient is not None:
            step.reduce(j, _Target(gradient, _WRITE_GRADIENT))
    for j in updated:
        if j not in waiting:
            step.reduce(j, _Target.of_update(storages[j]))
    for j, own in sums.items():
        step.update_by(j, *own, storages[j])
    return returned


@dataclass(frozen=True)
class _Target:
    """Where sums of gradients go.

    Attributes:
        numbers: The rows, or where sums are written.
        action: What is done, by its number in :mod:`distembed.fused.triton_update`.
        states: The optimizer's states.
        learning_rate: The learning rate.
        eps: What is added to denominators.
    """

    numbers: Tensor
    action: int
    states: Tensor | None = None
    learning_rate: float = 0.0
    eps: float = 0.0

    @classmethod
    def of_update(cls, storage: Storage) -> "_Target":
        assert storage.optimizer is not None
        action = _ACTIONS[storage.optimizer]
        return cls(storage.weights, action, storage.states, storage.learning_rate(), storage.eps)


@dataclass(frozen=True)
class _Sorted:
    """Keys of one partition in order, and the places of their ids."""

    keys: Tensor
    order: Tensor


@dataclass(frozen=True)
class _Backward:
    """One backward pass.

    Attributes:
        tables: The tables.
        batch: The ids.
        weights: All rows of each partition.
        gradients: Gradients of the composed vectors.
        parts: The tables' numbers, on the device.
        keys: Keys of the ids, in each partition.
        owners: Number of each id's vector or, where each id has its own, of its feature.
    """

    tables: DeviceTables
    batch: TritonBatch
    weights: tuple[Tensor, ...]
    gradients: Tensor
    parts: Tensor
    keys: tuple[Tensor, ...]
    owners: Tensor

    @classmethod
    def of(
        cls, tables: DeviceTables, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor
    ) -> "_Backward":
        """Writes the keys of all ids."""
        ids, pools = batch.ids, tables.formula.pools
        keys = tuple(torch.empty(len(ids), dtype=tables.key_type(j), device=ids.device) for j in range(len(storages)))
        owners = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
        parts = tables.parts(ids.device)
        lanes = 128
        num_lanes_used = batch.num_vectors(pools)
        import_module("distembed.fused.triton_kernels").write_keys[(num_blocks(num_lanes_used, lanes),)](
            ids,
            batch.offsets,
            parts,
            keys,
            owners,
            len(ids),
            batch.num_bags,
            tables.num_features,
            RULES=tables.rules,
            POOLS=pools,
            LANES=lanes,
            PADDED_FEATURES=power_of_two(tables.num_features),
        )
        return cls(tables, batch, tuple(own.weights for own in storages), gradients, parts, keys, owners)

    def sum_rows(self, j: int) -> tuple[Tensor, bool, _Sorted]:
        """Returns sums of the gradients of a partition's rows, whether they are at keys, and these in order."""
        num_ids, num_keys = len(self.batch.ids), self.tables.num_keys[j]
        at_key = num_keys <= num_ids
        columns = len(self.tables.formula.columns[j])
        sums = torch.empty(min(num_keys, num_ids), columns, dtype=torch.float32, device=self.gradients.device)
        return sums, at_key, self.reduce(j, _Target(sums, _WRITE_AT_KEY if at_key else _WRITE_AT_PLACE))

    def reduce(self, j: int, target: _Target) -> _Sorted:
        """Adds up the gradients of each row of a partition and sends them where they go; returns the keys in order."""
        tables, num_ids, formula = self.tables, len(self.batch.ids), self.tables.formula
        sorted_keys = _Sorted(*torch.sort(self.keys[j], stable=True))
        columns = formula.columns[j]
        num_chunks, padded = num_blocks(num_ids, CHUNK), power_of_two(len(columns))
        heads, tails = torch.empty(2, num_chunks, len(columns), device=self.gradients.device).unbind()
        lanes = num_lanes(padded)
        states = target.numbers if target.states is None else target.states
        ends = (heads, tails, num_ids, tables.num_features, target.learning_rate, target.eps)
        shared = {
            "J": j,
            "NUM_COLUMNS": len(columns),
            "PADDED": padded,
            "POOLS": formula.pools,
            "ACTION": target.action,
            "CHUNK": CHUNK,
        }
        _kernels().sum_runs[(num_blocks(num_chunks, lanes),)](
            sorted_keys.keys,
            sorted_keys.order,
            self.owners,
            self.keys,
            self.batch.ids if self.batch.weights is None else self.batch.weights,
            self.gradients,
            self.parts,
            self.weights,
            target.numbers,
            states,
            *ends,
            WIDTH=formula.width,
            COLUMN_START=columns.start,
            IS_PRODUCT=formula.is_product,
            HAS_WEIGHTS=self.batch.weights is not None,
            LANES=lanes,
            **shared,
        )
        _kernels().join_runs[(num_chunks,)](
            sorted_keys.keys,
            sorted_keys.order,
            self.owners,
            self.parts,
            target.numbers,
            states,
            *ends,
            NUM_PARTITIONS=len(self.weights),
            LANES=num_lanes(padded, JOINED_NUMBERS),
            **shared,
        )
        return sorted_keys

    def update_by(self, j: int, sums: Tensor, at_key: bool, sorted_keys: _Sorted, storage: Storage) -> None:
        """Updates the rows of a partition by sums that :meth:`sum_rows` returned."""
        columns, num_ids = self.tables.formula.columns[j], len(self.batch.ids)
        target, padded = _Target.of_update(storage), power_of_two(len(columns))
        lanes = num_lanes(padded)
        _kernels().update_rows[(num_blocks(num_ids, lanes),)](
            sorted_keys.keys,
            sorted_keys.order,
            self.owners,
            self.parts,
            sums,
            target.numbers,
            target.numbers if target.states is None else target.states,
            num_ids,
            self.tables.num_features,
            target.learning_rate,
            target.eps,
            J=j,
            NUM_PARTITIONS=len(self.weights),
            NUM_COLUMNS=len(columns),
            PADDED=padded,
            POOLS=self.tables.formula.pools,
            AT_KEY=at_key,
            ACTION=target.action,
            CHUNK=CHUNK,
            LANES=lanes,
        )


@cache
def _kernels() -> Any:
    return import_module("distembed.fused.triton_update")
