"""Matrix factorisation (Koren et al., IEEE Computer 2009; with SSE: Wu et al., NeurIPS 2019, section 4.1).

The score of a user for an item is ``u . v + b_user + b_item``. Biases are the last numbers of the vectors that are
looked up, so that they are sharded, compressed and replaced with them::

    user vector   u_1 ... u_{D-1}  b_user         query   u_1 ... u_{D-1}  1        offset  b_user
    item vector   v_1 ... v_{D-1}  b_item         item    v_1 ... v_{D-1}  b_item

Without biases all D numbers are factors.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.catalogue import Catalogue, Queries
from distembed.catalogue.queries import Items
from distembed.data.dataset.schema import SPARSE_FEATURES, USER
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.models.base import Model


class MF(Model):
    """Maps users and items to queries of the users, with the items of their rows.

    Args:
        embeddings: Maps a KeyedJaggedTensor to a dictionary of JaggedTensors, with one vector an id of each feature.
        item_table: The table of items. Its features, such as items and negative items, are scored by the users.
        biases: Whether the last number of a vector is a bias.
        dropout: Share of a vector's other numbers that are dropped in training.
    """

    batch_fields = (SPARSE_FEATURES,)

    def __init__(
        self, embeddings: nn.Module, item_table: CompositionalEmbeddingConfig, biases: bool, dropout: float
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.network = _Factors(Catalogue(self, "embeddings", item_table, bias=False), biases, dropout)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Queries:
        """Returns the query of each row's user."""
        queries: Queries = self.network(self.embeddings(sparse_features), sparse_features)
        return queries


class _Factors(nn.Module):
    """Makes queries of the vectors that were looked up; a module, so that TorchRec's pipeline does not trace it.

    Args:
        catalogue: The items to choose from.
        biases: Whether the last number of a vector is a bias.
        dropout: Share of the other numbers that are dropped in training.
    """

    def __init__(self, catalogue: Catalogue, biases: bool, dropout: float) -> None:
        super().__init__()
        self.catalogue = catalogue
        self._biases = biases
        self._dropout = dropout

    def forward(self, vectors: dict[str, JaggedTensor], ids: KeyedJaggedTensor) -> Queries:
        looked_up = {name: vectors[name].values() for name in (USER, *self.catalogue.table.feature_names)}
        dropped = {name: self._drop(each) for name, each in looked_up.items()}
        users = dropped.pop(USER)
        return Queries(
            vectors=torch.cat([users[:, :-1], users.new_ones(len(users), 1)], dim=1) if self._biases else users,
            catalogue=self.catalogue,
            items={name: Items(ids[name].values(), each) for name, each in dropped.items()},
            offsets=users[:, -1] if self._biases else None,
            looked_up=tuple(looked_up.values()),
        )

    def _drop(self, vectors: Float[Tensor, "ids dim"]) -> Float[Tensor, "ids dim"]:
        """Returns the vectors with some factors dropped, where the model is trained so."""
        if not (self.training and self._dropout):
            return vectors
        if not self._biases:
            return nn.functional.dropout(vectors, self._dropout)
        return torch.cat([nn.functional.dropout(vectors[:, :-1], self._dropout), vectors[:, -1:]], dim=1)
