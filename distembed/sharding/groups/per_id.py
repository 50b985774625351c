"""Groups that look ids up by FBGEMM's tables: every kind but the fused one.

A kind is chosen once, at construction, by whether composing commutes with the sum over a bag::

    pooled    sum_i compose(W1[p_i], W2[q_i])  =  compose(sum_i W1[p_i], sum_i W2[q_i])     sum, concat, feature
    product   sum_i W1[q_i] * W2[r_i]          =  sum_q W1[q] * (sum_{i: q_i = q} W2[r_i])  where buckets q are few
    others    every id is composed by itself, then pooled                                   maxima, paths

On a CPU each distinct id is looked up and composed once, on a GPU each occurrence (:mod:`distembed.sharding.ids`).
Where no bag has more than one id there is nothing to pool, and finding the distinct ids would take longer than
composing repeated ones.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import Composition, PathComposition, Product, TensorTrain
from distembed.sharding.bucket_pool import buckets_are_faster, count_buckets_per_bag, split_bags
from distembed.sharding.groups.base import Group, LookupRequest
from distembed.sharding.groups.load import (
    BAG_SUMS_LAUNCHES,
    FLOAT_BYTES,
    LONG_BYTES,
    GroupLoad,
    Launches,
    LookupMemory,
    LookupWork,
    TableLoad,
    bag_sums_memory,
    bag_sums_work,
    composing_bytes,
    embedding_bag_bytes,
    functions_memory,
)
from distembed.sharding.ids import DistinctIds, IdCounts, distinct_ids, every_id, take_once
from distembed.sharding.table_slice import LocalTable

_FINDING_BYTES = 400
"""Bytes read and written per id by :func:`distinct_ids`: a sort and twenty passes over integers."""
_TAKING_BYTES = 100
"""Bytes read and written per id by :func:`every_id`: places among the padded ids, without a sort."""
_SPLITTING_BYTES = 300
"""Bytes read and written per id by :func:`split_bags`: a sort of keys and fifteen passes over integers."""
DISTINCT_LAUNCHES = Launches(group=33, partition=15)
EVERY_ID_LAUNCHES = Launches(group=23, partition=10)


class DistinctGroup(Group):
    """Looks each distinct id up as a bag of its own, composes, then pools."""

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        return self.request_distinct(features)

    def request_distinct(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Requests each distinct id (on a GPU each occurrence) as a bag of its own, without weights."""
        # TBEs need equal numbers of bags for all features: bags of one id, then empty bags as padding
        #   feature 0   7 | 4 | 9         feature 1   3 |   |
        ids, counts_given = features.values().long(), IdCounts.of_batch(features)
        if ids.device.type == "cpu":
            distinct = distinct_ids(ids, counts_given.on_host, self.num_embeddings)
        else:
            distinct = every_id(ids, counts_given)
        rows, counts = self.rows(distinct.ids, distinct.counts), distinct.counts
        longest = torch.arange(max(1, *counts.on_host), device=rows.device)
        holds_id = longest < counts.on_device.unsqueeze(1)
        offsets = rows.new_zeros(holds_id.numel() + 1)
        torch.cumsum(holds_id.flatten(), dim=0, out=offsets[1:])
        # weights are applied in pooling
        return LookupRequest(rows, [offsets] * self.num_slices, [None] * self.num_slices, features, distinct)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes and pools the distinct ids' vectors; composes the sums where :meth:`request` asked for each bag."""
        features, distinct = request.features, request.distinct
        if distinct is None:
            return self.combine.compose(vectors).flatten(1)
        composed = self.compose_distinct(request, distinct, vectors)
        pooled = distinct.pool(
            composed, features.offsets().long(), "max" if self.takes_max else "sum", features.weights_or_none()
        )
        return pooled.unflatten(0, (self.num_features, -1)).transpose(0, 1).flatten(1)

    def compose_distinct(
        self, request: LookupRequest, distinct: DistinctIds, vectors: Sequence[Tensor]
    ) -> Float[Tensor, "distinct width"]:
        """Returns the composed vector of every distinct id: TBE vectors without padding bags, through any functions."""
        slots = distinct.slots()
        unpadded = [
            vector if position in self._stacks else take_once(vector.flatten(0, 1), slots)
            for position, vector in enumerate(vectors)
        ]
        if not isinstance(self.combine, PathComposition) or self.num_used == self.num_slices:
            return self.combine.compose(unpadded)
        assert isinstance(request.rows, Tensor)
        functions = [self._stacks[position].rows() for position in range(self.num_slices, self.num_used)]
        return self.combine.apply(unpadded[0], functions, request.rows[self.num_slices :])

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        return cls.distinct_memory(load, device_kind)

    @classmethod
    def distinct_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes of looking each distinct id up, composing it, then pooling."""
        table, counts, num_ids = load.table, load.num_composed, load.num_ids
        total, padded = sum(counts), max(counts) * len(counts)
        stack_dims = sum(dim for dim, is_replicated in zip(load.dims, load.is_replicated, strict=True) if is_replicated)
        tbe_dims = sum(load.dims) - stack_dims
        # vectors of TBEs are padded, and copied out of the padding
        looked_up, vectors = padded * tbe_dims * FLOAT_BYTES, total * sum(load.dims) * FLOAT_BYTES
        composed, output = total * load.columns * FLOAT_BYTES, load.output_bytes
        saved_in_composing = total * table.combine.num_saved(load.dims) * FLOAT_BYTES
        saved_vectors = vectors if table.function_tables() else saved_in_composing
        # rows, offsets of the padded lookup, where each id stands in it, its first occurrence, and the order of ids
        saved_longs = (len(table.scheme.num_rows) + 2) * total + padded + num_ids + load.num_bags
        saved = saved_longs * LONG_BYTES + saved_vectors
        if getattr(table, "pooling", None) == "max":
            # which id has each number of a maximum, which bag each id is in, and the ids
            saved += load.num_bags * load.columns * LONG_BYTES + 2 * num_ids * LONG_BYTES
        forward = looked_up + composed + output + 2 * (num_ids + total) * LONG_BYTES + max(0, vectors - saved_vectors)
        products = composed + saved_in_composing
        unpadding = vectors + (padded * max(load.dims) * FLOAT_BYTES if tbe_dims else 0) - saved_vectors
        backward = max(composed + output + 2 * num_ids * LONG_BYTES, products, unpadding)
        update = looked_up + total * stack_dims * FLOAT_BYTES
        if table.function_tables():
            # functions run after the lookup; in the backward pass they end before the vectors' gradients are made
            functions = functions_memory(load, device_kind)
            saved += functions.saved_bytes
            forward = max(forward, functions.forward_bytes)
            backward = max(backward, functions.backward_bytes)
        return LookupMemory(saved, forward, backward, update)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        return cls.distinct_work(load)

    @classmethod
    def distinct_work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of finding distinct ids, looking each up, composing it, then pooling."""
        columns, num_distinct = load.slice, load.num_composed
        finding_bytes = load.num_ids * (_FINDING_BYTES if load.finds_distinct else _TAKING_BYTES)
        # vectors are copied out of the padding (read, write), and their gradients into it (read, write)
        looked_up_columns = sum(part.num_columns for part in columns.partitions)
        padding_bytes = 4 * num_distinct * looked_up_columns * FLOAT_BYTES
        # forward and backward, an id's vector and its bag's
        pooling_bytes = 2 * (load.num_ids + load.num_vectors) * columns.num_columns * FLOAT_BYTES
        function_weights = sum(part.dim for part in columns.table.function_tables())
        return LookupWork(
            # in every partition, each distinct id is looked up as a bag of its own: (ids, bags)
            [(num_distinct, num_distinct)] * len(columns.partitions),
            finding_bytes + padding_bytes + pooling_bytes + composing_bytes(columns, num_distinct),
            # a multiplication and an addition, and in the backward pass two of each
            operations=6 * num_distinct * function_weights,
        )

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        return DISTINCT_LAUNCHES if load.finds_distinct else EVERY_ID_LAUNCHES


class PerIdGroup(DistinctGroup):
    """Looks bags up if each has at most one id and no weights require gradients; else distinct ids.

    The lookup of an empty bag gives zeros, which the composition must map to zeros (:func:`zeros_stay_zero`).
    """

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        if not weights_need_gradients(features) and self.has_at_most_one_id_each(features):
            # weight * (a * b) = (weight * a) * b: the first partition's lookup applies the weights
            return self.request_each_bag(features, [features.weights_or_none(), *[None] * (self.num_slices - 1)])
        return self.request_distinct(features)

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        return cls.distinct_memory(load, device_kind) if any(load.multi_hot) else bag_sums_memory(load)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        return cls.distinct_work(load) if load.is_multi_hot else bag_sums_work(load)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        return super().launches(load) if load.is_multi_hot else BAG_SUMS_LAUNCHES


class PooledGroup(DistinctGroup):
    """Pools each partition's vectors in the lookup, and composes the sums: as fast as plain tables.

    Per-sample weights that require gradients are the exception. Their gradients need the vectors of the forward pass,
    but FBGEMM reads the rows again in its backward pass, after another backward pass may have updated them. Ids are
    therefore looked up one by one then, which keeps their vectors.
    """

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        if weights_need_gradients(features):
            return self.request_distinct(features)
        return self.request_each_bag(features, [features.weights_or_none()] * self.num_slices)

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        return bag_sums_memory(load)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        return bag_sums_work(load)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        return BAG_SUMS_LAUNCHES


class ProductGroup(PerIdGroup):
    """Pools products by buckets (:mod:`..bucket_pool`) on a CPU, where that is faster than composing distinct ids.

    A GPU, many buckets per id, or weights that require gradients: as :class:`PerIdGroup`.
    """

    def __init__(
        self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], gradient_scale: int
    ) -> None:
        super().__init__(tables, replicated, gradient_scale)
        self._num_rows = [max(rows) for rows in zip(*[scheme.num_rows for scheme in self.partitions], strict=True)]
        self._num_codes = count_buckets_per_bag(self._num_rows)

    def request_distinct(self, features: KeyedJaggedTensor) -> LookupRequest:
        ids, lengths = features.values().long(), features.lengths()
        # on a GPU, the number of filled buckets would have to be copied to the host, which waits for the stream
        is_slower = ids.device.type != "cpu" or not buckets_are_faster(len(ids), len(lengths), self._num_codes)
        if is_slower or weights_need_gradients(features):
            return super().request_distinct(features)
        rows = self.rows(ids, IdCounts.of_batch(features))
        buckets = split_bags(rows, lengths.view(self.num_features, -1), self._num_rows, self._shifts)
        weights: list[Tensor | None] = [None] * self.num_slices
        if (id_weights := features.weights_or_none()) is not None:
            weights[buckets.largest] = id_weights.index_select(0, buckets.order)
        return LookupRequest(buckets.rows, buckets.offsets, weights, features, buckets=buckets)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        return super().finish(request, vectors) if request.buckets is None else request.buckets.pool(vectors).flatten(1)

    @classmethod
    def distinct_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        buckets_per_bag = count_buckets_per_bag(load.max_num_rows)
        if not load.finds_distinct or not buckets_are_faster(load.num_ids, load.num_bags, buckets_per_bag):
            return super().distinct_memory(load, device_kind)
        return _buckets_memory(load, buckets_per_bag)

    @classmethod
    def distinct_work(cls, load: TableLoad) -> LookupWork:
        num_rows = load.slice.table.scheme.num_rows
        buckets_per_bag = count_buckets_per_bag(num_rows)
        is_faster = buckets_are_faster(math.ceil(load.num_ids), math.ceil(load.num_bags), buckets_per_bag)
        if not (is_faster and load.finds_distinct):
            return super().distinct_work(load)
        num_buckets, num_codes = load.num_bags * buckets_per_bag, float(load.num_features * buckets_per_bag)
        largest = num_rows.index(max(num_rows))
        # (ids, bags): ids are summed into buckets by the largest partition; each code of the others is looked up once
        lookups = [(load.num_ids, num_buckets) if j == largest else (num_codes,) * 2 for j in range(len(num_rows))]
        # numbers moved per column: 4 a bucket (sums and their gradients), 3 a bag (pooled sums and their gradients)
        moved = (4 * num_buckets + 3 * load.num_bags) * load.slice.num_columns * FLOAT_BYTES
        return LookupWork(lookups, moved + load.num_ids * _SPLITTING_BYTES)


def _buckets_memory(load: GroupLoad, buckets_per_bag: int) -> LookupMemory:
    """Returns the bytes of pooling by buckets: indices, and one sum per bucket, whose gradient is as large."""
    num_buckets = load.num_bags * buckets_per_bag
    vectors = num_buckets * load.dims[0] * FLOAT_BYTES
    indices = load.num_ids * LONG_BYTES + num_buckets * LONG_BYTES
    # all partitions' rows, keys, their order, the buckets and how many ids each has
    sorting = load.num_ids * LONG_BYTES * (len(load.dims) + 4) + num_buckets * LONG_BYTES
    largest_is_replicated = all(load.is_replicated)
    saved = indices + vectors + (embedding_bag_bytes(load, num_buckets) if largest_is_replicated else 0)
    # bags are split before there are vectors; vectors of replicated weights are reordered by a copy
    splitting = indices + sorting - vectors - load.output_bytes
    forward = max(0, splitting, vectors if largest_is_replicated else 0)
    return LookupMemory(saved, forward, vectors + load.output_bytes, update_bytes=vectors)


class PathGroup(DistinctGroup):
    """Looks distinct ids up in the first partition, and applies their functions: rows of the other partitions.

    Functions cost more than finding equal ids, so distinct ids are composed even where bags have one id.
    """

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes the distinct ids' vectors; pools them, or copies them to rows if every bag has exactly one id."""
        features, distinct = request.features, request.distinct
        assert distinct is not None
        has_one_id_each = features.values().numel() == features.lengths().numel()
        if features.weights_or_none() is not None or not (has_one_id_each and self.has_at_most_one_id_each(features)):
            return super().finish(request, vectors)
        by_row = distinct.inverse.view(self.num_features, -1).t().flatten()
        composed = self.compose_distinct(request, distinct, vectors)
        return composed.index_select(0, by_row).unflatten(0, (-1, self.num_features)).flatten(1)


class SequenceGroup(DistinctGroup):
    """Composes each distinct id, and copies its vector to all its occurrences, in the order of the batch's ids."""

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "ids width"]:
        distinct = request.distinct
        assert distinct is not None
        composed = self.compose_distinct(request, distinct, vectors)
        return composed if distinct.order is None else composed.index_select(0, distinct.inverse)


def weights_need_gradients(features: KeyedJaggedTensor) -> bool:
    """Returns whether a batch has weights that need gradients."""
    weights = features.weights_or_none()
    return weights is not None and weights.requires_grad


def zeros_stay_zero(combine: Composition) -> bool:
    """Returns whether a composition maps zero vectors to a zero vector for all values of its parameters."""
    return combine.commutes_with_sum or type(combine) in (Product, TensorTrain)
