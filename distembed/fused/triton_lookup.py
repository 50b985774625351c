"""The fused lookup on CUDA: tables and results as those of :mod:`distembed.fused.operation`, by Triton's kernels.

The rows are read again in the backward pass, as on a CPU, so that nothing but the ids is kept for it. The host waits
for nothing, and what a step needs beside its batch is copied to the device in the first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.errors import UserError
from distembed.fused import triton_backward
from distembed.fused.operation import Formula, Part, Storage
from distembed.fused.triton_tables import DeviceTables, TritonBatch, num_blocks, num_lanes, power_of_two


@cache
def reason_unavailable() -> str | None:
    """Returns why Triton's kernels cannot be had here, in a sentence with a remedy; None where they can."""
    try:
        import_module("distembed.fused.triton_update")
    except ImportError as error:
        return f"triton cannot be imported ({error}); install a PyTorch that is built for CUDA, which brings it"
    return None


class TritonLookup:
    """Looks the ids of a group of tables up, of which each has one feature or more.

    Args:
        formula: What the tables have in common.
        parts: Of each feature, its table's partitions.
        tables: Number of features of each table, whose features lie side by side.
        state_columns: Number of states of a row, for each partition.

    Raises:
        UserError: Triton cannot be had.
    """

    def __init__(
        self,
        formula: Formula,
        parts: Sequence[Sequence[Part]],
        tables: Sequence[int],
        state_columns: Sequence[int],
    ) -> None:
        reason = reason_unavailable()
        if reason is not None:
            raise UserError(f"the fused lookup: {reason}.")
        self._kernels: Any = import_module("distembed.fused.triton_kernels")
        first_features = [0, *accumulate(tables)][:-1]
        self._tables = DeviceTables(formula, parts, first_features, state_columns)

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
        """
        weights = None if weights is None else weights.float().contiguous()
        batch = TritonBatch(ids.contiguous(), offsets.contiguous(), weights, self._tables.num_features)
        vectors = _Fused.apply(_Step(self, batch, storages), *[own.weights for own in storages])  # type: ignore[no-untyped-call]
        return vectors

    def compose(self, batch: TritonBatch, storages: Sequence[Storage]) -> Tensor:
        """Returns the composed vectors of a batch."""
        tables, formula = self._tables, self._tables.formula
        shape = (
            (batch.num_bags, tables.num_features * formula.width) if formula.pools else (len(batch.ids), formula.width)
        )
        outputs = torch.empty(shape, dtype=torch.float32, device=batch.ids.device)
        num_vectors = batch.num_vectors(formula.pools)
        if num_vectors == 0:
            return outputs
        groups = tables.column_groups()
        lanes = num_lanes(max(groups[4::5]))
        self._kernels.compose[(num_blocks(num_vectors, lanes),)](
            batch.ids,
            batch.offsets,
            batch.ids if batch.weights is None else batch.weights,
            tables.parts(batch.ids.device),
            tuple(own.weights for own in storages),
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

    def update(self, batch: TritonBatch, storages: Sequence[Storage], gradients: Tensor) -> list[Tensor | None]:
        """Updates the rows of a batch's ids; returns the gradients of rows that are not updated here."""
        return triton_backward.update(self._tables, batch, storages, gradients)


@dataclass(frozen=True)
class _Step:
    """One lookup: what its backward pass needs again."""

    lookup: TritonLookup
    batch: TritonBatch
    storages: Sequence[Storage]


class _Fused(torch.autograd.Function):
    """The autograd function of :class:`TritonLookup`; the weights are its arguments so that gradients come back."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *weights: Tensor) -> Tensor:
        ctx.step = step
        return step.lookup.compose(step.batch, step.storages)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        step: _Step = ctx.step
        return None, *step.lookup.update(step.batch, step.storages, gradient.float().contiguous())
