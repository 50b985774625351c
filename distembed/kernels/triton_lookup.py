"""The fused lookup on CUDA, by Triton's kernels; tables and results as in :mod:`distembed.kernels.operation`.

The forward pass writes the keys of all ids first, and keeps them. The backward pass, which is described in
:mod:`distembed.kernels.triton_backward`, reads the rows again, as on a CPU. The host waits for nothing: constants are
copied to the device in the first step. A batch's first bag begins at id 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.base.errors import UserError
from distembed.kernels.tables import INTEGERS, Formula, Storage, TablePart, Updates, as_operand, checks_rows
from distembed.kernels.triton_backward import update_tables
from distembed.kernels.triton_tables import (
    OPTIONS,
    DeviceTables,
    TritonBatch,
    launch,
    num_blocks,
    num_lanes,
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
        offsets: Int[Tensor, " bags_plus_1"] | None,
        weights: Float[Tensor, " ids"] | None,
        storages: Sequence[Storage],
    ) -> Float[Tensor, "..."]:
        """Returns composed vectors, ``[bags, features * width]``, or ``[ids, width]`` of sequences.

        ``offsets`` may be None where ids are pooled and each bag has one id.
        """
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "The weights of ids need a gradient, which lookups in one pass do not have on a GPU; detach them, or "
                "give the tables kernel='fbgemm'."
            )
        rows = tuple(_rows(storage) for storage in storages)
        all_weights = [weight for storage in storages for weight in storage.weights]
        # FBGEMM's weights on CUDA need no gradient; autograd calls a backward pass only if some argument needs one
        placeholder = torch.empty(0, requires_grad=any(storage.optimizer is not None for storage in storages))
        trains = torch.is_grad_enabled() and any(own.requires_grad for own in (placeholder, *all_weights))
        step = _Step(self, rows, storages, self.updates.so_far(storages), trains)
        batch = (
            as_operand(ids, ids.device, torch.int64),
            None if offsets is None else as_operand(offsets, ids.device, *INTEGERS),
            None if weights is None else as_operand(weights.float(), ids.device, torch.float32),
        )
        with torch.cuda.device_of(ids):  # Triton launches on the current device
            return _Fused.apply(step, placeholder, *batch, *all_weights)  # type: ignore[no-untyped-call]

    @property
    def formula(self) -> Formula:
        """The formula of all tables."""
        return self._tables.formula

    def find_keys(
        self, ids: Tensor, offsets: Tensor | None, trains: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        """Returns the keys of a :class:`TritonBatch` and, where the lookup trains, its owners and feature starts.

        Raises:
            UserError: There are more ids or bags than an int32 can count.
        """
        tables, pools, num_ids, device = self._tables, self.formula.pools, len(ids), ids.device
        num_bags, num_vectors = tables.num_bags(num_ids, offsets), tables.num_vectors(num_ids, offsets)
        if max(num_ids, num_bags) > _MOST:
            raise UserError(
                f"a lookup in one pass has {num_ids} ids in {num_bags} bags, and at most {_MOST} fit its "
                "numbers; make smaller batches, or give the tables kernel='fbgemm'."
            )
        keys = tuple(
            torch.empty(num_ids, dtype=tables.key_type(j), device=device) for j in range(tables.num_partitions)
        )
        for_backward = None
        if trains:
            starts = torch.empty(tables.num_features + 1, dtype=torch.int64, device=device)
            for_backward = torch.empty(num_ids, dtype=torch.int32, device=device), starts
        if num_vectors > 0:
            owners, feature_starts = for_backward or (None, None)
            launch(
                "write_keys",
                num_blocks(num_vectors, _KEY_LANES),
                ids,
                offsets,
                tables.parts(device),
                keys,
                owners,
                feature_starts,
                num_ids,
                num_bags // tables.num_features,
                tables.num_features,
                RULES=tables.rules,
                POOLS=pools,
                LANES=_KEY_LANES,
                FEATURE_BITS=(tables.num_features - 1).bit_length(),
                **OPTIONS,
            )
        if checks_rows():
            _require_rows(ids, offsets, keys)
        return keys, for_backward

    def compose(self, batch: TritonBatch, offsets: Tensor | None) -> Tensor:
        """Returns the composed vectors of a batch, whose bags begin and end at ``offsets``."""
        tables, formula = self._tables, self._tables.formula
        num_bags, device = tables.num_bags(batch.num_ids, offsets) // tables.num_features, batch.keys[0].device
        shape = (num_bags, tables.num_features * formula.width) if formula.pools else (batch.num_ids, formula.width)
        outputs = torch.empty(shape, dtype=torch.float32, device=device)
        num_vectors = tables.num_vectors(batch.num_ids, offsets)
        if num_vectors == 0:
            return outputs
        groups = tables.column_groups()
        lanes = num_lanes(max(groups[4::5]))
        launch(
            "compose",
            num_blocks(num_vectors, lanes),
            batch.keys,
            offsets,
            batch.weights,
            tables.parts(device),
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
            POOLS=formula.pools,
            LANES=lanes,
            FEATURE_BITS=(tables.num_features - 1).bit_length(),
            **OPTIONS,
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
    trains: bool  # whether a backward pass may come


class _Fused(torch.autograd.Function):
    """The autograd function of :class:`TritonLookup`; the weights are its arguments so that gradients come back."""

    @staticmethod
    def forward(
        ctx: Any,
        step: _Step,
        placeholder: Tensor,
        ids: Tensor,
        offsets: Tensor | None,
        id_weights: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.step = step
        keys, for_backward = step.lookup.find_keys(ids, offsets, step.trains)
        ctx.save_for_backward(id_weights, *(for_backward or ()), *keys)
        return step.lookup.compose(TritonBatch(keys, id_weights, step.rows, for_backward), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        step: _Step = ctx.step
        id_weights, owners, feature_starts, *keys = ctx.saved_tensors
        batch, lookup = TritonBatch(tuple(keys), id_weights, step.rows, (owners, feature_starts)), step.lookup
        if lookup.formula.needs_rows:
            lookup.updates.require(step.updates, step.storages)
        with torch.cuda.device_of(gradient):
            weight_gradients = lookup.update(batch, step.storages, gradient.float().contiguous())
        return None, None, None, None, None, *weight_gradients


def _rows(storage: Storage) -> Tensor:
    """Returns all rows of a partition; weights that every rank has are stacked."""
    if len(storage.weights) == 1:
        return storage.weights[0].detach().contiguous()
    return torch.cat([weight.detach() for weight in storage.weights])


_KEY_LANES = 128
"""Number of bags, or ids, whose keys a program writes."""
_MOST = 2**31 - 1


def _require_rows(ids: Tensor, offsets: Tensor | None, keys: Sequence[Tensor]) -> None:
    """Raises an :class:`IndexError` where the row of an id is not on this rank; waits for the device."""
    ids_end = len(ids) if offsets is None else int(offsets[-1])
    for j, partition_keys in enumerate(keys):
        missing = (partition_keys[:ids_end] < 0).nonzero()
        if len(missing) > 0:
            position = int(missing[0])
            raise IndexError(
                f"id {int(ids[position])} at position {position} of a fused lookup has a row in partition {j} that is "
                "not on this rank; the id lies outside of its table, or was sent to a rank that does not have its row."
            )
