"""SASRec (Kang and McAuley, ICDM 2018): a causal transformer over a user's items predicts the next one.

A token's vector is ``sqrt(D) u_i + p_a``, where the learned position p_a counts from the most recent item, a = 0, as
the paper's padding on the left does. Each block is ``x + dropout(attention(norm(x)))``, then ``x +
dropout(network(norm(x)))`` with a network of two layers (section III.B). The state after the last norm is multiplied
with the item table, which is the input table too (section III.D).

Rows are laid out in groups of similar length, see :mod:`distembed.models.sequences`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from distembed.models.layers import Dropout, drop
from distembed.models.sequences import QueriedRows, SequenceLayout, lay_out, take_queries, take_tokens

Groups = Sequence[tuple[int, int]]
"""Number of rows and of slots a row of each group."""


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a slot attends to itself and to earlier slots of its row.

    Args:
        dim: Dimension D of a vector.
        num_heads: Number of heads, each of D / num_heads numbers.
        dropout: Share of the weights that are dropped in training.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.project = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, slots: Float[Tensor, "slots dim"], groups: Groups) -> Float[Tensor, "slots dim"]:
        """Returns the attention output of each slot over the slots of its row."""
        projected = self.project(slots)
        sizes = [num_rows * length for num_rows, length in groups]
        attended = [
            self._attend(group, num_rows, length)
            for group, (num_rows, length) in zip(projected.split(sizes), groups, strict=True)
        ]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended)
        output: Tensor = self.output(joined)
        return output

    def _attend(self, projected: Tensor, num_rows: int, length: int) -> Float[Tensor, "slots dim"]:
        """Returns the attention of one group; its rows have one length."""
        head_dim = projected.shape[1] // (3 * self.num_heads)
        by_head = projected.view(num_rows, length, 3, self.num_heads, head_dim).permute(2, 0, 3, 1, 4)
        queries, keys, values = by_head.unbind(0)
        if self.training and self.dropout > 0 and projected.device.type == "cpu":
            attended = attend(queries, keys, values, self.dropout)
        else:
            dropout = self.dropout if self.training else 0.0
            attended = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        return attended.transpose(1, 2).reshape(num_rows * length, self.num_heads * head_dim)


Vectors = Float[Tensor, "rows heads slots head_dim"]


def attend(queries: Vectors, keys: Vectors, values: Vectors, dropout: float) -> Vectors:
    """Returns causal attention with dropped weights, as torch's does, which takes twice as long on a CPU."""
    num_rows, num_heads, length, dim = queries.shape
    flat = [vectors.reshape(num_rows * num_heads, length, dim) for vectors in (queries, keys, values)]
    later = torch.full((length, length), -torch.inf, dtype=queries.dtype).triu(1)
    scores = torch.baddbmm(later, flat[0], flat[1].transpose(1, 2), alpha=dim**-0.5)
    weights = drop(scores.softmax(2), dropout).to(queries.dtype)
    return torch.bmm(weights, flat[2]).view(num_rows, num_heads, length, dim)


class Block(nn.Module):
    """Attention and a network of two layers, each with a norm before it and a sum after it."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, num_heads, dropout)
        self.network = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), Dropout(dropout), nn.Linear(dim, dim))
        self.drop = Dropout(dropout)

    def forward(self, slots: Float[Tensor, "slots dim"], groups: Groups) -> Float[Tensor, "slots dim"]:
        slots = slots + self.drop(self.attention(self.attention_norm(slots), groups))
        return slots + self.drop(self.network(self.network_norm(slots)))


class CausalTransformer(nn.Module):
    """Maps vectors of tokens to states at the queries of each row.

    Args:
        dim: Dimension D of a vector.
        max_length: Most tokens of a row; older ones are left out.
        num_blocks: Number of blocks.
        num_heads: Number of heads.
        dropout: Share of numbers that are dropped in training.
    """

    def __init__(self, dim: int, max_length: int, num_blocks: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.max_length = max_length
        self.positions = nn.Parameter(torch.randn(max_length, dim) * 0.02)
        self.drop = Dropout(dropout)
        self.blocks = nn.ModuleList([Block(dim, num_heads, dropout) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Float[Tensor, "tokens dim"], queried: QueriedRows) -> Float[Tensor, "queries dim"]:
        """Returns the state at each query, zeros where its row has no token."""
        layout = lay_out(queried, self.max_length)
        return self.on_slots(take_tokens(tokens, layout.tokens), layout)

    def on_slots(self, vectors: Float[Tensor, "slots dim"], layout: SequenceLayout) -> Float[Tensor, "queries dim"]:
        """Returns the state at each query from the vectors of slots, by operations on tensors alone."""
        slots = self.drop(functional.embedding(layout.ages, self.positions) + vectors)
        for block in self.blocks:
            slots = block(slots, layout.groups)
        return take_queries(self.norm(slots), layout.queries)
