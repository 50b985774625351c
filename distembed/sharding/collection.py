"""The sharded module of sequences: TorchRec's own, with lookups that compose before anything is communicated."""

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.embedding.batches import (
    bags_of_rows,
    jagged_vectors,
    lengths_by_feature,
    with_equal_numbers_of_bags,
    without_gaps,
)
from distembed.embedding.collections import CompositionalEmbeddingCollection
from distembed.sharding.parameters import ShardedParameters, without_weights
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES, make_sharding
from distembed.sharding.table_slice import width
from distembed.sharding.units import SequenceUnits


class ShardedCompositionalEmbeddingCollection(ShardedParameters, ShardedEmbeddingCollection):
    """Takes the place of a :class:`CompositionalEmbeddingCollection` under ``DistributedModelParallel``.

    Ids are checked, mapped and, in training, replaced in ``input_dist``, before the all-to-all. All ranks construct and
    call it together.
    """

    _lookup_attribute = "embeddings"
    _units_type = SequenceUnits

    def _require_placements(self) -> None:
        """Raises unless all outputs have equal widths and a sharding type that TorchRec has for sequences.

        TorchRec's dists of sequences send vectors of one width.
        """
        widths = {table.name: width(table) for table in self._tables}
        if len(set(widths.values())) > 1:
            raise UserError(
                f"an id gives {widths} numbers in the tables of a sharded sequence collection, where all have to give "
                "equally many; put tables of feature generation into a collection of their own."
            )
        for name, placement in self._placements.items():
            if placement.unit.sharding_type not in SEQUENCE_SHARDING_TYPES:
                raise UserError(
                    f"table {name!r} is planned {placement.unit.sharding_type}; tables of sequences are placed "
                    f"{', '.join(SEQUENCE_SHARDING_TYPES)}."
                )

    # an instance method in the place of TorchRec's class method: the sharding needs this module's tables
    def create_embedding_sharding(
        self,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        **keywords: Any,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]:
        """Makes the sharding of all tables with one sharding type; freezes the tables that no optimizer trains."""
        self._note_settings(sharding_infos, env.rank)
        return make_sharding(self._placements, self._replicated, sharding_infos, env, device, pools=False, **keywords)

    def _initialize_torch_state(self, *arguments: Any, **keywords: Any) -> None:
        # TorchRec builds its parameters and state dict here, from configs that have described units until now
        self._embedding_configs = self._show_partition_tables(EmbeddingConfig)
        super()._initialize_torch_state(*arguments, **keywords)
        self._register_replicated()

    def input_dist(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Maps raw ids to table ids, replaces some in training, and sends each to the rank that looks it up.

        All ranks call it. ``ctx.raw_features`` keeps the batch, whose lengths and raw ids the output needs. A UserError
        refuses damaged batches, missing features, and ids outside of their tables.
        """
        features = without_gaps(maybe_td_to_kjt(features))
        self._follow_keys(features.keys(), self._sharding_type_to_sharding.values())
        self._follow_single_ids(features)
        ctx.raw_features = features
        mapped = with_equal_numbers_of_bags(without_weights(self._map_ids(features, admits=self.training)))
        perturbed = self._perturb_ids(ctx, mapped)
        if not perturbed.stride():  # TorchRec's dists of sequences fail on a batch of no rows: give it one empty row
            lengths = torch.zeros(len(perturbed.keys()), dtype=perturbed.lengths().dtype, device=perturbed.device())
            perturbed = KeyedJaggedTensor(perturbed.keys(), perturbed.values(), lengths=lengths, stride=1)
        return super().input_dist(ctx, perturbed)

    def _arrange(
        self, ctx: EmbeddingCollectionContext, zero: Tensor | None, embedded: dict[str, JaggedTensor]
    ) -> dict[str, JaggedTensor]:
        self._require_right_mode(ctx)  # a pipeline may look up before a step and wait within it
        features = ctx.raw_features
        bags = bags_of_rows(features.inverse_indices_or_none())
        lengths = lengths_by_feature(features)
        ids = features.values().split(features.length_per_key())
        outputs: dict[str, JaggedTensor] = {}
        for table in self._tables:
            for name in table.feature_names:
                i = features.keys().index(name)
                vectors = self._widened(embedded[name].values())
                if zero is not None:  # added to one feature: its gradients reach all unused weights
                    vectors, zero = vectors + zero, None
                own_ids, own_bags = ids[i] if self._need_indices else None, None if bags is None else bags[name]
                made = jagged_vectors(
                    table.vector_names(name), table.embedding_dim, vectors, lengths[i], own_ids, own_bags
                )
                for sequence in made.values():
                    self._limit(sequence.values(), [] if table.dense_gradient else [slice(None)])
                outputs |= made
        return outputs

    @property
    def unsharded_module_type(self) -> type[CompositionalEmbeddingCollection]:
        return CompositionalEmbeddingCollection
