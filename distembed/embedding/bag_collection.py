"""The unsharded module for bags: KeyedJaggedTensor of ids -> KeyedTensor of composed, pooled embeddings.

It is the reference for everything sharded: plain autograd, one table after another. It also declares the parameters
that the sharder places, on the meta device too, under the names ``embedding_bags.<table>__p<j>.weight``.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.base.tracing import is_proxy, is_traced, one_node
from distembed.embedding.batches import bags_of_rows, require_bags_for_rows
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.embedding.pooling import pool
from distembed.embedding.tables import CompositionalTables, torchrec_configs


class CompositionalEmbeddingBagCollection(
    CompositionalTables[CompositionalEmbeddingBagConfig], EmbeddingBagCollectionInterface
):
    """Takes the place of TorchRec's ``EmbeddingBagCollection``, with compositional tables.

    For each id the k rows' vectors are looked up and composed; only then are the vectors of a bag pooled. Keys of the
    output are the features in the tables' order; with feature generation a feature has one key a partition,
    ``<feature>__p<j>``. An empty bag gives zeros.

    Args:
        tables: At least one table; names and features must be unique.
        device: The device of the weights; on ``meta`` they are left to ``DistributedModelParallel``.
        is_weighted: Whether composed vectors are multiplied by the batch's per-sample weights.

    Raises:
        UserError: Names are not unique, or ``is_weighted`` is set and a table has pooling max.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingBagConfig],
        device: torch.device | str | None = None,
        is_weighted: bool = False,
    ) -> None:
        super().__init__(tables, device)
        for table in tables if is_weighted else ():
            if table.pooling == "max":
                raise UserError(
                    f"table {table.name!r} has pooling max, which goes with no per-sample weights; use sum or mean, or "
                    "put the table into a collection without is_weighted."
                )
        self._is_weighted = is_weighted
        self.embedding_bags = self._make_lookups(_embedding_bag)
        self.reset_parameters()

    @property
    def _lookups(self) -> nn.ModuleDict:
        return self.embedding_bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks ids up, composes and pools.

        Raises:
            UserError: An id lies outside of its table whose policy is ``error``, a feature is missing, or the batch has
                no weights although ``is_weighted`` is set.
        """
        if is_proxy(features):
            return one_node(self, features)
        features = maybe_td_to_kjt(features)
        mapped = self.map_ids(features)
        keys: list[str] = []
        dims: list[int] = []
        pooled = []
        bags = bags_of_rows(features.inverse_indices_or_none())
        one_each = not self._is_weighted and _has_one_id_a_bag(features)
        for feature in self.embed(features, mapped):
            names = feature.table.vector_names(feature.name)
            keys += names
            dims += [feature.table.embedding_dim] * len(names)
            if self._is_weighted and feature.weights is None:
                raise UserError(
                    "The collection has is_weighted=True, but the KeyedJaggedTensor has no weights; make it with "
                    "weights=, or the collection without is_weighted."
                )
            if one_each:
                own = feature.vectors
            else:
                weights = feature.weights if self._is_weighted else None
                own = pool(feature.vectors, feature.lengths, feature.table.pooling, weights)
            pooled.append(own if bags is None else own.index_select(0, bags[feature.name]))
        require_bags_for_rows(features)
        return KeyedTensor(keys, dims, torch.cat(pooled, dim=1))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns TorchRec's config of every table, in which its models find features and dimensions."""
        self._require_own_sharder()
        return self._shown_configs

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the same configs under the name by which TorchRec's managed collision asks for them."""
        return self.embedding_bag_configs()

    @cached_property
    def _shown_configs(self) -> list[EmbeddingBagConfig]:
        return torchrec_configs(EmbeddingBagConfig, self._tables, _pooling)

    def is_weighted(self) -> bool:
        """Returns whether per-sample weights are applied."""
        return self._is_weighted


def _has_one_id_a_bag(features: KeyedJaggedTensor) -> bool:
    """Returns whether each bag has one id, whose vector is that of the bag; on a GPU, which would be waited for, no."""
    lengths, values = features.lengths_or_none(), features.values()
    if lengths is None or is_traced() or lengths.device.type != "cpu":
        return False
    return len(values) == len(lengths) and bool((lengths == 1).all())


def _pooling(table: CompositionalEmbeddingBagConfig) -> dict[str, PoolingType]:
    """Returns a table's pooling as a field of TorchRec's config; maxima, which TorchRec lacks, appear as sums."""
    return {"pooling": PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM}


def _embedding_bag(weight: Tensor) -> nn.Module:
    """Returns a module that holds the vectors of one partition."""
    num_rows, dim = weight.shape
    return nn.EmbeddingBag(num_rows, dim, _weight=weight, mode="sum", include_last_offset=True)
