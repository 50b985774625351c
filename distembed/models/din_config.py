"""The section of the model ``din``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig, SoftOneHotConfig, ValueRange, require_heads_divide

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


HistoryKind = Literal["attention", "transformer", "mean", "sum"]
_Length = Annotated[int, Field(gt=0, le=10_000)]
_DEFAULT_LENGTH = 50
"""Most items that a transformer takes where neither the config nor the dataset has a limit."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DINConfig(FeatureVectorConfig):
    """The section of :class:`distembed.models.din.DIN`; dropout is in the deep network and in transformers.

    ``history`` and ``history_length`` have one value for all histories, or a value for each by its name, for example
    ``history_length: {clicked: 50, bought: 20}``.

    Attributes:
        name: The model's name, ``din``.
        history: How the items of a history become one vector: ``attention``, weighted by the row's item (also of the
            histories that a mapping leaves out); ``transformer``, the last state of a causal transformer; ``mean``;
            or ``sum``.
        attention: Hidden sizes of the network that weighs an item of the history.
        history_length: Most items of a history that are used, the last ones; null for all items. A transformer then
            takes as many items as ``max_length`` of the table's schema, or 50.
        num_blocks: Number of blocks of a transformer.
        num_heads: Number of heads of a transformer, each of an equal part of a vector.
        deep: Hidden sizes of the deep network.
        side_features: Whether the model takes lists of numbers beside histories, such as time gaps.
        side_soft_one_hot: The settings of the vectors of these numbers. The default is for the logarithm of a time in
            seconds: 20 bins up to 15 years.
        side_value_ranges: The ``value_range`` of single lists by their names, as ``{rating: [1, 5]}``.
    """

    name: Literal["din"] = "din"
    history: HistoryKind | dict[str, HistoryKind] = "attention"
    attention: Widths = field(default_factory=lambda: [64, 32])
    history_length: _Length | dict[str, _Length] | None = None
    num_blocks: Annotated[int, Field(gt=0, le=1000)] = 1
    num_heads: Annotated[int, Field(gt=0, le=1000)] = 1
    deep: Widths = field(default_factory=lambda: [512, 256])
    side_features: bool = True
    side_soft_one_hot: SoftOneHotConfig = field(
        default_factory=lambda: SoftOneHotConfig(bins=20, value_range=[0.0, 20.0])
    )
    side_value_ranges: dict[str, ValueRange] = field(default_factory=dict)

    def kind(self, history: str) -> HistoryKind:
        """Returns how the items of a history become one vector."""
        return self.history.get(history, "attention") if isinstance(self.history, dict) else self.history

    def max_length(self, history: str, max_ids_per_row: int | None) -> int | None:
        """Returns the most items of a history that are used, given the dataset's limit; None for all items."""
        own = self.history_length.get(history) if isinstance(self.history_length, dict) else self.history_length
        default = (max_ids_per_row or _DEFAULT_LENGTH) if self.kind(history) == "transformer" else None
        return own or default

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset, which needs at least one history."""
        from distembed.models.din import DIN, DINWithNumbers, numbers_beside

        require_heads_divide(self.num_heads, inputs.embedding_dim)
        has_numbers = self.side_features and any(numbers_beside(inputs).values())
        return (DINWithNumbers if has_numbers else DIN)(inputs, self)
