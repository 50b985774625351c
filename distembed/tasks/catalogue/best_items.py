"""The best items of queries, found chunk by chunk: of equal scores the one with the lower id is the better.

Score and id are one 64-bit key, so that the result depends on neither the order of the chunks nor their ranks::

    key    | score, as an integer of the same order | 2^32 - 1 - id |
             63                                   32  31           0
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_LOW = 2**32 - 1
_LOWEST = -(2**63)


class BestItems:
    """The best items of some queries so far.

    Args:
        num_queries: Number of queries.
        num_best: Number of items that are kept of each.
        device: Where the scores are.
    """

    def __init__(self, num_queries: int, num_best: int, device: torch.device) -> None:
        self.keys = torch.full((num_queries, num_best), _LOWEST, dtype=torch.long, device=device)

    def add(self, scores: Float[Tensor, "queries ids"], ids: Int64[Tensor, " ids"]) -> None:
        """Takes the scores of more items; those of -inf are left out.

        Args:
            scores: Float32 scores.
            ids: Ids below 2^32, none of which were added before.
        """
        num_best = min(self.keys.shape[1], len(ids))
        if not (num_best and len(scores)):
            return
        # few queries have a new best item in a late chunk
        queries = (scores.amax(1) >= scores_of(self.keys[:, -1])).nonzero().squeeze(1)
        rows = scores[queries]
        values, columns = rows.topk(num_best)
        # which of several with the last score are among them is left open
        last = values[:, -1:]
        is_tied = (torch.ge(rows, last, out=rows).sum(1) > num_best) & (last > -torch.inf).squeeze(1)
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
    """Returns the keys of items: the same ones for all queries, or of each its own."""
    # a score that is no number is the worst there is
    high = _ordered(scores.contiguous().view(torch.int32).long())
    keys = (high << 32) | (_LOW - ids)
    return torch.where(scores > -torch.inf, keys, _LOWEST)


def _ordered(bits: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Returns integers in the order of the numbers whose float32 bits are given, or the bits of such integers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
