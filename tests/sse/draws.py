"""Replaces ids by a rule, many enough to count."""

import torch
from torch import Tensor

from distembed.sse import SSE, IdPerturbation

MANY = 10**6


def replaced(ids: Tensor, num_ids: int, sse: SSE, seed: int = 0) -> Tensor:
    return IdPerturbation(num_ids, sse, seed=seed, rank=0, name="ids")(ids)


def evenly(num_ids: int, count: int) -> Tensor:
    return torch.arange(count) % num_ids
