"""The ``model`` section of a config: one frozen pydantic dataclass for each model, which builds it.

They are apart from the models, so that a config is read and checked without torch.
"""

from collections.abc import Sequence
from dataclasses import Field as DataclassField
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic.dataclasses
from pydantic import Field

from distembed.bounds import Widths
from distembed.data.dataset.schema import ITEM, USER
from distembed.errors import UserError
from distembed.names import STRICT

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


Shapes = dict[str, tuple[int, ...]]
"""The shape of each parameter of a module, by its path, in the module's order."""


class ModelConfig(Protocol):
    """A model's section of a config: a frozen pydantic dataclass that builds the model."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The model's name in ``MODELS``."""

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model for a dataset."""


@runtime_checkable
class CountedModelConfig(Protocol):
    """A model's section that can count what it builds, so that the model is described without torch.

    The model has a table for each categorical feature, and no other. Others are built to be described.
    """

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the model's parameters outside of its tables."""


@runtime_checkable
class DeclaringModelConfig(Protocol):
    """A model's section that says what the model returns, so that a task that takes something else is refused.

    Attributes:
        returns: ``logits`` [batch] of rows; ``pairs``, the queries of users with the items of their rows; or a word of
            one's own, which a task's section has as its ``takes``.
    """

    returns: ClassVar[str]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DLRMConfig:
    """The section of :class:`distembed.models.DLRM`; all other sizes follow from the data and the tables.

    Attributes:
        name: The model's name, ``dlrm``.
        bottom: Hidden sizes of the network over the dense features; its output has the dimension of the embeddings.
        top: Hidden sizes of the network over the interactions; its output is one logit.
    """

    returns: ClassVar[str] = "logits"
    name: Literal["dlrm"] = "dlrm"
    bottom: Widths = field(default_factory=lambda: [512, 256, 64])
    top: Widths = field(default_factory=lambda: [512, 256])

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.dlrm import DLRM

        embeddings, vector_names = inputs.pooled_embeddings()
        return DLRM(embeddings, vector_names, inputs.embedding_dim, inputs.num_dense, self.bottom, self.top)

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the networks' weights and biases."""
        has_bottom = inputs.num_dense > 0
        num_vectors = inputs.num_vectors + has_bottom
        dim, num_pairs = inputs.embedding_dim, num_vectors * (num_vectors - 1) // 2
        bottom = mlp_shapes("bottom", inputs.num_dense, [*self.bottom, dim]) if has_bottom else {}
        return bottom | mlp_shapes("top", (dim if has_bottom else 0) + num_pairs, [*self.top, 1])


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DCNConfig:
    """The section of :class:`distembed.models.DCN`.

    Attributes:
        name: The model's name, ``dcn``.
        deep: Hidden sizes of the deep network.
        num_cross_layers: Number of cross layers.
    """

    returns: ClassVar[str] = "logits"
    name: Literal["dcn"] = "dcn"
    deep: Widths = field(default_factory=lambda: [512, 256, 64])
    num_cross_layers: Annotated[int, Field(gt=0, le=1000)] = 6

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.dcn import DCN

        embeddings, vector_names = inputs.pooled_embeddings()
        return DCN(embeddings, vector_names, inputs.embedding_dim, inputs.num_dense, self.deep, self.num_cross_layers)

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the networks' weights and biases."""
        in_features = inputs.num_dense + inputs.num_vectors * inputs.embedding_dim
        crossed = (self.num_cross_layers, in_features)
        return {
            **mlp_shapes("deep", in_features, self.deep),
            "cross.weights": crossed,
            "cross.biases": crossed,
            "output.weight": (1, self.deep[-1] + in_features),
            "output.bias": (1,),
        }


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MFConfig:
    """The section of :class:`distembed.models.MF`; the dimension of the vectors is that of the embeddings.

    Attributes:
        name: The model's name, ``mf``.
        biases: Whether users and items have biases, which are the last numbers of their vectors.
        dropout: Share of a vector's numbers, biases excepted, that are dropped in training.
    """

    returns: ClassVar[str] = "pairs"
    name: Literal["mf"] = "mf"
    biases: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over users and items; features of other columns are not looked at.

        Raises:
            UserError: The dataset has no users or no items, or a vector has no number beside its bias.
        """
        from distembed.models.mf import MF

        for name in (USER, ITEM):
            if name not in inputs.tables:
                raise UserError(
                    f"MF takes the categorical features {USER!r} and {ITEM!r}, and this dataset has "
                    f"{', '.join(inputs.schema.categorical_names) or 'none'}; make one with `distembed prepare "
                    "ratings`."
                )
        if self.biases and inputs.embedding_dim < 2:
            raise UserError(
                "embedding.default.embedding_dim is 1, and with model.biases the last number of a vector is its bias; "
                "set at least 2, or model.biases to false."
            )
        embeddings, _ = inputs.sequence_embeddings([USER, ITEM])
        return MF(embeddings, inputs.tables[ITEM], self.biases, self.dropout)


def mlp_shapes(path: str, in_features: int, sizes: Sequence[int]) -> Shapes:
    """Returns the shapes of an MLP's weights and biases; between two linear layers there is one without parameters."""
    shapes: Shapes = {}
    for number, (fan_in, fan_out) in enumerate(zip([in_features, *sizes[:-1]], sizes, strict=True)):
        shapes[f"{path}.layers.{2 * number}.weight"] = (fan_out, fan_in)
        shapes[f"{path}.layers.{2 * number}.bias"] = (fan_out,)
    return shapes
