"""The best items of each user as outputs of a task, and as columns of a file of predictions.

A file has a row for each row that was ranked: ``user``, ``item_1`` to ``item_k`` from the best on, and ``score_1`` to
``score_k``. Users and items are the raw values of the dataset's vocabularies, or ids where it has none or ``--ids``
asks for them; where there are fewer than k items, the item is null (-1 among ids) and the score is -inf.
"""

from typing import Any

import numpy.typing as npt
from jaxtyping import Int64
from torch import Tensor

from distembed.catalogue import Queries, RankedItems
from distembed.data.dataset.schema import ITEM, USER
from distembed.tasks.base import Outputs, Rows

RECOMMENDATIONS = ("users", "best", "best_scores")
"""Names of the outputs of :func:`recommendations`."""


def recommendations(users: Int64[Tensor, " queries"], queries: Queries, ranked: RankedItems) -> Outputs:
    """Returns the users of queries with their best items and these items' scores, offsets of the queries added."""
    scores = ranked.best_scores
    if queries.offsets is not None:
        scores = scores + queries.offsets.float().unsqueeze(1)
    return dict(zip(RECOMMENDATIONS, (users, ranked.best, scores), strict=True))


def id_columns(num_best: int) -> tuple[str, ...]:
    """Returns the names of the columns of ids: the user and its best items."""
    return (USER, *(f"{ITEM}_{place + 1}" for place in range(num_best)))


def prediction_columns(num_best: int) -> tuple[str, ...]:
    """Returns the names of all columns."""
    return (*id_columns(num_best), *(f"score_{place + 1}" for place in range(num_best)))


def predictions(rows: Rows, num_best: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of rows with the outputs of :func:`recommendations`."""
    users, best, scores = (rows[name] for name in RECOMMENDATIONS)
    columns = [users, *best.reshape(-1, num_best).T, *scores.reshape(-1, num_best).T]
    return dict(zip(prediction_columns(num_best), columns, strict=True))
