"""The best items of each user as outputs of a task, and as columns of a file of predictions.

A file has a row for each row that was ranked: ``user``, ``item_1`` to ``item_k`` from the best on, and ``score_1`` to
``score_k``. Users and items are the raw values of the dataset's vocabularies, or ids where it has none or ``--ids``
asks for them; where there are fewer than k items, the item is null (-1 among ids) and the score is -inf.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.reader.batch import Batch
from distembed.data.table.vocabulary import raw_values, take_values
from distembed.models.queries import Queries
from distembed.tasks.base import Outputs
from distembed.tasks.catalogue import NOT_RANKED, CatalogueRanking, RankedItems
from distembed.tasks.ranking_metrics import RankingMetrics

RECOMMENDATIONS = ("users", "best", "best_scores")
"""Names of the outputs of :func:`recommendations`."""
RELEVANT, EXCLUDED = "relevant", "excluded"
"""Names of an evaluation batch's fields: each row's items that should rank high, and its items that are not ranked."""
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


def rank_queries(ranking: CatalogueRanking, vectors: Float[Tensor, "queries dim"], batch: Batch) -> RankedItems:
    """Ranks items for an evaluation's batch with the fields :data:`RELEVANT` and :data:`EXCLUDED`; all ranks call it.

    Args:
        ranking: The catalogue.
        vectors: The vector of each row's query.
        batch: The rows.
    """
    relevant, excluded = batch[RELEVANT], batch[EXCLUDED]
    assert isinstance(relevant, KeyedJaggedTensor) and isinstance(excluded, KeyedJaggedTensor)
    return ranking.rank(vectors.float(), relevant[ITEM], excluded[ITEM])


def ranked_fields(relevant: JaggedTensor, excluded: JaggedTensor) -> dict[str, KeyedJaggedTensor]:
    """Returns the fields of an evaluation's batch from which :func:`rank_queries` ranks items.

    Args:
        relevant: The items of each row that should rank high.
        excluded: The items of each row that are not ranked.
    """
    return {
        name: KeyedJaggedTensor([ITEM], items.values(), lengths=items.lengths())
        for name, items in ((RELEVANT, relevant), (EXCLUDED, excluded))
    }


def no_items(num_rows: int) -> JaggedTensor:
    """Returns no item for each of some rows."""
    return JaggedTensor(torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(num_rows, dtype=torch.int64))


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
