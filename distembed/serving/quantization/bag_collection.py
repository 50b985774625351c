"""The quantised collection for bags: KeyedJaggedTensor of ids -> KeyedTensor of composed, pooled embeddings."""

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.pooling import pool
from distembed.serving.quantization.tables import QuantizedTables

torch.fx.wrap("pool")


class QuantizedCompositionalEmbeddingBagCollection(
    QuantizedTables[CompositionalEmbeddingBagConfig], EmbeddingBagCollectionInterface
):
    """Takes the place of a :class:`CompositionalEmbeddingBagCollection` for inference; keys and shapes are the same.

    Args:
        module: The float collection, whose ``qconfig`` gives dtypes of weights and outputs.
    """

    def __init__(self, module: CompositionalEmbeddingBagCollection) -> None:
        super().__init__(module)
        self._is_weighted = module.is_weighted()
        self._configs = module.embedding_bag_configs()

    @classmethod
    def from_float(cls, module: CompositionalEmbeddingBagCollection) -> "QuantizedCompositionalEmbeddingBagCollection":
        return cls(module)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks ids up, composes and pools.

        Raises:
            UserError: An id lies outside of its table whose policy is ``error``, a feature is missing, features have
                batch sizes of their own, or the batch has no weights although ``is_weighted`` is set.
        """
        keys: list[str] = []
        dims: list[int] = []
        pooled = []
        for feature in self.embed(features, self._is_weighted):
            names = feature.table.vector_names(feature.name)
            keys += names
            dims += [feature.table.embedding_dim] * len(names)
            pooled.append(pool(feature.vectors, feature.lengths, feature.table.pooling, feature.weights))
        return KeyedTensor(keys, dims, torch.cat(pooled, dim=1).to(self._output_dtype))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns TorchRec's config of every table, in which its models find features and dimensions."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns whether per-sample weights are applied."""
        return self._is_weighted
