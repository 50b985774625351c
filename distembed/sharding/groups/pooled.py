"""Pools each partition's vectors where they are looked up, and composes the sums.

Right for compositions that commute with summing over a bag, and as fast as a plain table of as many vectors.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import Product
from distembed.sharding.groups.base import Group, LookupRequest, composing_bytes
from distembed.sharding.groups.load import (
    FLOAT_BYTES,
    LONG_BYTES,
    GroupLoad,
    Launches,
    LookupMemory,
    LookupWork,
    TableLoad,
)


class PooledGroup(Group):
    """Pools each partition's vectors where they are looked up, and composes the sums."""

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Asks for the sum over each bag, of each partition."""
        return self.request_each_bag(features, [features.weights_or_none()] * self.num_slices)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes the sums."""
        return self.combine.compose(vectors).flatten(1)

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns the bytes of sums over bags."""
        return bag_sums_memory(load)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        """Returns the work of sums over bags, of each partition."""
        return bag_sums_work(load)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        """Returns the operations of mapping ids to rows, of a sum over bags a partition, and of composing."""
        return BAG_SUMS_LAUNCHES


BAG_SUMS_LAUNCHES = Launches(group=14, partition=22)


def bag_sums_work(load: TableLoad) -> LookupWork:
    """Returns the work of summing every partition's vectors over bags and composing the sums."""
    lookups = [(load.num_ids, load.num_bags)] * len(load.slice.partitions)
    return LookupWork(lookups, composing_bytes(load.slice, load.num_bags))


def bag_sums_memory(load: GroupLoad) -> LookupMemory:
    """Returns the bytes of summing every partition's vectors over bags and composing the sums."""
    vectors = load.num_bags * sum(load.dims) * FLOAT_BYTES
    num_slices, combine = len(load.dims), load.table.combine
    saves_vectors = num_slices > 1 and isinstance(combine, Product)
    # rows of all partitions; where bags begin, as they came and in 64 bits
    indices = num_slices * load.num_ids * LONG_BYTES + load.num_bags * LONG_BYTES
    # a product of three saves that of the first two as well
    saved = vectors + max(0, num_slices - 2) * load.output_bytes if saves_vectors else 0
    # FBGEMM keeps the indices of the batch before
    forward = indices + load.num_ids * LONG_BYTES + (0 if saves_vectors or num_slices == 1 else vectors)
    saved += indices + embedding_bag_bytes(load, load.num_bags)
    return LookupMemory(saved, forward, backward_bytes=vectors, update_bytes=vectors)


def embedding_bag_bytes(load: GroupLoad, num_bags: int) -> int:
    """Returns what torch's ``embedding_bag`` saves for replicated weights: each bag's number of ids and its largest."""
    return sum(load.is_replicated) * num_bags * 2 * LONG_BYTES
