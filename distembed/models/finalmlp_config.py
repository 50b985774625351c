"""The section of the model ``finalmlp``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class StreamConfig:
    """The settings of one of the two streams of :class:`distembed.models.finalmlp.FinalMLP`.

    Attributes:
        sizes: Hidden sizes of the stream's network.
        gated_by: Names of the features whose vectors gate the stream, for example ``user`` and ``age``; none for a
            learned vector.
    """

    sizes: Widths = field(default_factory=lambda: [512, 256])
    gated_by: list[str] = field(default_factory=list)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class FinalMLPConfig(FeatureVectorConfig):
    """The section of :class:`distembed.models.finalmlp.FinalMLP`; dropout is in the streams' networks.

    Attributes:
        name: The model's name, ``finalmlp``.
        first: The first stream.
        second: The second stream.
        gate: Hidden sizes of the networks of the gates; null for streams without gates.
        num_heads: Number of heads of the bilinear layer; it divides the last size of both streams.
    """

    name: Literal["finalmlp"] = "finalmlp"
    first: StreamConfig = field(default_factory=StreamConfig)
    second: StreamConfig = field(default_factory=StreamConfig)
    gate: Widths | None = field(default_factory=lambda: [64])
    num_heads: Annotated[int, Field(gt=0, le=1000)] = 8

    @model_validator(mode="after")
    def _heads_divide_streams(self) -> "FinalMLPConfig":
        for name, stream in (("first", self.first), ("second", self.second)):
            if stream.sizes[-1] % self.num_heads:
                raise ValueError(
                    f"num_heads is {self.num_heads}, which does not divide {stream.sizes[-1]}, the last of "
                    f"{name}.sizes; choose a divisor of it"
                )
            if stream.gated_by and self.gate is None:
                raise ValueError(f"{name}.gated_by is set and gate is null: set gate to hidden sizes, or leave it out")
        return self

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset; the features that gate a stream must be among them."""
        from distembed.models.finalmlp import FinalMLP

        return FinalMLP(inputs, self)
