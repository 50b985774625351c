"""Tables that are divided by rows of which a rank has none: fewer rows than ranks."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sharding.groups.base import Group, LocalTable, LookupRequest
from distembed.sharding.groups.load import GroupLoad, Launches, LookupMemory, LookupWork, TableLoad


class AbsentGroup(Group):
    """Only empty bags come, which give zeros.

    Args:
        tables: The tables of which this rank has no row.
        pools: Whether ids are pooled over bags.
    """

    def __init__(self, tables: Sequence[LocalTable], pools: bool) -> None:
        self.num_features = sum(len(local.table.feature_names) for local in tables)
        self.num_slices = self.num_tbes = 0
        widths = [local.slice.num_columns for local in tables for _ in local.table.feature_names]
        self._width = sum(widths) if pools else widths[0]
        self._pools = pools

    def request(self, features: KeyedJaggedTensor) -> LookupRequest:
        """Returns a request that reads no weights: no slice of the group lies on this rank."""
        return LookupRequest([], [], [], features)

    def finish(self, request: LookupRequest, vectors: Sequence[Tensor]) -> Float[Tensor, "rows width"]:
        """Returns zeros for every bag, or nothing for sequences."""
        device = request.features.device()
        # with a gradient, since the other ranks wait for this one in the backward pass too
        nothing = torch.zeros(0, device=device, requires_grad=True)
        return torch.zeros(request.features.stride() if self._pools else 0, self._width, device=device) + nothing.sum()

    @classmethod
    def lookup_memory(cls, load: GroupLoad, device_kind: str) -> LookupMemory:
        """Returns zero bytes: nothing is looked up on this rank."""
        return LookupMemory(0, 0, 0, 0)

    @classmethod
    def work(cls, load: TableLoad) -> LookupWork:
        """Returns no work."""
        return LookupWork([], 0.0)

    @classmethod
    def launches(cls, load: TableLoad) -> Launches:
        """Returns the zeros and their sum."""
        return Launches(4, 0)
