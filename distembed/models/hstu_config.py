"""The section of the model ``hstu``."""

from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.models.config import NextItemsConfig, require_heads_divide

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class HSTUConfig(NextItemsConfig):
    """The section of a pointwise transformer over sequences of items (:mod:`distembed.models.hstu`).

    Attributes:
        name: The model's name, ``hstu``.
        num_layers: Number of layers.
        num_heads: Number of heads of attention, each of an equal part of a vector.
        times: Name of a column with a time for each item, in any unit; null for attention without times. A time may be
            missing.
    """

    name: Literal["hstu"] = "hstu"
    num_layers: Annotated[int, Field(gt=0, le=1000)] = 2
    num_heads: Annotated[int, Field(gt=0, le=1000)] = 1
    times: Annotated[str, Field(min_length=1)] | None = None

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over the items of sequences and their times; the heads have to divide a vector."""
        from distembed.base.names import one_of
        from distembed.models.hstu import PointwiseTransformer
        from distembed.models.next_items import NextItems, NextItemsWithNumbers, TokenVectors, item_collections

        dim = inputs.embedding_dim
        require_heads_divide(self.num_heads, dim)
        if self.times is not None:
            one_of("model.times", self.times, inputs.schema.dense_sequences)
        items, has_times = item_collections(inputs, self.tied), self.times is not None
        states = PointwiseTransformer(
            dim, items.max_length, self.num_layers, self.num_heads, self.dropout, has_times=has_times
        )
        model = NextItemsWithNumbers if has_times else NextItems
        return model(items, states, TokenVectors(dim), self.bias, self.times)
