"""The sharded module: TorchRec's own, with lookups that compose on the owner before anything is communicated."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import param_dp_sync
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.distributed.utils import append_prefix
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.embedding.bag_collection import CompositionalEmbeddingBagCollection
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.embedding.ids import IdMapper
from distembed.errors import UserError
from distembed.sharding.table_wise import CompositionalTableWiseSharding


class ShardedCompositionalEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """What ``DistributedModelParallel`` puts in place of a :class:`CompositionalEmbeddingBagCollection`.

    Ids are checked and mapped in ``input_dist``, before the all-to-all. All ranks construct and call it together.
    """

    _embedding_names: list[str]  # the base class's

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
        if module.is_weighted():
            raise UserError(
                "A collection with is_weighted=True cannot be sharded yet; use it on one device, or without weights."
            )
        self._tables = module.tables()
        self._input_dist_is_missing = True
        # not yet as parameters, which the base class's constructor would not let be
        self._replicated = _replicate_functions(self._tables, device)
        self._map_ids = IdMapper(self._tables)
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
        self.functions = nn.ParameterDict(self._replicated)
        # TorchRec's dists know one key a feature; where each partition gives a vector, it is as wide as all of these
        table_of = {name: table for table in self._tables for name in table.feature_names}
        features = self._embedding_names
        self._embedding_names = [vector for name in features for vector in table_of[name].vector_names(name)]
        self._embedding_dims = [
            table_of[name].embedding_dim for name in features for _ in range(table_of[name].num_vectors)
        ]

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
        return CompositionalTableWiseSharding(
            self._tables, sharding_infos, env, device, qcomm_codecs_registry, self._replicated
        )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Brings ids inside their tables, then sends each to its table's owner; all ranks call it."""
        if self._input_dist_is_missing:
            # TorchRec's own first-batch check would hold raw ids against the rows of partition tables
            self._create_input_dist(features.keys())
            self._input_dist_is_missing = self._has_uninitialized_input_dist = False
        return super().input_dist(ctx, self._map_ids(features))

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Sends composed vectors to the rows' ranks; all ranks call it."""
        return self._join_functions(super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Looks up, composes and sends; all ranks call it."""
        return self._join_functions(super().compute_and_output_dist(ctx, input))

    def _join_functions(self, embedded: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[KeyedTensor]:
        """Ties the output to every function, so that ranks that own none wait in the same gradient reductions."""
        if len(self.functions) and self._env.world_size > 1:
            nothing = 0 * sum(weight.sum() for weight in self.functions.values())
            embedded.callbacks.append(partial(param_dp_sync, no_op_tensor=nothing))
        return embedded

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of all parameters but the functions', which are data-parallel."""
        functions = {name for name, _ in self.functions.named_parameters(append_prefix(prefix, "functions"))}
        return (name for name in super().sharded_parameter_names(prefix) if name not in functions)

    @property
    def unsharded_module_type(self) -> type[CompositionalEmbeddingBagCollection]:
        """The module that this one replaces."""
        return CompositionalEmbeddingBagCollection


def _replicate_functions(
    tables: Sequence[CompositionalEmbeddingBagConfig], device: torch.device | None
) -> dict[str, nn.Parameter]:
    """Weights of all functions by name, drawn alike on every rank."""
    parts = [part for table in tables for part in table.function_tables()]
    return {part.name: nn.Parameter(part.init(torch.empty(part.num_rows, part.dim, device=device))) for part in parts}


def plan_of_partitions(
    tables: Sequence[CompositionalEmbeddingBagConfig], plan: dict[str, ParameterSharding]
) -> dict[str, ParameterSharding]:
    """Where each partition table goes, from a plan that names compositional tables: beside its siblings.

    Raises:
        UserError: for a sharding type other than table-wise, or vectors that FBGEMM cannot hold.
    """
    expanded = {}
    for table in tables:
        placed = plan[table.name]
        if placed.sharding_type != ShardingType.TABLE_WISE.value:
            raise UserError(
                f"table {table.name!r} is planned {placed.sharding_type}; compositional tables are placed table_wise."
            )
        for part in table.lookup_tables():
            if part.dim % 4:
                raise UserError(
                    f"table {table.name!r}: the vectors of partition table {part.name!r} have {part.dim} numbers; "
                    "FBGEMM takes multiples of 4. Choose embedding_dim, or dims of concat, accordingly."
                )
            sharding = copy.deepcopy(placed)
            assert sharding.sharding_spec is not None
            for shard in sharding.sharding_spec.shards:
                shard.shard_offsets, shard.shard_sizes = [0, 0], [part.num_rows, part.dim]
            expanded[part.name] = sharding
    return expanded
