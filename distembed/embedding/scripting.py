"""Collections as steps that TorchScript compiles, which is what ``torch.jit.script`` gets in their place.

TorchScript has no partitions and compositions. torch.fx follows what these do to stand-ins for ids, and what it writes
down is arithmetic and lookups, which TorchScript has::

    id -> row      (ids // 8, ids % 8)                  the scheme's, table by table
    row -> vector  embedding(row, weight)               of the collection's own weights, under their names
    vectors        compose, and pool where there are bags

Trade-off: a path's function is copied for each id, where the collection groups ids by function, so that it takes more
memory. Vectors are composed in float32, as TorchRec's are.

``torch.jit.script`` puts what it is given in the place of the collection in the model itself, too; called from Python,
it goes on as the collection there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.pooling import pool
from distembed.embedding.traced_features import FeatureIds, trace_features
from distembed.embedding.variable_batches import jagged_vectors

if TYPE_CHECKING:
    from distembed.embedding.bag_collection import CompositionalEmbeddingBagCollection
    from distembed.embedding.collection import CompositionalEmbeddingCollection

torch.fx.wrap("pool")


def scripted_bags(collection: "CompositionalEmbeddingBagCollection") -> torch.fx.GraphModule:
    """Returns a collection of bags as steps.

    Raises:
        UserError: It replaces ids in training, and is not in evaluation.
    """
    return _trace(collection, _BagSteps(collection))


def scripted_sequences(collection: "CompositionalEmbeddingCollection") -> torch.fx.GraphModule:
    """Returns a collection of sequences as steps.

    Raises:
        UserError: It replaces ids in training, and is not in evaluation.
    """
    return _trace(collection, _SequenceSteps(collection))


def _trace(collection: Any, steps: "_Steps") -> torch.fx.GraphModule:
    """Returns what torch.fx writes down."""
    if collection.training and collection.sse.replaces_ids:
        raise UserError(
            f"torch.jit.script of a {type(collection).__name__} whose ids are replaced in training (sse), which a "
            "script does not do; call eval() first, or train without torch.jit."
        )
    traced = torch.fx.symbolic_trace(steps)
    # constants of the steps are no part of the model's state
    traced._non_persistent_buffers_set.update(name for name, _ in traced.named_buffers(recurse=False))
    traced.training = collection.training
    own: Any = type(traced)  # a class for each trace
    own.__call__ = lambda self, *inputs, **named: collection(*inputs, **named)
    own.train = lambda self, mode=True: _train(self, collection, mode)
    return traced


def _train(traced: torch.fx.GraphModule, collection: nn.Module, mode: bool) -> torch.fx.GraphModule:
    """Sets the mode of a collection and of what stands in its place."""
    collection.train(mode)
    return nn.Module.train(traced, mode)


class _Steps(nn.Module):
    """Base of what is traced; it has the collection's weights under the names that they have there.

    Args:
        collection: The collection.
        is_weighted: Whether the weights of ids are asked for.
    """

    def __init__(self, collection: Any, is_weighted: bool) -> None:
        super().__init__()
        self.functions = collection.functions
        self._tables: list[CompositionalEmbeddingConfig] = collection.tables()
        self._is_weighted = is_weighted

    def embed(
        self, features: KeyedJaggedTensor, lookups: nn.ModuleDict
    ) -> Iterator[tuple[CompositionalEmbeddingConfig, str, FeatureIds, Float[Tensor, "ids width"]]]:
        """Yields the table, the name, the ids and the composed vectors of each feature, in the tables' order."""
        found = trace_features(without_inverse_indices(features), self._tables, self._is_weighted)
        for table in self._tables:
            for name in table.feature_names:
                rows = table.scheme.rows(found[name].mapped)
                weights: list[Any] = [
                    self.functions[part.name] if part.is_function else lookups[part.name].weight
                    for part in table.partition_tables()
                ]
                vectors = [nn.functional.embedding(rows[j], weight).float() for j, weight in enumerate(weights)]
                yield table, name, found[name], table.combine.compose(vectors)


class _BagSteps(_Steps):
    """A collection of bags."""

    def __init__(self, collection: "CompositionalEmbeddingBagCollection") -> None:
        super().__init__(collection, collection.is_weighted())
        self.embedding_bags = collection.embedding_bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        keys: list[str] = []
        dims: list[int] = []
        pooled = []
        for table, name, own, vectors in self.embed(features, self.embedding_bags):
            assert hasattr(table, "pooling")
            names = table.vector_names(name)
            keys += names
            dims += [table.embedding_dim] * len(names)
            pooled.append(pool(vectors, own.lengths, table.pooling, own.weights))
        return KeyedTensor(keys, dims, torch.cat(pooled, dim=1))


class _SequenceSteps(_Steps):
    """A collection of sequences."""

    def __init__(self, collection: "CompositionalEmbeddingCollection") -> None:
        super().__init__(collection, is_weighted=False)
        self.embeddings = collection.embeddings
        self._need_indices = collection.need_indices()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        outputs: dict[str, JaggedTensor] = {}
        for table, name, own, vectors in self.embed(features, self.embeddings):
            ids = own.ids if self._need_indices else None
            keys = table.vector_names(name)
            outputs |= jagged_vectors(keys, table.embedding_dim, vectors, own.lengths, ids, None)
        return outputs


@torch.fx.wrap
def without_inverse_indices(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a batch, or raises an error where rows share bags of features, which a script does not repeat."""
    if features.inverse_indices_or_none() is not None:
        raise ValueError("a script takes no inverse indices; give every feature a bag for each row.")
    return features
