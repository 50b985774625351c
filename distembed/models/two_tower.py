"""Two towers: a network over a user's features and one over an item's, whose vectors are multiplied.

Covington et al. (RecSys 2016) introduce the user's network and Yi et al. (RecSys 2019) the item's::

    user's features   x_u = [vectors of ids, soft one-hot vectors of numbers]     u = MLP_user(x_u)
    item's features   x_v = [vectors of ids, soft one-hot vectors of numbers]     v = MLP_item(x_v)
    score             u . v / (|u| |v| temperature);  without ``normalize``  u . v / temperature

Items do not depend on users, so that their vectors are computed once and searched by their inner products. In exchange
no layer sees features of both.

A batch has two kinds of rows. Rows of queries come first and have both sides' features. Rows of further items follow,
with the item's features alone::

    row        user's ids   item's ids
    0 ... B-1  yes          yes           queries, each with its own item
    B ... R-1  none         yes           further items, for example negatives
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES, WEIGHTS
from distembed.models.base import Model
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP, StackFeatures
from distembed.models.soft_one_hot import SoftOneHot
from distembed.models.two_tower_config import TwoTowerConfig

_LEAST_SQUARE = 1e-12


@dataclass(frozen=True)
class TowerVectors:
    """The output of a model of two towers; the score of an item for a query is the inner product of both vectors.

    Attributes:
        queries: The vector of each row of a query, divided by the temperature.
        items: The vector of each row's item, the further items included.
    """

    queries: Float[Tensor, "queries dim"]
    items: Float[Tensor, "rows dim"]


@dataclass(frozen=True)
class Side:
    """The features of a user or of an item.

    Attributes:
        categorical: Names of the categorical features.
        dense: Names of the dense features.
        dense_columns: The column of each dense feature in a batch.
        vector_names: Name of each vector that tables give; a feature may have several.
    """

    categorical: Sequence[str]
    dense: Sequence[str]
    dense_columns: Sequence[int]
    vector_names: Sequence[str]

    @classmethod
    def of(cls, inputs: ModelInputs, names: Sequence[str]) -> "Side":
        """Returns the side that has these features, in the order of the dataset's columns."""
        table_of = {feature: table for table in inputs.tables.values() for feature in table.feature_names}
        categorical = [feature for feature in inputs.schema.categorical_names if feature in names]
        dense = [name for name in inputs.schema.dense if name in names]
        columns = [inputs.schema.dense.index(name) for name in dense]
        vectors = [key for feature in categorical for key in table_of[feature].vector_names(feature)]
        return cls(categorical, dense, columns, vectors)


class Tower(nn.Module):
    """Maps the features of one side to a vector.

    Args:
        side: The features.
        embedding_dim: Dimension of the vector of each feature.
        hidden: Hidden sizes of the network.
        config: The model's section.
        divisor: The divisor of the vectors: the temperature for users, and 1 for items.
    """

    def __init__(
        self, side: Side, embedding_dim: int, hidden: Sequence[int], config: TwoTowerConfig, divisor: float = 1.0
    ) -> None:
        super().__init__()
        self.side, self.normalize, self.divisor = side, config.normalize, divisor
        self.stack = StackFeatures(side.vector_names, embedding_dim)
        self.soft_one_hot = (
            SoftOneHot(*config.soft_one_hot.arguments(len(side.dense), embedding_dim)) if side.dense else None
        )
        num_inputs = (len(side.vector_names) + len(side.dense)) * embedding_dim
        self.mlp = MLP(num_inputs, [*hidden, config.output_dim], last_is_linear=True, dropout=config.dropout)

    def forward(
        self, embedded: KeyedTensor, numbers: Float[Tensor, "rows dense"], num_rows: int
    ) -> Float[Tensor, "rows dim"]:
        """Returns the vectors of the first ``num_rows`` rows, divided by the divisor, in float32.

        Args:
            embedded: The vectors of the categorical features, by their names.
            numbers: The side's dense features.
            num_rows: Number of rows to compute.
        """
        vectors = []
        if self.side.vector_names:
            vectors.append(self.stack(embedded)[:num_rows].flatten(1))
        if self.soft_one_hot is not None:
            encoded = self.soft_one_hot(numbers[:num_rows]).flatten(1)
            vectors.append(encoded.to(vectors[0].dtype) if vectors else encoded)
        outputs: Tensor = self.mlp(torch.cat(vectors, dim=1)).float()
        return (unit_vectors(outputs) if self.normalize else outputs) / self.divisor


def unit_vectors(vectors: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """Divides vectors by their lengths.

    A vector shorter than 1e-6 has no direction. It becomes 0 and has no gradient: a new network gives 0 for a row
    without any feature, where the gradient of a division by the length would exceed all other gradients by far.
    """
    squares = vectors.square().sum(1, keepdim=True)
    return vectors * torch.where(squares > _LEAST_SQUARE, squares.clamp(min=_LEAST_SQUARE).rsqrt(), 0.0)


class Towers(nn.Module):
    """Both towers over the looked-up vectors of a batch; as a module TorchRec does not trace it."""

    def __init__(self, user: Tower, item: Tower) -> None:
        super().__init__()
        self.user, self.item = user, item
        # as buffers: a list of columns would be copied to a GPU in each step, which waits for the copy
        self.register_buffer("user_columns", torch.tensor(user.side.dense_columns, dtype=torch.int64), persistent=False)
        self.register_buffer("item_columns", torch.tensor(item.side.dense_columns, dtype=torch.int64), persistent=False)

    def forward(
        self,
        embedded: KeyedTensor,
        dense_features: Float[Tensor, "rows dense"],
        weights: Float[Tensor, " queries"],
    ) -> TowerVectors:
        """Returns the vectors of the first ``len(weights)`` rows' users and of all rows' items."""
        user_numbers = dense_features.index_select(1, cast(Tensor, self.user_columns))
        item_numbers = dense_features.index_select(1, cast(Tensor, self.item_columns))
        queries = self.user(embedded, user_numbers, len(weights))
        return TowerVectors(queries, self.item(embedded, item_numbers, len(dense_features)))


class TwoTower(Model):
    """Maps a batch of queries and further items to their vectors.

    Features of users and items that share a table, for example a history of items, share its vectors.

    Args:
        inputs: The features and their tables.
        config: The model's section.

    Raises:
        UserError: The dataset lacks the item or a feature of the item, or the user has no feature.
    """

    batch_fields = (DENSE_FEATURES, SPARSE_FEATURES, WEIGHTS)

    def __init__(self, inputs: ModelInputs, config: TwoTowerConfig) -> None:
        super().__init__()
        schema = inputs.schema
        one_of("model.item", config.item, schema.categorical_names)
        names = [*schema.categorical_names, *schema.dense]
        for name in config.item_features:
            one_of("model.item_features", name, [each for each in names if each != config.item])
        item_side = [config.item, *config.item_features]
        user_side = [name for name in names if name not in item_side]
        if not user_side:
            raise UserError(
                f"all features of the dataset ({', '.join(names)}) are model.item or model.item_features; the tower of "
                "users needs one: shorten model.item_features, or prepare a dataset with a feature of users."
            )
        self.embeddings, _ = inputs.pooled_embeddings()
        user, item = (Side.of(inputs, side) for side in (user_side, item_side))
        self.network = Towers(
            Tower(user, inputs.embedding_dim, config.user_tower, config, config.score_divisor),
            Tower(item, inputs.embedding_dim, config.item_tower, config),
        )

    def forward(
        self,
        dense_features: Float[Tensor, "rows dense"],
        sparse_features: KeyedJaggedTensor,
        weights: Float[Tensor, " queries"],
    ) -> TowerVectors:
        vectors: TowerVectors = self.network(self.embeddings(sparse_features), dense_features, weights)
        return vectors
