"""A group: tables that one lookup serves, and the memory and time of the lookup."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import CommOpGradientScaling
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.kernels.tables import FLOATS, as_operand
from distembed.sharding.bucket_pool import Buckets
from distembed.sharding.groups.load import LONG_BYTES, GroupLoad, Launches, LookupMemory, LookupWork, TableLoad
from distembed.sharding.ids import DistinctIds, FeatureRows, IdCounts
from distembed.sharding.table_slice import LocalTable

_SORT_MEMORY_BYTES = 64
"""Bytes for each id in FBGEMM's backward on CUDA: places in table and batch, unsorted and sorted, distinct rows, their
counts and starts, and the sorting itself."""


class _ReplicatedStack:
    """The replicated weights of a group's tables in one partition, concatenated by rows for one lookup.

    ``columns`` has, for each table, the weight's columns that this rank composes; empty for all columns.
    """

    def __init__(self, weights: Sequence[nn.Parameter], columns: Sequence[slice], gradient_scale: int) -> None:
        self._weights, self._columns = weights, columns
        self.gradient_scale = gradient_scale

    def weights(self) -> list[Tensor]:
        """Returns each table's weight, cut to the columns that this rank composes."""
        if not self._columns:
            return list(self._weights)
        return [weight[:, columns] for weight, columns in zip(self._weights, self._columns, strict=True)]

    def rows(self) -> Float[Tensor, "rows dim"]:
        """Returns all weights in float32; the backward pass multiplies their gradients by the scale."""
        weights = self.weights()
        stacked = (torch.cat(weights) if len(weights) > 1 else weights[0]).float()
        return CommOpGradientScaling.apply(stacked, self.gradient_scale) if self.gradient_scale > 1 else stacked

    def first_rows(self) -> list[int]:
        """Returns the row of the stack at which each table's weight begins."""
        return list(accumulate([len(weight) for weight in self._weights], initial=0))[:-1]


@dataclass
class LookupRequest:
    """A batch prepared for a group's lookup: the rows to look up, the bags to sum them over, and their weights.

    A *slice* is the part of a partition that this rank looks up. Fused groups leave rows, offsets and weights empty.
    """

    # rows to look up in each slice, then in each function partition
    rows: Int64[Tensor, "slices rows"] | list[Int64[Tensor, " rows"]]
    offsets: Sequence[Int64[Tensor, " bags_plus_1"]]  # for each slice: bag offsets into its rows
    weights: Sequence[Float[Tensor, " rows"] | None]  # for each slice: weights of its rows, or None if unweighted
    features: KeyedJaggedTensor  # the batch
    distinct: DistinctIds | None = None  # the batch's distinct ids, where distinct ids are looked up
    buckets: Buckets | None = None  # the batch's bags by code, where buckets are looked up

    def record_stream(self, stream: Any) -> None:
        for tensor in (*self.rows, *self.offsets, *self.weights):
            if tensor is not None:
                tensor.record_stream(stream)
        for batch_part in (self.features, self.distinct, self.buckets):
            if batch_part is not None:
                batch_part.record_stream(stream)


class Group(ABC):
    """Tables with equal group keys (:func:`~distembed.sharding.groups.group_key`) on one rank.

    For a batch, :meth:`request` finds rows, :meth:`look_up` returns the vectors of each partition, and :meth:`finish`
    composes and pools them. ``replicated`` holds the weights that every rank has, by partition table's name; their
    gradients are multiplied by ``gradient_scale``.
    """

    def __init__(
        self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], gradient_scale: int
    ) -> None:
        # whether the data promises at most one id in every bag of every rank; a GPU cannot check it without a wait
        self.has_single_ids = False
        first = tables[0]
        self.is_frozen, self._table = first.is_frozen, first.table
        per_feature = [local for local in tables for _ in local.table.feature_names]
        self.partitions = [local.table.scheme for local in per_feature]
        self._map = FeatureRows(self.partitions)
        self.combine = first.table.combine
        self.takes_max = getattr(first.table, "pooling", None) == "max"
        self.num_embeddings = max(local.table.num_embeddings for local in tables)
        self.num_features = len(per_feature)
        self.num_slices = len(first.partitions)
        self.num_tbes = len(first.shards)
        functions = range(self.num_slices, self.num_slices + len(first.table.function_tables()))
        used = [part.partition for part in first.partitions] + list(functions)
        self._stacks: dict[int, _ReplicatedStack] = {}
        # What to add to a row of the partition to get the row of this rank's weight, for each feature:
        #   TBE    - first row of this rank's block (FBGEMM itself adds where a table begins in the TBE)
        #   stack  + number of rows of the tables before it in the stack
        shifts = []
        for position, partition in enumerate(used):
            if partition in first.shards:
                shifts.append([-local.first_row for local in per_feature])
                continue
            weights = [replicated[local.table.partition_tables()[partition].name] for local in tables]
            columns = _columns_of(tables, position) if position < self.num_slices else []
            self._stacks[position] = stack = _ReplicatedStack(weights, columns, gradient_scale)
            shifts.append(
                [row for row, local in zip(stack.first_rows(), tables, strict=True) for _ in local.table.feature_names]
            )
        self.num_used = len(used)
        self._used = torch.tensor(used) if used != list(range(len(first.table.scheme.num_rows))) else None
        self._shifts = torch.tensor(shifts) if any(map(any, shifts)) else None

    def round_at_random(self, seed: Callable[[], int]) -> None:
        """Has updated float16 rows rounded by a step's seed; a UserError refuses a group that cannot, if it trains."""
        if self._table.data_type != "FP32" and not self.is_frozen:
            raise UserError(
                "train.sparse_optimizer.stochastic_rounding is 'everywhere', but a CPU rounds at random only where it "
                f"looks tables up in one pass and torch does not train them, unlike table {self._table.name!r}: set "
                "embedding.kernel=fused, which says why a table is not looked up in one pass, and "
                "plan.sharding_types=[table_wise]; or take stochastic_rounding: cuda."
            )

    @abstractmethod
    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Returns the rows to look up for a batch."""

    def has_at_most_one_id_each(self, features: KeyedJaggedTensor) -> bool:
        """Returns whether each bag surely has at most one id; on a GPU ``has_single_ids`` decides, without a wait."""
        lengths = features.lengths()
        if features.values().numel() > lengths.numel():
            return False
        return bool((lengths <= 1).all()) if lengths.device.type == "cpu" else self.has_single_ids

    def request_each_bag(self, features: KeyedJaggedTensor, weights: Sequence[Tensor | None]) -> LookupRequest:
        """Requests the weighted sum over each of the batch's bags in every slice; ``weights`` has one entry a slice."""
        rows = self.rows(features.values().long(), IdCounts.of_batch(features))
        return LookupRequest(rows, [features.offsets().long()] * self.num_slices, weights, features)

    @abstractmethod
    def finish(
        self, request: LookupRequest, vectors: Sequence[Float[Tensor, "bags features dim_j"]]
    ) -> Float[Tensor, "..."]:
        """Composes and pools the looked-up vectors of each slice; ``bags`` is the number of bags of one feature.

        Returns ``[batch, features * width]``, or ``[ids, width]`` for sequences.
        """

    def look_up(self, request: LookupRequest, tbes: Sequence[nn.Module]) -> list[Float[Tensor, "bags features dim_j"]]:
        """Returns each slice's vectors, summed over the request's bags.

        For a request of distinct ids, a replicated slice gives ``[distinct, dim_j]``: torch needs no padding bags.
        """
        remaining: Iterator[Any] = iter(tbes)
        return [
            self._sum_replicated(position, request)
            if position in self._stacks
            else self._sum_sharded(next(remaining), position, request)
            for position in range(self.num_slices)
        ]

    def prefetch(self, request: LookupRequest, tbes: Sequence[nn.Module | None], forward_stream: Any) -> None:
        """Loads the request's rows into the TBEs' caches; ``tbes`` has None in place of a TBE without a cache."""
        positions = [position for position in range(self.num_slices) if position not in self._stacks]
        own_tbes: Sequence[Any] = tbes
        for position, tbe in zip(positions, own_tbes, strict=True):
            if tbe is not None:
                operands = _operands(request, position)
                tbe.prefetch(operands["indices"], operands["offsets"], forward_stream=forward_stream)

    def trains(self, weights: Tensor | None) -> bool:
        """Returns whether a lookup has a backward pass, for vectors that are not frozen or for per-sample weights."""
        needs_pass = not self.is_frozen or (weights is not None and weights.requires_grad)
        return torch.is_grad_enabled() and needs_pass

    def _sum_sharded(self, tbe: Any, position: int, request: LookupRequest) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            vectors: Tensor = tbe(**_operands(request, position))
        return vectors.unflatten(1, (self.num_features, -1))

    def _sum_replicated(self, position: int, request: LookupRequest) -> Tensor:
        weight, row = self._stacks[position].rows(), request.rows[position]
        if request.distinct is not None:
            return nn.functional.embedding(row, weight)
        vectors = nn.functional.embedding_bag(
            row,
            weight,
            request.offsets[position],
            mode="sum",
            per_sample_weights=request.weights[position],
            include_last_offset=True,
        )
        return vectors.unflatten(0, (self.num_features, -1)).transpose(0, 1)

    def rows(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "used ids"]:
        """Returns the row of every id in each used partition, as a row of this rank's TBEs and stacks.

        Ids and counts go feature after feature. ``used`` are the slices' partitions, then the function partitions.
        """
        rows = self._map(ids, counts)
        if self._used is not None:
            self._used = self._used.to(ids.device)  # copied once
            rows = rows.index_select(0, self._used)
        if self._shifts is None:
            return rows
        self._shifts = self._shifts.to(ids.device)
        if counts.is_uniform:
            return (rows.view(len(rows), self.num_features, -1) + self._shifts.unsqueeze(2)).flatten(1)
        return rows + counts.of_each_id(self._shifts)

    @classmethod
    def memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes of :meth:`lookup_memory`, plus the stacks and gradients of replicated weights."""
        load = replace(load, finds_distinct=device_kind == "cpu")
        lookup, stacked_bytes = cls.lookup_memory(load, device_kind), load.replicated_vector_bytes
        forward_bytes = lookup.forward_bytes
        if load.stacks:
            # weights are stacked during the lookup: of the saved bytes only row indices exist yet, nothing is pooled
            index_bytes = len(load.dims) * load.num_ids * LONG_BYTES
            stacking_bytes = stacked_bytes + lookup.update_bytes + index_bytes - lookup.saved_bytes - load.output_bytes
            forward_bytes = max(forward_bytes, stacking_bytes)
        update_bytes = lookup.update_bytes + (stacked_bytes if load.averages_gradients else 0)
        if device_kind == "cuda":
            update_bytes += load.num_ids * _SORT_MEMORY_BYTES
        gradient_bytes = 0 if load.averages_gradients else stacked_bytes
        return LookupMemory(lookup.saved_bytes, forward_bytes, lookup.backward_bytes, update_bytes, gradient_bytes)

    @classmethod
    @abstractmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes of looking up, composing and pooling, without the gradients of replicated weights."""

    @classmethod
    @abstractmethod
    def work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of looking up, composing and pooling one table of the group."""

    @classmethod
    @abstractmethod
    def launches(cls, load: TableLoad) -> Launches:
        """Returns the number of operations that the group starts in a step with this load of one of its tables."""


def _operands(request: LookupRequest, position: int) -> dict[str, Tensor | None]:
    """Returns the tensors of a slice's lookup by the names of FBGEMM's arguments."""
    indices, offsets, weights = request.rows[position], request.offsets[position], request.weights[position]
    return {
        "indices": as_operand(indices, indices.device, torch.int64),
        "offsets": as_operand(offsets, indices.device, torch.int64),
        "per_sample_weights": None if weights is None else as_operand(weights, indices.device, *FLOATS),
    }


def _columns_of(tables: Sequence[LocalTable], position: int) -> list[slice]:
    """Returns each table's columns of the slice at ``position``; an empty list if every table uses all columns."""
    slices = [local.partitions[position] for local in tables]
    if all(part_slice.num_columns == part_slice.part.dim for part_slice in slices):
        return []
    return [slice(part_slice.start, part_slice.stop) for part_slice in slices]


class AbsentGroup(Group):
    """Tables that are divided by rows, on a rank that has no rows: it receives empty bags only, and returns zeros."""

    def __init__(self, tables: Sequence[LocalTable], pools: bool) -> None:
        self.num_features = sum(len(local.table.feature_names) for local in tables)
        self.num_slices = self.num_tbes = 0
        widths = [local.num_columns for local in tables for _ in local.table.feature_names]
        self._width = sum(widths) if pools else widths[0]
        self._pools = pools

    def round_at_random(self, seed: Callable[[], int]) -> None:
        """Rounds nothing: there are no rows."""

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        return LookupRequest([], [], [], features)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "rows width"]:
        device = request.features.device()
        # with a gradient: other ranks wait for this one in the backward pass
        nothing = torch.zeros(0, device=device, requires_grad=True)
        return torch.zeros(request.features.stride() if self._pools else 0, self._width, device=device) + nothing.sum()

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        return LookupMemory(saved_bytes=0, forward_bytes=0, backward_bytes=0, update_bytes=0)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        return LookupWork([], 0.0)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        return Launches(group=4, partition=0)
