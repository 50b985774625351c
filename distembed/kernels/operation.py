"""The fused lookup: ids in, composed and pooled vectors out, and tables updated within the backward pass.

The weights and the optimizers' states stay in FBGEMM's tables. Replicated rows are not updated here: the backward pass
returns their gradients, dense, as of any parameter::

    forward    ids -> rows of every partition -> composed -> pooled vectors     each vector is written once
    backward   gradients + the rows, read again -> one sum a row -> update      each row is updated once

Only the ids are kept for the backward pass. Gradients of a product's rows and of the ids' weights depend on rows. When
another backward pass of the same tables is about to update them, as where a collection is called twice in a step, they
are copied for the batches whose backward pass is still to come.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.kernels import layout
from distembed.kernels.loading import load_kernels
from distembed.kernels.tables import OPTIMIZERS, Formula, Storage, TablePart, Updates, as_operand, num_states
from distembed.partitions.base import Digit
from distembed.partitions.hashing import rows_by_keys

_CPU = torch.device("cpu")


class FusedLookup:
    """Looks the ids of a group of tables up; a table has one feature or more.

    Args:
        formula: The formula of all tables.
        feature_parts: ``feature_parts[i][j]`` is partition j of the table of feature i; features of one table share
            its parts.
        features_per_table: Number of features of each table; a table's features are neighbours.
        storages: ``storages[j]`` is the memory of partition j's rows, of all tables; only addresses may differ from
            step to step.
    """

    def __init__(
        self,
        formula: Formula,
        feature_parts: Sequence[Sequence[TablePart]],
        features_per_table: Sequence[int],
        storages: Sequence[Storage],
    ) -> None:
        self.formula, self.updates = formula, Updates()
        self._kernels = load_kernels(formula.lanes)
        # lookups of a single partition are made from these (_alone), and errors name the rows of parts
        self._feature_parts, self._features_per_table = feature_parts, features_per_table
        self._num_features = len(feature_parts)
        ends = np.cumsum(features_per_table)
        self._feature_ranges = np.stack([ends - features_per_table, ends], 1)  # [tables, 2]: first feature, last + 1
        self._table_of_feature = np.repeat(np.arange(len(features_per_table)), features_per_table)
        # what the kernels' blocks hold in every step; _placed copies them and fills in a step's addresses
        self._partitions, self._parts = _partition_fields(formula, storages), _part_fields(feature_parts, storages)
        # steps whose backward pass is to come and needs rows as they are now: copied before another step updates them
        self._waiting: WeakSet[_Step] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out waiting steps, and the kernels, which each process loads."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_waiting", "_kernels")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _waiting=WeakSet(), _kernels=load_kernels(state["formula"].lanes))

    def __call__(
        self,
        ids: Int64[Tensor, " ids"],
        offsets: Int64[Tensor, " bags_plus_1"],
        weights: Float[Tensor, " ids"] | None,
        storages: Sequence[Storage],
        counts: Sequence[int] | None = None,
    ) -> Float[Tensor, "..."]:
        """Returns composed vectors: pooled ones ``[bags, features * width]``, or ``[ids, width]`` of sequences.

        Args:
            ids: Ids of all features, feature after feature.
            offsets: Place of each bag's first id, and last the end of the last bag. An id of a sequence is a bag.
            weights: Weight of each id; None for 1.
            storages: Memory of each partition's rows in this step.
            counts: Number of ids of each feature, for sequences; None where ids are pooled, in equally many bags each.
        """
        features = np.zeros((self._num_features, layout.FEATURE_FIELDS), np.int64)
        width_bytes = layout.FLOAT_BYTES * self.formula.width
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
        batch = _Batch(
            as_operand(ids, _CPU, torch.int64),
            as_operand(offsets, _CPU, torch.int64),
            None if weights is None else as_operand(weights.float(), _CPU, torch.float32),
        )
        step = _Step(self, features, storages, shape, self.updates.so_far(storages), batch)
        needs_id_gradients = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        if self.formula.needs_rows or needs_id_gradients:
            self._waiting.add(step)  # a weak reference: a step whose graph is dropped waits no longer
        all_weights = [weight for storage in storages for weight in storage.weights]
        return _Fused.apply(step, *batch, *all_weights)  # type: ignore[no-untyped-call]

    def backward(
        self, step: "_Step", batch: "_Batch", gradients: Float[Tensor, "bags width"], needs_id_gradients: bool
    ) -> tuple[Float[Tensor, " ids"] | None, list[Tensor | None]]:
        """Updates the rows of a step's ids; first saves the rows that other steps still need.

        Returns:
            The gradients of the ids' weights, None unless ``needs_id_gradients``; and one for each weight of each
            storage, None for FBGEMM's and where all storages are frozen.

        Raises:
            UserError: The gradients depend on rows that have been updated since the forward pass.
        """
        if step.saved_vectors is None and (self.formula.needs_rows or needs_id_gradients):
            self.updates.require(step.updates, step.storages)
        self._waiting.discard(step)
        step.batch = None
        if all(storage.is_frozen for storage in step.storages):
            no_gradients: list[Tensor | None] = [None for storage in step.storages for _ in storage.weights]
            return self._weight_gradients(step, batch, gradients) if needs_id_gradients else None, no_gradients
        self._save_waiting_vectors()
        if any(storage.optimizer is not None for storage in step.storages):
            self.updates.count()
        id_gradients = self._weight_gradients(step, batch, gradients) if needs_id_gradients else None
        uses_saved_vectors = step.saved_vectors is not None and self.formula.needs_rows
        update = self._update_from_saved_vectors if uses_saved_vectors else self.update
        return id_gradients, update(step, batch, gradients)

    def _save_waiting_vectors(self) -> None:
        """Copies the vectors of the steps whose backward pass is still to come, before an update changes their rows."""
        for step in self._waiting:
            rows_are_unchanged = step.updates == self.updates.so_far(step.storages)
            if rows_are_unchanged:  # else the step's own backward pass raises
                step.saved_vectors = self._vectors_of_ids(step)
        self._waiting.clear()

    def compose(self, step: "_Step", batch: "_Batch") -> Float[Tensor, "bags width"]:
        """Returns the composed vectors of a step's bags."""
        outputs = torch.empty(step.shape, dtype=torch.float32)
        placed = self._placed(step.storages)
        job = self._job(step, batch, placed, outputs)
        scratch_bytes = layout.ADDRESS_BYTES * layout.BLOCK_IDS * len(placed.partitions)  # rows of a block of ids

        def compose(share: int, num_shares: int) -> None:
            scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
            outside = self._kernels.compose(job.ctypes.data, share, num_shares, scratch.data_ptr())
            if outside:
                raise self._row_outside(outside - 1, step, batch)

        most_bags = int(step.features[:, layout.NUM_BAGS].max(initial=0))
        in_threads(compose, max(1, min(torch.get_num_threads(), most_bags // layout.BLOCK_IDS)))
        return outputs

    def _row_outside(self, feature: int, step: "_Step", batch: "_Batch") -> IndexError:
        """Returns the error that names the first id of a feature whose row is not on this rank, from a new search."""
        first_bag, num_bags = step.features[feature, [layout.FIRST_BAG, layout.NUM_BAGS]].tolist()
        for raw_id in batch.ids[batch.offsets[first_bag] : batch.offsets[first_bag + num_bags]].tolist():
            for j, part in enumerate(self._feature_parts[feature]):
                row = _row(raw_id, part.digit)
                if not part.first_row <= row < part.first_row + part.num_rows:
                    return IndexError(
                        f"id {raw_id} of feature {feature} of a fused lookup has row {row} in partition {j}, and this "
                        f"rank has rows {part.first_row} to {part.first_row + part.num_rows - 1} of it; the id lies "
                        "outside of its table, or was sent to a rank that does not have its row."
                    )
        return IndexError(f"ids of feature {feature} of a fused lookup changed while it ran; give it a copy of them.")

    def _bag_per_id(self, step: "_Step", batch: "_Batch", width: int) -> tuple["_Step", "_Batch"]:
        """Returns a step and a batch of the same ids without weights, in which each id is a bag: ``[ids, width]``."""
        features, first_ids = step.features.copy(), batch.offsets[step.features[:, layout.FIRST_BAG]]
        features[:, layout.FIRST_BAG] = first_ids.numpy()
        features[:, layout.NUM_BAGS] = torch.diff(first_ids, append=batch.offsets[-1:]).numpy()
        features[:, layout.VECTOR_START] = layout.FLOAT_BYTES * width * features[:, layout.FIRST_BAG]
        id_step = _Step(self, features, step.storages, (len(batch.ids), width), step.updates)
        return id_step, _Batch(batch.ids, torch.arange(len(batch.ids) + 1), None)

    def _id_gradients(self, batch: "_Batch", gradients: Float[Tensor, "bags width"]) -> Float[Tensor, "ids width"]:
        """Returns each id's gradient: its bag's part of ``[bags, features * width]``, or its own row in a sequence."""
        gradients = gradients.float()
        if not self.formula.pools:
            return gradients.contiguous()
        bag_gradients = gradients.unflatten(1, (self._num_features, self.formula.width)).transpose(0, 1).flatten(0, 1)
        first_id, end_id = int(batch.offsets[0]), int(batch.offsets[-1])
        id_gradients = torch.zeros(len(batch.ids), self.formula.width)
        id_gradients[first_id:end_id] = bag_gradients.repeat_interleave(torch.diff(batch.offsets), dim=0)
        return id_gradients

    def _weight_gradients(
        self, step: "_Step", batch: "_Batch", gradients: Float[Tensor, "bags width"]
    ) -> Float[Tensor, " ids"]:
        """Returns the gradients of the ids' weights.

        With ``bag = sum_i w_i v_i``, the gradient of ``w_i`` is the dot product of ``v_i`` and the bag's gradient.
        """
        if step.saved_vectors is None:
            vectors = self.compose(*self._bag_per_id(step, batch, self.formula.width))
        else:
            vectors = torch.stack(step.saved_vectors).prod(0)
        return (vectors * self._id_gradients(batch, gradients)).sum(1)

    def _alone(self, j: int, step: "_Step", batch: "_Batch") -> tuple["FusedLookup", "_Step", "_Batch"]:
        """Returns a lookup of partition ``j`` alone, in which each id gets its row, with its step and batch."""
        width = len(self.formula.columns[j])
        formula = Formula([range(width)], is_product=False, pools=False)
        own_parts = [[parts[j]] for parts in self._feature_parts]
        lookup = FusedLookup(formula, own_parts, self._features_per_table, [step.storages[j]])
        id_step, id_batch = self._bag_per_id(step, batch, width)
        return lookup, replace(id_step, lookup=lookup, storages=[step.storages[j]]), id_batch

    def _vectors_of_ids(self, step: "_Step") -> list[Float[Tensor, "ids width"]]:
        """Returns tensors whose product is each id's vector: its rows in a product, else the composed vector alone."""
        assert step.batch is not None
        if not self.formula.needs_rows:
            return [self.compose(*self._bag_per_id(step, step.batch, self.formula.width))]
        partition_lookups = [self._alone(j, step, step.batch) for j in range(len(step.storages))]
        return [lookup.compose(id_step, id_batch) for lookup, id_step, id_batch in partition_lookups]

    def _update_from_saved_vectors(
        self, step: "_Step", batch: "_Batch", gradients: Float[Tensor, "bags width"]
    ) -> list[Tensor | None]:
        """Updates a product partition by partition, from the rows that were copied before another update.

        Row ``v_j`` of an id has the gradient ``w g`` times the copies of its other rows; each partition is then updated
        as a lookup of its own, in which every id is a bag.
        """
        id_gradients = self._id_gradients(batch, gradients)
        if batch.weights is not None:
            id_gradients = id_gradients * batch.weights[:, None]
        assert step.saved_vectors is not None
        returned: list[Tensor | None] = []
        for j in range(len(step.saved_vectors)):
            row_gradients = id_gradients
            for partition, rows in enumerate(step.saved_vectors):
                row_gradients = row_gradients if partition == j else row_gradients * rows
            lookup, id_step, id_batch = self._alone(j, step, batch)
            returned += lookup.update(id_step, id_batch, row_gradients)
        return returned

    def update(self, step: "_Step", batch: "_Batch", gradients: Float[Tensor, "bags width"]) -> list[Tensor | None]:
        """Updates FBGEMM's rows of a step's ids, and sums the gradients of replicated weights.

        Returns:
            One entry for each weight of each storage: the gradient of a replicated weight, None for FBGEMM's.
        """
        placed = self._placed(step.storages)
        returned: list[Tensor | None] = []
        for j, storage in enumerate(step.storages):
            if storage.optimizer is not None:
                returned.append(None)
                continue
            sums = [torch.zeros(weight.shape, dtype=torch.float32) for weight in storage.weights]
            addresses = np.array([gradient.data_ptr() for gradient in sums], np.int64)
            placed.partitions[j, layout.GRADIENT_ADDRESS] = addresses[0]
            placed.parts[:, j, layout.GRADIENT_START] = addresses[self._table_of_feature] - addresses[0]
            returned += sums
        gradients = gradients.float()
        if gradients.stride(1) != 1 or not self.formula.pools:  # the kernels know the stride from bag to bag
            gradients = as_operand(gradients, _CPU, torch.float32)
        job = self._job(step, batch, placed, gradients)
        tables = self._tables_by_share(step, batch)

        def update(share: int, num_shares: int) -> None:
            ranges, update_tables = tables[share], self._kernels.update
            # a call without scratch returns the bytes it needs, and does nothing
            num_bytes = update_tables(job.ctypes.data, ranges.ctypes.data, len(ranges), 0, 0)
            # torch's allocator reuses this memory from step to step
            scratch = torch.empty(num_bytes, dtype=torch.uint8)
            status = update_tables(job.ctypes.data, ranges.ctypes.data, len(ranges), scratch.data_ptr(), num_bytes)
            if status < 0:
                raise self._row_outside(-status - 1, step, batch)

        in_threads(update, len(tables))
        weights = [(weight, storage.gradient_scale) for storage in step.storages for weight in storage.weights]
        for gradient, (_, scale) in zip(returned, weights, strict=True):
            if gradient is not None and scale > 1:
                gradient.mul_(scale)
        return [
            None if gradient is None else gradient.to(weight.dtype)
            for gradient, (weight, _) in zip(returned, weights, strict=True)
        ]

    def _tables_by_share(self, step: "_Step", batch: "_Batch") -> list[npt.NDArray[np.int64]]:
        """Returns the tables of each thread, as ranges of features ``[n, 2]``, with about equally many ids.

        The table with most ids goes first, always to the thread with fewest so far. No table has two threads, so that
        sums of gradients do not depend on the number of threads.
        """
        ranges = self._feature_ranges
        num_threads = min(torch.get_num_threads(), len(ranges))
        if num_threads == 1:
            return [ranges]
        ends = batch.offsets.numpy()
        first_ids = ends[step.features[ranges[:, 0], layout.FIRST_BAG]]
        num_ids = np.diff(first_ids, append=ends[-1])
        shares: list[list[int]] = [[] for _ in range(num_threads)]
        loads = [0] * num_threads
        for table in np.argsort(-num_ids, kind="stable").tolist():
            least_loaded = loads.index(min(loads))
            loads[least_loaded] += int(num_ids[table])
            shares[least_loaded].append(table)
        return [ranges[share] for share in shares]

    def _placed(self, storages: Sequence[Storage]) -> "_Placed":
        """Returns copies of the kernel's blocks with this step's addresses, learning rates and dtypes filled in."""
        placed = _Placed(self._partitions.copy(), self._parts.copy())
        float_fields = placed.partitions.view(np.float64)
        for j, storage in enumerate(storages):
            addresses = np.array([weight.data_ptr() for weight in storage.weights], np.int64)
            placed.partitions[j, layout.WEIGHT_ADDRESS] = addresses[0]
            placed.partitions[j, layout.IS_HALF] = storage.itemsize == 2
            placed.partitions[j, layout.ROW_BYTES] = storage.row_bytes(len(self.formula.columns[j]))
            if storage.optimizer is None:
                placed.parts[:, j, layout.WEIGHT_START] = addresses[self._table_of_feature] - addresses[0]
                continue
            placed.partitions[j, layout.OPTIMIZER] = OPTIMIZERS[storage.optimizer]
            placed.partitions[j, layout.STATE_ADDRESS] = 0 if storage.states is None else storage.states.data_ptr()
            float_fields[j, layout.LEARNING_RATE], float_fields[j, layout.EPS] = storage.learning_rate, storage.eps
            placed.partitions[j, layout.ROUNDING_SEED] = 0 if storage.rounding_seed is None else storage.rounding_seed()
        return placed

    def _job(self, step: "_Step", batch: "_Batch", placed: "_Placed", vectors: Tensor) -> Any:
        """Returns the job block of ``layout``; ``vectors`` are the composed vectors, or their gradients."""
        job = np.zeros(layout.JOB_FIELDS, np.int64)
        job[layout.IDS], job[layout.OFFSETS] = batch.ids.data_ptr(), batch.offsets.data_ptr()
        job[layout.WEIGHTS] = 0 if batch.weights is None else batch.weights.data_ptr()
        job[layout.FEATURES], job[layout.NUM_FEATURES] = step.features.ctypes.data, self._num_features
        job[layout.PARTITIONS], job[layout.NUM_PARTITIONS] = placed.partitions.ctypes.data, len(placed.partitions)
        job[layout.PARTS] = placed.parts.ctypes.data
        job[layout.VECTORS], job[layout.STRIDE] = vectors.data_ptr(), layout.FLOAT_BYTES * vectors.stride(0)
        job[layout.WIDTH], job[layout.IS_PRODUCT] = self.formula.width, self.formula.is_product
        return job


@dataclass(frozen=True)
class _Placed:
    """The blocks ``[partitions, fields]`` and ``[features, partitions, fields]`` of ``layout``, with addresses."""

    partitions: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]


class _Batch(NamedTuple):
    """The ids of a step, as :meth:`FusedLookup.__call__` takes them."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass(eq=False)
class _Step:
    """One lookup, as its backward pass needs it again."""

    lookup: FusedLookup
    features: npt.NDArray[np.int64]  # the blocks [features, FEATURE_FIELDS] of layout
    storages: Sequence[Storage]
    shape: tuple[int, int]  # of the composed vectors
    updates: tuple[int, ...]  # updates before this lookup, as of Updates.so_far
    batch: _Batch | None = None  # until the backward pass
    saved_vectors: list[Tensor] | None = None  # [ids, width], their product is each id's vector; set if rows changed


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
        step: _Step = ctx.step
        id_gradients, returned = step.lookup.backward(
            step, _Batch(*ctx.saved_tensors), gradient, ctx.needs_input_grad[3]
        )
        return None, None, None, id_gradients, *returned


def _partition_fields(formula: Formula, storages: Sequence[Storage]) -> npt.NDArray[np.int64]:
    """Returns the blocks ``[partitions, PARTITION_FIELDS]`` of ``layout``, without a step's addresses."""
    blocks = np.zeros((len(formula.columns), layout.PARTITION_FIELDS), np.int64)
    for block, columns, storage in zip(blocks, formula.columns, storages, strict=True):
        block[layout.NUM_COLUMNS], block[layout.COLUMN_START] = len(columns), columns.start
        block[layout.STATE_ROW_BYTES] = layout.FLOAT_BYTES * num_states(storage.optimizer, len(columns))
    return blocks


def _part_fields(feature_parts: Sequence[Sequence[TablePart]], storages: Sequence[Storage]) -> npt.NDArray[np.int64]:
    """Returns the blocks ``[features, partitions, PART_FIELDS]`` of ``layout``, without a step's addresses."""
    blocks = np.zeros((len(feature_parts), len(storages), layout.PART_FIELDS), np.int64)
    for feature, parts in enumerate(feature_parts):
        for block, part, storage in zip(blocks[feature], parts, storages, strict=True):
            divisor, modulus = part.digit.divisor, part.digit.modulus or 0
            block[layout.DIVISOR], block[layout.DIVISOR_RECIPROCAL] = divisor, _reciprocal(divisor)
            block[layout.MODULUS], block[layout.MODULUS_RECIPROCAL] = modulus, _reciprocal(modulus)
            if part.digit.keys is not None:
                # hashes in the last, incomplete run of the modulus are drawn again, as by partitions.KeyedHash
                block[layout.LAST_HASH] = 2**63 - 1 - 2**63 % modulus
                block[layout.KEY_BEFORE], block[layout.KEY_AFTER] = part.digit.keys
            block[layout.LAST_ROW] = 2**63 - 1 if part.digit.last_row is None else part.digit.last_row
            block[layout.FIRST_ROW], block[layout.NUM_ROWS] = part.first_row, part.num_rows
            block[layout.WEIGHT_START] = storage.itemsize * part.weight_start
            block[layout.STATE_START] = layout.FLOAT_BYTES * part.state_start
            block[layout.FIRST_COLUMN], block[layout.ROUNDING_KEY] = part.first_column, part.rounding_key
    return blocks


def _row(raw_id: int, digit: Digit) -> int:
    """Returns an id's row by the rule of a partition, as the kernels compute it."""
    if digit.keys is not None:
        before, after, modulus, value = (torch.tensor([n]) for n in (*digit.keys, digit.modulus, raw_id))
        return int(rows_by_keys(value, before, after, modulus))
    row = raw_id % 2**64 // digit.divisor % (digit.modulus or 2**64)
    return row if digit.last_row is None else min(row, digit.last_row)


def _reciprocal(divisor: int) -> int:
    """Returns ``2 ** 64 / divisor`` rounded up, as a signed number, for ``rows._divide``; 0 outside of (1, 2 ** 32)."""
    if not 1 < divisor < 2**32:
        return 0
    reciprocal = (2**64 - 1) // divisor + 1
    return reciprocal - 2**64 if reciprocal >= 2**63 else reciprocal


@cache
def _pool() -> ThreadPoolExecutor:
    # a pool starts a thread only where none is idle
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="distembed-fused")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has no threads


def in_threads(run: Callable[[int, int], None], num_shares: int) -> None:
    """Calls ``run(share, num_shares)`` for each share: share 0 in this thread, the others in a pool of all cores.

    Returns when all have ended, and raises the first error.
    """
    futures = [_pool().submit(run, share, num_shares) for share in range(1, num_shares)]
    try:
        run(0, num_shares)
    finally:  # also after an error: the threads write to memory that the caller frees
        wait(futures)
    for future in futures:
        future.result()
