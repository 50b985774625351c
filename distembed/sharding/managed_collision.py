"""Sharded managed collision: TorchRec's modules that give raw ids a slot of a table, around compositional collections.

TorchRec keeps a slot and its vector on one rank, and divides tables by rows. The rows of a compositional table belong
to slots of many ranks: in a quotient-remainder table neighbouring slots have neighbouring remainders. So slots alone
are divided by rows here, by TorchRec's own module, and ids come back as slots before the collection looks them up,
wherever its tables lie::

    raw ids -> rank that has their slots -> slots -> rank of the batch -> collection (:mod:`distembed.sharding`)

Trade-off: one more exchange of ids, each way. A slot that goes from one id to another keeps its vector, as in
TorchRec's unsharded module: other slots share its rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import (
    ManagedCollisionCollectionContext,
    ManagedCollisionCollectionSharder,
    ShardedManagedCollisionCollection,
)
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    EnumerableShardingSpec,
    LazyNoWait,
    NoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import EmbeddingTableConfig
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.embedding.batches import with_ids
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.sharding.sharder import (
    CompositionalEmbeddingBagCollectionSharder,
    CompositionalEmbeddingCollectionSharder,
)

_SLOT_NUMBERS = 4
"""Columns of the tables that describe slots to TorchRec; they exist on the meta device alone."""


@dataclass
class ManagedIdsContext(ManagedCollisionCollectionContext):
    """TorchRec's context of a batch, with the batch's features, whose bags and weights the lookup needs."""

    features: KeyedJaggedTensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.features is not None:
            self.features.record_stream(stream)


class ShardedManagedCompositionalCollection(ShardedEmbeddingModule[KJTList, KJTList, Any, ManagedIdsContext]):
    """Takes the place of a module of managed collision with a compositional collection; all ranks call it together.

    Its output is a pair, as TorchRec's: the collection's output, and the batch with slots in the place of raw ids
    (None unless ``return_remapped_features`` is set).
    """

    def __init__(
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        plan: dict[str, ParameterSharding],
        sharder: Any,
        slot_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__()
        for child in module._managed_collision_collection.modules():
            if getattr(child, "_disable_fallback", False) and not getattr(child, "_no_bag", False):
                raise UserError(
                    "disable_fallback=True drops ids that have no slot, which sharded compositional tables do not "
                    "take; set disable_fallback=False, or no_bag=True."
                )
        collection: Any = module._embedding_module
        self._embedding_module = sharder.shard(collection, plan, env, device, module_fqn)
        slots = RwSequenceEmbeddingSharding(
            [_slot_table(table, env.world_size, device) for table in collection.tables()], env, device
        )
        self._managed_collision_collection: ShardedManagedCollisionCollection = slot_sharder.shard(
            module._managed_collision_collection, plan, env=env, device=device, embedding_shardings=[slots]
        )
        self._feature_names = slots.feature_names()
        self._return_remapped_features = module._return_remapped_features
        # Pipelines call the input dists of all child modules ahead of a batch's lookup. Slots are known at the lookup
        # alone, so the collection has its dists only while it runs.
        self._embedding_module._has_uninitialized_input_dist = False
        self._collection_dists: list[nn.Module] = []

    def create_context(self) -> ManagedIdsContext:
        return ManagedIdsContext(sharding_contexts=[])

    def input_dist(self, ctx: ManagedIdsContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Sends raw ids to the ranks that have their slots; raises a UserError for a missing feature."""
        features = maybe_td_to_kjt(features)
        keys = features.keys()
        missing = [name for name in self._feature_names if name not in keys]
        if missing:
            raise UserError(f"the batch has no feature {missing[0]!r}, only {keys}.")
        if keys != self._feature_names:
            inverse = features.inverse_indices_or_none()
            features = features.permute([keys.index(name) for name in self._feature_names])
            features._inverse_indices = inverse
        ctx.features = features
        # bags do not matter for slots: all ids of a feature are one bag, without weights
        counts = torch.tensor(features.length_per_key(), device=features.device())
        ids = KeyedJaggedTensor(self._feature_names, features.values().long(), lengths=counts, stride=1)
        return self._managed_collision_collection.input_dist(ctx, ids)

    def compute(self, ctx: ManagedIdsContext, dist_input: KJTList) -> KJTList:
        """Gives raw ids their slots on the slots' rank."""
        slots = self._managed_collision_collection.compute(ctx, dist_input)
        self._managed_collision_collection.evict()  # it has to be called before the next batch
        return slots

    def output_dist(self, ctx: ManagedIdsContext, output: KJTList) -> Any:
        """Sends slots back to the ranks of their batches, waits for them, and looks them up in the collection."""
        slots = self._managed_collision_collection
        (ids,) = slots._kjt_list_to_tensor_list(output)
        mapped = slots._output_dists[0](ids, ctx.sharding_contexts[0]).wait().flatten()
        assert ctx.features is not None
        remapped = with_ids(ctx.features, mapped, ctx.features.weights_or_none())
        collection = self._embedding_module
        collection._input_dists = self._collection_dists
        embedded = collection(remapped)
        self._collection_dists, collection._input_dists = collection._input_dists, []
        return embedded, LazyNoWait(remapped) if self._return_remapped_features else NoWait(None)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names that DDP must ignore: the collection's sharded parameters, and all parameters of slots."""
        yield from self._embedding_module.sharded_parameter_names(append_prefix(prefix, "_embedding_module"))
        slots = self._managed_collision_collection
        for name, _ in (*slots.named_parameters(), *slots.named_buffers()):
            yield append_prefix(prefix, f"_managed_collision_collection.{name}")

    @property
    def unsharded_module_type(self) -> type[BaseManagedCollisionEmbeddingCollection]:
        return BaseManagedCollisionEmbeddingCollection


class _ManagedCollisionSharder:
    """Shards managed collision around a compositional collection; offers the layouts of the collection's sharder."""

    _e_sharder: Any
    _mc_sharder: ManagedCollisionCollectionSharder

    def shard(
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCompositionalCollection:
        """Makes the sharded module; all ranks call it together."""
        device = device or torch.device("cpu")
        return ShardedManagedCompositionalCollection(
            module, params, self._e_sharder, self._mc_sharder, env, device, module_fqn
        )

    def shardable_parameters(self, module: BaseManagedCollisionEmbeddingCollection) -> dict[str, nn.Parameter]:
        """Returns the collection's units; raises a UserError if the collection is not compositional."""
        collection: Any = module._embedding_module
        if not isinstance(collection, CompositionalTables):
            raise UserError(
                f"{type(self).__name__} shards compositional collections, and the module has a "
                f"{type(collection).__name__}; shard it by TorchRec's {type(module).__name__}Sharder."
            )
        return self._e_sharder.shardable_parameters(collection)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types of the collection's tables; slots are divided by rows under all of them."""
        return self._e_sharder.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self._e_sharder.compute_kernels(sharding_type, compute_device_type)

    @property
    def sharded_module_type(self) -> type[ShardedManagedCompositionalCollection]:
        return ShardedManagedCompositionalCollection


class CompositionalManagedCollisionEmbeddingBagCollectionSharder(
    _ManagedCollisionSharder, ManagedCollisionEmbeddingBagCollectionSharder
):
    """Shards ``ManagedCollisionEmbeddingBagCollection`` with compositional tables.

    Args:
        ebc_sharder: The sharder of the collection.
        mc_sharder: TorchRec's sharder of ``ManagedCollisionCollection``.
    """

    def __init__(
        self,
        ebc_sharder: CompositionalEmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
    ) -> None:
        super().__init__(ebc_sharder or CompositionalEmbeddingBagCollectionSharder(), mc_sharder)


class CompositionalManagedCollisionEmbeddingCollectionSharder(
    _ManagedCollisionSharder, ManagedCollisionEmbeddingCollectionSharder
):
    """Shards ``ManagedCollisionEmbeddingCollection`` with compositional tables.

    Args:
        ec_sharder: The sharder of the collection.
        mc_sharder: TorchRec's sharder of ``ManagedCollisionCollection``.
    """

    def __init__(
        self,
        ec_sharder: CompositionalEmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
    ) -> None:
        super().__init__(ec_sharder or CompositionalEmbeddingCollectionSharder(), mc_sharder)


def _slot_table(table: CompositionalEmbeddingConfig, world_size: int, device: torch.device) -> EmbeddingShardingInfo:
    """Returns TorchRec's description of a table with a row for each slot, in equal blocks of rows on all ranks.

    Refuses a unified table.
    """
    if table.first_ids is not None:
        raise UserError(
            f"table {table.name!r} is unified, and managed collision gives all ids of a table slots in common; leave "
            "first_ids out, or the managed collision."
        )
    num_slots, names = table.num_embeddings, list(table.feature_names)
    block = -(-num_slots // world_size)
    starts = [min(rank * block, num_slots) for rank in range(world_size + 1)]
    shards = [
        ShardMetadata([start, 0], [stop - start, _SLOT_NUMBERS], f"rank:{rank}/{device.type}")
        for rank, (start, stop) in enumerate(pairwise(starts))
    ]
    return EmbeddingShardingInfo(
        EmbeddingTableConfig(num_slots, _SLOT_NUMBERS, table.name, feature_names=names, embedding_names=names),
        ParameterSharding(
            ShardingType.ROW_WISE.value, "fused", list(range(world_size)), EnumerableShardingSpec(shards)
        ),
        torch.empty(num_slots, _SLOT_NUMBERS, device="meta"),
    )
