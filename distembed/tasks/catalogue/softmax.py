"""Softmax cross-entropy over a catalogue: exact, or estimated from some drawn items.

The loss of query h with target t is ``log(sum_i exp(h . u_i + b_i)) - (h . u_t + b_t)``.

**Exact**, without all scores in memory and without gathering the vectors: the queries of all ranks are gathered, each
rank goes over its share of the items tile by tile, and the ranks' results are added up::

               items of the rank's share
               | chunk 0 | chunk 1 | chunk 2 |
    queries 0  |  tile   |  tile   |  tile   |  ->  log of the sum of exponentials, score of the target
    queries 1  |  tile   |  tile   |  tile   |  ->  (all ranks together: logsumexp of the ranks' logarithms)

Backward makes each tile again (Milakov and Gimelshein, 2018, for sums piece by piece). With ``p = exp(score - log of
the sum)``, less 1 at the target, and g the gradient of each query's loss, the gradient of the queries is ``g p U``, of
a chunk's vectors ``(g p)^T H``, and of their biases the sums of ``g p``. The price is one product in four, the gain
memory for one tile in place of all.

**Sampled**: with S items drawn with probabilities q, the mean of ``exp(s_target) + sum over draws j of exp(s_j) /
(S q_j)`` is the sum over all items for every q, where draws of the target count nothing (Bengio and Senecal, IEEE
Transactions on Neural Networks 2008). So ``log(S q_j)`` is subtracted from the score of a draw. With the targets of a
batch's other rows as draws, q is how often an item is a target (Yi et al., RecSys 2019). The loss, the logarithm of the
sum, has a bias that vanishes with the number of draws. Trade-off: work and gradients for drawn rows alone, so that
FBGEMM updates the table; and a worse loss the fewer draws there are. Items that are never drawn are not in the sum.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distembed.base.errors import UserError
from distembed.embedding.share import ReadChunk, TableShare
from distembed.models.queries import Catalogue, Items, Queries
from distembed.tasks.catalogue.rank_rows import RankRows

_EXCLUDED = -1e30
"""A bias with which an item's exponential is 0; it is finite, so that no difference of two is not a number."""


@dataclass(frozen=True)
class SoftmaxItems:
    """The items of a softmax, and the size of its tiles.

    Attributes:
        share: This rank's share of their vectors.
        num_excluded: Number of items, from the first one, that are left out of the softmax.
        items_at_once: Most items of a tile.
        queries_at_once: Most queries of a tile.
    """

    share: TableShare
    num_excluded: int = 0
    items_at_once: int = 4096
    queries_at_once: int = 256

    @classmethod
    def on(cls, device: torch.device, share: TableShare, num_excluded: int) -> "SoftmaxItems":
        """Returns the items with tiles for a device: they fit into a processor's cache, or keep CUDA busy."""
        return cls(share, num_excluded, *((8192, 2048) if device.type == "cuda" else (4096, 256)))


def catalogue_cross_entropy(
    catalogue: Catalogue,
    vectors: Float[Tensor, "queries dim"],
    targets: Int64[Tensor, " queries"],
    counts: Sequence[int] | None = None,
) -> Float[Tensor, " queries"]:
    """Returns the loss of each query over all items of a catalogue but its reserved ones; all ranks call it.

    A number added to all scores of a query, as in :attr:`Queries.offsets <distembed.models.queries.Queries.offsets>`,
    does not change the loss.

    Args:
        catalogue: The items and their biases.
        vectors: This rank's queries; it may have none.
        targets: The item that each query should choose, none of them reserved.
        counts: Number of queries of each rank; None for ranks to exchange them, which waits for a GPU.

    Raises:
        UserError: The table is not trained by gradients of all of its rows.
    """
    items = SoftmaxItems.on(vectors.device, catalogue.share(), catalogue.num_reserved)
    return cross_entropy(vectors, targets, catalogue.bias, items, counts)


def cross_entropy(
    vectors: Float[Tensor, "queries dim"],
    targets: Int64[Tensor, " queries"],
    bias: Float[Tensor, " items"] | None,
    items: SoftmaxItems,
    counts: Sequence[int] | None = None,
) -> Float[Tensor, " queries"]:
    """Returns the loss of each of this rank's queries; all ranks call it, also a rank without queries.

    The trainer scales a rank's loss to its share of the mean over all ranks' rows, times the number of ranks. With that
    scale, sharded weights get the gradient of the mean loss. The bias and replicated weights get, on each rank,
    gradients whose mean over ranks is the gradient of the mean loss.

    Args:
        vectors: This rank's queries, in the dtype of products; on a CPU these are in float32, which is faster there.
        targets: The item that each query should choose, none of them excluded.
        bias: The bias of all items, equal on all ranks; None for none.
        items: The items.
        counts: Number of queries of each rank; None for ranks to exchange them, which waits for a GPU.

    Raises:
        UserError: Gradients are needed, and a fused kernel updates the table's weights.
    """
    weights = [table_weight.weight for table_weight in items.share.weights]
    if torch.is_grad_enabled() and not all(weight.requires_grad for weight in weights):
        raise UserError(
            f"a softmax over table {items.share.table.name!r} has gradients in all of its rows, and the table is "
            "placed with a fused kernel, which takes those of looked-up rows; give the table dense_gradient=True."
        )
    if counts is None:
        ranks = RankRows.of(len(vectors), vectors.device, items.share)
    else:
        ranks = RankRows(counts, items.share.group)
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        vectors, targets, bias, items, ranks, *weights
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    """The losses of :func:`cross_entropy`; backward needs the queries and their log-sums, and no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        items: SoftmaxItems,
        ranks: RankRows,
        *weights: Tensor,
    ) -> Tensor:
        dtype = torch.float32 if vectors.device.type == "cpu" else vectors.dtype
        queries = _Queries(ranks.gather(vectors.to(dtype)), ranks.gather(targets), ranks)
        log_sum, scores = _forward(queries, bias, items)
        ctx.items, ctx.ranks, ctx.dtype = items, ranks, vectors.dtype
        ctx.save_for_backward(queries.vectors, queries.targets, log_sum, bias)
        return ranks.own(log_sum - scores).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        vectors, targets, log_sum, bias = ctx.saved_tensors
        items, ranks, share = ctx.items, ctx.ranks, ctx.items.share
        loss_gradients = ranks.gather(gradients[0].float())
        query_gradients, bias_gradients, weight_gradients = _backward(
            _Queries(vectors, targets, ranks), loss_gradients, log_sum, bias, items
        )
        # Losses are scaled by world_size, and of_weights sums over the losses of all ranks. DDP averages replicated
        # weights and the bias over ranks; nothing averages sharded weights, so they are divided here.
        for table_weight, gradient in zip(share.weights, weight_gradients, strict=True):
            if not table_weight.is_replicated:
                gradient.div_(share.world_size)
        typed_gradients = [
            gradient.to(table_weight.weight.dtype)
            for table_weight, gradient in zip(share.weights, weight_gradients, strict=True)
        ]
        return ranks.sum_own(query_gradients).to(ctx.dtype), None, bias_gradients, None, None, *typed_gradients


@dataclass(frozen=True)
class _Queries:
    """The queries of all ranks, the item that each should choose, and their number by rank."""

    vectors: Float[Tensor, "queries dim"]
    targets: Int64[Tensor, " queries"]
    ranks: RankRows


class _Float32Products:
    """Computes scores and gradients in float32; every tile's scores overwrite the same buffer.

    A score is one product: ``[h, 1, -shift] . [u, b, 1] = h . u + b - shift``. bfloat16 would round b and shift, so
    :class:`_HalfProducts` adds them in float32. Both classes: ``items`` prepares a chunk once for all of its tiles,
    ``scores`` makes a tile, and ``add`` is ``total += left @ right``.
    """

    def __init__(
        self, queries: Float[Tensor, "queries dim"], shift: Float[Tensor, " queries"], most_numbers: int
    ) -> None:
        ones = torch.ones(len(queries), 1, device=queries.device)
        self._queries = torch.cat([queries, ones, -shift.unsqueeze(1)], dim=1)
        self._buffer = torch.empty(most_numbers, device=queries.device)

    def items(self, vectors: Float[Tensor, "ids dim"], bias: Float[Tensor, " ids"]) -> Any:
        return torch.cat([vectors, bias.unsqueeze(1), torch.ones(len(vectors), 1, device=vectors.device)], dim=1)

    def scores(self, rows: slice, items: Any) -> Float[Tensor, "rows ids"]:
        queries = self._queries[rows]
        size = len(queries), len(items)
        return torch.mm(queries, items.T, out=self._buffer[: size[0] * size[1]].view(size))

    def add(self, total: Float[Tensor, "n m"], left: Float[Tensor, "n k"], right: Float[Tensor, "k m"]) -> None:
        total.addmm_(left, right)


class _HalfProducts:
    """Multiplies in the queries' 16-bit dtype and accumulates in float32, which torch offers on CUDA alone."""

    def __init__(
        self, queries: Float[Tensor, "queries dim"], shift: Float[Tensor, " queries"], most_numbers: int
    ) -> None:
        self._queries, self._shift = queries, shift.unsqueeze(1)

    def items(self, vectors: Float[Tensor, "ids dim"], bias: Float[Tensor, " ids"]) -> Any:
        return vectors.to(self._queries.dtype).T, bias

    def scores(self, rows: slice, items: Any) -> Float[Tensor, "rows ids"]:
        vectors, bias = items
        products = torch.mm(self._queries[rows], vectors, out_dtype=torch.float32)
        return products.add_(bias).sub_(self._shift[rows])

    def add(self, total: Float[Tensor, "n m"], left: Float[Tensor, "n k"], right: Float[Tensor, "k m"]) -> None:
        dtype = self._queries.dtype
        total.add_(torch.mm(left.to(dtype), right.to(dtype), out_dtype=torch.float32))


def _products(queries: Tensor, shift: Tensor | None, most_numbers: int) -> "_Float32Products | _HalfProducts":
    """Returns the products of queries in their dtype; ``shift`` is subtracted from all scores of each query."""
    none = torch.zeros(len(queries), device=queries.device) if shift is None else shift
    make = _Float32Products if queries.dtype == torch.float32 else _HalfProducts
    return make(queries, none, most_numbers)


class _Tiles:
    """The tiles of all queries and this rank's items.

    ``shift`` is subtracted from all scores of a query. Forward subtracts nothing; backward subtracts the logarithm of
    the query's sum, so that the exponential of a score is the item's probability.
    """

    def __init__(self, queries: _Queries, shift: Tensor | None, bias: Tensor | None, items: SoftmaxItems) -> None:
        self._queries, self._bias, self._items = queries, bias, items
        self._products = _products(queries.vectors, shift, items.queries_at_once * items.items_at_once)

    def chunks(self, with_gradients: bool) -> Iterator[tuple[ReadChunk, "Iterator[_Tile]"]]:
        """Yields this rank's chunks of items with their tiles; all ranks call it, and get equally many chunks."""
        for number in range(self._items.share.num_chunks(self._items.items_at_once)):
            read = self._items.share.read(number, self._items.items_at_once, with_gradients)
            yield read, self._tiles(read)

    def _tiles(self, read: ReadChunk) -> "Iterator[_Tile]":
        """Yields the tiles of a chunk, one for each block of queries; none for a chunk without ids."""
        ids = read.chunk_ids.ids
        if not len(ids):
            return
        bias = torch.zeros(len(ids), device=ids.device) if self._bias is None else self._bias.detach()[ids].float()
        if self._items.num_excluded:
            bias = bias.masked_fill(ids < self._items.num_excluded, _EXCLUDED)
        target_columns, is_here = read.chunk_ids.indices_of(self._queries.targets)
        prepared = self._products.items(read.vectors, bias)
        for start in range(0, len(self._queries.vectors), self._items.queries_at_once):
            rows = slice(start, start + self._items.queries_at_once)
            scores = self._products.scores(rows, prepared)
            yield _Tile(rows, scores, target_columns[rows].unsqueeze(1), is_here[rows].unsqueeze(1))

    def add_products(
        self, tile: "_Tile", vectors: Tensor, factors: Tensor, query_gradients: Tensor, item_gradients: Tensor
    ) -> None:
        """Adds ``G U`` of a tile to ``query_gradients`` and ``G^T factors`` to ``item_gradients``, in place.

        Args:
            tile: The tile, whose scores have been overwritten by their gradients G.
            vectors: The vectors U of the tile's items.
            factors: A row for each query of all ranks: its vector and 1, times the gradient of its loss.
            query_gradients: The sums for all queries.
            item_gradients: The sums for the tile's items.
        """
        self._products.add(item_gradients, tile.scores.T, factors[tile.rows])
        self._products.add(query_gradients[tile.rows], tile.scores, vectors)


@dataclass(frozen=True)
class _Tile:
    """The scores of some queries with a chunk's items, in a buffer that the next tile overwrites.

    Attributes:
        rows: The queries among all.
        scores: The scores.
        places: The place of each query's target among the items.
        is_here: Whether the target is among them.
    """

    rows: slice
    scores: Float[Tensor, "queries ids"]
    target_columns: Int64[Tensor, "queries 1"]
    is_here: Bool[Tensor, "queries 1"]


def _forward(queries: _Queries, bias: Tensor | None, items: SoftmaxItems) -> tuple[Tensor, Tensor]:
    """Returns the log of the sum of exponentials, in float64, and the target's score, for each query of all ranks."""
    log_sum = torch.full(queries.targets.shape, -torch.inf, dtype=torch.float64, device=queries.vectors.device)
    target_score = torch.zeros_like(log_sum)
    for _, tiles in _Tiles(queries, None, bias, items).chunks(with_gradients=False):
        for tile in tiles:
            target_score[tile.rows] += tile.scores.gather(1, tile.target_columns).mul_(tile.is_here).squeeze(1)
            highest = tile.scores.amax(1)
            # the largest probability is share = exp(highest) / sum, so log(sum) = highest - log(share); the softmax
            # overwrites the tile in one pass, where logsumexp would allocate another tensor of its size
            highest_probability = torch.softmax(tile.scores, 1, out=tile.scores).amax(1)
            log_sum[tile.rows] = log_sum[tile.rows].logaddexp((highest - highest_probability.log()).double())
    if queries.ranks.group is None:
        return log_sum, target_score
    local_results = torch.stack([log_sum, target_score])
    all_results = local_results.new_empty(len(queries.ranks.counts), *local_results.shape)
    dist.all_gather(list(all_results.unbind()), local_results, group=queries.ranks.group)
    return all_results[:, 0].logsumexp(0), all_results[:, 1].sum(0)


def _backward(
    queries: _Queries, gradients: Tensor, log_sum: Tensor, bias: Tensor | None, items: SoftmaxItems
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns the gradients of all ranks' losses in all queries, the bias and this rank's weights."""
    query_gradients = torch.zeros_like(queries.vectors, dtype=torch.float32)
    bias_gradients = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    weight_gradients = [
        torch.zeros_like(table_weight.weight, dtype=torch.float32) for table_weight in items.share.weights
    ]
    # g h for each query, and g in a last column: (p - one-hot target)^T times them gives the gradients of vectors and,
    # in the last column, of biases
    factors = torch.cat([queries.vectors.float(), torch.ones_like(gradients).unsqueeze(1)], 1) * gradients.unsqueeze(1)
    all_tiles = _Tiles(queries, log_sum.float(), bias, items)
    for read, tiles in all_tiles.chunks(with_gradients=True):
        item_gradients = torch.zeros(len(read.vectors), factors.shape[1], device=factors.device)
        for tile in tiles:
            tile.scores.exp_().scatter_add_(1, tile.target_columns, -tile.is_here.float())
            all_tiles.add_products(tile, read.vectors, factors, query_gradients, item_gradients)
        items.share.add_gradients(read, item_gradients[:, :-1], weight_gradients)
        if bias_gradients is not None:
            bias_gradients[read.chunk_ids.ids] = item_gradients[:, -1]
    return query_gradients.mul_(gradients.unsqueeze(1)), bias_gradients, weight_gradients


_MOST_SCORES = 2**25
"""Scores of a batch's queries and targets that are computed at once: 128 MiB, of a few tensors."""


def sampled_cross_entropy(
    targets: Float[Tensor, " queries"],
    negatives: Float[Tensor, "queries draws"],
    log_probabilities: Float[Tensor, "queries draws"],
    is_hit: Bool[Tensor, "queries draws"],
) -> Float[Tensor, " queries"]:
    """Returns the loss of each query, ``log of the estimated sum - s_target``; 0 where nothing but the target is drawn.

    Args:
        targets: The target's score of each query.
        negatives: The scores of the items drawn for it.
        log_probabilities: The logarithm of each draw's probability; a draw of -inf counts nothing.
        is_hit: Whether a draw is the query's target.
    """
    # without a name for the corrected scores: a step's largest tensors would live until the end
    candidates = torch.cat([targets.unsqueeze(1), _corrected(negatives, log_probabilities, is_hit)], dim=1)
    return candidates.logsumexp(1) - targets


def _corrected(
    negatives: Float[Tensor, "queries draws"],
    log_probabilities: Float[Tensor, "queries draws"],
    is_hit: Bool[Tensor, "queries draws"],
) -> Float[Tensor, "queries draws"]:
    """Returns ``s - log(probability) - log(draws)`` of each draw, and -inf of a draw that counts nothing."""
    num_draws = negatives.shape[1]
    corrected = (negatives - log_probabilities).sub_(math.log(num_draws) if num_draws else 0.0)
    return corrected.masked_fill_(is_hit | (log_probabilities == -torch.inf), -torch.inf)


def drawn_cross_entropy(
    queries: Queries, target: str, negative: str, log_probabilities: Float[Tensor, "queries draws"]
) -> Float[Tensor, " queries"]:
    """Returns the loss of each query with its own draws.

    Args:
        queries: The queries, each with one target and equally many negatives among their items.
        target: The feature of the targets.
        negative: The feature of the negatives.
        log_probabilities: The logarithm of each draw's probability.
    """
    is_hit = queries.items[negative].ids.view(log_probabilities.shape) == queries.items[target].ids.unsqueeze(1)
    scores = queries.scores(target).squeeze(1)
    return sampled_cross_entropy(scores, queries.scores(negative), log_probabilities, is_hit)


def in_batch_cross_entropy(
    queries: Queries, target: str, log_probabilities: Float[Tensor, " queries"]
) -> Float[Tensor, " queries"]:
    """Returns the loss of each query with the targets of this rank's other queries as negatives.

    Scores of very many queries are computed block by block, and again in the backward pass.

    Args:
        queries: The queries, with one target each among their items.
        target: The feature of the targets.
        log_probabilities: For each query, the logarithm of its target's share of all targets.
    """
    items = queries.items[target]
    bias = queries.catalogue.bias
    num_queries = len(items.ids)
    # sampled_cross_entropy subtracts log n for n columns; the query's own target is one of them, so n - 1 are draws,
    # and log n - log(n / (n - 1)) = log(n - 1) is subtracted
    shifts = -log_probabilities + (math.log(num_queries / (num_queries - 1)) if num_queries > 1 else 0.0)
    candidates = BatchCandidates(items, shifts, None if bias is None else bias[items.ids])
    return candidates.cross_entropy(queries.vectors)


@dataclass(frozen=True)
class BatchCandidates:
    """Items that all queries of a step share as candidates; a query's target is one of them.

    Attributes:
        items: The candidates.
        shifts: The number that is added to the score of each candidate, except for the queries that it is the target
            of: ``log(number of candidates) - log(expected number of its draws)``; inf for a candidate that is no draw.
        biases: The bias of each candidate; None for none.
        first: The candidate that is the target of the first query; the targets of further queries follow it.
    """

    items: Items
    shifts: Float[Tensor, " candidates"]
    biases: Float[Tensor, " candidates"] | None = None
    first: int = 0

    def cross_entropy(self, vectors: Float[Tensor, "queries dim"]) -> Float[Tensor, " queries"]:
        """Returns the loss of each query; scores of many are computed in blocks, and again in the backward pass."""
        rows_at_once = max(1, _MOST_SCORES // max(1, len(self.items.ids)))
        if rows_at_once >= len(vectors):
            return self._of_block(vectors, self.items.vectors, self.first)
        blocks = [
            checkpoint(
                self._of_block, block, self.items.vectors, self.first + number * rows_at_once, use_reentrant=False
            )
            for number, block in enumerate(vectors.split(rows_at_once))
        ]
        return torch.cat(blocks)

    def _of_block(
        self, vectors: Float[Tensor, "rows dim"], candidates: Float[Tensor, "candidates dim"], first: int
    ) -> Float[Tensor, " rows"]:
        """Returns the losses of queries whose targets are the candidates ``first`` to ``first + rows - 1``."""
        scores = vectors @ candidates.T
        if self.biases is not None:
            scores = scores + self.biases
        block_columns = slice(first, first + len(vectors))
        is_hit = self.items.ids.unsqueeze(0) == self.items.ids[block_columns].unsqueeze(1)
        targets = scores[:, block_columns].diagonal()
        return sampled_cross_entropy(targets, scores, (-self.shifts).expand_as(scores), is_hit)
