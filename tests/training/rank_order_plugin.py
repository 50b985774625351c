"""A plugin for test runs: gradients are summed in the order of the ranks.

An all-reduce sums parts of a bucket of gradients in different orders. After its first step, DistributedDataParallel
divides gradients into other buckets. So a run that resumes on 4 ranks sums some in another order than without the
break, and rounds differently. With this plugin it is equal to the bit.
"""

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_construct = DistributedDataParallel.__init__


def mean_in_rank_order(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(reduce(torch.add, parts) / len(parts))
    return future


def construct_with_hook(self: DistributedDataParallel, *arguments: Any, **settings: Any) -> None:
    _construct(self, *arguments, **settings)
    self.register_comm_hook(None, mean_in_rank_order)


DistributedDataParallel.__init__ = construct_with_hook  # type: ignore[method-assign]
