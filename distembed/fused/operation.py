"""The fused lookup: ids in, composed and pooled vectors out, and tables updated within the backward pass.

The weights and the optimizers' states stay where they are, in FBGEMM's tables. Rows that every rank has are not updated
here: their gradients come out of the backward pass, dense, as those of any parameter.

The rows are read again in the backward pass, so that nothing but the ids is kept for it. They are those of the forward
pass unless another backward pass of the same tables ran in between.
"""

import os
import threading
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
from distembed.fused.loading import Kernels, load
from distembed.partitions.base import Digit

OPTIMIZERS = {"sgd": layout.SGD, "adagrad": layout.ADAGRAD, "row_wise_adagrad": layout.ROW_WISE_ADAGRAD}
"""The optimizers that the kernels have, by their names in ``distembed.optim.OPTIMIZERS``."""
MAX_ROWS, MAX_IDS = 2**31 - 1, 2**31 - 1
_ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """A partition of one feature's table, and the rows of it that are here.

    Attributes:
        digit: How ids are mapped to rows.
        first_row: The first row that is here.
        num_rows: Number of rows that are here.
        weight_start: Place of the first row's first number in the partition's storage.
        state_start: Place of its first state in that of states.
    """

    digit: Digit
    first_row: int
    num_rows: int
    weight_start: int
    state_start: int = 0


@dataclass(frozen=True)
class Storage:
    """Where a partition's rows lie in a step.

    Attributes:
        weights: All rows, one behind the other.
        optimizer: A key of :data:`OPTIMIZERS`, which updates them; None where their gradients are returned.
        states: The optimizer's states; None where it has none.
        learning_rate: Gives the learning rate when rows are updated.
        eps: What is added to denominators.
    """

    weights: Tensor
    optimizer: str | None = None
    states: Tensor | None = None
    learning_rate: Callable[[], float] = float
    eps: float = 0.0


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
        numbers = [number for own in self.columns for number in (own.start, len(own))]
        return 4 if any(number % 8 for number in numbers) else 8


class FusedLookup:
    """Looks the ids of a group of tables up, of which each has one feature or more.

    Args:
        formula: What the tables have in common.
        parts: Of each feature, its table's partitions.
        tables: Number of features of each table, whose features lie side by side.
        state_columns: Number of states of a row, for each partition.
        itemsizes: Bytes of a number of each partition's rows: 4, or 2 for float16.
    """

    def __init__(
        self,
        formula: Formula,
        parts: Sequence[Sequence[Part]],
        tables: Sequence[int],
        state_columns: Sequence[int],
        itemsizes: Sequence[int],
    ) -> None:
        self._formula, self._num_features = formula, len(parts)
        self._kernels = load(formula.lanes)
        self._table_ends = np.cumsum(tables).tolist()
        self._partitions = np.zeros((len(formula.columns), layout.PARTITION_FIELDS), np.int64)
        for own, columns, states, itemsize in zip(
            self._partitions, formula.columns, state_columns, itemsizes, strict=True
        ):
            own[layout.NUM_COLUMNS], own[layout.COLUMN_START] = len(columns), columns.start
            own[layout.IS_HALF], own[layout.ROW_BYTES] = itemsize == 2, len(columns) * itemsize
            own[layout.STATE_ROW_BYTES] = 4 * states
        self._parts = np.array(
            [[_part_fields(part, itemsize) for part, itemsize in zip(own, itemsizes, strict=True)] for own in parts],
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
            shape, stride = (num_bags, self._num_features * self._formula.width), self._num_features * width_bytes
        else:
            features[:, layout.NUM_BAGS] = counts
            features[1:, layout.FIRST_BAG] = np.cumsum(counts)[:-1]
            features[:, layout.VECTOR_START] = features[:, layout.FIRST_BAG] * width_bytes
            shape, stride = (len(ids), self._formula.width), width_bytes
        step = _Step(self, batch, features, stride, storages)
        vectors = _Fused.apply(step, shape, *[own.weights for own in storages])  # type: ignore[no-untyped-call]
        return vectors

    def compose(self, step: "_Step", outputs: Float[Tensor, "bags width"]) -> None:
        """Writes the composed vectors of a step's bags."""
        partitions = self._placed(step.storages)
        job = self._job(step, partitions, outputs)
        num_partitions = len(partitions)

        def compose(share: int, num_shares: int) -> None:
            scratch = _scratch(8 * layout.BLOCK_IDS * num_partitions)
            self._kernels.compose(job.ctypes.data, share, num_shares, scratch.data_ptr())

        _in_threads(compose, len(outputs) // 64)

    def update(self, step: "_Step", gradients: Float[Tensor, "bags width"]) -> list[Tensor | None]:
        """Updates the rows of a step's ids; returns the gradients of rows that are not updated here."""
        partitions = self._placed(step.storages)
        returned: list[Tensor | None] = []
        for own, storage in zip(partitions, step.storages, strict=True):
            gradient = None
            if storage.optimizer is None:
                gradient = torch.zeros_like(storage.weights)
                own[layout.GRADIENT_ADDRESS] = gradient.data_ptr()
            returned.append(gradient)
        job = self._job(step, partitions, gradients)
        tables = self._tables_by_share(step)

        def update(share: int, num_shares: int) -> None:
            for first, end in tables[share]:
                self._update_table(job, first, end)

        _in_threads(update, len(tables), len(tables))
        return returned

    def _update_table(self, job: Any, first_feature: int, last_feature: int) -> None:
        num_bytes = _scratch(0).numel()
        while True:
            scratch = _scratch(num_bytes)
            needed = self._kernels.update(
                job.ctypes.data, first_feature, last_feature, scratch.data_ptr(), scratch.numel()
            )
            if needed <= scratch.numel():
                return
            num_bytes = needed

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

    def _placed(self, storages: Sequence[Storage]) -> Any:
        """Returns the partitions with the addresses that their storages have now."""
        partitions = self._partitions.copy()
        numbers = partitions.view(np.float64)
        for j, own in enumerate(storages):
            partitions[j, layout.WEIGHT_ADDRESS] = own.weights.data_ptr()
            if own.optimizer is None:
                continue
            partitions[j, layout.OPTIMIZER] = OPTIMIZERS[own.optimizer]
            partitions[j, layout.STATE_ADDRESS] = 0 if own.states is None else own.states.data_ptr()
            numbers[j, layout.LEARNING_RATE], numbers[j, layout.EPS] = own.learning_rate(), own.eps
        return partitions

    def _job(self, step: "_Step", partitions: Any, vectors: Tensor) -> Any:
        batch = step.batch
        job = np.zeros(layout.JOB_FIELDS, np.int64)
        job[layout.IDS], job[layout.OFFSETS] = batch.ids.data_ptr(), batch.offsets.data_ptr()
        job[layout.WEIGHTS] = 0 if batch.weights is None else batch.weights.data_ptr()
        job[layout.FEATURES], job[layout.NUM_FEATURES] = step.features.ctypes.data, self._num_features
        job[layout.PARTITIONS], job[layout.NUM_PARTITIONS] = partitions.ctypes.data, len(partitions)
        job[layout.PARTS] = self._parts.ctypes.data
        job[layout.VECTORS], job[layout.STRIDE] = vectors.data_ptr(), step.stride
        job[layout.WIDTH], job[layout.IS_PRODUCT] = self._formula.width, self._formula.is_product
        return job


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
    stride: int
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
        return None, None, *ctx.step.lookup.update(ctx.step, gradient.float().contiguous())


def _part_fields(part: Part, itemsize: int) -> list[int]:
    divisor, modulus = part.digit.divisor, part.digit.modulus or 0
    fields = [0] * layout.PART_FIELDS
    fields[layout.DIVISOR], fields[layout.DIVISOR_RECIPROCAL] = divisor, _reciprocal(divisor)
    fields[layout.MODULUS], fields[layout.MODULUS_RECIPROCAL] = modulus, _reciprocal(modulus)
    fields[layout.FIRST_ROW], fields[layout.NUM_ROWS] = part.first_row, part.num_rows
    fields[layout.WEIGHT_START], fields[layout.STATE_START] = itemsize * part.weight_start, 4 * part.state_start
    fields[layout.GRADIENT_START] = 4 * part.weight_start
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


_local = threading.local()


def _scratch(num_bytes: int) -> Tensor:
    """Returns at least so many bytes of memory of this thread, from a multiple of 64 on; they grow and are kept."""
    held: Tensor | None = getattr(_local, "scratch", None)
    if held is None or held.numel() < num_bytes:
        whole = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        start = -whole.data_ptr() % _ALIGNMENT
        _local.scratch = held = whole[start : start + num_bytes]
    return held


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="distembed-fused")


os.register_at_fork(after_in_child=_pool.cache_clear)  # where the threads are not


def _in_threads(run: Callable[[int, int], None], most_shares: int, num_shares: int | None = None) -> None:
    """Runs a function for each share, in as many threads as torch uses; this one takes the first share.

    Args:
        run: Takes the number of a share, and how many there are.
        most_shares: How many threads there is work for.
        num_shares: How many shares there are, if that is given.
    """
    shares = num_shares if num_shares is not None else max(1, min(torch.get_num_threads(), most_shares))
    if shares == 1:
        run(0, 1)
        return
    others = [_pool(shares - 1).submit(run, share, shares) for share in range(1, shares)]
    run(0, shares)
    for other in others:
        other.result()


__all__ = ["MAX_IDS", "MAX_ROWS", "OPTIMIZERS", "Formula", "FusedLookup", "Kernels", "Part", "Storage"]
