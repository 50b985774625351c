"""The unsharded module: KeyedJaggedTensor of ids -> KeyedTensor of composed, pooled embeddings.

The reference for everything sharded: plain autograd, one table after another. It also declares the parameters that the
sharder places, on the meta device too, under the names ``embedding_bags.<table>__p<j>.weight``.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.embedding.ids import check_ids
from distembed.errors import UserError


class CompositionalEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Takes the place of TorchRec's ``EmbeddingBagCollection``, with compositional tables.

    For each id the k rows' vectors are looked up and composed; only then are the vectors of a bag pooled. Keys of the
    output are the features in the tables' order; an empty bag gives zeros.

    Args:
        tables: at least one; names and features must be unique.
        device: where the weights live; ``meta`` to let ``DistributedModelParallel`` make them.
    """

    def __init__(
        self, tables: Sequence[CompositionalEmbeddingBagConfig], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self._tables = _require_unique(tables)
        self._device = torch.device(device or "cpu")
        self._num_embeddings = {name: table.num_embeddings for table in tables for name in table.feature_names}
        self._configs = [config for table in tables for config in partition_configs(table)]
        self.embedding_bags = nn.ModuleDict()
        for config in self._configs:
            bag = nn.EmbeddingBag(
                config.num_embeddings,
                config.embedding_dim,
                _weight=_empty_weight(config, self._device),
                mode="sum",
                include_last_offset=True,
            )
            if self._device.type != "meta":
                assert config.init_fn is not None
                config.init_fn(bag.weight)
            self.embedding_bags[config.name] = bag

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks ids up; raises :class:`UserError` on an id outside its table."""
        check_ids(features, self._num_embeddings)
        # not KeyedJaggedTensor.to_dict: it fails on a batch of no rows
        lengths = features.lengths().view(len(features.keys()), features.stride())
        ids = features.values().split(features.length_per_key())
        jagged = {key: (ids[i], lengths[i]) for i, key in enumerate(features.keys())}
        pooled = {}
        for table in self._tables:
            for name in table.feature_names:
                if name not in jagged:
                    raise UserError(f"feature {name!r} of table {table.name!r} is not among {list(jagged)}.")
                pooled[name] = self._pool(table, *jagged[name])
        return KeyedTensor(list(pooled), [v.shape[1] for v in pooled.values()], torch.cat(list(pooled.values()), dim=1))

    def _pool(
        self, table: CompositionalEmbeddingBagConfig, ids: Int[Tensor, " ids"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch dim"]:
        rows = table.scheme.rows(ids.long())
        vectors = table.combine.compose(
            [
                nn.functional.embedding(rows[j], self.embedding_bags.get_parameter(f"{part.name}.weight"))
                for j, part in enumerate(table.partition_tables())
            ]
        )
        bag_of_id = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        pooled = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, bag_of_id, vectors)
        return pooled / lengths.clamp(min=1).unsqueeze(1) if table.is_mean else pooled

    def tables(self) -> list[CompositionalEmbeddingBagConfig]:
        """The compositional tables, in order."""
        return list(self._tables)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """TorchRec's config of every partition table."""
        return self._configs

    def is_weighted(self) -> bool:
        """Per-sample weights are not read."""
        return False

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self._device


def _empty_weight(config: EmbeddingBagConfig, device: torch.device) -> Tensor:
    dtype = data_type_to_dtype(config.data_type)
    return torch.empty(config.num_embeddings, config.embedding_dim, device=device, dtype=dtype)


def partition_configs(table: CompositionalEmbeddingBagConfig) -> list[EmbeddingBagConfig]:
    """TorchRec's config of each partition table of ``table``, summed: the mean is taken after composing."""
    return [
        EmbeddingBagConfig(
            name=part.name,
            num_embeddings=part.num_rows,
            embedding_dim=part.dim,
            feature_names=list(table.feature_names),
            pooling=PoolingType.SUM,
            data_type=table.data_type,
            init_fn=part.init,
        )
        for part in table.partition_tables()
    ]


def _require_unique(tables: Sequence[CompositionalEmbeddingBagConfig]) -> list[CompositionalEmbeddingBagConfig]:
    if not tables:
        raise UserError("tables is empty; give at least one table.")
    for what, names in (("name", [t.name for t in tables]), ("feature", [f for t in tables for f in t.feature_names])):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise UserError(f"tables: the {what} {repeated[0]!r} is used by more than one table; make it unique.")
    return list(tables)
