"""The sections of the models ``mmoe`` and ``ple``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs

NumExperts = Annotated[int, Field(gt=0, le=1000)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ExpertsConfig(FeatureVectorConfig):
    """The settings that MMoE and PLE share; dropout is in the experts and in the towers.

    Attributes:
        deep: Hidden sizes of each expert.
        tower: Hidden sizes of each label's tower, before its logit.
    """

    returns: ClassVar[str] = "multi_logits"
    deep: Widths = field(default_factory=lambda: [512, 256])
    tower: Widths = field(default_factory=lambda: [64])


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MMoEConfig(ExpertsConfig):
    """The section of :class:`distembed.models.experts.Experts` with one level of shared experts.

    Attributes:
        name: The model's name, ``mmoe``.
        num_experts: Number of experts, which all labels share; 1 is a shared bottom.
    """

    name: Literal["mmoe"] = "mmoe"
    num_experts: NumExperts = 4

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset, with a gate and a tower for each label."""
        from distembed.models.experts import Experts

        return Experts(inputs, self, num_shared=self.num_experts)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PLEConfig(ExpertsConfig):
    """The section of :class:`distembed.models.experts.Experts` with levels of shared and of specific experts.

    Attributes:
        name: The model's name, ``ple``.
        num_levels: Number of levels; 1 is customised gate control (CGC).
        num_shared: Number of experts of a level that all labels share.
        num_specific: Number of experts of a level that each label has for itself.
    """

    name: Literal["ple"] = "ple"
    num_levels: Annotated[int, Field(gt=0, le=100)] = 2
    num_shared: NumExperts = 2
    num_specific: NumExperts = 2

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset, with gates, experts and a tower for each label."""
        from distembed.models.experts import Experts

        return Experts(inputs, self, self.num_shared, self.num_specific, self.num_levels)
