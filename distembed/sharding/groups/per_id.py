"""Looks each id up by itself, composes, then pools.

Ids repeat within a batch, as those of clicks do: on a CPU each distinct id is looked up and composed once, on a GPU
each occurrence (:mod:`distembed.sharding.distinct`). Where no bag has more than one id there is nothing to pool, and
finding the distinct ids would take longer than composing repeated ones.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import Composition, PathComposition, Product
from distembed.sharding.distinct import DistinctIds, distinct_ids, every_id, take_once
from distembed.sharding.feature_rows import IdCounts
from distembed.sharding.groups.bag_sums import BAG_SUMS_LAUNCHES, bag_sums_memory, bag_sums_work
from distembed.sharding.groups.base import Group, LookupRequest, composing_bytes
from distembed.sharding.groups.functions import functions_memory
from distembed.sharding.groups.load import (
    FLOAT_BYTES,
    LONG_BYTES,
    GroupLoad,
    Launches,
    LookupMemory,
    LookupWork,
    TableLoad,
)

_FINDING_BYTES = 400
"""Bytes that are read and written for each id to find the distinct ones: sorting, and twenty passes over numbers."""
_TAKING_BYTES = 100
"""The same where every id is taken as it is: its place among those that are padded."""
DISTINCT_LAUNCHES = Launches(group=33, partition=15)
EVERY_ID_LAUNCHES = Launches(group=23, partition=10)


class DistinctGroup(Group):
    """Looks each distinct id up as a bag of its own, composes, then pools."""

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Asks for each distinct id."""
        return self.request_distinct(features)

    def request_distinct(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Asks for each distinct id once.

        The i-th ids of all features lie side by side; features with fewer are padded with empty bags.
        """
        ids, given = features.values().long(), IdCounts.of_batch(features)
        if ids.device.type == "cpu":
            distinct = distinct_ids(ids, given.on_host, self.num_embeddings)
        else:
            distinct = every_id(ids, given)
        rows, counts = self.rows(distinct.ids, distinct.counts), distinct.counts
        longest = torch.arange(max(1, *counts.on_host), device=rows.device)
        filled = longest < counts.on_device.unsqueeze(1)
        offsets = rows.new_zeros(filled.numel() + 1)
        torch.cumsum(filled.flatten(), dim=0, out=offsets[1:])
        # weights are for when these are pooled
        return LookupRequest(rows, [offsets] * self.num_slices, [None] * self.num_slices, features, distinct)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes the distinct ids' vectors and pools them over the bags of ids."""
        features, distinct = request.features, request.distinct
        assert distinct is not None
        composed = self.compose_distinct(request, distinct, vectors)
        pooled = distinct.pool(
            composed, features.offsets().long(), "max" if self.takes_max else "sum", features.weights_or_none()
        )
        return pooled.unflatten(0, (self.num_features, -1)).transpose(0, 1).flatten(1)

    def compose_distinct(
        self, request: LookupRequest, distinct: DistinctIds, vectors: Sequence[Tensor]
    ) -> Float[Tensor, "distinct width"]:
        """Returns the composed vector of every distinct id."""
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
        """Returns the bytes of looking distinct ids up."""
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
        is_product = isinstance(table.combine, Product)
        saved_vectors = vectors if is_product or table.function_tables() else 0
        # rows, offsets of the padded lookup, where each id stands in it, its first occurrence, and the order of ids
        saved_longs = (len(table.scheme.num_rows) + 2) * total + padded + num_ids + load.num_bags
        saved = saved_longs * LONG_BYTES + saved_vectors
        if getattr(table, "pooling", None) == "max":
            # which id has each number of a maximum, which bag each id is in, and the ids
            saved += load.num_bags * load.columns * LONG_BYTES + 2 * num_ids * LONG_BYTES
        forward = looked_up + composed + output + 2 * (num_ids + total) * LONG_BYTES + vectors - saved_vectors
        products = composed + (vectors if is_product else 0)
        unpadding = vectors + (padded * max(load.dims) * FLOAT_BYTES if tbe_dims else 0) - saved_vectors
        backward = max(composed + output + 2 * num_ids * LONG_BYTES, products, unpadding)
        update = looked_up + total * stack_dims * FLOAT_BYTES
        if table.function_tables():
            # functions run when vectors are there, and their gradients are gone when those of vectors come
            functions = functions_memory(load, device_kind)
            saved += functions.saved_bytes
            forward = max(forward, functions.forward_bytes)
            backward = max(backward, functions.backward_bytes)
        return LookupMemory(saved, forward, backward, update)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of looking distinct ids up."""
        return cls.distinct_work(load)

    @classmethod
    def distinct_work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of finding distinct ids, looking each up, composing it, then pooling."""
        own, distinct = load.slice, load.num_composed
        # vectors are copied out of the padding, and their gradients into it
        unpadding = 4 * distinct * sum(part.num_columns for part in own.partitions) * FLOAT_BYTES
        pooling = 2 * (load.num_ids + load.num_vectors) * own.num_columns * FLOAT_BYTES
        finding = load.num_ids * (_FINDING_BYTES if load.finds_distinct else _TAKING_BYTES)
        functions = sum(part.dim for part in own.table.function_tables())
        return LookupWork(
            [(distinct, distinct)] * len(own.partitions),
            finding + unpadding + pooling + composing_bytes(own, distinct),
            # a multiplication and an addition, and in the backward pass two of each
            operations=6 * distinct * functions,
        )

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        """Returns the operations of finding distinct ids, of their lookup in each partition, and of pooling."""
        return DISTINCT_LAUNCHES if load.finds_distinct else EVERY_ID_LAUNCHES


class PerIdGroup(DistinctGroup):
    """Looks ids up as they are where no bag has more than one, else distinct ids.

    Empty bags are looked up as zeros, which the composition has to leave zeros (:func:`zeros_stay_zero`).
    """

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Asks for each bag where no bag has more than one id, else for each distinct id.

        Weights that need gradients are applied to distinct ids' vectors as well (:mod:`.pooled` says why).
        """
        if not weights_need_gradients(features) and self.has_at_most_one_id_each(features):
            # a product is weighted by weighting one of its factors
            return self.request_each_bag(features, [features.weights_or_none(), *[None] * (self.num_slices - 1)])
        return self.request_distinct(features)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes the vectors of the bags' single ids, or composes and pools distinct ids."""
        return super().finish(request, vectors) if request.distinct else self.combine.compose(vectors).flatten(1)

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes of whichever the batches ask for."""
        return cls.distinct_memory(load, device_kind) if any(load.multi_hot) else bag_sums_memory(load)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of whichever the batches ask for."""
        return cls.distinct_work(load) if load.is_multi_hot else bag_sums_work(load)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        """Returns the operations of whichever the batches ask for."""
        return super().launches(load) if load.is_multi_hot else BAG_SUMS_LAUNCHES


def weights_need_gradients(features: KeyedJaggedTensor) -> bool:
    """Returns whether the weights of a batch's ids have gradients."""
    weights = features.weights_or_none()
    return weights is not None and weights.requires_grad


def zeros_stay_zero(combine: Composition) -> bool:
    """Returns whether a composition makes zeros of zeros, whatever its parameters."""
    return combine.commutes_with_sum or type(combine) is Product
