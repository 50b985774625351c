"""Paths: vectors are looked up in the first partition only; the rows of the others are functions.

Functions cost more than finding out which ids are the same, so distinct ids are composed even where bags have one id.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sharding.groups.base import LookupRequest
from distembed.sharding.groups.per_id import DistinctGroup


class PathGroup(DistinctGroup):
    """Looks distinct ids up in the first partition, and sends each through its functions."""

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        """Composes the distinct ids' vectors; where each bag has one id, takes them in the place of pooling."""
        features, distinct = request.features, request.distinct
        assert distinct is not None
        if features.weights_or_none() is not None or not self._has_one_id_each(features):
            return super().finish(request, vectors)
        by_row = distinct.inverse.view(self.num_features, -1).t().flatten()
        composed = self.compose_distinct(request, distinct, vectors)
        return composed.index_select(0, by_row).unflatten(0, (-1, self.num_features)).flatten(1)

    def _has_one_id_each(self, features: KeyedJaggedTensor) -> bool:
        return features.values().numel() == features.lengths().numel() and self.has_at_most_one_id_each(features)
