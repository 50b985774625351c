"""The output of models of users and items: queries, the batch's items, and the catalogue to score them against."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.share import TableShare


class Catalogue(nn.Module):
    """The items that a model chooses from: a table of one of its own collections, and a bias for each id.

    Sharding replaces a model's collections, so each call of :meth:`share` looks the collection up, by its name, in the
    model that owns it. The model does not become a child module of the catalogue.

    Args:
        owner: The model.
        collection: Name of the model's attribute that holds the collection.
        table: The table of items in the collection.
        bias: Whether each item has a bias, which starts from 0.
        num_reserved: Number of ids, from the first one, that stand for no item and are left out of a softmax.
        is_tied: Whether the model's input is looked up in the table too.
    """

    def __init__(
        self,
        owner: nn.Module,
        collection: str,
        table: CompositionalEmbeddingConfig,
        bias: bool,
        num_reserved: int = 0,
        is_tied: bool = True,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_owner", owner)  # a plain attribute: a child would be the model within itself
        self._collection = collection
        self.table = table
        self.num_reserved = num_reserved
        self.is_tied = is_tied
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings)) if bias else None

    @property
    def num_items(self) -> int:
        return self.table.num_embeddings

    def share(self) -> TableShare:
        """Returns this rank's current share of the items' vectors."""
        share: TableShare = getattr(self._owner, self._collection).share(self.table.name)
        return share


@dataclass(frozen=True)
class Items:
    """Ids and vectors of a batch's items, query after query; every query has the same number of items."""

    ids: Int64[Tensor, " items"]
    vectors: Float[Tensor, "items dim"]


@dataclass(frozen=True)
class Queries:
    """Queries that are scored against items: the score of item i for query h is ``h . u_i + b_i + offset_h``.

    Attributes:
        vectors: The vector h of each query.
        catalogue: The items to choose from, with their biases.
        items: Items of the batch by feature: ``item_target``, ``item_negative``.
        offsets: A number for each query that is added to all of its scores; None for nothing.
        looked_up: Vectors that were looked up for the batch, whose squares a task may penalise.
        known_scores: Scores that the model has already computed, by feature.
    """

    vectors: Float[Tensor, "queries dim"]
    catalogue: Catalogue
    items: Mapping[str, Items] = field(default_factory=dict)
    offsets: Float[Tensor, " queries"] | None = None
    looked_up: tuple[Float[Tensor, "*ids dim"], ...] = ()
    known_scores: Mapping[str, Float[Tensor, "queries items"]] = field(default_factory=dict)

    def scores(self, feature: str) -> Float[Tensor, "queries items"]:
        """Returns the score of each query with its own items of a feature, biases and offsets included."""
        if feature in self.known_scores:
            return self.known_scores[feature]
        items = self.items[feature]
        dim = self.vectors.shape[1]
        # without queries, view could not infer the number of items of each
        vectors = items.vectors.view(len(self.vectors), -1, dim) if len(self.vectors) else items.vectors.view(0, 1, dim)
        scores = (self.vectors.unsqueeze(1) * vectors).sum(2)
        if self.catalogue.bias is not None:
            scores = scores + self.catalogue.bias[items.ids].view_as(scores)
        return scores if self.offsets is None else scores + self.offsets.unsqueeze(1)
