"""Pools each partition's vectors where they are looked up, and composes the sums.

Right for compositions that commute with summing over a bag, and as fast as a plain table of as many vectors. Weights
that need gradients are the exception: their gradients are of vectors as they were looked up, and FBGEMM's backward pass
reads rows that another pass may have updated since. Ids are then looked up one by one.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sharding.groups.bag_sums import BAG_SUMS_LAUNCHES, bag_sums_memory, bag_sums_work
from distembed.sharding.groups.base import LookupRequest
from distembed.sharding.groups.load import GroupLoad, Launches, LookupMemory, LookupWork, TableLoad
from distembed.sharding.groups.per_id import DistinctGroup, weights_need_gradients


class PooledGroup(DistinctGroup):
    """Pools each partition's vectors where they are looked up, and composes the sums."""

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Asks for the sum over each bag, of each partition; for distinct ids where weights need gradients."""
        if weights_need_gradients(features):
            return self.request_distinct(features)
        return self.request_each_bag(features, [features.weights_or_none()] * self.num_slices)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes the sums, or composes and pools distinct ids."""
        return super().finish(request, vectors) if request.distinct else self.combine.compose(vectors).flatten(1)

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
