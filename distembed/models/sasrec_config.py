"""The section of the model ``sasrec``."""

from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.models.config import NextItemsConfig, require_heads_divide

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SASRecConfig(NextItemsConfig):
    """The section of a causal transformer over sequences of items (:mod:`distembed.models.sasrec`).

    Weights of attention are dropped as numbers are.

    Attributes:
        name: The model's name, ``sasrec``.
        num_blocks: Number of blocks of attention and of a network of two layers.
        num_heads: Number of heads of attention, each of an equal part of a vector.
    """

    name: Literal["sasrec"] = "sasrec"
    num_blocks: Annotated[int, Field(gt=0, le=1000)] = 2
    num_heads: Annotated[int, Field(gt=0, le=1000)] = 1

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over the items of sequences, without other columns; the heads have to divide a vector."""
        from distembed.models.next_items import NextItems, TokenVectors, item_collections
        from distembed.models.sasrec import CausalTransformer

        dim = inputs.embedding_dim
        require_heads_divide(self.num_heads, dim)
        items = item_collections(inputs, self.tied)
        states = CausalTransformer(dim, items.max_length, self.num_blocks, self.num_heads, self.dropout)
        return NextItems(items, states, TokenVectors(dim), self.bias)
