"""A plain SASRec on one device (Kang & McAuley 2018, section III), the peer of distembed's SASRec.

Sequences are padded on the left to one length, as in published code. Items are in one ``nn.Embedding``, whose row 0 is
the padding and which is also the output unless untied. The losses are the paper's binary loss with one negative a
target, and the cross-entropy of a softmax over all items, with all logits at once.

Shape letters: ``B`` sequences, ``L`` positions, ``D`` numbers of a vector, ``N`` items with the padding.
"""

import dataclasses

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model; ``num_items`` includes the padding, and ``bias`` is each item's bias in the output."""

    num_items: int
    max_length: int = 50
    embedding_dim: int = 64
    num_blocks: int = 2
    num_heads: int = 2
    feedforward_dim: int = 64
    dropout: float = 0.5
    tied: bool = True
    bias: bool = True


class Block(nn.Module):
    """Self-attention and a feed-forward network, each with a norm before and a sum after it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim = size.embedding_dim
        self.num_heads, self.dropout = size.num_heads, size.dropout
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, size.feedforward_dim),
            nn.ReLU(),
            nn.Dropout(size.dropout),
            nn.Linear(size.feedforward_dim, dim),
        )
        self.drop = nn.Dropout(size.dropout)

    def forward(self, hidden: Float[Tensor, "B L D"], mask: Tensor) -> Float[Tensor, "B L D"]:
        """Returns the block's outputs; the mask (bool ``[B, 1, L, L]``) is whether row position attends to column."""
        projected = self.project(self.attention_norm(hidden))
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        hidden = hidden + self.drop(self.output(attended.transpose(1, 2).flatten(2)))
        return hidden + self.drop(self.feedforward(self.feedforward_norm(hidden)))


class PlainSASRec(nn.Module):
    """Self-attentive sequential recommendation: a vector that predicts the next item after each position."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.items = nn.Embedding(size.num_items, size.embedding_dim, padding_idx=0)
        self.outputs = self.items if size.tied else nn.Embedding(size.num_items, size.embedding_dim)
        self.positions = nn.Embedding(size.max_length, size.embedding_dim)
        self.bias = nn.Parameter(torch.zeros(size.num_items)) if size.bias else None
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.embedding_dim)
        self.drop = nn.Dropout(size.dropout)
        for table in {self.items, self.outputs, self.positions}:
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, inputs: Int64[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """Returns a vector for each position of at most ``max_length`` items, padded with 0 on the left."""
        length = inputs.shape[1]
        hidden = self.drop(self.items(inputs) + self.positions.weight[-length:])
        causal = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=inputs.device)
        mask = (causal & (inputs != 0)[:, None, None, :]) | itself
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.norm(hidden)

    def scores(self, vectors: Float[Tensor, "rows D"]) -> Float[Tensor, "rows N"]:
        """Returns the score of every item; the padding's score has no meaning."""
        return functional.linear(vectors, self.outputs.weight, self.bias)

    def softmax_loss(self, inputs: Int64[Tensor, "B L"], targets: Int64[Tensor, "B L"]) -> Float[Tensor, ""]:
        """Returns the mean cross-entropy of the softmax over all items, without targets of 0."""
        counted = targets != 0
        return functional.cross_entropy(self.scores(self(inputs)[counted]), targets[counted])

    def binary_loss(
        self, inputs: Int64[Tensor, "B L"], targets: Int64[Tensor, "B L"], negatives: Int64[Tensor, "B L"]
    ) -> Float[Tensor, ""]:
        """Returns the mean binary loss of targets and one negative each, the paper's equation 6."""
        counted = targets != 0
        vectors = self(inputs)[counted]
        positive, negative = (self._score(vectors, items[counted]) for items in (targets, negatives))
        return -(functional.logsigmoid(positive) + functional.logsigmoid(-negative)).mean()

    def _score(self, vectors: Float[Tensor, "rows D"], items: Int64[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        scores = (vectors * self.outputs(items)).sum(1)
        return scores if self.bias is None else scores + self.bias[items]
