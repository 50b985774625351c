"""The unsharded module for sequences: KeyedJaggedTensor of ids -> one composed embedding for each id."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.base.tracing import is_proxy, one_node
from distembed.embedding.batches import bags_of_rows, jagged_vectors
from distembed.embedding.config import CompositionalEmbeddingConfig, vector_names
from distembed.embedding.tables import CompositionalTables, torchrec_configs


class CompositionalEmbeddingCollection(CompositionalTables[CompositionalEmbeddingConfig], EmbeddingCollectionInterface):
    """Takes the place of TorchRec's ``EmbeddingCollection``, with compositional tables.

    Parameters are named ``embeddings.<table>__p<j>.weight``. With feature generation a feature has one output for each
    partition, ``<feature>__p<j>``.

    Args:
        tables: At least one table, all of the same ``embedding_dim``; names and features must be unique.
        device: The device of the weights; on ``meta`` they take no memory.
        need_indices: Whether the outputs carry their ids, as weights.

    Raises:
        UserError: Names are not unique, or the tables' dimensions differ.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(tables, device)
        for table in tables:
            if table.embedding_dim != tables[0].embedding_dim:
                raise UserError(
                    f"embedding_dim of table {table.name!r} is {table.embedding_dim} and that of {tables[0].name!r} "
                    f"{tables[0].embedding_dim}; the tables of a CompositionalEmbeddingCollection have the same: make "
                    "one collection for each."
                )
        self._need_indices = need_indices
        self.embeddings = self._make_lookups(_embedding)
        self.reset_parameters()

    @property
    def _lookups(self) -> nn.ModuleDict:
        return self.embeddings

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and composes; each output has its feature's lengths.

        Raises:
            UserError: An id lies outside of its table whose policy is ``error``, or a feature is missing.
        """
        if is_proxy(features):
            node = one_node(self, features)
            return {key: node[key] for key in vector_names(self._tables)}
        features = maybe_td_to_kjt(features)
        mapped = self.map_ids(features)
        bags = bags_of_rows(features.inverse_indices_or_none())
        outputs: dict[str, JaggedTensor] = {}
        for feature in self.embed(features, mapped):
            keys, dim = feature.table.vector_names(feature.name), self.embedding_dim()
            ids = feature.ids if self._need_indices else None
            own = None if bags is None else bags[feature.name]
            outputs |= jagged_vectors(keys, dim, feature.vectors, feature.lengths, ids, own)
        return outputs

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns TorchRec's config of every table, in which its models find features and dimensions."""
        self._require_own_sharder()
        return self._shown_configs

    @cached_property
    def _shown_configs(self) -> list[EmbeddingConfig]:
        return torchrec_configs(EmbeddingConfig, self._tables)

    def embedding_dim(self) -> int:
        """Returns the dimension of a vector."""
        return self._tables[0].embedding_dim

    def need_indices(self) -> bool:
        """Returns whether the outputs carry their ids."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the keys of the output for each table."""
        return [[key for name in table.feature_names for key in table.vector_names(name)] for table in self._tables]


def _embedding(weight: Tensor) -> nn.Module:
    """Returns a module that holds the vectors of one partition."""
    num_rows, dim = weight.shape
    return nn.Embedding(num_rows, dim, _weight=weight)
