"""The ``model`` section of a config: one frozen pydantic dataclass for each model, which builds it.

They are apart from the models, so that a config is read and checked without torch.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import Field as DataclassField
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic.dataclasses
from pydantic import Field, field_validator, model_validator

from distembed.base.bounds import Width, Widths
from distembed.base.errors import UserError
from distembed.base.names import STRICT
from distembed.data.dataset.schema import ITEM, USER

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


LARGEST_NUMBER = 2.0**40
"""The largest magnitude of a number that soft one-hot vectors tell apart, about 1.1e12.

With it the squares of gradients are still far from the largest float32.
"""
_WITH_SOFT_ONE_HOT = ("soft_one_hot", "both")

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
    """A model's section that can count what it builds, so that the model is described without torch.

    The model has a table for each categorical feature, and no other. Others are built to be described.
    """

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the model's parameters outside of its tables."""


@runtime_checkable
class DeclaringModelConfig(Protocol):
    """A model's section that says what the model returns, so that a task that takes something else is refused.

    Attributes:
        returns: ``logits`` [batch] of rows; ``pairs``, the queries of users with the items of their rows; or a word of
            one's own, which a task's section has as its ``takes``.
    """

    returns: ClassVar[str]


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
    value_range: Annotated[list[float], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [0.0, 10.0])

    @field_validator("value_range")
    @classmethod
    def _is_a_range(cls, value: list[float]) -> list[float]:
        """Refuses bins that could not lie between the two numbers."""
        if not -LARGEST_NUMBER <= value[0] < value[1] <= LARGEST_NUMBER:
            raise ValueError(f"{value} is no range: set two numbers, the smaller one first")
        return value

    def arguments(self, num_features: int, embedding_dim: int) -> tuple[int, int, int, bool, list[float]]:
        """Returns the arguments of the layer over so many features, with vectors of this dimension."""
        return num_features, self.bins, embedding_dim, self.layer_norm, self.value_range

    def shapes(self, path: str, num_features: int, embedding_dim: int) -> Shapes:
        """Returns the shapes of the layer's parameters."""
        bins, vector = (num_features, self.bins), (num_features, embedding_dim)
        shapes = {"weights": bins, "biases": bins, "vectors": (*bins, embedding_dim), "missing": vector}
        norm = {"norm.weight": vector, "norm.bias": vector} if self.layer_norm else {}
        return {f"{path}.{name}": shape for name, shape in (shapes | norm).items()}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LowRankCrossConfig:
    """The settings of :class:`distembed.models.low_rank_cross.LowRankCross`."""

    num_layers: Annotated[int, Field(gt=0, le=1000)] = 3
    rank: Width = 512


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DLRMConfig:
    """The section of :class:`distembed.models.DLRM`; all other sizes follow from the data and the tables.

    Attributes:
        name: The model's name, ``dlrm``.
        bottom: Hidden sizes of the network over the dense features; its output has the dimension of the embeddings.
        top: Hidden sizes of the network over the interactions; its output is one logit.
        dense: What makes a vector of the dense features: the network ``bottom``, the sum of their soft one-hot vectors,
            or the sum of both.
        soft_one_hot: The settings of soft one-hot vectors, where ``dense`` has them; null for the default ones.
        cross: Cross layers in place of the pairwise dot products (DLRM-DCNv2); null for dot products.
    """

    returns: ClassVar[str] = "logits"
    name: Literal["dlrm"] = "dlrm"
    bottom: Widths = field(default_factory=lambda: [512, 256, 64])
    top: Widths = field(default_factory=lambda: [512, 256])
    dense: Literal["bottom", "soft_one_hot", "both"] = "bottom"
    soft_one_hot: SoftOneHotConfig | None = None
    cross: LowRankCrossConfig | None = None

    @model_validator(mode="after")
    def _settings_are_used(self) -> "DLRMConfig":
        """Refuses settings of soft one-hot vectors that the model has not."""
        _require_used(self.dense, self.soft_one_hot)
        return self

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset.

        Raises:
            UserError: Dense numbers may be missing, and the model cannot tell that they are.
        """
        from distembed.models.dlrm import DLRM
        from distembed.models.low_rank_cross import LowRankCross
        from distembed.models.soft_one_hot import SoftOneHotSum

        num_numbers, soft_one_hot = _dense_inputs(self.dense, self.soft_one_hot, inputs)
        dim, layer, cross = inputs.embedding_dim, None, None
        if soft_one_hot is not None:
            layer = SoftOneHotSum(*soft_one_hot.arguments(inputs.num_dense, dim))
        if self.cross is not None:
            in_features = (inputs.num_vectors + (inputs.num_dense > 0)) * dim
            cross = LowRankCross(in_features, self.cross.num_layers, self.cross.rank)
        embeddings, vector_names = inputs.pooled_embeddings()
        return DLRM(embeddings, vector_names, dim, num_numbers, self.bottom, self.top, layer, cross)

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the networks' weights and biases; errors as :meth:`build`."""
        num_numbers, soft_one_hot = _dense_inputs(self.dense, self.soft_one_hot, inputs)
        has_dense = inputs.num_dense > 0
        num_vectors = inputs.num_vectors + has_dense
        dim, num_pairs = inputs.embedding_dim, num_vectors * (num_vectors - 1) // 2
        shapes = mlp_shapes("bottom", num_numbers, [*self.bottom, dim]) if num_numbers else {}
        if soft_one_hot is not None:
            shapes |= soft_one_hot.shapes("soft_one_hot", inputs.num_dense, dim)
        if self.cross is None:
            return shapes | mlp_shapes("top", (dim if has_dense else 0) + num_pairs, [*self.top, 1])
        in_features, rank, layers = num_vectors * dim, self.cross.rank, range(self.cross.num_layers)
        shapes |= {f"interactions.down.{layer}.weight": (rank, in_features) for layer in layers}
        for layer in layers:
            shapes[f"interactions.up.{layer}.weight"] = (in_features, rank)
            shapes[f"interactions.up.{layer}.bias"] = (in_features,)
        return shapes | mlp_shapes("top", in_features, [*self.top, 1])


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DCNConfig:
    """The section of :class:`distembed.models.DCN`.

    Attributes:
        name: The model's name, ``dcn``.
        deep: Hidden sizes of the deep network.
        num_cross_layers: Number of cross layers.
        dense: What the inputs have of each dense feature: its number, its soft one-hot vector, or both.
        soft_one_hot: The settings of soft one-hot vectors, where ``dense`` has them; null for the default ones.
    """

    returns: ClassVar[str] = "logits"
    name: Literal["dcn"] = "dcn"
    deep: Widths = field(default_factory=lambda: [512, 256, 64])
    num_cross_layers: Annotated[int, Field(gt=0, le=1000)] = 6
    dense: Literal["numbers", "soft_one_hot", "both"] = "numbers"
    soft_one_hot: SoftOneHotConfig | None = None

    @model_validator(mode="after")
    def _settings_are_used(self) -> "DCNConfig":
        """Refuses settings of soft one-hot vectors that the model has not."""
        _require_used(self.dense, self.soft_one_hot)
        return self

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset.

        Raises:
            UserError: Dense numbers may be missing, and the model cannot tell that they are.
        """
        from distembed.models.dcn import DCN
        from distembed.models.soft_one_hot import SoftOneHot

        num_numbers, soft_one_hot = _dense_inputs(self.dense, self.soft_one_hot, inputs)
        layer = None
        if soft_one_hot is not None:
            layer = SoftOneHot(*soft_one_hot.arguments(inputs.num_dense, inputs.embedding_dim))
        embeddings, vector_names = inputs.pooled_embeddings()
        cross = self.num_cross_layers
        return DCN(embeddings, vector_names, inputs.embedding_dim, num_numbers, self.deep, cross, layer)

    def dense_shapes(self, inputs: "ModelInputs") -> Shapes:
        """Returns the shapes of the networks' weights and biases; errors as :meth:`build`."""
        num_numbers, soft_one_hot = _dense_inputs(self.dense, self.soft_one_hot, inputs)
        dim = inputs.embedding_dim
        in_features = num_numbers + (inputs.num_vectors + (inputs.num_dense if soft_one_hot else 0)) * dim
        crossed = (self.num_cross_layers, in_features)
        return {
            **(soft_one_hot.shapes("soft_one_hot", inputs.num_dense, dim) if soft_one_hot else {}),
            **mlp_shapes("deep", in_features, self.deep),
            "cross.weights": crossed,
            "cross.biases": crossed,
            "output.weight": (1, self.deep[-1] + in_features),
            "output.bias": (1,),
        }


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MFConfig:
    """The section of :class:`distembed.models.MF`; the dimension of the vectors is that of the embeddings.

    Attributes:
        name: The model's name, ``mf``.
        biases: Whether users and items have biases, which are the last numbers of their vectors.
        dropout: Share of a vector's numbers, biases excepted, that are dropped in training.
    """

    returns: ClassVar[str] = "pairs"
    name: Literal["mf"] = "mf"
    biases: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over users and items; features of other columns are not looked at.

        Raises:
            UserError: The dataset has no users or no items, an id has several vectors, or a vector has no number beside
                its bias.
        """
        from distembed.embedding.share import require_one_vector
        from distembed.models.mf import MF

        for name in (USER, ITEM):
            if name not in inputs.tables:
                raise UserError(
                    f"MF takes the categorical features {USER!r} and {ITEM!r}, and this dataset has "
                    f"{', '.join(inputs.schema.categorical_names) or 'none'}; make one with `distembed prepare "
                    "ratings`."
                )
            require_one_vector(inputs.tables[name])
        if self.biases and inputs.embedding_dim < 2:
            raise UserError(
                "embedding.default.embedding_dim is 1, and with model.biases the last number of a vector is its bias; "
                "set at least 2, or model.biases to false."
            )
        several = {feature.name for feature in inputs.schema.categorical if feature.multi_hot}
        looked_up = {*inputs.tables[USER].feature_names, *inputs.tables[ITEM].feature_names}
        is_pooled = not several & looked_up  # of one id a row the lookup that pools has less to do
        embeddings, _ = (inputs.pooled_embeddings if is_pooled else inputs.sequence_embeddings)([USER, ITEM])
        return MF(embeddings, is_pooled, inputs.tables[ITEM], self.biases, self.dropout)


def _require_used(dense: str, soft_one_hot: SoftOneHotConfig | None) -> None:
    """Refuses settings of soft one-hot vectors for a model that has none."""
    if soft_one_hot is not None and dense not in _WITH_SOFT_ONE_HOT:
        raise ValueError(
            f"soft_one_hot is set, and dense is {dense!r}, which has no such vectors: set dense to "
            f"{' or '.join(_WITH_SOFT_ONE_HOT)}, or leave soft_one_hot out"
        )


def _dense_inputs(
    dense: str, soft_one_hot: SoftOneHotConfig | None, inputs: "ModelInputs"
) -> tuple[int, SoftOneHotConfig | None]:
    """Returns how many dense features a model takes as numbers, and the settings of its soft one-hot vectors, if any.

    Raises:
        UserError: Numbers may be missing, and the model has nothing that tells it.
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


def plan_values(config: ModelConfig) -> dict[str, Any]:
    """Returns a model's section in plain values, for a plan's inputs.

    Defaults of settings that models did not always have are left out, so that plans saved before them still match.
    """
    fields = {each.name: each.default for each in dataclasses.fields(config)}
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in ("dense", "soft_one_hot", "cross") or value != fields[name]
    }


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SASRecConfig:
    """The section of a causal transformer over sequences of items (:mod:`distembed.models.sasrec`).

    The dimension of its vectors is that of the embeddings, and the greatest length of a sequence the task's.

    Attributes:
        name: The model's name, ``sasrec``.
        num_blocks: Number of blocks of attention and of a network of two layers.
        num_heads: Number of heads of attention, each of an equal part of a vector.
        dropout: Share of numbers, and of weights of attention, that are dropped in training.
        tied: Whether the items' input vectors are the output's too, or there is a second table for that.
        bias: Whether each item has an output bias.
    """

    returns: ClassVar[str] = "sequences"
    name: Literal["sasrec"] = "sasrec"
    num_blocks: Annotated[int, Field(gt=0, le=1000)] = 2
    num_heads: Annotated[int, Field(gt=0, le=1000)] = 1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    tied: bool = True
    bias: bool = True

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over the items of sequences; other columns are not looked at.

        Raises:
            UserError: Batches are no sequences of items, or the heads do not divide a vector.
        """
        from distembed.models.next_items import NextItems, TokenVectors, item_collections
        from distembed.models.sasrec import CausalTransformer

        dim = inputs.embedding_dim
        if dim % self.num_heads:
            raise UserError(
                f"model.num_heads is {self.num_heads}, which does not divide embedding.default.embedding_dim={dim}; "
                "choose a divisor of it."
            )
        items = item_collections(inputs, self.tied)
        states = CausalTransformer(dim, items.max_length, self.num_blocks, self.num_heads, self.dropout)
        return NextItems(items, states, TokenVectors(dim), self.bias)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class GRUConfig:
    """The section of a recurrent session model (:mod:`distembed.models.session`).

    Lists of ids and of numbers that stand beside the items are embedded, and projected together with them.

    Attributes:
        name: The model's name, ``gru``.
        hidden: Numbers of the recurrent state; a linear layer maps it to those of a vector.
        num_layers: Number of recurrent layers.
        dropout: Share of numbers of inputs, and between layers, that are dropped in training.
        tied: Whether the items' input vectors are the output's too, or there is a second table for that.
        bias: Whether each item has an output bias.
        side_features: Whether the model takes what stands beside the items.
        soft_one_hot: How numbers beside the items become vectors.
    """

    returns: ClassVar[str] = "sequences"
    name: Literal["gru"] = "gru"
    hidden: Width = 100
    num_layers: Annotated[int, Field(gt=0, le=100)] = 1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    tied: bool = True
    bias: bool = True
    side_features: bool = True
    soft_one_hot: SoftOneHotConfig = field(default_factory=SoftOneHotConfig)

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over the items of sequences and, unless told not to, over what stands beside them.

        Raises:
            UserError: Batches are no sequences of items.
        """
        from distembed.models.next_items import NextItems, NextItemsWithNumbers, TokenVectors, item_collections
        from distembed.models.session import RecurrentStates
        from distembed.models.soft_one_hot import SoftOneHot

        lists = [each.name for each in inputs.schema.categorical if each.multi_hot and each.table is None]
        beside = [name for name in lists if name != ITEM] if self.side_features else []
        numbers = inputs.schema.dense_sequences if self.side_features else ()
        items, dim = item_collections(inputs, self.tied, beside), inputs.embedding_dim
        states = RecurrentStates(dim, self.hidden, items.max_length, self.num_layers, self.dropout)
        encode = SoftOneHot(*self.soft_one_hot.arguments(len(numbers), dim)) if numbers else None
        model = NextItemsWithNumbers if numbers else NextItems
        return model(items, states, TokenVectors(dim, beside, numbers, encode), self.bias)


def mlp_shapes(path: str, in_features: int, sizes: Sequence[int]) -> Shapes:
    """Returns the shapes of an MLP's weights and biases; between two linear layers there is one without parameters."""
    shapes: Shapes = {}
    for number, (fan_in, fan_out) in enumerate(zip([in_features, *sizes[:-1]], sizes, strict=True)):
        shapes[f"{path}.layers.{2 * number}.weight"] = (fan_out, fan_in)
        shapes[f"{path}.layers.{2 * number}.bias"] = (fan_out,)
    return shapes
