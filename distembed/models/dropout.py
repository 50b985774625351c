"""Dropout whose random bits cost little on a CPU.

There torch draws a number for each entry, which takes a third of the step of a small transformer. Here an entry has 16
of the bits of one 64-bit number that four of them share. The probability is rounded to a multiple of 2^-16, and what is
left is scaled by the one that was rounded.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

_BITS = 16


def drop(values: Float[Tensor, "*shape"], probability: float) -> Float[Tensor, "*shape"]:
    """Returns values of which each is 0 with a probability, and the others are scaled to the same mean.

    The numbers are those of torch's generator of the values' device.
    """
    if values.device.type != "cpu":
        return functional.dropout(values, probability)
    num_dropped = min(round(probability * 2**_BITS), 2**_BITS - 1)
    words = torch.empty(-(-values.numel() * _BITS // 64), dtype=torch.int64)
    words.random_(-(2**63), None)  # all 64 bits, where the least number is given
    bits = words.view(torch.int16)[: values.numel()].view(values.shape)
    is_kept = bits >= num_dropped - 2 ** (_BITS - 1)
    return values * is_kept.to(values.dtype).mul_(2**_BITS / (2**_BITS - num_dropped))


class Dropout(nn.Module):
    """Drops numbers in training, as :func:`drop` does.

    Args:
        probability: Share of the numbers that are dropped, below 1.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def extra_repr(self) -> str:
        return f"probability={self.probability}"

    def forward(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Returns the values, in training with some of them dropped."""
        return drop(values, self.probability) if self.training and self.probability > 0 else values
