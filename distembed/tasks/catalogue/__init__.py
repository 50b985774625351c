"""A table as a catalogue: items that a model has as its input are also what it chooses from (tied embeddings).

The score of item i for a query h is ``l_i = h . u_i + b_i``, where u_i is the vector of i in the item table and b_i its
bias (Inan et al., ICLR 2017; Press and Wolf, EACL 2017). :mod:`distembed.models.queries` holds the bias and finds the
table, :mod:`distembed.models.queries` is what a model returns to its task; ``user_items.py`` says which items each user
has, ``negatives.py`` draws items that a user does not have, and ``ranking.py`` ranks them all.
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
