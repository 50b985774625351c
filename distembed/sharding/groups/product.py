"""Products: bags that are large for the small partitions are summed in buckets of ids that have a factor in common.

The other bags are looked up id by id (:mod:`distembed.sharding.groups.per_id`);
:mod:`distembed.sharding.bucket_pool` has the formula and says when buckets are faster.
"""

import math
from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sharding.bucket_pool import buckets_are_faster, count_buckets_per_bag, split_bags
from distembed.sharding.feature_rows import IdCounts
from distembed.sharding.groups.bag_sums import embedding_bag_bytes
from distembed.sharding.groups.base import LocalTable, LookupRequest
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES, GroupLoad, LookupMemory, LookupWork, TableLoad
from distembed.sharding.groups.per_id import PerIdGroup, weights_need_gradients

_SPLITTING_BYTES = 300
"""Bytes that are read and written for each id to split bags: sorting keys, and fifteen passes over numbers."""


class ProductGroup(PerIdGroup):
    """Splits bags by the rows of the small partitions, on a CPU, where these are few for the ids that there are."""

    def __init__(
        self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], gradient_scale: int
    ) -> None:
        super().__init__(tables, replicated, gradient_scale)
        self._num_rows = [max(rows) for rows in zip(*[scheme.num_rows for scheme in self.partitions], strict=True)]
        self._num_codes = count_buckets_per_bag(self._num_rows)

    def request_distinct(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Asks for the sums over buckets where these are faster, else for each distinct id."""
        ids, lengths = features.values().long(), features.lengths()
        # a GPU would be waited for, to know which buckets are filled
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
        """Multiplies and sums over buckets, or composes and pools."""
        return super().finish(request, vectors) if request.buckets is None else request.buckets.pool(vectors).flatten(1)

    @classmethod
    def distinct_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes of buckets where these are faster, else of looking distinct ids up."""
        buckets_per_bag = count_buckets_per_bag(load.max_num_rows)
        if not load.finds_distinct or not buckets_are_faster(load.num_ids, load.num_bags, buckets_per_bag):
            return super().distinct_memory(load, device_kind)
        return _buckets_memory(load, buckets_per_bag)

    @classmethod
    def distinct_work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of buckets where these are faster, else of looking distinct ids up."""
        num_rows = load.slice.table.scheme.num_rows
        buckets_per_bag = count_buckets_per_bag(num_rows)
        few = not buckets_are_faster(math.ceil(load.num_ids), math.ceil(load.num_bags), buckets_per_bag)
        if few or not load.finds_distinct:
            return super().distinct_work(load)
        num_buckets, codes = load.num_bags * buckets_per_bag, float(load.num_features * buckets_per_bag)
        largest = num_rows.index(max(num_rows))
        lookups = [(load.num_ids, num_buckets) if j == largest else (codes, codes) for j in range(len(num_rows))]
        # sums are read with their gradients, which are written; the pooled sums are as many as bags
        moved = (4 * num_buckets + 3 * load.num_bags) * load.slice.num_columns * FLOAT_BYTES
        return LookupWork(lookups, moved + load.num_ids * _SPLITTING_BYTES)


def _buckets_memory(load: GroupLoad, buckets_per_bag: int) -> LookupMemory:
    """Returns the bytes of sums over buckets of the largest partition's vectors; their gradient is as large."""
    num_buckets = load.num_bags * buckets_per_bag
    vectors = num_buckets * load.dims[0] * FLOAT_BYTES
    indices = load.num_ids * LONG_BYTES + num_buckets * LONG_BYTES
    # all partitions' rows, keys, their order, the buckets and how many ids each has
    sorting = load.num_ids * LONG_BYTES * (len(load.dims) + 4) + num_buckets * LONG_BYTES
    largest_is_replicated = all(load.is_replicated)
    saved = indices + vectors + (embedding_bag_bytes(load, num_buckets) if largest_is_replicated else 0)
    # bags are split before there are vectors; those of replicated weights come in another order, and are copied
    splitting = indices + sorting - vectors - load.output_bytes
    forward = max(0, splitting, vectors if largest_is_replicated else 0)
    return LookupMemory(saved, forward, vectors + load.output_bytes, update_bytes=vectors)
