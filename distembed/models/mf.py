"""Matrix factorisation (Koren et al., IEEE Computer 2009; with SSE: Wu et al., NeurIPS 2019, section 4.1).

The score of a user for an item is ``u . v + b_user + b_item``. Biases are the last numbers of the vectors that are
looked up, so that they are sharded, compressed and replaced with them::

    user vector   u_1 ... u_{D-1}  b_user         query   u_1 ... u_{D-1}  1        offset  b_user
    item vector   v_1 ... v_{D-1}  b_item         item    v_1 ... v_{D-1}  b_item

Without biases all D numbers are factors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.data.dataset.schema import SPARSE_FEATURES, USER
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.models.base import Model
from distembed.models.layers import StackFeatures
from distembed.models.queries import Catalogue, Items, Queries


class MF(Model):
    """Maps users and items to queries of the users, with the items of their rows.

    Args:
        embeddings: Maps a KeyedJaggedTensor to a KeyedTensor if ``is_pooled``, else to a dictionary of JaggedTensors.
        is_pooled: Whether every row has one id of each feature, so that lookups may pool.
        item_table: The table of items. The users score its features: items and negative items.
        biases: Whether the last number of a vector is a bias.
        dropout: Share of a vector's other numbers that are dropped in training.
    """

    batch_fields = (SPARSE_FEATURES,)

    def __init__(
        self,
        embeddings: nn.Module,
        is_pooled: bool,
        item_table: CompositionalEmbeddingConfig,
        biases: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.biases = biases
        catalogue = Catalogue(self, "embeddings", item_table, bias=False, is_tied=False)
        self.network = (_BagQueries if is_pooled else _IdQueries)(catalogue, biases, dropout)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Queries:
        queries: Queries = self.network(self.embeddings(sparse_features), sparse_features)
        return queries


class _IdQueries(nn.Module):
    """Makes queries from a sequence collection's vectors, one an id; as a module TorchRec does not trace it."""

    def __init__(self, catalogue: Catalogue, biases: bool, dropout: float) -> None:
        super().__init__()
        self.catalogue = catalogue
        self._biases = biases
        self._dropout = dropout

    @property
    def _features(self) -> Sequence[str]:
        """The features whose vectors are looked up, users first."""
        return (USER, *self.catalogue.table.feature_names)

    def forward(self, embedded: Mapping[str, JaggedTensor], ids: KeyedJaggedTensor) -> Queries:
        looked_up = {name: embedded[name].values() for name in self._features}
        users, *items = (self._drop(vectors) for vectors in looked_up.values())
        queries, offsets = queries_of_users(users, self._biases)
        return Queries(
            vectors=queries,
            catalogue=self.catalogue,
            items=self._items(items, ids),
            offsets=offsets,
            looked_up=tuple(looked_up.values()),
        )

    def _items(self, vectors: Sequence[Float[Tensor, "ids dim"]], ids: KeyedJaggedTensor) -> dict[str, Items]:
        names = self._features[1:]
        return {name: Items(ids[name].values(), items) for name, items in zip(names, vectors, strict=True)}

    def _drop(self, vectors: Float[Tensor, "*ids dim"]) -> Float[Tensor, "*ids dim"]:
        if not (self.training and self._dropout):
            return vectors
        if not self._biases:
            return nn.functional.dropout(vectors, self._dropout)
        return torch.cat([nn.functional.dropout(vectors[..., :-1], self._dropout), vectors[..., -1:]], dim=-1)


class _BagQueries(_IdQueries):
    """Makes queries from a pooled collection's vectors, one a row and feature, with the scores of the rows' items.

    A small model's step mostly copies gradients: :class:`_PairScores` writes them once, as the lookup's backward reads
    them.
    """

    def __init__(self, catalogue: Catalogue, biases: bool, dropout: float) -> None:
        super().__init__(catalogue, biases, dropout)
        self._stack = StackFeatures(self._features, catalogue.table.embedding_dim)

    def forward(self, embedded: KeyedTensor, ids: KeyedJaggedTensor) -> Queries:
        looked_up = self._stack(embedded)
        vectors = self._drop(looked_up)
        scores: Tensor = _PairScores.apply(vectors, self._biases)  # type: ignore[no-untyped-call]
        users, *items = vectors.unbind(1)
        queries, offsets = queries_of_users(users, self._biases)
        return Queries(
            vectors=queries,
            catalogue=self.catalogue,
            items=self._items(items, ids),
            offsets=offsets,
            looked_up=(looked_up,),
            known_scores=dict(zip(self._features[1:], scores.split(1, dim=1), strict=True)),
        )


class _PairScores(torch.autograd.Function):
    """Maps the vectors of a user and of items in each row [rows, 1 + items, dim] to the items' scores [rows, items].

    With biases, s_i = [u, 1] . [v_i, b_i] + b_user. So ds_i/d[v_i, b_i] = [u, 1], ds_i/du = v_i and ds_i/db_user = 1.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, biases: bool) -> Tensor:
        users, *items = vectors.unbind(1)
        queries = _with_ones(users) if biases else users
        ctx.save_for_backward(queries, vectors)
        ctx.biases = biases
        scores = torch.stack([(queries * item).sum(1) for item in items], dim=1)
        return scores + users[:, -1:] if biases else scores

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient,) = gradients
        queries, vectors = ctx.saved_tensors
        vector_gradients = torch.empty_like(vectors)
        user_gradients, *item_gradients = vector_gradients.unbind(1)
        weights, items = gradient.split(1, dim=1), vectors.unbind(1)[1:]
        for weight, item_gradient in zip(weights, item_gradients, strict=True):
            torch.mul(weight, queries, out=item_gradient)
        torch.mul(weights[0], items[0], out=user_gradients)
        for weight, item in zip(weights[1:], items[1:], strict=True):
            user_gradients.addcmul_(weight, item)
        if ctx.biases:
            user_gradients[:, -1] = gradient.sum(1)
        return vector_gradients, None


def queries_of_users(
    users: Float[Tensor, "rows dim"], biases: bool
) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, " rows"] | None]:
    """Splits users' vectors into queries and offsets, as the module draws them; without biases offsets are None."""
    return (_with_ones(users), users[:, -1]) if biases else (users, None)


def _with_ones(users: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
    """Returns vectors with a last number of 1 in place of the bias."""
    return torch.cat([users[:, :-1], torch.ones_like(users[:, -1:])], dim=1)
