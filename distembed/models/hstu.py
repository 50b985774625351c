"""HSTU (Zhai et al., ICML 2024, "Actions Speak Louder than Words"): pointwise attention over a user's items.

A layer computes, of the normalised inputs x of a row (equations 1 to 3)::

    u, v, q, k = split(silu(x W + c))
    a_ij       = silu(q_i . k_j / sqrt(D_head) + p[i - j] + r[bucket(t_i - t_j)]) / N    for j <= i, else 0
    y_i        = x_i + W_2 (norm(sum_j a_ij v_j) * u_i) + c_2

where p is a learned number for each distance between places, r one for each bucket of the time between two items, and N
is the greatest length of a row. There is no softmax: the sum grows with the number of items that match, so the state
tells how much a user likes an item, not only that they like it more than other items. The published code divides the
products by sqrt(D_head), the paper does not.

Training starts from the items themselves, W_2 = 0, and from nearly equal weights, p = 1. With W_2 drawn like other
weights the sums drown the item that the row ends with, which costs 0.03 of NDCG@10 of 101 on Amazon Beauty.

Rows are laid out in groups of similar length, see :mod:`distembed.models.sequences`. N is a constant, so that a row's
states do not depend on its group.
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from distembed.models.layers import Dropout, make_linear
from distembed.models.sequences import QueriedRows, SequenceLayout, lay_out, take_queries, take_tokens

_NUM_BUCKETS = 64


class PointwiseAttention(nn.Module):
    """A layer of HSTU: maps slots [slots, dim] to slots, each from itself and earlier slots of its row.

    Args:
        dim: Dimension D of a vector.
        max_length: Most slots N of a row.
        num_heads: Number of heads, each of D / num_heads numbers.
        dropout: Share of numbers that are dropped in training.
        has_times: Whether the time between items has a part in the attention.
    """

    def __init__(self, dim: int, max_length: int, num_heads: int, dropout: float, has_times: bool) -> None:
        super().__init__()
        self.num_heads, self.max_length = num_heads, max_length
        self.norm, self.attended_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project, self.output = make_linear(dim, 4 * dim), make_linear(dim, dim)
        nn.init.zeros_(self.output.weight)
        self.drop = Dropout(dropout)
        self.distances = nn.Parameter(1 + torch.randn(max_length) * 0.02)
        self.gaps = nn.Parameter(torch.randn(_NUM_BUCKETS) * 0.02) if has_times else None

    def forward(
        self,
        slots: Float[Tensor, "slots dim"],
        groups: tuple[tuple[int, int], ...],
        times: Float[Tensor, " slots"] | None,
    ) -> Float[Tensor, "slots dim"]:
        """Returns the layer's output; ``groups`` has the number of rows and of slots a row of each group."""
        sizes = [num_rows * length for num_rows, length in groups]
        gates, *attended_by = functional.silu(self.project(self.norm(slots))).chunk(4, dim=1)
        parts = zip(groups, *(each.split(sizes) for each in attended_by), strict=True)
        times_of_group = [None] * len(sizes) if times is None else times.split(sizes)
        sums = [
            self._attend(own, values, queries, keys, own_times)
            for (own, values, queries, keys), own_times in zip(parts, times_of_group, strict=True)
        ]
        attended = self.attended_norm(sums[0] if len(sums) == 1 else torch.cat(sums))
        return slots + cast(Tensor, self.output(self.drop(attended * gates)))

    def _attend(
        self, group: tuple[int, int], values: Tensor, queries: Tensor, keys: Tensor, times: Tensor | None
    ) -> Float[Tensor, "slots dim"]:
        """Returns ``sum_j a_ij v_j`` for the slots of one group, whose rows have one length."""
        num_rows, length = group
        values, queries, keys = (
            each.unflatten(1, (self.num_heads, -1)).unflatten(0, group).transpose(1, 2)
            for each in (values, queries, keys)
        )
        places = torch.arange(length, device=values.device)
        distances = places.unsqueeze(1) - places
        products = queries @ keys.transpose(2, 3) * queries.shape[3] ** -0.5
        scores = products + self.distances[distances.clamp(min=0)].to(queries.dtype)
        if self.gaps is not None and times is not None:
            by_row = times.view(num_rows, length)
            buckets = gap_buckets(by_row.unsqueeze(2) - by_row.unsqueeze(1))
            scores = scores + functional.embedding(buckets, self.gaps.unsqueeze(1)).squeeze(3).unsqueeze(1)
        weights = functional.silu(scores).masked_fill(distances < 0, 0.0) / self.max_length
        return (weights.to(values.dtype) @ values).transpose(1, 2).flatten(2).flatten(0, 1)


def gap_buckets(gaps: Float[Tensor, "*shape"]) -> Tensor:
    """Returns the bucket of each time between two items: ``log2(1 + gap)``, cut to a whole number of at most 62.

    A gap to an item without a time, NaN, has the bucket 63.
    """
    # log2 is exact for powers of 2, which begin a bucket, unlike log1p divided by log(2)
    return torch.log2(1 + gaps.abs()).clamp(max=_NUM_BUCKETS - 2).nan_to_num(nan=_NUM_BUCKETS - 1).long()


class PointwiseTransformer(nn.Module):
    """Maps vectors of tokens to states at the queries of each row.

    Args:
        dim: Dimension D of a vector.
        max_length: Most tokens of a row; older ones are left out.
        num_layers: Number of layers.
        num_heads: Number of heads.
        dropout: Share of numbers that are dropped in training.
        has_times: Whether tokens have times.
    """

    def __init__(
        self, dim: int, max_length: int, num_layers: int, num_heads: int, dropout: float, has_times: bool = False
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.positions = nn.Parameter(torch.randn(max_length, dim) * 0.02)
        self.drop = Dropout(dropout)
        self.layers = nn.ModuleList(
            PointwiseAttention(dim, max_length, num_heads, dropout, has_times) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, tokens: Float[Tensor, "tokens dim"], rows: QueriedRows, times: Float[Tensor, " tokens"] | None = None
    ) -> Float[Tensor, "queries dim"]:
        """Returns the state at each query, zeros where its row has no token."""
        layout = lay_out(rows, self.max_length)
        of_slots = None if times is None else take_tokens(times.unsqueeze(1), layout.tokens).squeeze(1)
        return self.on_slots(take_tokens(tokens, layout.tokens), layout, of_slots)

    def on_slots(
        self, vectors: Float[Tensor, "slots dim"], layout: SequenceLayout, times: Float[Tensor, " slots"] | None = None
    ) -> Float[Tensor, "queries dim"]:
        """Returns the state at each query from the vectors of slots, by operations on tensors alone."""
        slots = self.drop(functional.embedding(layout.ages, self.positions) + vectors)
        for layer in self.layers:
            slots = layer(slots, layout.groups, times)
        return take_queries(self.norm(slots), layout.queries)
