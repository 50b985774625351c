"""A table as a catalogue: items that a model has as its input are also what it chooses from (tied embeddings).

The score of item i for a query h is ``l_i = h . u_i + b_i``, where u_i is the vector of i in the item table and b_i its
bias (Inan et al., ICLR 2017; Press and Wolf, EACL 2017). ``catalogue.py`` holds the bias and finds the table,
``queries.py`` is what a model returns to its task, ``user_items.py`` says which items each user has,
``negatives.py`` draws items that a user does not have, and ``ranking.py`` ranks them all.
"""

from distembed.catalogue.catalogue import Catalogue
from distembed.catalogue.negatives import NegativeDraws, item_weights
from distembed.catalogue.queries import Queries
from distembed.catalogue.ranking import NOT_RANKED, CatalogueRanking, RankedItems
from distembed.catalogue.user_items import UserItems

__all__ = [
    "NOT_RANKED",
    "Catalogue",
    "CatalogueRanking",
    "NegativeDraws",
    "Queries",
    "RankedItems",
    "UserItems",
    "item_weights",
]
