"""Settings and counts that the ``model`` sections of configs share, read and checked without torch.

Each model is two files: ``NAME_config.py`` has its section, a frozen pydantic dataclass whose ``build`` imports the
network from ``NAME.py``.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import Field as DataclassField
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

import pydantic.dataclasses
from pydantic import AfterValidator, Field

from distembed.base.errors import UserError
from distembed.base.names import STRICT
from distembed.base.validation import Width

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


LARGEST_NUMBER = 2.0**40
"""The largest magnitude of a number that soft one-hot vectors tell apart, about 1.1e12.

With it the squares of gradients are still far from the largest float32.
"""
_WITH_SOFT_ONE_HOT = ("soft_one_hot", "both")

Share = Annotated[float, Field(ge=0, lt=1)]
"""A share of numbers, for example of dropped ones."""


def _require_range(value: list[float]) -> list[float]:
    """Refuses bins that could not lie between the two numbers."""
    if not -LARGEST_NUMBER <= value[0] < value[1] <= LARGEST_NUMBER:
        raise ValueError(f"{value} is no range: set two numbers, the smaller one first")
    return value


ValueRange = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_require_range)]
"""Where the centres of soft one-hot bins start: evenly from the first number to the second."""
Shapes = dict[str, tuple[int, ...]]
"""The shape of each parameter of a module, by its path, in the module's order."""


class ModelConfig(Protocol):
    """A model's section of a config: a frozen pydantic dataclass that builds the model."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The model's name in ``MODELS``."""

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model for a dataset."""


@runtime_checkable
class CountedModelConfig(Protocol):
    """A section that counts the parameters it builds, so that the model is described without torch.

    The model has one table for each categorical feature. Other models are built to be described.
    """

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the model's parameters outside of its tables."""


@runtime_checkable
class DeclaringModelConfig(Protocol):
    """A section that declares the model's output, so that a task that takes another kind of output is refused.

    Attributes:
        returns: ``logits`` [batch] of rows; ``multi_logits`` [batch, labels], in the order of the labels; ``pairs``,
            the queries of users with the items of their rows; ``sequences``; ``towers``, the vectors of users and
            items; or a word of a plugin's own. It has to equal the ``takes`` of the task's section.
    """

    returns: ClassVar[str]


@runtime_checkable
class ItemModelConfig(Protocol):
    """A section that says which features of the dataset are an item's, for a task over a catalogue of items.

    Attributes:
        item: The categorical feature whose ids are the items.
        item_features: The item's other features, categorical or dense.
    """

    item: str
    item_features: list[str]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SoftOneHotConfig:
    """The settings of :class:`distembed.models.soft_one_hot.SoftOneHot`.

    Attributes:
        bins: Number of bins of each feature.
        layer_norm: Whether each feature's vector is normalised.
        value_range: Where the centres of the bins start: evenly from the first number to the second. The default is for
            counts on a log scale, as ``distembed prepare criteo`` writes them.
    """

    bins: Width = 10
    layer_norm: bool = False
    value_range: ValueRange = field(default_factory=lambda: [0.0, 10.0])

    def arguments(self, num_features: int, embedding_dim: int) -> tuple[int, int, int, bool, list[float]]:
        """Returns the arguments of the layer over the features, with vectors of this dimension."""
        return num_features, self.bins, embedding_dim, self.layer_norm, self.value_range

    def shapes(self, path: str, num_features: int, embedding_dim: int) -> Shapes:
        """Returns the shapes of the layer's parameters."""
        bins, vector = (num_features, self.bins), (num_features, embedding_dim)
        shapes = {"weights": bins, "biases": bins, "vectors": (*bins, embedding_dim), "missing": vector}
        norm = {"norm.weight": vector, "norm.bias": vector} if self.layer_norm else {}
        return {f"{path}.{name}": shape for name, shape in (shapes | norm).items()}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class FeatureVectorConfig:
    """The settings of every :class:`distembed.models.vectors.FeatureVectorModel`.

    Attributes:
        soft_one_hot: The settings of the dense features' vectors.
        dropout: Share of the numbers after each hidden layer that are dropped in training.
    """

    returns: ClassVar[str] = "logits"
    soft_one_hot: SoftOneHotConfig = field(default_factory=SoftOneHotConfig)
    dropout: Share = 0.0


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class NextItemsConfig:
    """Settings of models of the next item of a sequence (:mod:`distembed.models.next_items`).

    Vectors have the dimension of the embeddings; the task sets the greatest length of a sequence.

    Attributes:
        dropout: Share of numbers that are dropped in training.
        tied: Whether the items' input vectors are the output's too, or the output has a second table.
        bias: Whether each item has an output bias.
    """

    returns: ClassVar[str] = "sequences"
    dropout: Share = 0.2
    tied: bool = True
    bias: bool = True


def require_heads_divide(num_heads: int, embedding_dim: int) -> None:
    """Refuses heads of attention that are no equal parts of a vector."""
    if embedding_dim % num_heads:
        raise UserError(
            f"model.num_heads is {num_heads}, which does not divide embedding.default.embedding_dim={embedding_dim}; "
            "choose a divisor of it."
        )


def require_used(dense: str, soft_one_hot: SoftOneHotConfig | None) -> None:
    """Refuses settings of soft one-hot vectors for a model that has none."""
    if soft_one_hot is not None and dense not in _WITH_SOFT_ONE_HOT:
        raise ValueError(
            f"soft_one_hot is set, and dense is {dense!r}, which has no such vectors: set dense to "
            f"{' or '.join(_WITH_SOFT_ONE_HOT)}, or leave soft_one_hot out"
        )


def dense_inputs(
    dense: str, soft_one_hot: SoftOneHotConfig | None, inputs: "ModelInputs"
) -> tuple[int, SoftOneHotConfig | None]:
    """Returns the number of dense features that a model takes as numbers, and the settings of its soft one-hot vectors.

    Raises:
        UserError: Numbers may be missing, and the model cannot tell missing numbers from others.
    """
    if not inputs.num_dense:
        return 0, None
    if dense in _WITH_SOFT_ONE_HOT:
        return 0 if dense == "soft_one_hot" else inputs.num_dense, soft_one_hot or SoftOneHotConfig()
    if inputs.schema.missing_dense:
        raise UserError(
            f"model.dense is {dense!r}, and dense numbers of this dataset may be missing, which it cannot tell from "
            f"others: set model.dense to {' or '.join(_WITH_SOFT_ONE_HOT)}, or prepare the data with zeros for what is "
            "missing."
        )
    return inputs.num_dense, None


def mlp_shapes(path: str, in_features: int, sizes: Sequence[int]) -> Shapes:
    """Returns the shapes of an MLP's weights and biases; every second layer is a ReLU."""
    shapes: Shapes = {}
    for number, (fan_in, fan_out) in enumerate(zip([in_features, *sizes[:-1]], sizes, strict=True)):
        shapes[f"{path}.layers.{2 * number}.weight"] = (fan_out, fan_in)
        shapes[f"{path}.layers.{2 * number}.bias"] = (fan_out,)
    return shapes


def plan_values(config: ModelConfig) -> dict[str, Any]:
    """Returns a model's section in plain values, for a plan's inputs; settings at their defaults may be left out."""
    fields = {each.name: each.default for each in dataclasses.fields(config)}
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in ("dense", "soft_one_hot", "cross") or value != fields[name]
    }
