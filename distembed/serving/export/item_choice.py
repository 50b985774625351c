"""The best items of queries, as operations on tensors alone: all items of a catalogue are scored, and k are kept.

Nothing of the items is ready but their tables as these are stored. An item table is stored as the run has it, as
partitions, or as the vector of each item where that is smaller, like any other table (``--materialise auto``); its
vectors are composed for each call, chunk by chunk, so that neither all of them nor all scores are ever in memory::

    items    | chunk | chunk | chunk |      vectors of a chunk, scores [batch, chunk], the best k of it; then dropped
    best     |   k  ->   k  ->   k   |

The trade-off: a catalogue of a million items of 64 numbers takes 256 MB as vectors and a quarter of that as partitions
of 4 collisions, and composing it reads and writes the 256 MB anew in each call, whether that has one row or many. For
few rows a call that is most of the time, and ``--materialise always`` is what a server with the memory wants: the
vectors are then read where they lie. A tied model has one copy of them either way, for its inputs and its outputs.

The best are chosen by products in float32. Their scores are then products in float64, rounded, as the trainer's
scores are (:mod:`distembed.tasks.catalogue.ranking`); for all items they would take twice the time. An item whose score
equals the last chosen one's, or differs by rounding alone, may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from distembed.serving.export.table_groups import TableGroup
from distembed.tasks.catalogue.best_items import best_keys, ids_of, keys_of, scores_of

_LEAST_CHUNK, _MOST_CHUNKS = 1 << 16, 64
"""Items of a chunk, unless there were more chunks: each makes a program longer."""


class ItemChoice(nn.Module):
    """Maps queries to their best items and these items' scores ``h . u_i + b_i``, of equal scores the lower id first.

    Args:
        items: The table of items, alone in its group.
        num_items: Number of its ids.
        bias: The bias of each id; None where they have none.
        reserved: Ids that stand for no item.
        num_best: Number of items of each query.
    """

    def __init__(
        self, items: TableGroup, num_items: int, bias: Tensor | None, reserved: Sequence[int], num_best: int
    ) -> None:
        super().__init__()
        self.items = items
        own = torch.zeros(num_items) if bias is None else bias.detach().clone().float()
        own[list(reserved)] = -torch.inf
        self.register_buffer("bias", own)
        self.register_buffer("zero", torch.zeros(1, 1, dtype=torch.int64))
        self._num_items, self._num_best = num_items, num_best
        self._chunk = max(_LEAST_CHUNK, -(-num_items // _MOST_CHUNKS))

    def forward(
        self,
        queries: Float[Tensor, "batch dim"],
        owners: Int64[Tensor, " ids"],
        left_out: Int64[Tensor, " ids"],
        is_item: Bool[Tensor, " ids"],
    ) -> tuple[Int64[Tensor, "batch best"], Float[Tensor, "batch best"]]:
        """Returns the best items, -1 where there are fewer, and their scores, -inf there.

        Args:
            queries: The queries.
            owners: Rows of ids.
            left_out: The ids, which are not among their row's best items.
            is_item: Which of them are items at all; others change nothing.
        """
        chunks = [
            self._best_between(first, min(first + self._chunk, self._num_items), queries, (owners, left_out, is_item))
            for first in range(0, self._num_items, self._chunk)
        ]
        keys = best_keys(torch.cat(chunks, dim=1), self._num_best)
        return ids_of(keys), scores_of(keys)

    def _best_between(
        self, first: int, stop: int, queries: Tensor, left_out: tuple[Tensor, Tensor, Tensor]
    ) -> Int64[Tensor, "batch most"]:
        """Returns the keys of the best items of a chunk."""
        bias = cast(Tensor, self.bias)[first:stop]
        vectors = self._vectors(first, stop)
        scores = torch.addmm(bias, queries, vectors.T)
        owners, ids, is_item = left_out
        places = ids - first
        is_here = is_item & (places >= 0) & (places < stop - first)
        minus = torch.where(is_here, -torch.inf, 0.0)
        scores = scores.index_put((owners, places.clamp(0, stop - first - 1)), minus, accumulate=True)
        rounded, columns = scores.topk(min(self._num_best, stop - first))
        exact = (queries.double().unsqueeze(1) * vectors[columns].double()).sum(2) + bias[columns].double()
        return keys_of(torch.where(rounded > -torch.inf, exact.float(), -torch.inf), columns + first)

    def _vectors(self, first: int, stop: int) -> Float[Tensor, "ids dim"]:
        """Returns the vectors of a chunk."""
        if self.items.is_full:
            return self.items.vectors_between(first, stop)
        # rows that depend on no tensor at all are left unwritten by the compiler of torch 2.13 where they are stacked
        ids = torch.arange(first, stop) + cast(Tensor, self.zero)
        return self.items.vectors(ids, [0])[0]
