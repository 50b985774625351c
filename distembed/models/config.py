"""The ``model`` section of a config: one frozen pydantic dataclass for each model, which builds it.

They are apart from the models, so that a config is read and checked without torch.
"""

from dataclasses import Field as DataclassField
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import pydantic.dataclasses
from pydantic import Field

from distembed.bounds import Widths
from distembed.names import STRICT

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


class ModelConfig(Protocol):
    """A model's section of a config: a frozen pydantic dataclass that builds the model."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The model's name in ``MODELS``."""

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model for a dataset."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DLRMConfig:
    """The section of :class:`distembed.models.DLRM`; all other sizes follow from the data and the tables.

    Attributes:
        name: The model's name, ``dlrm``.
        bottom: Hidden sizes of the network over the dense features; its output has the dimension of the embeddings.
        top: Hidden sizes of the network over the interactions; its output is one logit.
    """

    name: Literal["dlrm"] = "dlrm"
    bottom: Widths = field(default_factory=lambda: [512, 256, 64])
    top: Widths = field(default_factory=lambda: [512, 256])

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.dlrm import DLRM

        embeddings, vector_names = inputs.pooled_embeddings()
        return DLRM(embeddings, vector_names, inputs.embedding_dim, inputs.num_dense, self.bottom, self.top)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DCNConfig:
    """The section of :class:`distembed.models.DCN`.

    Attributes:
        name: The model's name, ``dcn``.
        deep: Hidden sizes of the deep network.
        num_cross_layers: Number of cross layers.
    """

    name: Literal["dcn"] = "dcn"
    deep: Widths = field(default_factory=lambda: [512, 256, 64])
    num_cross_layers: Annotated[int, Field(gt=0, le=1000)] = 6

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.dcn import DCN

        embeddings, vector_names = inputs.pooled_embeddings()
        return DCN(embeddings, vector_names, inputs.embedding_dim, inputs.num_dense, self.deep, self.num_cross_layers)
