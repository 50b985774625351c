"""The sections of the models ``dcnv2`` and ``gdcn``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Width, Widths
from distembed.models.config import FeatureVectorConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class CrossAndDeepConfig(FeatureVectorConfig):
    """The settings that DCN V2 and Gated DCN share; dropout is in the deep network.

    Attributes:
        num_cross_layers: Number of cross layers.
        deep: Hidden sizes of the deep network.
        structure: Whether the deep network runs beside the cross layers or on their output.
    """

    num_cross_layers: Annotated[int, Field(gt=0, le=1000)] = 3
    deep: Widths = field(default_factory=lambda: [512, 256])
    structure: Literal["parallel", "stacked"] = "parallel"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DCNv2Config(CrossAndDeepConfig):
    """The section of :class:`distembed.models.dcnv2.DCNv2`.

    Attributes:
        name: The model's name, ``dcnv2``.
        rank: Rank of the cross layers' matrices; null for whole matrices.
    """

    name: Literal["dcnv2"] = "dcnv2"
    rank: Width | None = None

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.dcnv2 import DCNv2

        return DCNv2(inputs, self, self.rank)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class GDCNConfig(CrossAndDeepConfig):
    """The section of :class:`distembed.models.dcnv2.DCNv2` whose cross layers have gates.

    Attributes:
        name: The model's name, ``gdcn``.
    """

    name: Literal["gdcn"] = "gdcn"

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.dcnv2 import DCNv2

        return DCNv2(inputs, self, gated=True)
