"""The section of the model ``dcn``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import Shapes, SoftOneHotConfig, dense_inputs, mlp_shapes, require_used

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DCNConfig:
    """The section of :class:`distembed.models.DCN`.

    Attributes:
        name: The model's name, ``dcn``.
        deep: Hidden sizes of the deep network.
        num_cross_layers: Number of cross layers.
        dense: The inputs from each dense feature: its number, its soft one-hot vector, or both.
        soft_one_hot: The settings of soft one-hot vectors, where ``dense`` has them; null for the default ones.
    """

    returns: ClassVar[str] = "logits"
    name: Literal["dcn"] = "dcn"
    deep: Widths = field(default_factory=lambda: [512, 256, 64])
    num_cross_layers: Annotated[int, Field(gt=0, le=1000)] = 6
    dense: Literal["numbers", "soft_one_hot", "both"] = "numbers"
    soft_one_hot: SoftOneHotConfig | None = None

    @model_validator(mode="after")
    def _settings_are_used(self) -> "DCNConfig":
        require_used(self.dense, self.soft_one_hot)
        return self

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset; missing dense numbers need soft one-hot vectors."""
        from distembed.models.dcn import DCN
        from distembed.models.soft_one_hot import SoftOneHot

        num_numbers, soft_one_hot = dense_inputs(self.dense, self.soft_one_hot, inputs)
        layer = None
        if soft_one_hot is not None:
            layer = SoftOneHot(*soft_one_hot.arguments(inputs.num_dense, inputs.embedding_dim))
        embeddings, vector_names = inputs.pooled_embeddings()
        cross = self.num_cross_layers
        return DCN(embeddings, vector_names, inputs.embedding_dim, num_numbers, self.deep, cross, layer)

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the networks' weights and biases; errors as :meth:`build`."""
        num_numbers, soft_one_hot = dense_inputs(self.dense, self.soft_one_hot, inputs)
        dim = inputs.embedding_dim
        in_features = num_numbers + (inputs.num_vectors + (inputs.num_dense if soft_one_hot else 0)) * dim
        crossed = (self.num_cross_layers, in_features)
        return {
            **(soft_one_hot.shapes("soft_one_hot", inputs.num_dense, dim) if soft_one_hot else {}),
            **mlp_shapes("deep", in_features, self.deep),
            "cross.weights": crossed,
            "cross.biases": crossed,
            "output.weight": (1, self.deep[-1] + in_features),
            "output.bias": (1,),
        }
