"""The ``model`` section of a config: one dataclass a model, told apart by ``name``."""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, Field, PositiveInt
from torch import nn

from distembed.models.dcn import DCN
from distembed.models.dlrm import DLRM

_STRICT = ConfigDict(extra="forbid", strict=True)
Sizes = Annotated[list[PositiveInt], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class DLRMConfig:
    """Hidden sizes of :class:`distembed.models.DLRM`; its input, D and 1 follow from the data and the tables."""

    name: Literal["dlrm"] = "dlrm"
    bottom: Sizes = field(default_factory=lambda: [512, 256, 64])
    top: Sizes = field(default_factory=lambda: [512, 256])

    def build(
        self, embeddings: nn.Module, vector_names: Sequence[str], embedding_dim: int, num_dense: int
    ) -> nn.Module:
        """Makes the model."""
        return DLRM(embeddings, vector_names, embedding_dim, num_dense, self.bottom, self.top)


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class DCNConfig:
    """Sizes of :class:`distembed.models.DCN`."""

    name: Literal["dcn"] = "dcn"
    deep: Sizes = field(default_factory=lambda: [512, 256, 64])
    num_cross_layers: PositiveInt = 6

    def build(
        self, embeddings: nn.Module, vector_names: Sequence[str], embedding_dim: int, num_dense: int
    ) -> nn.Module:
        """Makes the model."""
        return DCN(embeddings, vector_names, embedding_dim, num_dense, self.deep, self.num_cross_layers)


ModelConfig = Annotated[DLRMConfig | DCNConfig, Field(discriminator="name")]
MODELS = {"dlrm": DLRMConfig, "dcn": DCNConfig}
"""Config class by model name."""


def build_model(
    config: DLRMConfig | DCNConfig,
    embeddings: nn.Module,
    vector_names: Sequence[str],
    embedding_dim: int,
    num_dense: int,
) -> nn.Module:
    """The model of a config around an embedding module.

    Args:
        config: its sizes.
        embeddings: KeyedJaggedTensor -> KeyedTensor.
        vector_names: keys of that KeyedTensor, each a vector of ``embedding_dim``.
        embedding_dim: D.
        num_dense: number of dense features.
    """
    return config.build(embeddings, vector_names, embedding_dim, num_dense)
