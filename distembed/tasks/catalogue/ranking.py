"""Ranks of items among a whole catalogue, and the best items, where the catalogue lies on many ranks.

Queries go to the items: a block of queries is gathered from all ranks, each rank scores its own ids chunk by chunk, and
only counts and the best items go back::

                       ids of rank 0          ids of rank 1
    queries of rank 0  | chunk | chunk |      | chunk | chunk |      scores of a block of queries and a chunk
    queries of rank 1  | chunk | chunk |      | chunk | chunk |      are made, compared and dropped

The rank of a relevant item is the number of candidates ahead of it: those of a higher score and, since a model that
scores all alike has no claim to a good rank, irrelevant ones of the same score. Of relevant ones with equal scores the
first that was given is ahead. A score that is no number puts a relevant item behind all. A relevant item that is
excluded is no candidate and has no rank: the target must not decide which items are ranked.

Scores are products in float64, rounded to float32: so items with the same vector and bias have the same score, whatever
product they were in, and ranks do not depend on the number of ranks. Trade-off: such a product takes twice the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from distembed.models.queries import Catalogue
from distembed.tasks.catalogue.best_items import BestItems, best_keys, ids_of, scores_of
from distembed.tasks.catalogue.query_items import QueryItems
from distembed.tasks.catalogue.rank_rows import RankRows

_MOST_SCORES_ON_CPU, _MOST_SCORES = 2**20, 2**26
"""Number of scores that are in memory at once; on a CPU as many as its caches hold."""
_MOST_IDS = 2**16
_PAIRS_AT_ONCE = 2**14

NOT_RANKED = -1
"""In the place of the rank of a relevant item that is excluded."""


@dataclass(frozen=True)
class RankedItems:
    """What a ranking says of the queries of this rank.

    Attributes:
        ranks: Number of candidates ahead of each relevant item, in the order in which these were given; ``NOT_RANKED``
            for one that is excluded.
        best: The best items of each query, the best first; -1 where there are fewer.
        best_scores: Their scores, -inf where there are fewer.
    """

    ranks: Int64[Tensor, " relevant"]
    best: Int64[Tensor, "queries best"]
    best_scores: Float[Tensor, "queries best"]


@dataclass(frozen=True)
class CatalogueRanking:
    """Ranks the items of a catalogue.

    Attributes:
        catalogue: The items, of which there are at most 2^32, with their biases.
        reserved: Ids that stand for no item, which are not ranked.
        num_best: Number of best items of each query; 0 for none.
    """

    catalogue: Catalogue
    reserved: tuple[int, ...] = ()
    num_best: int = 10

    @torch.no_grad()
    def rank(
        self, vectors: Float[Tensor, "queries dim"], relevant: JaggedTensor, excluded: JaggedTensor
    ) -> RankedItems:
        """Ranks all items that are not reserved for the queries of this rank; all ranks call it.

        Args:
            vectors: The queries of this rank, which may be none.
            relevant: The relevant items of each query, distinct.
            excluded: The items of each query that are not ranked, such as those that its user has.
        """
        pairs = QueryItems.of(relevant), QueryItems.of(excluded)
        ranks, keys = zip(*map(self._rank_block, self._blocks(vectors, *pairs)), strict=True)
        best = torch.cat(keys)
        return RankedItems(torch.cat(ranks), ids_of(best), scores_of(best))

    @torch.no_grad()
    def rank_among(
        self,
        vectors: Float[Tensor, "queries dim"],
        targets: Int64[Tensor, " queries"],
        sampled: Int64[Tensor, "queries sampled"],
    ) -> Int64[Tensor, " queries"]:
        """Returns how many of a query's sampled items are ahead of its target; all ranks call it.

        Args:
            vectors: The queries of this rank, which may be none.
            targets: The relevant item of each query.
            sampled: As many items for each query, none of them relevant.
        """
        items = torch.cat([targets.unsqueeze(1), sampled], 1)
        pairs = QueryItems.of(JaggedTensor(items.flatten(), lengths=items.new_full((len(items),), items.shape[1])))
        blocks = self._blocks(vectors, pairs, pairs.between(0, 0))
        scores = torch.cat([block.of_relevant.own(self._pair_scores(block)) for block in blocks]).view(items.shape)
        return (~(scores[:, 1:] < scores[:, :1])).sum(1)

    def _blocks(
        self, vectors: Float[Tensor, "queries dim"], relevant: QueryItems, excluded: QueryItems
    ) -> Iterator[_Block]:
        """Yields all ranks' queries block by block; all ranks call it, and get equally many blocks, at least one."""
        share = self.catalogue.share()
        most_scores = _MOST_SCORES_ON_CPU if vectors.device.type == "cpu" else _MOST_SCORES
        most_queries = max(1, *RankRows.of(len(vectors), vectors.device, share).counts)
        rows = min(most_queries, max(1, math.isqrt(most_scores) // share.world_size))
        for first in range(0, most_queries, rows):
            own, own_relevant = vectors[first : first + rows], relevant.between(first, first + rows)
            own_excluded = excluded.between(first, first + rows)
            queries, of_relevant, of_excluded = (
                RankRows.of(len(each), vectors.device, share) for each in (own, own_relevant, own_excluded)
            )
            first_query = queries.own_place.start
            yield _Block(
                vectors=_with_last(queries.gather(own.float()).double(), 1.0),
                relevant=own_relevant.gathered(first_query, of_relevant),
                excluded=own_excluded.gathered(first_query, of_excluded),
                of_queries=queries,
                of_relevant=of_relevant,
                most_ids=min(_MOST_IDS, max(1, most_scores // (rows * share.world_size))),
            )

    def _chunks(self, block: _Block) -> Iterator[_Chunk]:
        """Yields this rank's items; all ranks call it."""
        reserved = torch.tensor(self.reserved, dtype=torch.long, device=block.vectors.device)
        bias = self.catalogue.bias
        for chunk in self.catalogue.share().chunks(block.most_ids):
            biases = 0.0 if bias is None else bias[chunk.ids].double()
            vectors = _with_last(chunk.vectors.double(), biases)
            yield _Chunk(chunk.ids, vectors, torch.isin(chunk.ids, reserved))

    def _pair_scores(self, block: _Block) -> Float[Tensor, " relevant"]:
        """Returns the score of each relevant item of a block, of all ranks; all ranks call it."""
        pairs = block.relevant
        scores = block.vectors.new_zeros(len(pairs), dtype=torch.float32)
        for chunk in self._chunks(block):
            found = torch.stack(pairs.in_chunk(chunk.ids))
            for places, columns in (part.unbind() for part in found.split(_PAIRS_AT_ONCE, 1)):
                products = block.vectors[pairs.queries[places]] * chunk.vectors[columns]
                scores[places] = products.sum(1).float()
        return block.of_relevant.sum_all(scores)

    def _rank_block(self, block: _Block) -> tuple[Int64[Tensor, " relevant"], Int64[Tensor, "queries best"]]:
        """Returns the ranks of this rank's relevant items of a block, and the keys of the best; all ranks call it."""
        is_excluded = block.relevant.are_in(block.excluded)
        scores = self._pair_scores(block).masked_fill(is_excluded, -torch.inf)
        ahead = torch.zeros_like(block.relevant.items)
        best = BestItems(len(block.vectors), self.num_best, ahead.device)
        for chunk in self._chunks(block):
            rows = chunk.scores(block.vectors)
            places, columns = block.excluded.in_chunk(chunk.ids)
            rows[block.excluded.queries[places], columns] = -torch.inf
            places, columns = block.relevant.in_chunk(chunk.ids)
            queries = block.relevant.queries[places]
            rows[queries, columns] = scores[places]
            best.add(rows, chunk.ids)
            rows[queries, columns] = -torch.inf
            ahead += _count_not_below(rows, block.relevant.queries, scores)
        own = block.of_relevant.own_place
        ranks = block.of_relevant.sum_own(ahead) + _places_among_relevant(block.relevant.queries[own], scores[own])
        ranks = ranks.masked_fill(is_excluded[own], NOT_RANKED)
        keys = block.of_queries.own_of_all(best.keys)
        return ranks, best_keys(keys.transpose(0, 1).flatten(1), self.num_best)


@dataclass(frozen=True)
class _Block:
    """Queries of all ranks.

    Attributes:
        vectors: The queries, with a last number of 1 for the items' biases.
        relevant: The relevant items of each.
        excluded: The items of each that are not ranked.
        of_queries: Whose the queries are.
        of_relevant: Whose the relevant items are.
        most_ids: Most ids of a chunk.
    """

    vectors: Float[Tensor, "queries dim"]
    relevant: QueryItems
    excluded: QueryItems
    of_queries: RankRows
    of_relevant: RankRows
    most_ids: int


@dataclass(frozen=True)
class _Chunk:
    """Some of this rank's items.

    Attributes:
        ids: Their ids.
        vectors: Their vectors, with their biases as last numbers.
        is_reserved: Which of them are reserved.
    """

    ids: Int64[Tensor, " ids"]
    vectors: Float[Tensor, "ids dim"]
    is_reserved: Bool[Tensor, " ids"]

    def scores(self, queries: Float[Tensor, "queries dim"]) -> Float[Tensor, "queries ids"]:
        """Returns the scores of all queries and items; -inf for reserved ids."""
        vectors = self.vectors.clone()
        vectors[:, -1].masked_fill_(self.is_reserved, -torch.inf)
        return (queries @ vectors.T).float()


def _with_last(vectors: Float[Tensor, "rows dim"], last: Float[Tensor, " rows"] | float) -> Float[Tensor, "rows dim_1"]:
    """Returns vectors with a last number of their own each, or the same."""
    extended = vectors.new_empty(len(vectors), vectors.shape[1] + 1)
    extended[:, :-1], extended[:, -1] = vectors, last
    return extended


def _count_not_below(
    scores: Float[Tensor, "queries ids"], queries: Int64[Tensor, " pairs"], thresholds: Float[Tensor, " pairs"]
) -> Int64[Tensor, " pairs"]:
    """Returns how many scores of each pair's query are not below its threshold, in as much memory as the scores.

    The scores are written over where each query has one pair.
    """
    num_ids = scores.shape[1]
    if torch.equal(queries, torch.arange(len(scores), device=queries.device)):
        return num_ids - torch.lt(scores, thresholds.unsqueeze(1), out=scores).sum(1).long()
    counts = [
        num_ids - torch.lt(rows := scores[part], limit.unsqueeze(1), out=rows).sum(1)
        for part, limit in zip(queries.split(max(1, len(scores))), thresholds.split(max(1, len(scores))), strict=True)
    ]
    return torch.cat(counts).long()


def _places_among_relevant(
    queries: Int64[Tensor, " relevant"], scores: Float[Tensor, " relevant"]
) -> Int64[Tensor, " relevant"]:
    """Returns how many of its query's relevant items are ahead of each: scores that are no numbers come last."""
    worst_last = torch.where(scores.isnan(), -torch.inf, scores)
    order = worst_last.argsort(descending=True, stable=True)
    order = order[queries[order].argsort(stable=True)]
    sorted_queries = queries[order]
    places = torch.arange(len(order), device=order.device) - torch.searchsorted(sorted_queries, sorted_queries)
    return torch.empty_like(places).index_copy_(0, order, places)
