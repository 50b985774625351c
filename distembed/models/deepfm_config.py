"""The section of the model ``deepfm``."""

from dataclasses import field
from typing import TYPE_CHECKING, Literal

import pydantic.dataclasses

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DeepFMConfig(FeatureVectorConfig):
    """The section of :class:`distembed.models.deepfm.DeepFM`; dropout is in the deep network.

    Attributes:
        name: The model's name, ``deepfm``.
        deep: Hidden sizes of the deep network.
    """

    name: Literal["deepfm"] = "deepfm"
    deep: Widths = field(default_factory=lambda: [512, 256])

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset."""
        from distembed.models.deepfm import DeepFM

        return DeepFM(inputs, self)
