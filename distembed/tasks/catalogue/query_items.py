"""Pairs of a query and an item, which are looked for among the ids of a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from distembed.tasks.catalogue.rank_rows import RankRows


@dataclass(frozen=True, eq=False)
class QueryItems:
    """Pairs of a query and an item, in the order of queries.

    Attributes:
        queries: Number of each pair's query.
        items: Id of each pair's item.
    """

    queries: Int64[Tensor, " pairs"]
    items: Int64[Tensor, " pairs"]

    @classmethod
    def of(cls, items: JaggedTensor) -> QueryItems:
        """Returns a pair for each item of each query."""
        lengths = items.lengths()
        queries = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return cls(queries, items.values())

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.items)

    def between(self, first: int, last: int) -> QueryItems:
        """Returns the pairs of the queries ``[first, last)``, which are counted from ``first`` on."""
        bounds = torch.tensor([first, last], device=self.queries.device)
        begin, end = torch.searchsorted(self.queries, bounds).tolist()
        return QueryItems(self.queries[begin:end] - first, self.items[begin:end])

    def gathered(self, first_query: int, ranks: RankRows) -> QueryItems:
        """Returns the pairs of all ranks; all ranks call it.

        Args:
            first_query: Number of this rank's first query among those of all ranks.
            ranks: Numbers of pairs.
        """
        return QueryItems(ranks.gather(self.queries + first_query), ranks.gather(self.items))

    def are_in(self, others: QueryItems) -> Bool[Tensor, " pairs"]:
        """Returns which of the pairs are among others; items are below 2^32, and queries below 2^31."""
        keys, other_keys = ((pairs.queries << 32) + pairs.items for pairs in (self, others))
        return torch.isin(keys, other_keys)

    def in_chunk(self, ids: Int64[Tensor, " ids"]) -> tuple[Int64[Tensor, " found"], Int64[Tensor, " found"]]:
        """Returns the numbers of the pairs whose items are among some ids, and the place of each one's item there."""
        items, order = self._by_item
        first = torch.searchsorted(items, ids)
        counts = torch.searchsorted(items, ids, right=True) - first
        columns = torch.repeat_interleave(torch.arange(len(ids), device=ids.device), counts)
        before = counts.cumsum(0) - counts
        places = torch.arange(len(columns), device=ids.device) + (first - before)[columns]
        return order[places], columns

    @cached_property
    def _by_item(self) -> tuple[Tensor, Tensor]:
        items, order = self.items.sort()
        return items, order
