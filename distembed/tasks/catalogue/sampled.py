"""Sampled softmax: the sum of exponentials over all items, estimated from the target and some drawn items.

With S items drawn with probabilities q, the mean of ``exp(s_target) + sum over draws j of exp(s_j) / (S q_j)`` is the
sum over all items for every q, where draws of the target count nothing (Bengio and Senecal, IEEE Transactions on Neural
Networks 2008). So ``log(S q_j)`` is subtracted from the score of a draw. With the targets of a batch's other rows as
draws, q is how often an item is a target (Yi et al., RecSys 2019).

The loss, the logarithm of the sum, has a bias that vanishes with the number of draws. Trade-off against the exact
softmax: work and gradients for drawn rows alone, so that FBGEMM updates the table; and a worse loss the fewer draws
there are. Items that are never drawn, for example a user's own, are missing from the sum.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distembed.models.queries import Items, Queries

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
    num_draws = negatives.shape[1]
    corrected = negatives - log_probabilities - (math.log(num_draws) if num_draws else 0.0)
    corrected = corrected.masked_fill(is_hit | (log_probabilities == -torch.inf), -torch.inf)
    return torch.cat([targets.unsqueeze(1), corrected], dim=1).logsumexp(1) - targets


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
    """Returns the loss of each query with the targets of this rank's other queries as draws.

    Scores of very many queries are computed block by block, and again in the backward pass.

    Args:
        queries: The queries, with one target each among their items.
        target: The feature of the targets.
        log_probabilities: The logarithm of how often each query's target is a target.
    """
    items = queries.items[target]
    bias = queries.catalogue.bias
    num_queries = len(items.ids)
    # a query's own target is a column, and no draw
    shifts = -log_probabilities + (math.log(num_queries / (num_queries - 1)) if num_queries > 1 else 0.0)
    shared = items, None if bias is None else bias[items.ids], shifts
    rows_at_once = max(1, _MOST_SCORES // max(1, num_queries))
    if rows_at_once >= num_queries:
        return _block_of_batch(queries.vectors, 0, *shared)
    blocks = [
        checkpoint(_block_of_batch, vectors, number * rows_at_once, *shared, use_reentrant=False)
        for number, vectors in enumerate(queries.vectors.split(rows_at_once))
    ]
    return torch.cat(blocks)


def _block_of_batch(
    vectors: Float[Tensor, "rows dim"],
    first: int,
    items: Items,
    biases: Float[Tensor, " queries"] | None,
    shifts: Float[Tensor, " queries"],
) -> Float[Tensor, " rows"]:
    """Returns the losses of the queries from ``first`` on; ``shifts`` are added to the scores of targets as draws."""
    scores = vectors @ items.vectors.T
    if biases is not None:
        scores = scores + biases
    own = slice(first, first + len(vectors))
    is_hit = items.ids.unsqueeze(0) == items.ids[own].unsqueeze(1)
    return sampled_cross_entropy(scores[:, own].diagonal(), scores, -shifts.expand_as(scores), is_hit)
