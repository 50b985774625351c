"""The products of a softmax's tiles: in float32, or of 16-bit numbers on CUDA.

In float32 biases and what is subtracted from a query's scores are columns more of both factors, so that a product gives
finished scores and nothing goes over the tile again. bfloat16 would round them, and adds them in float32.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Products(ABC):
    """Scores of queries and items, tile by tile.

    Args:
        queries: All queries.
        shift: What is subtracted from all scores of each.
        most_numbers: Most numbers of a tile.
    """

    @abstractmethod
    def __init__(
        self, queries: Float[Tensor, "queries dim"], shift: Float[Tensor, " queries"], most_numbers: int
    ) -> None:
        """Prepares all queries."""

    @abstractmethod
    def items(self, vectors: Float[Tensor, "ids dim"], bias: Float[Tensor, " ids"]) -> Any:
        """Prepares the items of a chunk, for several tiles."""

    @abstractmethod
    def scores(self, rows: slice, items: Any) -> Float[Tensor, "rows ids"]:
        """Returns the scores of some queries with prepared items; they may lie where those of the call before lay."""

    @abstractmethod
    def add(self, total: Float[Tensor, "n m"], left: Float[Tensor, "n k"], right: Float[Tensor, "k m"]) -> None:
        """Adds the product of two matrices to a total."""


class Float32Products(Products):
    """Products in float32, into one buffer."""

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


class HalfProducts(Products):
    """Products of numbers in the queries' own 16 bits, added up in float32, which torch has on CUDA."""

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


def products(
    queries: Float[Tensor, "queries dim"], shift: Float[Tensor, " queries"] | None, most_numbers: int
) -> Products:
    """Returns the products of queries in their own dtype.

    Args:
        queries: All queries, in float32, or in 16 bits on other devices than a CPU.
        shift: What is subtracted from all scores of each; None for nothing.
        most_numbers: Most numbers of a tile.
    """
    none = torch.zeros(len(queries), device=queries.device) if shift is None else shift
    make = Float32Products if queries.dtype == torch.float32 else HalfProducts
    return make(queries, none, most_numbers)
