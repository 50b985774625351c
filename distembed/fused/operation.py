"""The fused lookup: ids in, composed and pooled vectors out, and tables updated within the backward pass.

The weights and the optimizers' states stay where they are, in FBGEMM's tables. Rows that every rank has are not updated
here: their gradients come out of the backward pass, dense, as those of any parameter.

The rows are read again in the backward pass, so that nothing but the ids is kept for it. Where another backward pass of
the same tables has updated them in between, gradients that depend on them are refused.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.errors import UserError
from distembed.fused import layout
from distembed.fused.loading import load
from distembed.partitions.base import Digit

OPTIMIZERS = {"sgd": layout.SGD, "adagrad": layout.ADAGRAD, "row_wise_adagrad": layout.ROW_WISE_ADAGRAD}
"""The optimizers that the kernels have, by their names in ``distembed.optim.OPTIMIZERS``."""
MAX_ROWS = 2**31 - 1


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
        learning_rate: The learning rate, as it is in the forward pass.
        eps: What is added to denominators.
        gradient_scale: Factor of the gradients that are returned.
        rounding_seed: Gives the seed by which float16 rows are rounded at random when they are updated, on CUDA; they
            are rounded to the nearest number where it is None, and on a CPU.
    """

    weights: Sequence[Tensor]
    optimizer: str | None = None
    states: Tensor | None = None
    learning_rate: float = 0.0
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
    def needs_rows(self) -> bool:
        """Whether gradients of rows depend on other rows."""
        return self.is_product and len(self.columns) > 1

    @property
    def lanes(self) -> int:
        """How many columns kernels take at once."""
        return lanes_of(self.columns)


def lanes_of(columns: Sequence[range]) -> int:
    """Returns how many columns kernels take at once: eight, or four where a partition's do not come in eights."""
    return 4 if any(number % 8 for own in columns for number in (own.start, len(own))) else 8


class Updates:
    """Counts the updates of tables, so that a backward pass knows whether rows are those of its forward pass."""

    def __init__(self) -> None:
        self.number = 0

    def require(self, number: int) -> None:
        """Refuses a backward pass whose rows are others by now.

        Args:
            number: How many updates there had been in its forward pass.

        Raises:
            UserError: There have been more since.
        """
        if number != self.number:
            raise UserError(
                "A batch's gradients depend on rows that another backward pass of the same tables has updated since it "
                "was looked up, as where one collection is called twice before the backward pass, or a graph is "
                "retained. Call backward once after each lookup, or give the tables kernel='fbgemm', which keeps rows."
            )


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
        self.formula, self._num_features, self.updates = formula, len(parts), Updates()
        self._kernels = load(formula.lanes)
        self._table_ends = np.cumsum(tables).tolist()
        self._partitions = np.zeros((len(formula.columns), layout.PARTITION_FIELDS), np.int64)
        for own, columns, storage in zip(self._partitions, formula.columns, storages, strict=True):
            own[layout.NUM_COLUMNS], own[layout.COLUMN_START] = len(columns), columns.start
            states = {"adagrad": len(columns), "row_wise_adagrad": 1}.get(storage.optimizer or "", 0)
            own[layout.STATE_ROW_BYTES] = 4 * states
        self._table_of_feature = np.repeat(np.arange(len(tables)), tables)
        itemsizes = [storage.itemsize for storage in storages]  # of FBGEMM's: of others no part has a start
        self._parts = np.array(
            [[_part_fields(part, size) for part, size in zip(own, itemsizes, strict=True)] for own in parts],
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
            weights: Weights of the ids, of bags that are pooled.
            storages: Where each partition's rows lie.
            counts: Number of ids of each feature, of sequences.

        Raises:
            UserError: In the backward pass: rows that gradients depend on have been updated since.
        """
        features = self._features.copy()
        width_bytes = 4 * self.formula.width
        if counts is None:
            num_bags = (len(offsets) - 1) // self._num_features
            features[:, layout.FIRST_BAG] = np.arange(self._num_features) * num_bags
            features[:, layout.NUM_BAGS] = num_bags
            features[:, layout.VECTOR_START] = np.arange(self._num_features) * width_bytes
            shape = (num_bags, self._num_features * self.formula.width)
        else:
            features[:, layout.NUM_BAGS] = counts
            features[1:, layout.FIRST_BAG] = np.cumsum(counts)[:-1]
            features[:, layout.VECTOR_START] = features[:, layout.FIRST_BAG] * width_bytes
            shape = (len(ids), self.formula.width)
        step = _Step(self, features, storages, shape, self.updates.number)
        batch = (ids.contiguous(), offsets.contiguous(), None if weights is None else weights.float().contiguous())
        all_weights = [weight for own in storages for weight in own.weights]
        vectors: Tensor = _Fused.apply(step, *batch, *all_weights)  # type: ignore[no-untyped-call]
        return vectors

    def compose(self, step: "_Step", batch: "_Batch") -> Float[Tensor, "bags width"]:
        """Returns the composed vectors of a step's bags."""
        outputs = torch.empty(step.shape, dtype=torch.float32)
        placed = self._placed(step.storages)
        job = self._job(step, batch, placed, outputs)
        scratch_bytes = 8 * layout.BLOCK_IDS * len(placed.partitions)

        def compose(share: int, num_shares: int) -> None:
            scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
            self._kernels.compose(job.ctypes.data, share, num_shares, scratch.data_ptr())

        most_bags = int(step.features[:, layout.NUM_BAGS].max(initial=0))
        _in_threads(compose, max(1, min(torch.get_num_threads(), most_bags // layout.BLOCK_IDS)))
        return outputs

    def weight_gradients(
        self, step: "_Step", batch: "_Batch", gradients: Float[Tensor, "bags width"]
    ) -> Float[Tensor, " ids"]:
        """Returns the gradients of the ids' weights: the dot products of each id's vector and its bag's gradient."""
        width, begins = self.formula.width, batch.offsets[step.features[:, layout.FIRST_BAG]]
        features = step.features.copy()
        features[:, layout.FIRST_BAG] = begins.numpy()
        features[:, layout.NUM_BAGS] = torch.diff(begins, append=batch.offsets[-1:]).numpy()
        features[:, layout.VECTOR_START] = 4 * width * features[:, layout.FIRST_BAG]
        each_id = _Batch(batch.ids, torch.arange(len(batch.ids) + 1), None)
        shape = (len(batch.ids), width)
        vectors = self.compose(_Step(self, features, step.storages, shape, step.num_updates), each_id)
        by_bag = gradients.float().unflatten(1, (self._num_features, width)).transpose(0, 1).flatten(0, 1)
        first, last = int(batch.offsets[0]), int(batch.offsets[-1])
        bags = torch.repeat_interleave(torch.diff(batch.offsets))
        found = torch.zeros(len(batch.ids))
        found[first:last] = (vectors[first:last] * by_bag[bags]).sum(1)
        return found

    def update(self, step: "_Step", batch: "_Batch", gradients: Float[Tensor, "bags width"]) -> list[Tensor | None]:
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
        if gradients.stride(1) != 1 or not self.formula.pools:
            gradients = gradients.contiguous()
        job = self._job(step, batch, placed, gradients)
        tables = self._tables_by_share(step, batch)
        self.updates.number += any(storage.optimizer is not None for storage in step.storages)

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

    def _tables_by_share(self, step: "_Step", batch: "_Batch") -> list[list[tuple[int, int]]]:
        """Returns the tables of each thread, as ranges of features, with about equally many ids."""
        starts = [0, *self._table_ends[:-1]]
        ranges = list(zip(starts, self._table_ends, strict=True))
        num_threads = min(torch.get_num_threads(), len(ranges))
        if num_threads == 1:
            return [ranges]
        first_bags = step.features[:, layout.FIRST_BAG]
        ends = batch.offsets.numpy()
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
            placed.partitions[j, layout.IS_HALF] = own.itemsize == 2
            placed.partitions[j, layout.ROW_BYTES] = own.row_bytes(len(self.formula.columns[j]))
            if own.optimizer is None:
                placed.parts[:, j, layout.WEIGHT_START] = addresses[self._table_of_feature] - addresses[0]
                continue
            placed.partitions[j, layout.OPTIMIZER] = OPTIMIZERS[own.optimizer]
            placed.partitions[j, layout.STATE_ADDRESS] = 0 if own.states is None else own.states.data_ptr()
            numbers[j, layout.LEARNING_RATE], numbers[j, layout.EPS] = own.learning_rate, own.eps
        return placed

    def _job(self, step: "_Step", batch: "_Batch", placed: "_Placed", vectors: Tensor) -> Any:
        job = np.zeros(layout.JOB_FIELDS, np.int64)
        job[layout.IDS], job[layout.OFFSETS] = batch.ids.data_ptr(), batch.offsets.data_ptr()
        job[layout.WEIGHTS] = 0 if batch.weights is None else batch.weights.data_ptr()
        job[layout.FEATURES], job[layout.NUM_FEATURES] = step.features.ctypes.data, self._num_features
        job[layout.PARTITIONS], job[layout.NUM_PARTITIONS] = placed.partitions.ctypes.data, len(placed.partitions)
        job[layout.PARTS] = placed.parts.ctypes.data
        job[layout.VECTORS], job[layout.STRIDE] = vectors.data_ptr(), 4 * vectors.stride(0)
        job[layout.WIDTH], job[layout.IS_PRODUCT] = self.formula.width, self.formula.is_product
        return job


@dataclass(frozen=True)
class _Placed:
    """Blocks of the partitions and of the parts, with addresses."""

    partitions: Any
    parts: Any


class _Batch(NamedTuple):
    """The ids of a step, as :meth:`FusedLookup.__call__` takes them."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class _Step:
    """One lookup: what its backward pass needs again, but for the batch.

    Attributes:
        lookup: What looks up.
        features: Blocks of the features.
        storages: Where each partition's rows lie.
        shape: Shape of the composed vectors.
        num_updates: How many updates there had been.
    """

    lookup: FusedLookup
    features: Any
    storages: Sequence[Storage]
    shape: tuple[int, int]
    num_updates: int


class _Fused(torch.autograd.Function):
    """The autograd function of :class:`FusedLookup`; the weights are its arguments so that gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, step: _Step, ids: Tensor, offsets: Tensor, id_weights: Tensor | None, *weights: Tensor
    ) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(ids, offsets, id_weights)
        return step.lookup.compose(step, _Batch(ids, offsets, id_weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        step, lookup, batch, of_ids = ctx.step, ctx.step.lookup, _Batch(*ctx.saved_tensors), ctx.needs_input_grad[3]
        if lookup.formula.needs_rows or of_ids:
            lookup.updates.require(step.num_updates)
        id_gradients = lookup.weight_gradients(step, batch, gradient) if of_ids else None
        return None, None, None, id_gradients, *lookup.update(step, batch, gradient)


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

    The first share is this thread's. All have ended when it returns or raises.
    """
    others = [_pool(num_shares - 1).submit(run, share, num_shares) for share in range(1, num_shares)]
    try:
        run(0, num_shares)
    finally:  # what they write is let go afterwards
        wait(others)
    for other in others:
        other.result()
