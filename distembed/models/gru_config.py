"""The section of the model ``gru``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Width
from distembed.data.dataset.schema import ITEM
from distembed.models.config import NextItemsConfig, SoftOneHotConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class GRUConfig(NextItemsConfig):
    """The section of a recurrent session model (:mod:`distembed.models.gru`).

    Side features, lists of ids and of numbers with an entry for each item, are embedded and projected with the items.
    Numbers are dropped from inputs and between layers.

    Attributes:
        name: The model's name, ``gru``.
        hidden: Numbers of the recurrent state; a linear layer maps it to a vector.
        num_layers: Number of recurrent layers.
        side_features: Whether the model takes side features.
        soft_one_hot: The settings of the vectors of side features that are numbers.
    """

    name: Literal["gru"] = "gru"
    hidden: Width = 100
    num_layers: Annotated[int, Field(gt=0, le=100)] = 1
    side_features: bool = True
    soft_one_hot: SoftOneHotConfig = field(default_factory=SoftOneHotConfig)

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over the items of sequences and their side features."""
        from distembed.models.gru import RecurrentStates
        from distembed.models.next_items import NextItems, NextItemsWithNumbers, TokenVectors, item_collections
        from distembed.models.soft_one_hot import SoftOneHot

        lists = [feature.name for feature in inputs.schema.categorical if feature.multi_hot and feature.table is None]
        beside = [name for name in lists if name != ITEM] if self.side_features else []
        numbers = inputs.schema.dense_sequences if self.side_features else ()
        items, dim = item_collections(inputs, self.tied, beside), inputs.embedding_dim
        states = RecurrentStates(dim, self.hidden, items.max_length, self.num_layers, self.dropout)
        encode = SoftOneHot(*self.soft_one_hot.arguments(len(numbers), dim)) if numbers else None
        model = NextItemsWithNumbers if numbers else NextItems
        return model(items, states, TokenVectors(dim, beside, numbers, encode), self.bias)
