"""The section of the model ``dlrm``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.names import STRICT
from distembed.base.validation import Width, Widths
from distembed.models.config import Shapes, SoftOneHotConfig, dense_inputs, mlp_shapes, require_used

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LowRankCrossConfig:
    """The settings of :class:`distembed.models.layers.CrossLayersV2` with low rank."""

    num_layers: Annotated[int, Field(gt=0, le=1000)] = 3
    rank: Width = 512


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DLRMConfig:
    """The section of :class:`distembed.models.DLRM`; all other sizes follow from the data and the tables.

    Attributes:
        name: The model's name, ``dlrm``.
        bottom: Hidden sizes of the network over the dense features; its output has the dimension of the embeddings.
        top: Hidden sizes of the network over the interactions; its output is one logit.
        dense: The vector of the dense features: the output of the network ``bottom``, the sum of their soft one-hot
            vectors, or the sum of both.
        soft_one_hot: The settings of soft one-hot vectors, where ``dense`` has them; null for the default ones.
        cross: Cross layers in place of the pairwise dot products (DLRM-DCNv2); null for dot products.
    """

    returns: ClassVar[str] = "logits"
    name: Literal["dlrm"] = "dlrm"
    bottom: Widths = field(default_factory=lambda: [512, 256, 64])
    top: Widths = field(default_factory=lambda: [512, 256])
    dense: Literal["bottom", "soft_one_hot", "both"] = "bottom"
    soft_one_hot: SoftOneHotConfig | None = None
    cross: LowRankCrossConfig | None = None

    @model_validator(mode="after")
    def _settings_are_used(self) -> "DLRMConfig":
        require_used(self.dense, self.soft_one_hot)
        return self

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset; missing dense numbers need soft one-hot vectors."""
        from distembed.models.dlrm import DLRM
        from distembed.models.layers import CrossLayersV2
        from distembed.models.soft_one_hot import SoftOneHotSum

        num_numbers, soft_one_hot = dense_inputs(self.dense, self.soft_one_hot, inputs)
        dim, layer, cross = inputs.embedding_dim, None, None
        if soft_one_hot is not None:
            layer = SoftOneHotSum(*soft_one_hot.arguments(inputs.num_dense, dim))
        if self.cross is not None:
            in_features = (inputs.num_vectors + (inputs.num_dense > 0)) * dim
            cross = CrossLayersV2(in_features, self.cross.num_layers, self.cross.rank)
        embeddings, vector_names = inputs.pooled_embeddings()
        return DLRM(embeddings, vector_names, dim, num_numbers, self.bottom, self.top, layer, cross)

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the networks' weights and biases; errors as :meth:`build`."""
        num_numbers, soft_one_hot = dense_inputs(self.dense, self.soft_one_hot, inputs)
        has_dense = inputs.num_dense > 0
        num_vectors = inputs.num_vectors + has_dense
        dim, num_pairs = inputs.embedding_dim, num_vectors * (num_vectors - 1) // 2
        shapes = mlp_shapes("bottom", num_numbers, [*self.bottom, dim]) if num_numbers else {}
        if soft_one_hot is not None:
            shapes |= soft_one_hot.shapes("soft_one_hot", inputs.num_dense, dim)
        if self.cross is None:
            return shapes | mlp_shapes("top", (dim if has_dense else 0) + num_pairs, [*self.top, 1])
        in_features, rank, layers = num_vectors * dim, self.cross.rank, range(self.cross.num_layers)
        shapes |= {f"interactions.down.{layer}.weight": (rank, in_features) for layer in layers}
        for layer in layers:
            shapes[f"interactions.up.{layer}.weight"] = (in_features, rank)
            shapes[f"interactions.up.{layer}.bias"] = (in_features,)
        return shapes | mlp_shapes("top", in_features, [*self.top, 1])
