"""Managed ids on several ranks: raw ids are sent to the ranks of their buckets, and slots come back.

::

    raw ids of this rank's rows -> rank of each id's bucket -> slots -> this rank -> all-to-all of the tables

A rank goes through the ids of its buckets feature after feature, and rank after rank within a feature. This is the
order of the whole batch, since ranks have consecutive rows, so that any number of ranks gives the same slots.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from distembed.embedding.managed import ManagedFeatures, ManagedIds, map_parts


class ShardedManagedFeatures(ManagedFeatures):
    """Gives the ids of a batch's managed features their slots; all ranks call it together.

    Args:
        by_feature: The identities by the names of features, placed on the ranks of ``group``.
        group: The ranks.
    """

    def __init__(self, by_feature: dict[str, ManagedIds], group: dist.ProcessGroup) -> None:
        super().__init__(by_feature)
        self._group = group

    def _slots(self, managed: Sequence[ManagedIds], ids: Sequence[Tensor], admits: bool) -> Sequence[Tensor]:
        world_size = self._group.size()
        if world_size == 1:
            return super()._slots(managed, ids, admits)
        owners = np.concatenate(
            [own.owners_of(raw.cpu().numpy()) for own, raw in zip(managed, ids, strict=True)]
            or [np.empty(0, np.uint16)]
        )
        order = torch.from_numpy(np.argsort(owners, kind="stable")).to(ids[0].device)  # by rank, then by feature
        features = np.repeat(np.arange(len(ids)), [len(raw) for raw in ids])
        counts = np.bincount(owners.astype(np.int64) * len(ids) + features, minlength=world_size * len(ids))
        sent = torch.from_numpy(counts).view(world_size, len(ids))
        received = self._exchange(sent.to(order.device), [1] * world_size, [1] * world_size).cpu()
        sizes = sent.sum(1).tolist(), received.sum(1).tolist()
        raw_ids = self._exchange(torch.cat(list(ids))[order], *sizes)
        blocks = raw_ids.split(received.flatten().tolist())  # [ranks, features]
        by_feature = [blocks[rank * len(ids) + i] for i in range(len(ids)) for rank in range(world_size)]
        slots = map_parts([own for own in managed for _ in range(world_size)], by_feature, admits)
        by_rank = [slots[i * world_size + rank] for rank in range(world_size) for i in range(len(ids))]
        returned = self._exchange(torch.cat(by_rank), sizes[1], sizes[0])
        return torch.empty_like(returned).index_copy_(0, order, returned).split([len(raw) for raw in ids])

    def _exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Int64[Tensor, "..."]:
        """Sends the first ``sent[0]`` of the values to rank 0 and so on; returns the received values in rank order."""
        output = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(output, values, list(received), list(sent), group=self._group)
        return output
