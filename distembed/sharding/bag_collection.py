"""The sharded module: TorchRec's own, with lookups that compose on the owner before anything is communicated."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding.bag_collection import CompositionalEmbeddingBagCollection
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.embedding.ids import check_ids
from distembed.errors import UserError
from distembed.sharding.table_wise import CompositionalTableWiseSharding


class ShardedCompositionalEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """What ``DistributedModelParallel`` puts in place of a :class:`CompositionalEmbeddingBagCollection`.

    Ids are checked in ``input_dist``, before the all-to-all. All ranks construct and call it together.
    """

    def __init__(
        self,
        module: CompositionalEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        self._tables = module.tables()
        self._input_dist_is_missing = True
        self._num_embeddings = {name: table.num_embeddings for table in self._tables for name in table.feature_names}
        super().__init__(
            module,
            plan_of_partitions(self._tables, table_name_to_parameter_sharding),
            env,
            # ids are checked before they are mapped, and rows lie in their tables by construction
            fused_params={"bounds_check_mode": BoundsCheckMode.NONE, **(fused_params or {})},
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    # an instance method in the place of TorchRec's class method: the sharding needs this module's tables
    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
        """Makes the sharding of all tables placed in one way."""
        return CompositionalTableWiseSharding(self._tables, sharding_infos, env, device, qcomm_codecs_registry)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks ids, then sends each to its table's owner; all ranks call it."""
        if self._input_dist_is_missing:
            # TorchRec's own first-batch check would hold raw ids against the rows of partition tables
            self._create_input_dist(features.keys())
            self._input_dist_is_missing = self._has_uninitialized_input_dist = False
        check_ids(features, self._num_embeddings)
        return super().input_dist(ctx, features)

    @property
    def unsharded_module_type(self) -> type[CompositionalEmbeddingBagCollection]:
        """The module that this one replaces."""
        return CompositionalEmbeddingBagCollection


def plan_of_partitions(
    tables: Sequence[CompositionalEmbeddingBagConfig], plan: dict[str, ParameterSharding]
) -> dict[str, ParameterSharding]:
    """Where each partition table goes, from a plan that names compositional tables: beside its siblings.

    Raises:
        UserError: for a sharding type other than table-wise.
    """
    expanded = {}
    for table in tables:
        placed = plan[table.name]
        if placed.sharding_type != ShardingType.TABLE_WISE.value:
            raise UserError(
                f"table {table.name!r} is planned {placed.sharding_type}; compositional tables are placed table_wise."
            )
        for part in table.partition_tables():
            sharding = copy.deepcopy(placed)
            assert sharding.sharding_spec is not None
            for shard in sharding.sharding_spec.shards:
                shard.shard_offsets, shard.shard_sizes = [0, 0], [part.num_rows, part.dim]
            expanded[part.name] = sharding
    return expanded
