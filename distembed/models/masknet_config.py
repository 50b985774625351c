"""The section of the model ``masknet``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MaskNetConfig(FeatureVectorConfig):
    """The section of :class:`distembed.models.masknet.MaskNet`; dropout is in the deep network after parallel blocks.

    Attributes:
        name: The model's name, ``masknet``.
        structure: Whether the mask blocks run side by side or one after another.
        blocks: Output size of each mask block.
        reduction: Hidden size of a mask's network, as a multiple of the block's inputs.
        deep: Hidden sizes of the network over the outputs of parallel blocks; unused in series.
    """

    name: Literal["masknet"] = "masknet"
    structure: Literal["parallel", "serial"] = "parallel"
    blocks: Widths = field(default_factory=lambda: [64, 64, 64])
    reduction: Annotated[float, Field(gt=0, le=100)] = 1.0
    deep: Widths = field(default_factory=lambda: [256, 128])

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.masknet import MaskNet

        return MaskNet(inputs, self)
