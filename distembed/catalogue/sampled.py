"""Sampled softmax: the sum of exponentials over all items, estimated from the target and some drawn items.

Of S items drawn with probabilities q, ``exp(s_target) + sum over draws j of exp(s_j) / (S q_j)``, in which draws of the
target count nothing, has the sum over all items as its mean, whatever q is (Bengio and Senecal, IEEE Transactions on
Neural Networks 2008). So ``log(S q_j)`` is subtracted from the score of a draw. With the targets of a batch's other
rows as draws, q is how often an item is a target (Yi et al., RecSys 2019).

The loss, its logarithm, is not free of bias, but that vanishes with the number of draws. Trade-off against the exact
softmax: work and gradients for drawn rows alone, so that FBGEMM updates the table; and worse a loss the fewer draws are
made. Where draws leave items out, such as a user's own, these are not in the sum either.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from distembed.catalogue.queries import Queries


def sampled_cross_entropy(
    targets: Float[Tensor, " queries"],
    negatives: Float[Tensor, "queries draws"],
    log_probabilities: Float[Tensor, "queries draws"],
    is_hit: Bool[Tensor, "queries draws"],
) -> Float[Tensor, " queries"]:
    """Returns the loss of each query, ``log of the estimated sum - s_target``; 0 where nothing but the target is drawn.

    Args:
        targets: The target's score of each query.
        negatives: The scores of the items that were drawn for it.
        log_probabilities: The logarithm of the probability with which each draw gives its item; one of -inf, which an
            item that replaced another may have, counts nothing.
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
        queries: The queries, with one target and as many negatives each among their items.
        target: The feature of the targets.
        negative: The feature of the negatives.
        log_probabilities: The logarithm of the probability with which each draw gives its item.
    """
    is_hit = queries.items[negative].ids.view(log_probabilities.shape) == queries.items[target].ids.unsqueeze(1)
    scores = queries.scores(target).squeeze(1)
    return sampled_cross_entropy(scores, queries.scores(negative), log_probabilities, is_hit)


def in_batch_cross_entropy(
    queries: Queries, target: str, log_probabilities: Float[Tensor, " queries"]
) -> Float[Tensor, " queries"]:
    """Returns the loss of each query with the targets of this rank's other queries as draws.

    Args:
        queries: The queries, with one target each among their items.
        target: The feature of the targets.
        log_probabilities: The logarithm of the probability with which a target is each query's: how often it is one.
    """
    items = queries.items[target]
    scores = queries.vectors @ items.vectors.T
    if queries.catalogue.bias is not None:
        scores = scores + queries.catalogue.bias[items.ids]
    is_hit = items.ids.unsqueeze(0) == items.ids.unsqueeze(1)
    own, num_queries = scores.diagonal(), len(items.ids)
    # a query's own target is a column, and no draw
    correction = math.log(num_queries / (num_queries - 1)) if num_queries > 1 else 0.0
    return sampled_cross_entropy(own, scores + correction, log_probabilities.expand_as(scores), is_hit)
