"""The quantised collection for sequences: KeyedJaggedTensor of ids -> one composed embedding for each id."""

from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from distembed.embedding.batches import jagged_vectors
from distembed.serving.quantization.tables import QuantizedTables


class QuantizedCompositionalEmbeddingCollection(
    QuantizedTables[CompositionalEmbeddingConfig], EmbeddingCollectionInterface
):
    """Takes the place of a :class:`CompositionalEmbeddingCollection` for inference; keys and shapes are the same.

    Args:
        module: The float collection, whose ``qconfig`` gives dtypes of weights and outputs.
    """

    def __init__(self, module: CompositionalEmbeddingCollection) -> None:
        super().__init__(module)
        self._need_indices = module.need_indices()
        self._configs = module.embedding_configs()
        self._names = module.embedding_names_by_table()

    @classmethod
    def from_float(cls, module: CompositionalEmbeddingCollection) -> "QuantizedCompositionalEmbeddingCollection":
        return cls(module)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and composes; each output has its feature's lengths.

        Raises:
            UserError: An id lies outside of its table whose policy is ``error``, a feature is missing, or features have
                batch sizes of their own.
        """
        outputs: dict[str, JaggedTensor] = {}
        for feature in self.embed(features):
            keys = feature.table.vector_names(feature.name)
            ids = feature.ids if self._need_indices else None
            vectors = feature.vectors.to(self._output_dtype)
            outputs |= jagged_vectors(keys, self.embedding_dim(), vectors, feature.lengths, ids, None)
        return outputs

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns TorchRec's config of every table, in which its models find features and dimensions."""
        return self._configs

    def embedding_dim(self) -> int:
        """Returns the dimension of a vector."""
        return self._tables[0].embedding_dim

    def need_indices(self) -> bool:
        """Returns whether the outputs carry their ids."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the keys of the output for each table."""
        return self._names
