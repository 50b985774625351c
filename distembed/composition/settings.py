"""The settings of compositions: keys of a table's section in a config, read and checked without torch."""

from dataclasses import field

import pydantic.dataclasses
from pydantic import field_validator

from distembed.base.bounds import Widths
from distembed.base.names import STRICT, one_of
from distembed.composition import ACTIVATIONS
from distembed.partitions.settings import SchemeSettings


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ConcatSettings(SchemeSettings):
    """The settings of ``concat``.

    Attributes:
        dims: The dimension of each partition's vectors; equal shares unless given.
    """

    dims: Widths | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PathMLPSettings(SchemeSettings):
    """The settings of ``path_mlp``.

    Attributes:
        hidden: The hidden sizes of each function.
        activation: The activation between the layers of a function.
    """

    hidden: Widths = field(default_factory=lambda: [64])
    activation: str = "relu"

    @field_validator("activation")
    @classmethod
    def _known_activation(cls, value: str) -> str:
        return one_of("activation", value, ACTIVATIONS)
