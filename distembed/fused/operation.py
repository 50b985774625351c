"""The fused lookup: ids in, composed and pooled vectors out, and tables updated within the backward pass.

The weights and the optimizers' states stay where they are, in FBGEMM's tables. Rows that every rank has are not updated
here: their gradients come out of the backward pass, dense, as those of any parameter.

The rows are read again in the backward pass, so that nothing but the ids is kept for it. They are those of the forward
pass unless another backward pass of the same tables ran in between.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.fused import layout
from distembed.fused.loading import load
from distembed.partitions.base import Digit

OPTIMIZERS = {"sgd": layout.SGD, "adagrad": layout.ADAGRAD, "row_wise_adagrad": layout.ROW_WISE_ADAGRAD}
"""The optimizers that the kernels have, by their names in ``distembed.optim.OPTIMIZERS``."""
MAX_ROWS, MAX_IDS = 2**31 - 1, 2**31 - 1


@dataclass(frozen=True)
class Part:
    """A partition of one feature's table, and the rows of it that are here.

    Attributes:
        digit: How ids are mapped to rows.
        first_row: The first row that is here.
        num_rows: Number of rows that are here.
        weight_start: Place of the first row's first number in FBGEMM's storage of the partition; 0 for weights that
            every rank has.
        state_start: Place of its first state in that of states.
    """

    digit: Digit
    first_row: int
    num_rows: int
    weight_start: int = 0
    state_start: int = 0


@dataclass(frozen=True)
class Storage:
    """Where a partition's rows lie in a step.

    Attributes:
        weights: FBGEMM's storage of all tables' rows; or, of what every rank has, each table's ``[rows, columns]``.
        optimizer: A key of :data:`OPTIMIZERS`, which updates them; None where their gradients are returned.
        states: The optimizer's states; None where it has none.
        learning_rate: Gives the learning rate when rows are updated.
        eps: What is added to denominators.
        gradient_scale: Factor of the gradients that are returned.
        rounding_seed: Gives the seed by which float16 rows are rounded at random when they are updated, on CUDA; they
            are rounded to the nearest number where it is None, and on a CPU.
    """

    weights: Sequence[Tensor]
    optimizer: str | None = None
    states: Tensor | None = None
    learning_rate: Callable[[], float] = float
    eps: float = 0.0
    gradient_scale: int = 1
    rounding_seed: Callable[[], int] | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a number of a row: 4, or 2 for float16."""
        return self.weights[0].element_size()

    def row_bytes(self, num_columns: int) -> int:
        """Returns the bytes from one row to the next."""
        return (num_columns if self.optimizer is not None else self.weights[0].stride(0)) * self.itemsize


@dataclass(frozen=True)
class Formula:
    """What tables of a fused lookup have in common.

    Attributes:
        columns: The columns of the composed vector that each partition takes part in.
        is_product: Whether vectors are multiplied; else each is added where its columns are.
        pools: Whether vectors are summed over bags; else each id has its own.
    """

    columns: Sequence[range]
    is_product: bool
    pools: bool

    @property
    def width(self) -> int:
        """Number of columns of a composed vector."""
        return max(own.stop for own in self.columns)

    @property
    def lanes(self) -> int:
        """How many columns kernels take at once."""
        return lanes_of(self.columns)


def lanes_of(columns: Sequence[range]) -> int:
    """Returns how many columns kernels take at once: eight, or four where a partition's do not come in eights."""
    return 4 if any(number % 8 for own in columns for number in (own.start, len(own))) else 8


class FusedLookup:
    """Looks the ids of a group of tables up, of which each has one feature or more.

    Args:
        formula: What the tables have in common.
        parts: Of each feature, its table's partitions.
        tables: Number of features of each table, whose features lie side by side.
        storages: Where each partition's rows lie; addresses may differ from step to step, and nothing else.
    """

    def __init__(
        self,
        formula: Formula,
        parts: Sequence[Sequence[Part]],
        tables: Sequence[int],
        storages: Sequence[Storage],
    ) -> None:
        self._formula, self._num_features = formula, len(parts)
        self._kernels = load(formula.lanes)
        self._table_ends = np.cumsum(tables).tolist()
        self._partitions = np.zeros((len(formula.columns), layout.PARTITION_FIELDS), np.int64)
        for own, columns, storage in zip(self._partitions, formula.columns, storages, strict=True):
            own[layout.NUM_COLUMNS], own[layout.COLUMN_START] = len(columns), columns.start
            own[layout.IS_HALF], own[layout.ROW_BYTES] = storage.itemsize == 2, storage.row_bytes(len(columns))
            states = {"adagrad": len(columns), "row_wise_adagrad": 1}.get(storage.optimizer or "", 0)
            own[layout.STATE_ROW_BYTES] = 4 * states
        self._table_of_feature = np.repeat(np.arange(len(tables)), tables)
        self._parts = np.array(
            [
                [_part_fields(part, storage.itemsize) for part, storage in zip(own, storages, strict=True)]
                for own in parts
            ],
            np.int64,
        )
        self._features = np.zeros((self._num_features, layout.FEATURE_FIELDS), np.int64)

    def __call__(
        self,
        ids: Int64[Tensor, " ids"],
        offsets: Int64[Tensor, " bags_plus_1"],
        weights: Float[Tensor, " ids"] | None,
        storages: Sequence[Storage],
        counts: Sequence[int] | None = None,
    ) -> Float[Tensor, "..."]:
        """Returns composed vectors, ``[bags, features * width]``, or ``[ids, width]`` of sequences.

        Args:
            ids: Ids of all features, feature after feature.
            offsets: Where bags begin and the last one ends, feature after feature.
            weights: Weights of the ids.
            storages: Where each partition's rows lie.
            counts: Number of ids of each feature, of sequences.
        """
        batch = _Batch(
            ids.contiguous(), offsets.contiguous(), None if weights is None else weights.float().contiguous()
        )
        features = self._features.copy()
        width_bytes = 4 * self._formula.width
        if counts is None:
            num_bags = (len(offsets) - 1) // self._num_features
            features[:, layout.FIRST_BAG] = np.arange(self._num_features) * num_bags
            features[:, layout.NUM_BAGS] = num_bags
            features[:, layout.VECTOR_START] = np.arange(self._num_features) * width_bytes
            shape = (num_bags, self._num_features * self._formula.width)
        else:
            features[:, layout.NUM_BAGS] = counts
            features[1:, layout.FIRST_BAG] = np.cumsum(counts)[:-1]
            features[:, layout.VECTOR_START] = features[:, layout.FIRST_BAG] * width_bytes
            shape = (len(ids), self._formula.width)
        step = _Step(self, batch, features, storages)
        all_weights = [weight for own in storages for weight in own.weights]
        vectors: Tensor = _Fused.apply(step, shape, *all_weights)  # type: ignore[no-untyped-call]
        return vectors

    def compose(self, step: "_Step", outputs: Float[Tensor, "bags width"]) -> None:
        """Writes the composed vectors of a step's bags."""
        placed = self._placed(step.storages)
        job = self._job(step, placed, outputs)
        scratch_bytes = 8 * layout.BLOCK_IDS * len(placed.partitions)

        def compose(share: int, num_shares: int) -> None:
            scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
            self._kernels.compose(job.ctypes.data, share, num_shares, scratch.data_ptr())

        most_bags = int(step.features[:, layout.NUM_BAGS].max(initial=0))
        _in_threads(compose, max(1, min(torch.get_num_threads(), most_bags // layout.BLOCK_IDS)))

    def update(self, step: "_Step", gradients: Float[Tensor, "bags width"]) -> list[Tensor | None]:
        """Updates the rows of a step's ids.

        Returns:
            A gradient for each weight that is not updated here, and None for FBGEMM's.
        """
        placed = self._placed(step.storages)
        returned: list[Tensor | None] = []
        for j, storage in enumerate(step.storages):
            if storage.optimizer is not None:
                returned.append(None)
                continue
            sums = [torch.zeros(weight.shape, dtype=torch.float32) for weight in storage.weights]
            addresses = np.array([own.data_ptr() for own in sums], np.int64)
            placed.partitions[j, layout.GRADIENT_ADDRESS] = addresses[0]
            placed.parts[:, j, layout.GRADIENT_START] = addresses[self._table_of_feature] - addresses[0]
            returned += sums
        gradients = gradients.float()
        if gradients.stride(1) != 1 or not self._formula.pools:
            gradients = gradients.contiguous()
        job = self._job(step, placed, gradients)
        tables = self._tables_by_share(step)

        def update(share: int, num_shares: int) -> None:
            for first, end in tables[share]:
                num_bytes = self._kernels.update(job.ctypes.data, first, end, 0, 0)
                # which the allocator keeps from step to step
                scratch = torch.empty(num_bytes, dtype=torch.uint8)
                self._kernels.update(job.ctypes.data, first, end, scratch.data_ptr(), num_bytes)

        _in_threads(update, len(tables))
        weights = [(weight, own.gradient_scale) for own in step.storages for weight in own.weights]
        return [
            None if own is None else own.mul_(scale).to(weight.dtype) if scale > 1 else own.to(weight.dtype)
            for own, (weight, scale) in zip(returned, weights, strict=True)
        ]

    def _tables_by_share(self, step: "_Step") -> list[list[tuple[int, int]]]:
        """Returns the tables of each thread, as ranges of features, with about equally many ids."""
        starts = [0, *self._table_ends[:-1]]
        ranges = list(zip(starts, self._table_ends, strict=True))
        num_threads = min(torch.get_num_threads(), len(ranges))
        if num_threads == 1:
            return [ranges]
        first_bags = step.features[:, layout.FIRST_BAG]
        ends = step.batch.offsets.numpy()
        begins = ends[first_bags[starts]]
        num_ids = np.append(begins[1:], ends[-1]) - begins
        shares: list[list[tuple[int, int]]] = [[] for _ in range(num_threads)]
        loads = [0] * num_threads
        for table in np.argsort(-num_ids, kind="stable"):
            least = loads.index(min(loads))
            loads[least] += int(num_ids[table])
            shares[least].append(ranges[table])
        return shares

    def _placed(self, storages: Sequence[Storage]) -> "_Placed":
        """Returns the tables with the addresses that their storages have now."""
        placed = _Placed(self._partitions.copy(), self._parts.copy())
        numbers = placed.partitions.view(np.float64)
        for j, own in enumerate(storages):
            addresses = np.array([weight.data_ptr() for weight in own.weights], np.int64)
            placed.partitions[j, layout.WEIGHT_ADDRESS] = addresses[0]
            if own.optimizer is None:
                placed.parts[:, j, layout.WEIGHT_START] = addresses[self._table_of_feature] - addresses[0]
                continue
            placed.partitions[j, layout.OPTIMIZER] = OPTIMIZERS[own.optimizer]
            placed.partitions[j, layout.STATE_ADDRESS] = 0 if own.states is None else own.states.data_ptr()
            numbers[j, layout.LEARNING_RATE], numbers[j, layout.EPS] = own.learning_rate(), own.eps
        return placed

    def _job(self, step: "_Step", placed: "_Placed", vectors: Tensor) -> Any:
        batch = step.batch
        job = np.zeros(layout.JOB_FIELDS, np.int64)
        job[layout.IDS], job[layout.OFFSETS] = batch.ids.data_ptr(), batch.offsets.data_ptr()
        job[layout.WEIGHTS] = 0 if batch.weights is None else batch.weights.data_ptr()
        job[layout.FEATURES], job[layout.NUM_FEATURES] = step.features.ctypes.data, self._num_features
        job[layout.PARTITIONS], job[layout.NUM_PARTITIONS] = placed.partitions.ctypes.data, len(placed.partitions)
        job[layout.PARTS] = placed.parts.ctypes.data
        job[layout.VECTORS], job[layout.STRIDE] = vectors.data_ptr(), 4 * vectors.stride(0)
        job[layout.WIDTH], job[layout.IS_PRODUCT] = self._formula.width, self._formula.is_product
        return job


@dataclass(frozen=True)
class _Placed:
    """Blocks of the partitions and of the parts, with addresses."""

    partitions: Any
    parts: Any


@dataclass(frozen=True)
class _Batch:
    """The ids of a step, as :meth:`FusedLookup.__call__` takes them."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class _Step:
    """One lookup: what its backward pass needs again."""

    lookup: FusedLookup
    batch: _Batch
    features: Any
    storages: Sequence[Storage]


class _Fused(torch.autograd.Function):
    """The autograd function of :class:`FusedLookup`; the weights are its arguments so that gradients come back."""

    @staticmethod
    def forward(ctx: Any, step: _Step, shape: tuple[int, int], *weights: Tensor) -> Tensor:
        outputs = torch.empty(shape, dtype=torch.float32)
        step.lookup.compose(step, outputs)
        ctx.step = step
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return None, None, *ctx.step.lookup.update(ctx.step, gradient)


def _part_fields(part: Part, itemsize: int) -> list[int]:
    divisor, modulus = part.digit.divisor, part.digit.modulus or 0
    fields = [0] * layout.PART_FIELDS
    fields[layout.DIVISOR], fields[layout.DIVISOR_RECIPROCAL] = divisor, _reciprocal(divisor)
    fields[layout.MODULUS], fields[layout.MODULUS_RECIPROCAL] = modulus, _reciprocal(modulus)
    fields[layout.FIRST_ROW], fields[layout.NUM_ROWS] = part.first_row, part.num_rows
    fields[layout.WEIGHT_START], fields[layout.STATE_START] = itemsize * part.weight_start, 4 * part.state_start
    return fields


def _reciprocal(divisor: int) -> int:
    """Returns ``floor((2 ** 64 - 1) / divisor) + 1``, as a signed number; 0 for divisors outside of (1, 2 ** 32).

    The upper half of its product with a number below 2 ** 32 is the number's quotient: the error of the reciprocal is
    below ``2 ** 32 / 2 ** 64``, and the quotient's distance to the next integer above is at least ``1 / divisor``.
    """
    if not 1 < divisor < 2**32:
        return 0
    reciprocal = (2**64 - 1) // divisor + 1
    return reciprocal - 2**64 if reciprocal >= 2**63 else reciprocal


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="distembed-fused")


os.register_at_fork(after_in_child=_pool.cache_clear)  # where the threads are not


def _in_threads(run: Callable[[int, int], None], num_shares: int) -> None:
    """Runs a function for each share, given its number and how many there are, in a thread each.

    The first share is this thread's.
    """
    others = [_pool(num_shares - 1).submit(run, share, num_shares) for share in range(1, num_shares)]
    run(0, num_shares)
    for other in others:
        other.result()
