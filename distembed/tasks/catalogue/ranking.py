"""Ranks of items among a whole catalogue, and the best items, where the catalogue lies on many ranks.

Queries go to the items: a block of queries is gathered from all ranks, each rank scores its own ids chunk by chunk, and
only counts and the best items go back::

                       ids of rank 0          ids of rank 1
    queries of rank 0  | chunk | chunk |      | chunk | chunk |      scores of a block of queries and a chunk
    queries of rank 1  | chunk | chunk |      | chunk | chunk |      are made, compared and dropped

The rank of a relevant item is the number of candidates ahead of it: items of a higher score, and irrelevant items of an
equal score, since a model that scores all alike has no claim to a good rank. Of relevant items with equal scores, the
one given first is ahead. A relevant item whose score is NaN comes last. A relevant item that is excluded, or whose id
is reserved for missing or unknown items, is no candidate and has no rank: the target must not decide which items are
ranked.

In this module the *rank of an item* is its place in a ranking; *this rank*, *all ranks* and *rank 1* are processes.

Scores are products in float64, rounded to float32. So items with equal vectors and biases have equal scores in every
product, and ranks do not depend on the number of ranks. Trade-off: a float64 product takes twice the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from distembed.embedding.share import VectorChunk
from distembed.tasks.catalogue.rank_rows import RankRows, SharedItems

_MOST_SCORES_ON_CPU, _MOST_SCORES = 2**20, 2**26
"""Number of scores in memory at once; on a CPU as many as its caches hold."""
_MOST_IDS = 2**16
_PAIRS_AT_ONCE = 2**14

# A scored item is one int64 *key*: the float32 score, mapped to an integer of the same order, in the high 32 bits, and
# 2^32 - 1 - id in the low ones. The larger key has the higher score or, of equal scores, the lower id.
_LOW = 2**32 - 1
_LOWEST = -(2**63)  # the key of no item

NOT_RANKED = -1
"""The rank of a relevant item that is excluded or reserved."""


class ItemChunks(SharedItems, Protocol):
    """Items that ranks share, with their vectors."""

    def chunks(self, most_ids: int) -> Iterator[VectorChunk]:
        """Yields this rank's ids with their vectors, at most ``most_ids`` at once; all ranks call it."""


class RankedCatalogue(Protocol):
    """Items to rank: the items of a table (:class:`distembed.models.queries.Catalogue`), or :class:`ItemVectors`."""

    @property
    def bias(self) -> Tensor | None:
        """The bias of each id; None for none."""

    def share(self) -> ItemChunks:
        """Returns this rank's share of the items."""


@dataclass(frozen=True)
class RankedItems:
    """The ranking for the queries of this rank.

    Attributes:
        ranks: Number of candidates ahead of each relevant item, in the order given; ``NOT_RANKED`` for an excluded
            or reserved item.
        best: The best items of each query, the best first; -1 where there are fewer.
        best_scores: The scores of ``best``; -inf where there are fewer.
    """

    ranks: Int64[Tensor, " relevant"]
    best: Int64[Tensor, "queries best"]
    best_scores: Float[Tensor, "queries best"]


@dataclass(frozen=True)
class CatalogueRanking:
    """Ranks the items of a catalogue.

    Attributes:
        catalogue: At most 2^32 items, with their biases.
        reserved: Ids that stand for no item, which are not ranked.
        num_best: Number of best items of each query; 0 for none.
    """

    catalogue: RankedCatalogue
    reserved: tuple[int, ...] = ()
    num_best: int = 10

    @torch.no_grad()
    def rank(
        self, vectors: Float[Tensor, "queries dim"], relevant: JaggedTensor, excluded: JaggedTensor
    ) -> RankedItems:
        """Ranks all items that are not reserved for the queries of this rank, which may be none; all ranks call it.

        Args:
            vectors: The queries of this rank.
            relevant: The relevant items of each query, distinct.
            excluded: The items of each query that are not ranked.
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
            sampled: Irrelevant items for each query.
        """
        items = torch.cat([targets.unsqueeze(1), sampled], 1)
        pairs = QueryItems.of(JaggedTensor(items.flatten(), lengths=items.new_full((len(items),), items.shape[1])))
        blocks = self._blocks(vectors, pairs, pairs.between(0, 0))
        scores = torch.cat([block.relevant_rows.own(self._pair_scores(block)) for block in blocks]).view(items.shape)
        return (~(scores[:, 1:] < scores[:, :1])).sum(1)

    def _blocks(
        self, vectors: Float[Tensor, "queries dim"], relevant: QueryItems, excluded: QueryItems
    ) -> Iterator[_Block]:
        """Yields blocks with some queries of every rank; all ranks call it, and get equally many blocks, at least one.

        The number of queries of a block bounds the scores in memory: (queries of all ranks) x (ids of a chunk).
        """
        share = self.catalogue.share()
        most_scores = _MOST_SCORES_ON_CPU if vectors.device.type == "cpu" else _MOST_SCORES
        most_queries = max(1, *RankRows.of(len(vectors), vectors.device, share).counts)
        queries_per_block = min(most_queries, max(1, math.isqrt(most_scores) // share.world_size))
        for start in range(0, most_queries, queries_per_block):
            stop = start + queries_per_block
            block_vectors = vectors[start:stop]
            block_relevant, block_excluded = relevant.between(start, stop), excluded.between(start, stop)
            query_rows, relevant_rows, excluded_rows = (
                RankRows.of(len(pairs), vectors.device, share)
                for pairs in (block_vectors, block_relevant, block_excluded)
            )
            first_query = query_rows.own_place.start
            yield _Block(
                vectors=_append_column(query_rows.gather(block_vectors.float()).double(), 1.0),
                relevant=block_relevant.gathered(first_query, relevant_rows),
                excluded=block_excluded.gathered(first_query, excluded_rows),
                query_rows=query_rows,
                relevant_rows=relevant_rows,
                most_ids=min(_MOST_IDS, max(1, most_scores // (queries_per_block * share.world_size))),
            )

    def _chunks(self, block: _Block) -> Iterator[_Chunk]:
        """Yields this rank's items in chunks of at most ``block.most_ids``; all ranks call it."""
        reserved = self._reserved_ids(block)
        bias = self.catalogue.bias
        for chunk in self.catalogue.share().chunks(block.most_ids):
            biases = 0.0 if bias is None else bias[chunk.ids].double()
            vectors = _append_column(chunk.vectors.double(), biases)
            yield _Chunk(chunk.ids, vectors, torch.isin(chunk.ids, reserved))

    def _reserved_ids(self, block: _Block) -> Int64[Tensor, " reserved"]:
        return torch.tensor(self.reserved, dtype=torch.long, device=block.vectors.device)

    def _pair_scores(self, block: _Block) -> Float[Tensor, " relevant"]:
        """Returns the score of each relevant item of a block, for all ranks' queries; all ranks call it.

        Each item lies on one rank, whose scores are added to the zeros of the other ranks.
        """
        pairs = block.relevant
        scores = block.vectors.new_zeros(len(pairs), dtype=torch.float32)
        if not len(pairs):  # on no rank
            return scores
        for chunk in self._chunks(block):
            chunk_pairs = torch.stack(pairs.in_chunk(chunk.ids))
            for indices, columns in (pairs_part.unbind() for pairs_part in chunk_pairs.split(_PAIRS_AT_ONCE, 1)):
                products = block.vectors[pairs.queries[indices]] * chunk.vectors[columns]
                scores[indices] = products.sum(1).float()
        return block.relevant_rows.sum_all(scores)

    def _rank_block(self, block: _Block) -> tuple[Int64[Tensor, " relevant"], Int64[Tensor, "queries best"]]:
        """Returns the ranks of this rank's relevant items of a block, and its queries' best keys; all ranks call it.

        The rank of a relevant item r of query q is the number of q's items ahead of it, counted in two groups: the
        items that are neither relevant nor excluded, on the ranks that hold them, and the other relevant items of q.
        """
        relevant, own_pairs = block.relevant, block.relevant_rows.own_place
        is_excluded = relevant.are_in(block.excluded) | torch.isin(relevant.items, self._reserved_ids(block))
        relevant_scores = self._pair_scores(block).masked_fill(is_excluded, -torch.inf)
        num_ahead, best = self._compare_own_items(block, relevant_scores)
        ranks = block.relevant_rows.sum_own(num_ahead)  # reduce-scatter
        ranks += _places_among_relevant(relevant.queries[own_pairs], relevant_scores[own_pairs])
        ranks = ranks.masked_fill(is_excluded[own_pairs], NOT_RANKED)
        keys = block.query_rows.own_of_all(best)  # all-to-all: [ranks, own queries, best]
        return ranks, best_keys(keys.transpose(0, 1).flatten(1), self.num_best)

    def _compare_own_items(
        self, block: _Block, relevant_scores: Float[Tensor, " pairs"]
    ) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, "queries best"]]:
        """Compares this rank's items with the relevant items of all ranks' queries; all ranks call it.

        Returns:
            The number of this rank's items ahead of each pair's relevant item, which are neither relevant nor excluded
            and whose score is not lower; and the best keys of each query, an item's score and id packed in one number.
        """
        relevant, excluded = block.relevant, block.excluded
        num_ahead = torch.zeros_like(relevant.items)
        best = BestItems(len(block.vectors), self.num_best, num_ahead.device)
        for chunk in self._chunks(block):
            scores = chunk.scores(block.vectors)  # [queries, ids of the chunk]; -inf takes an item out
            pairs, columns = excluded.in_chunk(chunk.ids)
            scores[excluded.queries[pairs], columns] = -torch.inf
            pairs, columns = relevant.in_chunk(chunk.ids)
            queries = relevant.queries[pairs]
            # the chunk's product may round otherwise than _pair_scores: equal scores, so that ties are ties
            scores[queries, columns] = relevant_scores[pairs]
            best.add(scores, chunk.ids)
            scores[queries, columns] = -torch.inf  # relevant items are counted by _places_among_relevant
            num_ahead += _count_not_below(scores, relevant.queries, relevant_scores)
        return num_ahead, best.keys


@dataclass(frozen=True)
class _Block:
    """Queries of all ranks with their relevant and excluded items; queries and relevant items also as counts by rank.

    A query's vector ends in 1, which is multiplied with an item's bias. ``most_ids`` is the largest size of a chunk.
    """

    vectors: Float[Tensor, "queries dim"]
    relevant: QueryItems
    excluded: QueryItems
    query_rows: RankRows
    relevant_rows: RankRows
    most_ids: int


@dataclass(frozen=True)
class _Chunk:
    """Some of this rank's items; an item's vector ends in its bias."""

    ids: Int64[Tensor, " ids"]
    vectors: Float[Tensor, "ids dim"]
    is_reserved: Bool[Tensor, " ids"]

    def scores(self, queries: Float[Tensor, "queries dim"]) -> Float[Tensor, "queries ids"]:
        """Returns the scores of all queries and items; -inf for reserved ids."""
        vectors = self.vectors.clone()
        vectors[:, -1].masked_fill_(self.is_reserved, -torch.inf)
        return (queries @ vectors.T).float()


def _append_column(
    vectors: Float[Tensor, "rows dim"], last: Float[Tensor, " rows"] | float
) -> Float[Tensor, "rows dim_1"]:
    extended = vectors.new_empty(len(vectors), vectors.shape[1] + 1)
    extended[:, :-1], extended[:, -1] = vectors, last
    return extended


def _count_not_below(
    scores: Float[Tensor, "queries ids"], queries: Int64[Tensor, " pairs"], thresholds: Float[Tensor, " pairs"]
) -> Int64[Tensor, " pairs"]:
    """Returns how many scores of each pair's query are not below the pair's threshold; overwrites ``scores``.

    A pair is a query and the score of one of its relevant items, the threshold. No score is below NaN, so an item whose
    score is NaN comes last.
    """
    num_ids = scores.shape[1]
    # with one pair for each query, rows need not be gathered
    if torch.equal(queries, torch.arange(len(scores), device=queries.device)):
        return num_ids - torch.lt(scores, thresholds.unsqueeze(1), out=scores).sum(1).long()
    pairs_at_once = max(1, len(scores))
    counts = []
    for some_queries, limits in zip(queries.split(pairs_at_once), thresholds.split(pairs_at_once), strict=True):
        rows = scores[some_queries]
        counts.append(num_ids - torch.lt(rows, limits.unsqueeze(1), out=rows).sum(1))
    return torch.cat(counts).long()


def _places_among_relevant(
    queries: Int64[Tensor, " relevant"], scores: Float[Tensor, " relevant"]
) -> Int64[Tensor, " relevant"]:
    """Returns how many relevant items of the same query are ahead of each one: by score, then in the order given.

    ``queries`` is ascending. NaN scores come last.
    """
    # two stable sorts order by query, then by score; the place within the query is the distance from its first item
    worst_last = torch.where(scores.isnan(), -torch.inf, scores)
    order = worst_last.argsort(descending=True, stable=True)
    order = order[queries[order].argsort(stable=True)]
    sorted_queries = queries[order]
    places_in_query = torch.arange(len(order), device=order.device) - torch.searchsorted(sorted_queries, sorted_queries)
    return torch.empty_like(places_in_query).index_copy_(0, order, places_in_query)


@dataclass(frozen=True, eq=False)
class QueryItems:
    """Pairs of a query's index and an item's id, in ascending order of ``queries``."""

    queries: Int64[Tensor, " pairs"]
    items: Int64[Tensor, " pairs"]

    @classmethod
    def of(cls, items: JaggedTensor) -> QueryItems:
        lengths = items.lengths()
        queries = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return cls(queries, items.values())

    def __len__(self) -> int:
        return len(self.items)

    def between(self, first: int, end: int) -> QueryItems:
        """Returns the pairs of the queries ``[first, end)``, renumbered so that query ``first`` is 0."""
        bounds = torch.tensor([first, end], device=self.queries.device)
        begin_pair, end_pair = torch.searchsorted(self.queries, bounds).tolist()
        return QueryItems(self.queries[begin_pair:end_pair] - first, self.items[begin_pair:end_pair])

    def gathered(self, first_query: int, ranks: RankRows) -> QueryItems:
        """Returns the pairs of all ranks; ``first_query`` is added to this rank's queries. All ranks call it."""
        return QueryItems(ranks.gather(self.queries + first_query), ranks.gather(self.items))

    def are_in(self, other_pairs: QueryItems) -> Bool[Tensor, " pairs"]:
        """Returns whether each pair is also in ``other_pairs``; items are below 2^32, and queries below 2^31."""
        keys, other_keys = ((pairs.queries << 32) + pairs.items for pairs in (self, other_pairs))
        return torch.isin(keys, other_keys)

    def in_chunk(self, ids: Int64[Tensor, " ids"]) -> tuple[Int64[Tensor, " found"], Int64[Tensor, " found"]]:
        """Returns the index of each pair whose item is in the chunk, and the column of the item in ``ids``."""
        # among the sorted items those equal to ids[j] are a run of counts[j] pairs that begins at run_starts[j]:
        #   sorted items 3 5 5 8, ids 5 8 -> run_starts 1 3, counts 2 1 -> columns 0 0 1, positions 1 2 3
        items, order = self._by_item
        run_starts = torch.searchsorted(items, ids)
        counts = torch.searchsorted(items, ids, right=True) - run_starts
        columns = torch.repeat_interleave(torch.arange(len(ids), device=ids.device), counts)
        columns_before = counts.cumsum(0) - counts
        positions = torch.arange(len(columns), device=ids.device) + (run_starts - columns_before)[columns]
        return order[positions], columns

    @cached_property
    def _by_item(self) -> tuple[Tensor, Tensor]:
        items, order = self.items.sort()
        return items, order


class BestItems:
    """The best items so far of ``num_queries`` queries, ``num_best`` of each."""

    def __init__(self, num_queries: int, num_best: int, device: torch.device) -> None:
        self.keys = torch.full((num_queries, num_best), _LOWEST, dtype=torch.long, device=device)

    def add(self, scores: Float[Tensor, "queries ids"], ids: Int64[Tensor, " ids"]) -> None:
        """Adds the float32 scores of further ids below 2^32; an id whose score is -inf or NaN is never a best item."""
        num_best = min(self.keys.shape[1], len(ids))
        if not (num_best and len(scores)):
            return
        # later chunks hold a new best item for few queries: the other queries are skipped
        highest = scores.amax(1)
        if highest.isnan().any():  # NaN is the greatest for amax and topk
            scores = torch.where(scores.isnan(), -torch.inf, scores)
            highest = scores.amax(1)
        queries = (highest >= scores_of(self.keys[:, -1])).nonzero().squeeze(1)
        rows = scores[queries]
        values, columns = rows.topk(num_best)
        # topk may choose any of the items that tie for the last place; keys, over the whole row, prefer the lowest id
        lowest_best = values[:, -1:]
        is_tied = (torch.ge(rows, lowest_best, out=rows).sum(1) > num_best) & (lowest_best > -torch.inf).squeeze(1)
        self._keep_best(queries[~is_tied], keys_of(values, ids[columns])[~is_tied])
        tied = queries[is_tied]
        self._keep_best(tied, keys_of(scores[tied], ids))

    def _keep_best(self, queries: Int64[Tensor, " some"], keys: Int64[Tensor, "some new"]) -> None:
        self.keys[queries] = best_keys(torch.cat([self.keys[queries], keys], 1), self.keys.shape[1])


def best_keys(keys: Int64[Tensor, "queries any"], num_best: int) -> Int64[Tensor, "queries best"]:
    """Returns the best keys of each query, the best first."""
    return keys.topk(num_best, dim=1).values


def ids_of(keys: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Returns the id of each key; -1 where there was no item."""
    return torch.where(keys == _LOWEST, -1, _LOW - (keys & _LOW))


def scores_of(keys: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the score of each key; -inf where there was no item."""
    scores = _ordered(keys >> 32).to(torch.int32).view(torch.float32)
    return torch.where(keys == _LOWEST, -torch.inf, scores)


def keys_of(scores: Float[Tensor, "queries ids"], ids: Int64[Tensor, "*ids"]) -> Int64[Tensor, "queries ids"]:
    """Returns the keys of items: one set for all queries, or a set for each."""
    # NaN fails the comparison below, so it counts as no item, as -inf does
    high = _ordered(scores.contiguous().view(torch.int32).long())
    keys = (high << 32) | (_LOW - ids)
    return torch.where(scores > -torch.inf, keys, _LOWEST)


def _ordered(bits: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Maps the bits of float32 numbers, as signed integers, to integers in the order of the numbers, and back.

    The bits of negative numbers are in reverse order, so all of them but the sign are flipped.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
