"""The reference DLRM on one device, written after its description, as the peer of distembed's DLRM.

Naumov et al. 2019 (arXiv 1906.00091), section 2: a bottom network maps dense features to a vector, and a table for each
categorical feature maps ids to a vector, one feature after another. The dot products of all pairs of vectors, and the
bottom network's vector, go into a top network that ends in a sigmoid. Tables are quotient-remainder tables (Shi et al.,
KDD 2020, algorithm 2). The model is fp32, eager and in one process. Its default optimizer is ``torch.optim.SGD`` with
sparse gradients for the tables; ``torch.optim.Adagrad`` takes sparse gradients too.

Shape letters: ``B`` rows, ``D`` numbers of a vector.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        num_ids: Number of ids of each categorical feature.
        collisions: Number of rows of the small table, and number of ids that share a row of the large table.
        embedding_dim: Numbers of a vector, D.
        num_dense: Number of dense features.
        bottom: Hidden sizes of the bottom network.
        top: Hidden sizes of the top network.
    """

    num_ids: Sequence[int]
    collisions: int
    embedding_dim: int
    num_dense: int
    bottom: Sequence[int] = (512, 256, 64)
    top: Sequence[int] = (512, 256)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch; ``offsets`` and ``ids`` have a tensor for each feature: the starts of the rows' bags, and their ids."""

    dense: Float[Tensor, "B dense"]
    offsets: Sequence[Int64[Tensor, " B"]]
    ids: Sequence[Int64[Tensor, " ids"]]
    labels: Float[Tensor, " B"]


class QuotientRemainderBag(nn.Module):
    r"""The product of two ``nn.EmbeddingBag``.

    An id ``x`` has row ``x \ collisions`` of the large table and row ``x mod collisions`` of the small table. As in the
    reference, bags are summed in each table before the product. Only for bags of one id this equals the sum of the ids'
    products.
    """

    def __init__(self, num_ids: int, collisions: int, embedding_dim: int) -> None:
        super().__init__()
        self.collisions = collisions
        self.quotients, self.remainders = (
            nn.EmbeddingBag(num_rows, embedding_dim, mode="sum", sparse=True)
            for num_rows in (-(-num_ids // collisions), collisions)
        )
        for table in (self.quotients, self.remainders):  # near 1: products of small numbers would vanish
            nn.init.uniform_(table.weight, num_ids**-0.5, 1.0)

    def forward(self, ids: Int64[Tensor, " ids"], offsets: Int64[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """Returns a vector for each bag."""
        quotients = torch.div(ids, self.collisions, rounding_mode="floor")
        remainders = torch.remainder(ids, self.collisions)
        return self.quotients(quotients, offsets) * self.remainders(remainders, offsets)


def _network(sizes: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Returns linear layers of these sizes, with a ReLU after each, and ``last`` after the last layer."""
    layers: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


class ReferenceDLRM(nn.Module):
    """Maps dense features and bags of ids to the probability of a click."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim = size.embedding_dim
        self.bags = nn.ModuleList(QuotientRemainderBag(num_ids, size.collisions, dim) for num_ids in size.num_ids)
        num_vectors = len(self.bags) + 1
        first, second = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("_first", first, persistent=False)
        self.register_buffer("_second", second, persistent=False)
        self.bottom = _network([size.num_dense, *size.bottom, dim], nn.ReLU())
        self.top = _network([dim + len(first), *size.top, 1], nn.Sigmoid())

    def forward(self, rows: Rows) -> Float[Tensor, " B"]:
        """Returns the probability of each row."""
        dense = self.bottom(rows.dense)
        looked_up = [bag(ids, offsets) for bag, ids, offsets in zip(self.bags, rows.ids, rows.offsets, strict=True)]
        vectors = torch.stack([dense, *looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self._first, self._second]
        return self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)

    def loss(self, rows: Rows) -> Float[Tensor, ""]:
        """Returns the mean binary cross-entropy of the probabilities."""
        return functional.binary_cross_entropy(self(rows), rows.labels)
