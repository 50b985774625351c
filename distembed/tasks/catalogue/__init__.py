"""A table as a catalogue: the model's input items are also the items that it chooses from (tied embeddings).

The score of item i for a query h is ``l_i = h . u_i + b_i``, where u_i is the vector of i in the item table and b_i its
bias (Inan et al., ICLR 2017; Press and Wolf, EACL 2017). :mod:`distembed.models.queries` holds the table and the bias
and makes the queries that a model returns to its task.
"""

from distembed.tasks.catalogue.negatives import NegativeDraws, item_weights
from distembed.tasks.catalogue.ranking import NOT_RANKED, CatalogueRanking, RankedItems
from distembed.tasks.catalogue.user_items import UserItems

__all__ = [
    "NOT_RANKED",
    "CatalogueRanking",
    "NegativeDraws",
    "RankedItems",
    "UserItems",
    "item_weights",
]
