"""A small model of a dense part and a collection, TorchRec's or ours, that takes plain tensors."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
    vector_names,
)
from distembed.partitions import PARTITIONS
from tests.composability.stock import DIM
from tests.embedding.schemes import make_partition, small_composition

NUM_IDS, NUM_DENSE = 60, 3
KINDS = ("bags", "weighted bags", "sequences")
Pairs = Sequence[tuple[str, str]]
"""The scheme and the composition of each table."""
EACH_ONCE: Pairs = list(zip(itertools.cycle(PARTITIONS), COMPOSITIONS, strict=False))
ALL_PAIRS: Pairs = [(scheme, composition) for scheme in PARTITIONS for composition in COMPOSITIONS]
ONE: Pairs = [("quotient_remainder", "product")]


def our_tables(make: Any, pairs: Pairs, poolings: Sequence[str] = (), **settings: Any) -> list[Any]:
    """One table a pair, the first of which two features read."""
    return [
        make(
            f"t{i}",
            NUM_IDS,
            DIM,
            [f"f{i}", "shared"] if i == 0 else [f"f{i}"],
            make_partition(scheme, NUM_IDS),
            small_composition(composition),
            **({"pooling": poolings[i % len(poolings)]} if poolings else {}),
            **settings,
        )
        for i, (scheme, composition) in enumerate(pairs)
    ]


class SmallModel(nn.Module):
    """A collection, a layer for numbers, and one over both.

    Args:
        embeddings: The collection.
        kind: What it is, one of :data:`KINDS`.
        features: The features, in the order of a batch.
        keys: The keys of the collection's output that are used.
    """

    def __init__(self, embeddings: nn.Module, kind: str, features: Sequence[str], keys: Sequence[str]) -> None:
        super().__init__()
        self.embeddings, self.kind, self.features, self.keys = embeddings, kind, list(features), list(keys)
        torch.manual_seed(1)
        self.bottom = nn.Linear(NUM_DENSE, DIM)
        self.top = nn.Linear(DIM * (1 + len(keys)), 1)

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.score(dense, KeyedJaggedTensor(self.features, values, lengths=lengths, weights=weights))

    def score(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.embeddings(features)
        if self.kind == "sequences":
            # the sum over the batch, which all rows have: a sequence's length is no shape
            parts = [embedded[key].values().sum(0).expand(dense.shape[0], -1) for key in self.keys]
            vectors = torch.cat(parts, dim=1)
        else:
            vectors = embedded.values()
        return self.top(torch.cat([self.bottom(dense), vectors], dim=1)).squeeze(1)


class TakesFeatures(nn.Module):
    """The same model, which is given a KeyedJaggedTensor."""

    def __init__(self, model: SmallModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        return self.model.score(dense, features)


def our_model(kind: str, pairs: Pairs = EACH_ONCE, **settings: Any) -> SmallModel:
    if kind == "sequences":
        tables = our_tables(CompositionalEmbeddingConfig, pairs, **settings)
        embeddings: nn.Module = CompositionalEmbeddingCollection(tables)
    else:
        poolings = ("sum", "mean") if kind == "weighted bags" else ("sum", "mean", "max")
        tables = our_tables(CompositionalEmbeddingBagConfig, pairs, poolings, **settings)
        embeddings = CompositionalEmbeddingBagCollection(tables, is_weighted=kind == "weighted bags")
    features = [name for table in tables for name in table.feature_names]
    return SmallModel(embeddings, kind, features, vector_names(tables))


def stock_model(kind: str, num_tables: int = 1) -> SmallModel:
    features = ["f0", "shared", *[f"f{i}" for i in range(1, num_tables)]]
    torch.manual_seed(0)
    make = EmbeddingConfig if kind == "sequences" else EmbeddingBagConfig
    tables: list[Any] = [
        make(
            name=f"t{i}",
            num_embeddings=NUM_IDS,
            embedding_dim=DIM,
            feature_names=["f0", "shared"] if i == 0 else [f"f{i}"],
        )
        for i in range(num_tables)
    ]
    if kind == "sequences":
        embeddings: nn.Module = EmbeddingCollection(tables)
        keys = [name for names in embeddings.embedding_names_by_table() for name in names]
        return SmallModel(embeddings, kind, features, keys)
    embeddings = EmbeddingBagCollection(tables, is_weighted=kind == "weighted bags")
    return SmallModel(embeddings, kind, features, features)


def draw(model: SmallModel, num_rows: int, seed: int, most_ids: int = 3) -> tuple[Tensor, ...]:
    """The inputs of a model for a batch; with ``most_ids=1`` each bag has one id, else 0 to that many."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(model.features) * num_rows,)
    lengths = torch.randint(0, most_ids + 1, size, generator=generator) if most_ids > 1 else torch.ones(size).long()
    values = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
    dense = torch.rand(num_rows, NUM_DENSE, generator=generator)
    weights = [torch.rand(len(values), generator=generator)] if model.kind == "weighted bags" else []
    return dense, values, lengths, *weights


BATCHES = ((4, 2, 3), (7, 3, 1))
"""Rows, seed and most ids a bag: ragged and single-valued batches of other sizes."""
