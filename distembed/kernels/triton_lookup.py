"""The fused lookup on CUDA, by Triton's kernels; tables and results as in :mod:`distembed.kernels.operation`.

The rows are read again in the backward pass, as on a CPU, so that nothing but the ids is kept for it. The host waits
for nothing: constants are copied to the device in the first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.base.errors import UserError
from distembed.kernels import triton_backward
from distembed.kernels.operands import INTEGERS, as_operand, checks_rows
from distembed.kernels.tables import Formula, Part, Storage, Updates
from distembed.kernels.triton_tables import DeviceTables, TritonBatch, load, num_blocks, num_lanes, power_of_two


class TritonLookup:
    """Looks the ids of a group of tables up; a table has one feature or more.

    Args:
        formula: The formula of all tables.
        parts: Of each feature, its table's partitions.
        tables: Number of features of each table, whose features lie side by side.
        storages: Where each partition's rows lie; tensors may differ from step to step, and nothing else.

    Raises:
        UserError: Triton cannot be imported.
    """

    def __init__(
        self,
        formula: Formula,
        parts: Sequence[Sequence[Part]],
        tables: Sequence[int],
        storages: Sequence[Storage],
    ) -> None:
        load()  # what is missing is told here, and not in the first step
        self._tables, self.updates = DeviceTables(formula, parts, tables, storages), Updates()

    def __call__(
        self,
        ids: Int64[Tensor, " ids"],
        offsets: Int[Tensor, " bags_plus_1"],
        weights: Float[Tensor, " ids"] | None,
        storages: Sequence[Storage],
    ) -> Float[Tensor, "..."]:
        """Returns composed vectors, ``[bags, features * width]``, or ``[ids, width]`` of sequences.

        Args:
            ids: Ids of all features, feature after feature.
            offsets: Where bags begin and the last one ends, feature after feature; equally many bags of each. The
                first one begins with the first id. Of ids behind the last one there are no vectors; a sequence's are
                not written.
            weights: Weights of the ids, of bags that are pooled.
            storages: Where each partition's rows lie.

        Raises:
            UserError: The weights need a gradient. In the backward pass: rows that gradients depend on have been
                updated since.
        """
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "The weights of ids need a gradient, which lookups in one pass do not have on a GPU; detach them, or "
                "give the tables kernel='fbgemm'."
            )
        rows = tuple(_rows(own) for own in storages)
        all_weights = [weight for own in storages for weight in own.weights]
        # FBGEMM's weights on CUDA are no parameters: something has to say that there is a backward pass
        placeholder = torch.empty(0, requires_grad=any(own.optimizer is not None for own in storages))
        step = _Step(self, self._tables.num_features, rows, storages, self.updates.so_far(storages))
        batch = (
            as_operand(ids, ids.device, torch.int64),
            as_operand(offsets, ids.device, *INTEGERS),
            None if weights is None else as_operand(weights.float(), ids.device, torch.float32),
        )
        vectors: Tensor = _Fused.apply(step, placeholder, *batch, *all_weights)  # type: ignore[no-untyped-call]
        return vectors

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
        load().compose[(num_blocks(num_vectors, lanes),)](
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
        """Raises an :class:`IndexError` where the row of an id is not here; waits for the device."""
        keys, _ = triton_backward.find_keys(self._tables, batch)
        for j, own in enumerate(keys):
            missing = (own[: int(batch.offsets[-1])] < 0).nonzero()
            if len(missing) > 0:
                position = int(missing[0])
                raise IndexError(
                    f"id {int(batch.ids[position])} at position {position} of a fused lookup has a row in partition "
                    f"{j} that is not on this rank; the id lies outside of its table, or was sent to a rank that does "
                    "not have its row."
                )

    def update(self, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor) -> list[Tensor | None]:
        """Counts the update and runs :func:`distembed.kernels.triton_backward.update`."""
        if any(storage.optimizer is not None for storage in storages):
            self.updates.count()
        return triton_backward.update(self._tables, batch, storages, gradients)


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
