"""The items of a table that a model chooses from, with a bias each."""

import torch
from torch import nn

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.share import TableShare


class Catalogue(nn.Module):
    """The items that a model chooses from: a table of one of its own collections, and a bias for each id.

    It finds the collection whenever it needs it, since sharding replaces a model's collections.

    Args:
        owner: The model, which holds the collection as an attribute. It does not become a child of the catalogue.
        collection: Name of that attribute.
        table: The table of items, which is in the collection.
        bias: Whether each item has a bias, which starts from 0.
        num_reserved: How many ids, from the first on, stand for no item: they have no part in a softmax.
        is_tied: Whether the model's input is looked up in the table too, which a model without tied embeddings has
            two of.
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
        """The number of ids, reserved ones included."""
        return self.table.num_embeddings

    def share(self) -> TableShare:
        """Returns this rank's share of the items' vectors, as they are now."""
        share: TableShare = getattr(self._owner, self._collection).share(self.table.name)
        return share
