"""The best items of each user as outputs of a task, and as columns of a file of predictions.

A file has a row for each row that was ranked: ``user``, ``item_1`` to ``item_k`` from the best on, and ``score_1`` to
``score_k``. Users and items are the raw values of the dataset's vocabularies, or ids where it has none or ``--ids``
asks for them; where there are fewer than k items, the item is null (-1 among ids) and the score is -inf.
"""

from typing import Any

import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.table.vocabulary import raw_values, take_values
from distembed.models.queries import Queries
from distembed.tasks.base import Outputs, Rows
from distembed.tasks.catalogue import NOT_RANKED, RankedItems
from distembed.tasks.ranking_metrics import RankingMetrics

RECOMMENDATIONS = ("users", "best", "best_scores")
"""Names of the outputs of :func:`recommendations`."""
HAS_NEGATIVES = "has_negatives"
"""Name of the field of a training batch, one boolean a row or target: whether there is a negative for its user."""
_MOST_NAMED = 3


def recommendations(users: Int64[Tensor, " queries"], queries: Queries, ranked: RankedItems) -> Outputs:
    """Returns the user of each query, its best items, and their scores.

    A ranking leaves out the offset of a query, which changes no order; the scores returned include it.
    """
    scores = ranked.best_scores
    if queries.offsets is not None:
        scores = scores + queries.offsets.float().unsqueeze(1)
    return dict(zip(RECOMMENDATIONS, (users, ranked.best, scores), strict=True))


def ranked_targets(ranked: RankedItems, lengths: Int64[Tensor, " queries"], metrics: RankingMetrics) -> Outputs:
    """Returns the metrics of each query, and ``excluded_targets``, how many of its relevant items are not ranked.

    Args:
        ranked: The ranking.
        lengths: Number of relevant items of each query.
        metrics: The metrics to compute.
    """
    is_excluded = (ranked.ranks == NOT_RANKED).long()
    queries = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=len(is_excluded))
    excluded_targets = torch.zeros_like(lengths).index_add(0, queries, is_excluded)
    return {"metrics": metrics.by_query(ranked.ranks, lengths), "excluded_targets": excluded_targets}


def seen_items_metrics(excludes_seen: bool, rows: Rows) -> dict[str, float]:
    """Returns the metrics ``rows``, ``exclude_seen``, and ``excluded_targets``: unranked, since seen, targets."""
    excluded_targets = int(rows["excluded_targets"].sum())
    return {"rows": len(rows["excluded_targets"]), "exclude_seen": excludes_seen, "excluded_targets": excluded_targets}


def without_negatives_lines(users: Int64[Tensor, " users"], dataset: str) -> list[str]:
    """Returns a line on users for whom no negative can be drawn, the first by their raw values; no line for none."""
    if not len(users):
        return []
    named_users, manifest = users[:_MOST_NAMED].cpu().numpy(), Manifest.load(dataset)
    names = [f"id {user}" for user in named_users.tolist()]
    if USER in manifest.vocabularies:
        names = take_values(raw_values(dataset_folder(dataset), manifest, USER), named_users).to_pylist()
    more = f" and {len(users) - len(named_users):,} more" if len(users) > len(named_users) else ""
    return [
        f"note: {len(users):,} user(s) have every item, so no negative can be drawn, and their rows have no loss "
        f"against negatives: {', '.join(map(str, names))}{more}"
    ]


def id_columns(num_best: int) -> tuple[str, ...]:
    """Returns the names of the columns of ids: the user and its best items."""
    return (USER, *(f"{ITEM}_{index + 1}" for index in range(num_best)))


def prediction_columns(num_best: int) -> tuple[str, ...]:
    """Returns the names of all columns."""
    return (*id_columns(num_best), *(f"score_{index + 1}" for index in range(num_best)))


def predictions(rows: Rows, num_best: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of rows with the outputs of :func:`recommendations`."""
    users, best, scores = (rows[name] for name in RECOMMENDATIONS)
    columns = [users, *best.reshape(-1, num_best).T, *scores.reshape(-1, num_best).T]
    return dict(zip(prediction_columns(num_best), columns, strict=True))
