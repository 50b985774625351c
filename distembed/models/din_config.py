"""The section of the model ``din``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig, require_heads_divide

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DINConfig(FeatureVectorConfig):
    """The section of :class:`distembed.models.din.DIN`; dropout is in the deep network and in the transformer.

    Attributes:
        name: The model's name, ``din``.
        history: How the items of a history become one vector: ``attention``, weighted by the row's item, or
            ``transformer``, the last state of a causal transformer.
        attention: Hidden sizes of the network that weighs an item of the history.
        history_length: Most items of a history that the transformer takes, the last ones.
        num_blocks: Number of blocks of the transformer.
        num_heads: Number of heads of the transformer, each of an equal part of a vector.
        deep: Hidden sizes of the deep network.
    """

    name: Literal["din"] = "din"
    history: Literal["attention", "transformer"] = "attention"
    attention: Widths = field(default_factory=lambda: [64, 32])
    history_length: Annotated[int, Field(gt=0, le=10_000)] = 50
    num_blocks: Annotated[int, Field(gt=0, le=1000)] = 1
    num_heads: Annotated[int, Field(gt=0, le=1000)] = 1
    deep: Widths = field(default_factory=lambda: [512, 256])

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset, which needs at least one history."""
        from distembed.models.din import DIN

        require_heads_divide(self.num_heads, inputs.embedding_dim)
        return DIN(inputs, self)
