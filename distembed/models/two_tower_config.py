"""The section of the model ``two_tower``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Width
from distembed.data.dataset.schema import ITEM
from distembed.models.config import Share, SoftOneHotConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs

HiddenSizes = Annotated[list[Width], Field(max_length=1000)]
"""Hidden sizes of a tower; none for one linear layer."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TwoTowerConfig:
    """The section of :class:`distembed.models.TwoTower`.

    Attributes:
        name: The model's name, ``two_tower``.
        item: The categorical feature whose ids are the items, one a row.
        item_features: The item's other features, categorical or dense. All remaining features are the user's.
        user_tower: Hidden sizes of the network over the user's features.
        item_tower: Hidden sizes of the network over the item's features.
        output_dim: Dimension of the vectors of users and items.
        normalize: Whether both vectors are scaled to length 1.
        temperature: The divisor of all scores; null for 0.05 with ``normalize``, and for 1 without.
        dropout: Share of the numbers after each hidden layer that are dropped in training.
        soft_one_hot: The settings of the dense features' vectors.
    """

    returns: ClassVar[str] = "towers"
    name: Literal["two_tower"] = "two_tower"
    item: str = ITEM
    item_features: list[str] = field(default_factory=list)
    user_tower: HiddenSizes = field(default_factory=lambda: [256, 128])
    item_tower: HiddenSizes = field(default_factory=lambda: [256, 128])
    output_dim: Width = 64
    normalize: bool = True
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dropout: Share = 0.0
    soft_one_hot: SoftOneHotConfig = field(default_factory=SoftOneHotConfig)

    @property
    def score_divisor(self) -> float:
        """The divisor of all scores."""
        if self.temperature is not None:
            return self.temperature
        return 0.05 if self.normalize else 1.0

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset.

        Raises:
            UserError: The dataset lacks the item or a feature of the item, or the user has no feature.
        """
        from distembed.models.two_tower import TwoTower

        return TwoTower(inputs, self)
