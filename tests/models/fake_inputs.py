"""The inputs of a model with given vectors in the place of tables."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.data.dataset.schema import Schema


class FakeEmbeddings(nn.Module):
    """Returns the vectors of features by name, in the order of ``keys``."""

    def __init__(self, vectors: dict[str, Tensor]) -> None:
        super().__init__()
        self.keys, self.vectors = list(vectors), vectors

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        dims = [self.vectors[key].shape[1] for key in self.keys]
        return KeyedTensor(self.keys, dims, torch.cat([self.vectors[key] for key in self.keys], dim=1))


@dataclass(frozen=True)
class _FakeTable:
    feature_names: list[str]

    def vector_names(self, feature_name: str) -> list[str]:
        return [feature_name]


class FakeInputs:
    """The inputs of a model, with given vectors of the features ``a``, ``b`` and ``c`` in the place of tables."""

    embedding_dim = 4

    def __init__(self, vectors: dict[str, Tensor], schema: Schema) -> None:
        self.embeddings, self.schema, self.num_dense = FakeEmbeddings(vectors), schema, len(schema.dense)
        self.num_labels = len(schema.all_labels)
        self.tables = {name: _FakeTable([name]) for name in vectors}

    def pooled_embeddings(self, features: None = None) -> tuple[nn.Module, list[str]]:
        return self.embeddings, list(self.embeddings.vectors)


def ids(batch: int) -> KeyedJaggedTensor:
    """Returns a batch with one id of each feature in a row."""
    return KeyedJaggedTensor(list("abc"), torch.zeros(3 * batch, dtype=torch.long), torch.ones(3 * batch))
