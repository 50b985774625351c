"""The dists of tables whose rows are divided between the ranks of a node: ids go there, sums come back in two steps.

Partial sums are added up within the node that has the table, over its faster network, and only whole sums go from node
to node (TorchRec's ``table_row_wise`` and ``grid_shard``)::

    ids       every rank  ->  the rank, on the table's node, that has the row
    vectors   reduce-scatter within the node: local rank r gets the sums of the bags of all local ranks r
              all-to-all between the ranks of one local number: each gets the sums of its own bags
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.partitions import Partition
from distembed.sharding.row_wise import DividedRows, sort_by_row_block


class NodeInputDist(TwRwSparseFeaturesDist):
    """Sends every id to one rank of each node that has columns of its table; all ranks construct and call it together.

    Args:
        pg: The process group of all ranks.
        ranks_per_node: Number of ranks on each node.
        num_features: How many features each rank has.
        divided: For each feature, node after node, its table's scheme and the number of the partition that is divided
            by rows.
        rows_per_block: For each feature, number of rows of that partition on a rank.
        device: Device of the batches.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        ranks_per_node: int,
        num_features: list[int],
        divided: Sequence[tuple[Partition, int]],
        rows_per_block: Sequence[int],
        device: torch.device | None,
    ) -> None:
        super().__init__(pg, ranks_per_node, num_features, [ranks_per_node * n for n in rows_per_block], device=device)
        self._rows = DividedRows(divided)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sends ids, lengths and, where there are some, weights."""
        in_blocks, _ = sort_by_row_block(
            sparse_features, self._rows(sparse_features), self._local_size, self._feature_block_sizes_tensor
        )
        return self._dist(in_blocks.permute(self._sf_staggered_shuffle, self._sf_staggered_shuffle_tensor))


class NodeOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Sums the parts of each bag within a node, and sends the sums to the bag's rank; for unequal batches too.

    Not every backend scatters or gathers unequal parts (gloo does not): they are padded to equal ones.

    Args:
        stock: TorchRec's dist for batches of equal sizes.
    """

    def __init__(self, stock: GridPooledEmbeddingDist) -> None:
        super().__init__()
        stock._create_output_dist_modules()  # which it would do in the first step
        self._stock = stock

    def forward(
        self, local_embs: Float[Tensor, "batches width"], sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Sends the partial sums of all bags, those of one local rank's batches side by side; all ranks call it."""
        assert sharding_ctx is not None
        stock, sizes = self._stock, sharding_ctx.batch_size_per_rank
        if len(set(sizes)) == 1:
            equal: Awaitable[Tensor] = stock(local_embs, sharding_ctx)
            return equal
        ranks_per_node = stock._intra_pg.size()
        own = stock._rank % ranks_per_node
        sizes_of_nodes = [sizes[local_rank::ranks_per_node] for local_rank in range(ranks_per_node)]
        parts = local_embs.split([sum(of_nodes) for of_nodes in sizes_of_nodes])
        padded = nn.utils.rnn.pad_sequence(list(parts), batch_first=True).flatten(0, 1)
        summed = stock._intra_dist(padded).wait()[: sum(sizes_of_nodes[own])]
        sent: Awaitable[Tensor] = stock._cross_dist(summed, batch_size_per_rank=sizes_of_nodes[own])
        return sent
