"""Pooling: the composed vectors of a bag become one vector.

::

    ids       7  4  7     9        bags of 2, 0, 1 and 1 ids
    lengths   2     0  1  1
    vectors   a  b  c     d   ->   sum [a + b, 0, c, d]
"""

import torch
from torch import Tensor, nn

from distembed.base.errors import UserError


@torch.fx.wrap
def pool(vectors: Tensor, lengths: Tensor, pooling: str, weights: Tensor | None = None) -> Tensor:
    """Pools vectors that lie bag after bag; an empty bag gives zeros.

    A trace of torch.fx holds it as one step, and TorchScript compiles it, so that its annotations say no shapes.

    Args:
        vectors: The composed vector of each id, float [ids, width].
        lengths: The number of ids of each bag, integers [batch]; their sum is the number of ids.
        pooling: ``sum``; ``mean``, the sum divided by the number of ids, also where it is weighted, as in FBGEMM; or
            ``max``, elementwise and without weights.
        weights: Factors, each of its id's vector, float [ids].

    Returns:
        The vector of each bag, float [batch, width].

    Raises:
        UserError: The pooling is ``max`` and weights are given.
    """
    if weights is not None:
        if pooling == "max":
            raise UserError("pooling max goes with no per-sample weights; use sum or mean, or give none.")
        vectors = vectors * weights.to(vectors.dtype).unsqueeze(1)
    if pooling == "max":
        return _max(vectors, lengths)
    # faster forward and backward than an embedding_bag over the vectors, or a segment_reduce of them
    bags = torch.arange(lengths.shape[0], device=lengths.device)
    bag_per_id = bags.repeat_interleave(lengths, output_size=vectors.shape[0])
    summed = vectors.new_zeros(lengths.shape[0], vectors.shape[1]).index_add(0, bag_per_id, vectors)
    return summed / lengths.clamp(min=1).unsqueeze(1) if pooling == "mean" else summed


def _max(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Returns the elementwise maximum of each bag."""
    offsets = nn.functional.pad(lengths.long().cumsum(0), [1, 0])
    order = torch.arange(vectors.shape[0], device=vectors.device)
    pooled: Tensor = nn.functional.embedding_bag(order, vectors, offsets, mode="max", include_last_offset=True)
    return pooled
