"""The sharded module of bags: TorchRec's own, with lookups that compose before anything is communicated."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.embedding.batches import bags_of_rows, require_bags_for_rows, with_equal_numbers_of_bags, without_gaps
from distembed.embedding.collections import CompositionalEmbeddingBagCollection
from distembed.sharding.parameters import ShardedParameters, without_weights
from distembed.sharding.shardings import make_sharding
from distembed.sharding.table_slice import width
from distembed.sharding.units import BagUnits


class ShardedCompositionalEmbeddingBagCollection(ShardedParameters, ShardedEmbeddingBagCollection):
    """Takes the place of a :class:`CompositionalEmbeddingBagCollection` under ``DistributedModelParallel``.

    Ids are checked, mapped and, in training, replaced in ``input_dist``, before the all-to-all. Keys of the output are
    in the order of the unsharded module, under any plan. All ranks construct and call it together.

    Attributes:
        weights_come_later: Whether a feature processor computes the ids' weights after the input dist.
    """

    weights_come_later: bool = False
    _lookup_attribute = "embedding_bags"
    _units_type = BagUnits

    def __init__(self, module: CompositionalEmbeddingBagCollection, *arguments: Any, **keywords: Any) -> None:
        super().__init__(module, *arguments, **keywords)
        self._output = _Output(module, self._embedding_names)

    # an instance method in the place of TorchRec's class method: the sharding needs this module's tables
    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        **keywords: Any,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]:
        """Makes the sharding of all tables with one sharding type; freezes the tables that no optimizer trains."""
        self._note_settings(sharding_infos, env.rank)
        # the constructors of the other sharding types do not take this argument
        if sharding_infos[0].param_sharding.sharding_type in (
            ShardingType.COLUMN_WISE.value,
            ShardingType.TABLE_COLUMN_WISE.value,
        ):
            keywords["permute_embeddings"] = permute_embeddings
        return make_sharding(self._placements, self._replicated, sharding_infos, env, device, pools=True, **keywords)

    def _initialize_torch_state(self, *arguments: Any, **keywords: Any) -> None:
        # TorchRec builds its parameters and state dict here, from configs that have described units until now
        self._embedding_bag_configs = self._show_partition_tables(EmbeddingBagConfig)
        super()._initialize_torch_state(*arguments, **keywords)
        self._register_replicated()

    @staticmethod
    def _pre_load_state_dict_hook(
        self: "ShardedCompositionalEmbeddingBagCollection", state_dict: dict[str, Any], prefix: str, *hook_args: Any
    ) -> None:
        """Replaces each ShardedTensor in ``state_dict`` by one tensor of this rank's shards, stacked by rows.

        A rank's shards of a weight have equal widths (:func:`~distembed.sharding.table_slice.own_ranges`).
        """
        local_tensors = {}
        for name in self._model_parallel_name_to_local_shards:
            key = f"{prefix}embedding_bags.{name}.weight"
            if isinstance(state_dict.get(key), ShardedTensor):
                shards = [shard.tensor for shard in state_dict.pop(key).local_shards()] or [torch.empty(0)]
                # a single shard may be most of a rank's memory: it is not copied
                local_tensors[key] = torch.cat(shards) if len(shards) > 1 else shards[0]
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *hook_args)
        state_dict.update(local_tensors)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Maps raw ids to table ids, replaces some in training, and sends each to the rank that looks it up.

        All ranks call it. For the output, ``ctx`` gets the bag sizes of mean-pooled features and the inverse indices.
        A UserError refuses damaged batches, missing features or weights, weights that require gradients, unequal
        numbers of bags without inverse indices, and ids outside of their tables.
        """
        features = without_gaps(maybe_td_to_kjt(features))
        self._follow_keys(features.keys(), self._embedding_shardings)
        self._follow_single_ids(features)
        if self._is_weighted and not self.weights_come_later:
            self._require_weights(features.weights_or_none())
        mapped = self._map_ids(features, admits=self.training)  # checks that the batch is whole
        require_bags_for_rows(mapped)
        bag_features = with_equal_numbers_of_bags(mapped if self._is_weighted else without_weights(mapped))
        ctx.divisor = self._output.divisor(bag_features)
        sent = super().input_dist(ctx, self._perturb_ids(ctx, bag_features))
        ctx.inverse_indices = features.inverse_indices_or_none()
        return sent

    def _require_weights(self, weights: Tensor | None) -> None:
        """Raises if a batch has no weights, or weights that require gradients: input dists have no backward pass."""
        if weights is None:
            raise UserError(
                "The collection has is_weighted=True, but the KeyedJaggedTensor has no weights; make it with "
                "weights=, or the collection without is_weighted."
            )
        if weights.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "The weights of the KeyedJaggedTensor need gradients, which no sharded collection sends back to the "
                "rows' ranks; detach the weights, or compute them by TorchRec's FeatureProcessedEmbeddingBagCollection "
                "around the collection, which does so where ids are looked up."
            )

    def _arrange(self, ctx: EmbeddingBagCollectionContext, zero: Tensor | None, embedded: KeyedTensor) -> KeyedTensor:
        self._require_right_mode(ctx)  # a pipeline may look up before a step and wait within it
        values = self._widened(embedded.values())
        arranged = self._output.arrange(values, zero, ctx.divisor, bags_of_rows(ctx.inverse_indices))
        self._limit(arranged.values(), self._output.limited_columns)
        return arranged

    @property
    def unsharded_module_type(self) -> type[CompositionalEmbeddingBagCollection]:
        return CompositionalEmbeddingBagCollection


class _Output:
    """Makes the unsharded module's output from the per-bag sums that TorchRec's dists return.

    Dists return ``features`` grouped by sharding type; the output has them table by table. Ranks return sums for mean
    pooling too, because a rank may see only some ids of a bag: this class divides the complete sums.
    """

    def __init__(self, module: CompositionalEmbeddingBagCollection, features: Sequence[str]) -> None:
        tables = module.tables()
        table_of = {name: table for table in tables for name in table.feature_names}
        self._splits = [width(table_of[name]) for name in features]
        self._in_order = list(table_of)
        self._order = [list(features).index(name) for name in self._in_order]
        # neighbouring tables that are trained by the sparse optimizer: columns whose gradients may have a limit
        self.limited_columns: list[slice] = []
        start = 0
        for is_dense, neighbours in groupby(tables, key=lambda table: table.dense_gradient):
            stop = start + sum(len(table.feature_names) * width(table) for table in neighbours)
            self.limited_columns += [] if is_dense else [slice(start, stop)]
            start = stop
        self._means = {i: name for i, name in enumerate(self._in_order) if table_of[name].pooling == "mean"}
        self._keys = [key for table in tables for name in table.feature_names for key in table.vector_names(name)]
        self._dims = [
            table.embedding_dim for table in tables for _ in table.feature_names for _ in range(table.num_vectors)
        ]

    def divisor(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Returns the number of ids in each bag, at least 1, ``[mean-pooled features, batch]``; None without any."""
        if not self._means:
            return None
        lengths = features.lengths().view(len(features.keys()), features.stride())
        return torch.stack([lengths[features.keys().index(name)] for name in self._means.values()]).clamp(min=1)

    def arrange(
        self, values: Tensor, zero: Tensor | None, divisor: Tensor | None, bags: Mapping[str, Tensor] | None
    ) -> KeyedTensor:
        """Reorders the dists' sums ``[bags, all widths]``, divides means, and repeats bags that several rows share.

        ``zero`` is added in place, for gradients of weights that this rank does not use. ``bags`` has the bag of each
        row; None where row i has bag i.
        """
        if zero is not None:
            values.add_(zero)
        if self._order != list(range(len(self._order))) or self._means or bags is not None:
            sums = values.split(self._splits, dim=1)
            ordered = [sums[index] for index in self._order]
            for row, index in enumerate(self._means):
                assert divisor is not None
                ordered[index] = ordered[index] / divisor[row].unsqueeze(1)
            if bags is not None:
                named_sums = zip(self._in_order, ordered, strict=True)
                ordered = [feature_sums.index_select(0, bags[name]) for name, feature_sums in named_sums]
            values = torch.cat(ordered, dim=1)
        return KeyedTensor(self._keys, self._dims, values)
