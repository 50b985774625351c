"""The dists of tables that are divided by rows: each id goes to the rank that has its row.

TorchRec's own input dist routes an id by its value. Here the row in the divided partition decides, and the id itself
travels, so that its owner can compute its rows in the other partitions.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, bucketize_kjt_before_all2all
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.partitions import Partition


class RowWiseInputDist(RwSparseFeaturesDist):
    """Sends every id to one rank; all ranks construct and call it together.

    Args:
        pg: The process group.
        divided: Scheme of each feature's table, and the number of the partition that is divided by rows.
        device: Device of the batches.
    """

    def __init__(
        self, pg: dist.ProcessGroup, divided: Sequence[tuple[Partition, int]], device: torch.device | None
    ) -> None:
        super().__init__(pg, len(divided), [scheme.num_rows[partition] for scheme, partition in divided], device=device)
        self._divided = divided

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sends ids, lengths and, where there are some, weights."""
        return self._dist(self._sort_by_rank(sparse_features))

    def _sort_by_rank(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        by_row = KeyedJaggedTensor(
            features.keys(),
            self._rows(features),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
        )
        sorted_rows, places = bucketize_kjt_before_all2all(
            by_row, self._world_size, self._feature_block_sizes_tensor, output_permute=True
        )
        assert places is not None
        self.unbucketize_permute_tensor = places  # for the way back of sequences
        ids = features.values()
        return KeyedJaggedTensor(
            sorted_rows.keys(),
            torch.empty_like(ids).scatter_(0, places.long(), ids),
            weights=sorted_rows.weights_or_none(),
            lengths=sorted_rows.lengths(),
            stride=features.stride(),
        )

    def _rows(self, features: KeyedJaggedTensor) -> Int64[Tensor, " ids"]:
        """Returns the rows of all ids in their divided partitions."""
        by_feature = zip(self._divided, features.values().long().split(features.length_per_key()), strict=True)
        return torch.cat([scheme.rows(ids)[partition] for (scheme, partition), ids in by_feature])


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """Sums the ranks' parts of each bag on the bag's rank; TorchRec's dist, for batches of unequal sizes too.

    Not every backend scatters or gathers unequal parts (gloo does not): they are padded to equal ones.
    """

    def forward(
        self, local_embs: Float[Tensor, "batches width"], sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Sends the partial sums of every rank's bags, rank after rank; all ranks call it."""
        assert sharding_ctx is not None
        sizes = sharding_ctx.batch_size_per_rank
        if len(set(sizes)) == 1:
            return super().forward(local_embs, sharding_ctx)
        longest, own = max(sizes), sizes[dist.get_rank(self._pg)]
        padded = nn.utils.rnn.pad_sequence(list(local_embs.split(sizes)), batch_first=True).flatten(0, 1)
        summed = super().forward(padded, EmbeddingShardingContext(batch_size_per_rank=[longest] * len(sizes)))
        summed.callbacks.append(lambda output: output[:own])
        return summed
