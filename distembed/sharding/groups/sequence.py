"""Sequences: each id gets its own composed vector, and nothing is pooled."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from distembed.sharding.groups.base import LookupRequest
from distembed.sharding.groups.per_id import DistinctGroup


class SequenceGroup(DistinctGroup):
    """Composes each distinct id and copies its vector to all its occurrences, in the order of ids."""

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "ids width"]:
        """Composes the distinct ids' vectors and copies them to the ids."""
        distinct = request.distinct
        assert distinct is not None
        composed = self.compose_distinct(request, distinct, vectors)
        return composed if distinct.order is None else composed.index_select(0, distinct.inverse)
