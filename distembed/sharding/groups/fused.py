"""One pass for a whole lookup: ids are mapped, looked up, composed and pooled together, and rows updated backward.

It takes the place of the other kinds where all conditions of :func:`reason_not_fused` hold: tables on a CPU, or on a
GPU with ``kernel="fused"``; partitions that are digits of ids or, on a CPU, of their hashes; a product, sum or
concatenation; sums over bags; and an optimizer that the kernels have (:mod:`distembed.kernels`). FBGEMM's tables keep
the weights and the states, so that names and checkpoints do not differ.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.machine import is_intel_processor
from distembed.composition import Concat, Feature, PathLinear, PathMLP, Product, Sum
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.initialization import name_key
from distembed.kernels.layout import BLOCK_IDS, place_bits
from distembed.kernels.loading import reason_not_compiled, reason_unavailable
from distembed.kernels.operation import FusedLookup
from distembed.kernels.tables import MAX_ROWS, OPTIMIZERS, Formula, Storage, TablePart, lanes_for
from distembed.kernels.triton_backward import PartitionSizes, saved_bytes, update_bytes
from distembed.kernels.triton_lookup import TritonLookup
from distembed.kernels.triton_tables import ids_of_slice
from distembed.optim.kinds import fused_optimizer_name
from distembed.sharding.groups.base import Group, LookupRequest
from distembed.sharding.groups.load import (
    FLOAT_BYTES,
    LONG_BYTES,
    GroupLoad,
    Launches,
    LookupMemory,
    LookupWork,
    TableLoad,
)
from distembed.sharding.table_slice import LocalTable, TableSlice, is_pooled

_COMPOSED = (Product, Sum, Concat, Feature, PathLinear, PathMLP)
"""Compositions that the kernels compute, paths only without functions. Subclasses may compute something else."""
_COMPUTE_KERNELS = {"cpu": (None, "fused"), "cuda": (None, "fused", "fused_uvm")}
"""TorchRec's compute kernels whose rows the fused kernels can read; None for weights that every rank has."""
_BLOCK_BYTES = 256
"""Bytes of a partition's bookkeeping in a CPU's update, with alignment gaps."""
_PRECISIONS = (SparseType.FP32, SparseType.FP16)


class FusedGroup(Group):
    """Maps, looks up, composes and pools in :meth:`look_up`; the backward pass updates the rows in the TBEs' memory.

    The TBEs only hold weights and optimizer states. The first batch sets up the kernels for them.
    """

    _lookup: FusedLookup | TritonLookup | None = None
    _rounding_seed: Callable[[], int] | None = None

    def __init__(
        self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], gradient_scale: int
    ) -> None:
        super().__init__(tables, replicated, gradient_scale)
        self._tables = list(tables)
        self._pools = is_pooled(tables[0].table)

    def round_at_random(self, seed: Callable[[], int]) -> None:
        """Has a CPU's updated float16 rows rounded by a step's seed; refuses rows that every rank has."""
        if self._stacks:
            super().round_at_random(seed)
        self._rounding_seed = seed

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Returns the batch: the pass finds the rows itself."""
        return LookupRequest([], [], [], features)

    def look_up(self, request: LookupRequest, tbes: Sequence[nn.Module]) -> list[Tensor]:
        """Returns the composed and pooled vectors."""
        features, storages = request.features, self._storages(tbes)
        if self._lookup is None:
            self._lookup = self._make_lookup(storages, tbes)
        ids = features.values().long()
        weights = features.weights_or_none() if self._pools else None
        with torch.set_grad_enabled(self.trains(weights)):
            vectors = self._vectors(ids, weights, features, storages)
        if vectors.requires_grad:
            own_tbes: Sequence[Any] = tbes
            for tbe in own_tbes:
                tbe.step += 1  # as FBGEMM's own lookup does: it is the seed of rounding at random
        return [vectors]

    def _vectors(
        self, ids: Tensor, weights: Tensor | None, features: KeyedJaggedTensor, storages: Sequence[Storage]
    ) -> Tensor:
        if isinstance(self._lookup, TritonLookup):  # it finds an id's feature by the starts of bags
            has_one_id_each = len(ids) == features.lengths().numel() and self.has_at_most_one_id_each(features)
            offsets = None if self._pools and has_one_id_each else features.offsets()
            return self._lookup(ids, offsets, weights, storages)
        assert self._lookup is not None
        if self._pools:
            return self._lookup(ids, features.offsets().long(), weights, storages)
        return self._lookup(ids, torch.arange(len(ids) + 1), None, storages, features.length_per_key())

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "..."]:
        (composed,) = vectors
        return composed

    def _storages(self, tbes: Sequence[nn.Module]) -> list[Storage]:
        remaining = iter(tbes)
        stacks = [self._stacks.get(position) for position in range(self.num_slices)]
        return [
            _storage(next(remaining), self.is_frozen, self._rounding_seed)
            if stack is None
            else Storage(_readable(stack.weights()), gradient_scale=stack.gradient_scale, is_frozen=self.is_frozen)
            for stack in stacks
        ]

    def _make_lookup(self, storages: Sequence[Storage], tbes: Sequence[Any]) -> FusedLookup | TritonLookup:
        # for each table and partition: the id's digit, and where rows and states begin in the TBE's flat memory
        first, remaining = self._tables[0], iter(tbes)
        by_table: list[list[TablePart]] = [[] for _ in self._tables]
        for position, part_slice in enumerate(first.partitions):
            tbe = None if position in self._stacks else next(remaining)
            for table, (local, table_parts) in enumerate(zip(self._tables, by_table, strict=True)):
                digits = local.table.scheme.digits()
                assert digits is not None
                digit = digits[part_slice.partition]
                if tbe is None:
                    table_parts.append(TablePart(digit, 0, local.partitions[position].part.num_rows))
                    continue
                state_start = 0 if storages[position].states is None else tbe.momentum1_physical_offsets[table]
                num_rows, start = tbe.embedding_specs[table][0], tbe.weights_physical_offsets[table]
                column, key = local.partitions[position].start, name_key(local.partitions[position].part.name)
                table_parts.append(TablePart(digit, local.first_row, num_rows, start, state_start, column, key))
        feature_counts = [len(local.table.feature_names) for local in self._tables]
        by_feature = [parts for parts, count in zip(by_table, feature_counts, strict=True) for _ in range(count)]
        columns = columns_of_partitions(first)
        assert columns is not None
        formula = Formula(columns, isinstance(self.combine, Product), self._pools)
        lookup = FusedLookup if storages[0].weights[0].device.type == "cpu" else TritonLookup
        return lookup(formula, by_feature, feature_counts, storages)

    @classmethod
    def memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        lookup, replicated = cls.lookup_memory(load, device_kind), load.replicated_vector_bytes
        gradients = 0 if load.averages_gradients else replicated
        update = lookup.update_bytes + (replicated if load.averages_gradients else 0)
        return LookupMemory(lookup.saved_bytes, lookup.forward_bytes, lookup.backward_bytes, update, gradients)

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes that wait for the backward pass (saved), and of gradient sums of distinct rows (update).

        A CPU saves ids and bag offsets, a GPU the ids' keys and owners. On a CPU, each thread updates one table at a
        time, so the largest ``num_threads`` tables count. A GPU updates all tables at once.
        """
        saved = (load.num_bags + load.num_ids) * LONG_BYTES  # offsets and ids
        num_ids: Counter[Hashable] = Counter()  # of each table, whose features are updated together
        num_rows: dict[Hashable, list[int]] = {}  # of each table, in each partition
        local_rows: dict[Hashable, list[int]] = {}  # of each table, on this rank
        for table_slice, mean_ids in zip(load.slices, load.num_ids_per_feature, strict=True):
            # a rank may have several ranges of a table's columns: each counts as a table
            partitions, partition_rows = table_slice.partitions, table_slice.table.scheme.num_rows
            table = (table_slice.table.name, *[(part_slice.partition, part_slice.start) for part_slice in partitions])
            num_ids[table] += math.ceil(mean_ids)
            num_rows[table] = [partition_rows[part_slice.partition] for part_slice in partitions]
            local_rows[table] = _local_rows(table_slice, load.num_row_blocks)
        if device_kind == "cuda":
            stacked = load.replicated_vector_bytes if load.stacks else 0
            sizes = [
                PartitionSizes(sum(table_rows), max(table_rows), num_columns)
                for table_rows, num_columns in zip(zip(*local_rows.values(), strict=True), load.dims, strict=True)
            ]
            # a backward pass holds keys, owners and stacked rows to its end
            held = saved_bytes(load.num_ids, [own.num_keys for own in sizes]) + stacked
            update = held + update_bytes(load.num_ids, len(load.slices), sizes) + load.output_bytes
            return LookupMemory(held, forward_bytes=saved, backward_bytes=0, update_bytes=update)
        table_bytes = sorted((_update_bytes(load, num_rows[table], num_ids[table]) for table in num_ids), reverse=True)
        # the gradient of the vectors lives until all rows are updated
        update = sum(table_bytes[: load.num_threads]) + load.output_bytes
        return LookupMemory(saved, forward_bytes=0, backward_bytes=0, update_bytes=update)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of looking each id up in every partition and writing each column of the output once.

        Sums count for the first partition alone if partitions share columns (product), else for every one (concat).
        """
        partitions, columns = load.slice.partitions, load.slice.num_columns
        lookups = [
            (load.num_ids, load.num_vectors if part_slice is partitions[0] or part_slice.num_columns < columns else 0.0)
            for part_slice in partitions
        ]
        return LookupWork(lookups, 0.0, in_one_pass=True)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        """Counts a CPU's two passes and the operations that find the tables, or a GPU's kernels, sorts and zeros.

        A GPU writes keys and composes; where a bag may have several ids, it adds their lengths up. Each partition takes
        two kernels. A sorted partition takes a sort before them. In a product, sums of all sorted partitions but one
        are cleared, and update their rows later.
        """
        if load.finds_distinct:
            return Launches(group=7, partition=0)
        rows_and_parts = zip(_local_rows(load.slice, load.num_row_blocks), load.slice.partitions, strict=True)
        num_sorted = sum(ids_of_slice(rows, part.num_columns) is None for rows, part in rows_and_parts)
        waiting = max(0, num_sorted - 1) if isinstance(load.slice.table.combine, Product) else 0
        return Launches(group=2 + load.is_multi_hot + num_sorted + 2 * waiting, partition=2)


def _local_rows(table_slice: TableSlice, num_row_blocks: int) -> list[int]:
    """Returns the number of rows of each partition that a rank has: a block, or all rows where every rank has them."""
    return [
        -(-part.part.num_rows // (num_row_blocks if part.partition in table_slice.sharded else 1))
        for part in table_slice.partitions
    ]


def _update_bytes(load: GroupLoad, num_rows: Sequence[int], num_ids: int) -> int:
    """Returns the bytes that a CPU's update of one table allocates; replicated partitions get gradients instead."""
    num_bytes = (2 * LONG_BYTES * BLOCK_IDS + _BLOCK_BYTES) * len(load.dims)  # addresses of rows and sums
    for part_slice, rows, is_replicated in zip(load.slices[0].partitions, num_rows, load.is_replicated, strict=True):
        if not is_replicated:  # a sum and a number for each distinct row, and a hash table to find it
            num_bytes += min(rows, num_ids) * (part_slice.num_columns + 1) * FLOAT_BYTES
            num_bytes += 4 << place_bits(rows, num_ids)
    return num_bytes


@cache
def is_faster_alone(optimizer: str | None) -> bool:
    """Returns whether tables of one partition take less time in one pass than by FBGEMM's lookup on this processor.

    Steps were measured on an Intel processor: FBGEMM takes 1.2 to 2.8 times as long with Adagrad, 1.8 to 9 times with
    row-wise Adagrad, 0.8 to 1.8 times with SGD. AMD's processors are judged by products of two partitions, which take
    0.57 of the time of hashed tables with Adagrad. FBGEMM's row-wise Adagrad takes two to three times as long as its
    Adagrad on AMD's processors without AVX-512, and no longer on those with it.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") not in ("x86_64", "AMD64"):
        return False  # not measured
    is_slow_row_wise = is_intel_processor() or not capabilities.get("avx512_f", False)
    return optimizer == "adagrad" or (optimizer == "row_wise_adagrad" and is_slow_row_wise)


def reason_not_fused(table_slice: TableSlice, device_kind: str, optimizer: str | None) -> str | None:
    """Returns why a slice cannot be looked up in one pass, worded to follow "because"; None if it can.

    Only settings are checked, and on a CPU whether kernels exist for the machine: plans ask without any weights.
    """
    table = table_slice.table
    if device_kind != "cpu" and table.kernel != "fused":
        return "the tables are on a GPU, on which it has not been measured to be faster"
    digits = table.scheme.digits()
    if digits is None:
        return f"rows of {table.scheme.name} are not digits of ids"
    if device_kind != "cpu" and any(digit.keys is not None for digit in digits):
        return f"rows of {table.scheme.name} are hashes of ids, which the kernels for GPUs do not compute"
    if device_kind != "cpu" and any(digit.last_row is not None for digit in digits):
        return f"rows of {table.scheme.name} have a largest one, which the kernels for GPUs do not compute"
    if type(table.combine) not in _COMPOSED:
        return f"the kernels have no formula of {table.combine.name}"
    if table.function_tables() or columns_of_partitions(table_slice) is None:
        return f"{table.combine.name} does not compose column by column"
    if getattr(table, "pooling", None) == "max":
        return "pooling is max"
    if table.data_type == "BF16":
        return "data_type is BF16"
    if any(part_slice.num_columns % 4 for part_slice in table_slice.partitions):
        return "a number of columns is no multiple of 4"
    if any(part_slice.part.num_rows > MAX_ROWS for part_slice in table_slice.partitions):
        return f"a partition has more than {MAX_ROWS} rows"
    for part_slice in table_slice.partitions:
        if part_slice.kernel not in _COMPUTE_KERNELS[device_kind]:
            return f"its compute kernel is {part_slice.kernel}"
    if table_slice.sharded and optimizer not in OPTIMIZERS:
        return f"the optimizer is {optimizer}, and it has {', '.join(OPTIMIZERS)}"
    # plans for GPUs are made on other machines too, which do not know whether a GPU's kernels are available
    return reason_unavailable() if device_kind == "cpu" else None


def reason_not_loaded(table_slice: TableSlice, device_kind: str) -> str | None:
    """Compiles and loads a slice's CPU kernels; returns why that fails, or None. GPU kernels compile at first use."""
    columns = columns_of_partitions(table_slice)
    assert columns is not None
    return reason_not_compiled(lanes_for(columns)) if device_kind == "cpu" else None


def fused_refusal(table: CompositionalEmbeddingConfig, reason: str) -> UserError:
    """Returns the error of a table with ``kernel='fused'`` that cannot be looked up in one pass."""
    return UserError(
        f"table {table.name!r} has kernel='fused', but cannot be looked up in one pass, because {reason}; "
        "give it kernel='auto', which takes FBGEMM's lookups then."
    )


def columns_of_partitions(table_slice: TableSlice) -> list[range] | None:
    """Returns the slice's columns to which each partition contributes; None if a column depends on all columns.

    Partitions share all columns (product, sum) or none (concat: one range after another).
    """
    table = table_slice.table
    columns = table.combine.columns(table.embedding_dim, len(table.scheme.num_rows))
    if columns is None:
        return None
    widths = [part_slice.num_columns for part_slice in table_slice.partitions]
    if isinstance(table.combine, Product) or all(column_range == columns[0] for column_range in columns):
        return [range(num_columns) for num_columns in widths]
    ends = list(accumulate(widths))
    return [range(end - num_columns, end) for num_columns, end in zip(widths, ends, strict=True)]


def reason_against_settings(tbes: Sequence[Any]) -> str | None:
    """Returns why the kernels cannot use FBGEMM's tables as they are set, worded to follow "because", or None."""
    for tbe in tbes:
        if not isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen):
            return f"the tables are FBGEMM's {type(tbe).__name__}"
        locations = {spec[2] for spec in tbe.embedding_specs}
        if len(locations) > 1 or EmbeddingLocation.MANAGED_CACHING in locations:
            names = sorted(location.name for location in locations)
            return f"rows are in {' and '.join(names)}, and the passes read no cache"
        optimizer_args = tbe.optimizer_args
        if tbe.weights_precision not in _PRECISIONS or tbe.pooling_mode != PoolingMode.SUM:
            return f"the tables are of {tbe.weights_precision} and {tbe.pooling_mode}"
        for setting in ("weight_decay", "weight_decay_mode", "max_norm", "gradient_clipping"):
            if getattr(optimizer_args, setting):
                return f"{setting} is {getattr(optimizer_args, setting)}"
    return None


def _readable(weights: list[Tensor]) -> list[Tensor]:
    """Returns weights that the kernels can read, all float32 or all float16 with equal strides; else float32 copies."""
    first = weights[0]
    if first.dtype in (torch.float32, torch.float16) and first.stride(1) == 1:
        if all((weight.dtype, weight.stride()) == (first.dtype, first.stride()) for weight in weights):
            return weights
    return [weight.float().contiguous() for weight in weights]


_optimizer_name = cache(fused_optimizer_name)  # every step asks for it


def _storage(tbe: Any, is_frozen: bool, rounding_seed: Callable[[], int] | None) -> Storage:
    """Returns a TBE's weights, optimizer states and current optimizer settings, as the kernels take them."""
    optimizer = _optimizer_name(tbe.optimizer)
    states = None if tbe.optimizer == EmbOptimType.EXACT_SGD else _numbers(tbe, "momentum1")
    seed = rounding_seed if tbe.use_cpu else (lambda: tbe.step % 2**31) if tbe.stochastic_rounding else None
    weights = [_numbers(tbe, "weights")]
    rate, eps = tbe.get_learning_rate(), tbe.optimizer_args.eps
    return Storage(weights, optimizer, states, rate, eps, rounding_seed=seed, is_frozen=is_frozen)


def _numbers(tbe: Any, name: str) -> Tensor:
    """Returns a TBE's ``weights`` or ``momentum1``: FBGEMM keeps them in ``_host``, ``_dev`` or ``_uvm`` tensors."""
    if tbe.use_cpu:
        return getattr(tbe, f"{name}_host")
    on_device: Tensor = getattr(tbe, f"{name}_dev")
    return on_device if on_device.numel() > 0 else getattr(tbe, f"{name}_uvm")
