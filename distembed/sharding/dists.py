"""The dists of tables that are divided by rows, over all ranks or within a node, and the release of their memory.

TorchRec's own input dist routes an id by its value. Here the id's row in the divided partition decides its rank, and
the id itself is sent, so that its owner can compute its rows in the other partitions::

    row_wise                     ids       every rank -> the rank that has the row
                                 vectors   reduce-scatter: each rank gets the sums of its own bags
    table_row_wise, grid_shard   ids       every rank -> the rank, on the table's node, that has the row
                                 vectors   reduce-scatter in the node: local rank r gets the bags of all local ranks r
                                           all-to-all between the ranks of one local number: each gets its own bags

Within nodes, partial sums are added up over the node's faster network, and only whole sums go from node to node. Not
every backend reduces parts of unequal sizes (gloo does not): unequal parts are padded.

On CPUs, a thread of gloo's reports a collective as done before it releases the tensors that it has sent and received.
Where that thread then waits for a core, vectors of a whole batch stay in memory for milliseconds more. So
:func:`release_promptly` has a step wait for the release, which costs microseconds and makes its peak repeatable.
"""

import os
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable, SequenceEmbeddingsAwaitable
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    EmbeddingShardingContext,
    bucketize_kjt_before_all2all,
)
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.kernels.tables import FLOATS, INTEGERS, as_operand
from distembed.partitions import Partition
from distembed.sharding.ids import FeatureRows, IdCounts


class DividedRows:
    """Maps the ids of a batch to rows of their tables' *divided partition*, the partition that is split by rows.

    ``divided`` has, for each feature of the batch in order, its table's scheme and the divided partition's number.
    """

    def __init__(self, divided: Sequence[tuple[Partition, int]]) -> None:
        # neighbouring features with one kind of scheme form a run, which one call of FeatureRows maps
        runs = groupby(divided, lambda feature: (type(feature[0]), len(feature[0].num_rows), feature[1]))
        self._runs: list[tuple[int, int, FeatureRows]] = []
        for (_, _, partition), run in runs:
            schemes = [scheme for scheme, _ in run]
            self._runs.append((len(schemes), partition, FeatureRows(schemes)))

    def __call__(self, features: KeyedJaggedTensor) -> Int64[Tensor, " ids"]:
        """Returns the row of every id of a batch whose features are the entries of ``divided``, in order."""
        ids, counts, lengths = features.values().long(), features.length_per_key(), features.lengths()
        rows, first_feature, first_id = [], 0, 0
        for num_features, partition, to_rows in self._runs:
            end_feature = first_feature + num_features
            run_lengths = lengths[first_feature * features.stride() : end_feature * features.stride()]
            run_counts = IdCounts(counts[first_feature:end_feature], run_lengths)
            rows.append(to_rows(ids[first_id : first_id + run_counts.total], run_counts)[partition])
            first_feature, first_id = end_feature, first_id + run_counts.total
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class RowWiseInputDist(RwSparseFeaturesDist):
    """Sends every id to the rank that holds its row of the divided partition; all ranks construct and call it.

    ``divided`` is as for :class:`DividedRows`.
    """

    def __init__(
        self, pg: dist.ProcessGroup, divided: Sequence[tuple[Partition, int]], device: torch.device | None
    ) -> None:
        super().__init__(pg, len(divided), [scheme.num_rows[partition] for scheme, partition in divided], device=device)
        self._rows = DividedRows(divided)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sends ids, lengths and any weights, and keeps the ids' permutation for the output dist of sequences."""
        in_blocks, positions = sort_by_row_block(
            sparse_features, self._rows(sparse_features), self._world_size, self._feature_block_sizes_tensor
        )
        self.unbucketize_permute_tensor = positions
        return self._dist(in_blocks)


def sort_by_row_block(
    features: KeyedJaggedTensor, rows: Int64[Tensor, " ids"], num_blocks: int, rows_per_block: Int[Tensor, " features"]
) -> tuple[KeyedJaggedTensor, Int[Tensor, " ids"]]:
    """Sorts the ids of a batch by the block that holds their row: rows ``[b * rows_per_block, (b + 1) * ...)``.

    Args:
        features: The batch.
        rows: Row of each id in the divided partition of its table.
        num_blocks: Number of blocks, one for each receiving rank.
        rows_per_block: Number of rows in a block, for each feature.

    Returns:
        The batch with a key for each pair of block and feature, block by block; and each id's place in this order.
    """
    # FBGEMM's operator sorts values by block. It sorts the rows here; the ids then follow to the same places.
    ids, weights = features.values(), features.weights_or_none()
    by_row = KeyedJaggedTensor(
        features.keys(),
        as_operand(rows, ids.device, *INTEGERS),
        weights=None if weights is None else as_operand(weights, ids.device, *FLOATS),
        lengths=as_operand(features.lengths(), ids.device, *INTEGERS),
        stride=features.stride(),
    )
    sorted_rows, positions = bucketize_kjt_before_all2all(by_row, num_blocks, rows_per_block, output_permute=True)
    assert positions is not None
    in_blocks = KeyedJaggedTensor(
        sorted_rows.keys(),
        torch.empty_like(ids).scatter_(0, positions.long(), ids),
        weights=sorted_rows.weights_or_none(),
        lengths=sorted_rows.lengths(),
        stride=features.stride(),
    )
    return in_blocks, positions


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """Sums the ranks' parts of each bag on the bag's rank; TorchRec's dist, for batches of unequal sizes too."""

    def forward(
        self, local_embs: Float[Tensor, "batches width"], sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Returns the complete sums of this rank's bags; all ranks call it.

        ``local_embs`` holds this rank's partial sums for the bags of all ranks, rank after rank.
        """
        assert sharding_ctx is not None
        sizes = sharding_ctx.batch_size_per_rank
        if len(set(sizes)) == 1:
            return super().forward(local_embs, sharding_ctx)
        most_rows, num_own_rows = max(sizes), sizes[dist.get_rank(self._pg)]
        padded = nn.utils.rnn.pad_sequence(list(local_embs.split(sizes)), batch_first=True).flatten(0, 1)
        summed = super().forward(padded, EmbeddingShardingContext(batch_size_per_rank=[most_rows] * len(sizes)))
        summed.callbacks.append(lambda output: output[:num_own_rows])
        return summed


class NodeInputDist(TwRwSparseFeaturesDist):
    """Sends every id to each node that has columns of its table, there to the rank that holds its row.

    All ranks construct and call it together.

    Args:
        pg: The process group of all ranks.
        ranks_per_node: Number of ranks on each node.
        num_features: Number of features that each rank receives.
        divided: As for :class:`DividedRows`, for the features of each node, node after node.
        rows_per_block: Number of rows of the divided partition on a rank, for each entry of ``divided``.
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
        # from (block, node, feature) to (node, block, feature): rank = node * ranks_per_node + block
        return self._dist(in_blocks.permute(self._sf_staggered_shuffle, self._sf_staggered_shuffle_tensor))


class NodeOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Adds up the partial sums of each bag within a node, and sends each sum to the bag's rank.

    It wraps TorchRec's dist ``stock``, which needs batches of equal sizes; here sizes may differ between ranks.
    """

    def __init__(self, stock: GridPooledEmbeddingDist) -> None:
        super().__init__()
        stock._create_output_dist_modules()  # otherwise done in the first step
        self._stock = stock

    def forward(
        self, local_embs: Float[Tensor, "batches width"], sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Returns the sums of this rank's bags over all nodes' columns; all ranks call it.

        ``local_embs`` has the partial sums of all ranks' bags: local rank 0 of every node, then local rank 1, ...
        """
        assert sharding_ctx is not None
        stock, sizes = self._stock, sharding_ctx.batch_size_per_rank
        if len(set(sizes)) == 1:
            return stock(local_embs, sharding_ctx)
        ranks_per_node = stock._intra_pg.size()
        own_local_rank = stock._rank % ranks_per_node
        # batch sizes of the ranks with one local rank, node after node; parts are padded to the largest sum
        sizes_by_local_rank = [sizes[local_rank::ranks_per_node] for local_rank in range(ranks_per_node)]
        sums = local_embs.split([sum(node_sizes) for node_sizes in sizes_by_local_rank])
        padded = nn.utils.rnn.pad_sequence(list(sums), batch_first=True).flatten(0, 1)
        summed = stock._intra_dist(padded).wait()[: sum(sizes_by_local_rank[own_local_rank])]
        return stock._cross_dist(summed, batch_size_per_rank=sizes_by_local_rank[own_local_rank])


_MOST_LOOKS = 1000
"""Most checks of the tensors that a collective still holds, each with a chance for its thread to run."""


def release_promptly(output_dists: Iterable[nn.Module]) -> None:
    """Makes every wait for an exchange of vectors, or of their gradients, last until gloo has released its tensors."""
    for output_dist in output_dists:
        for module in output_dist.modules():
            module.register_forward_hook(_take_over)


def _take_over(module: nn.Module, arguments: Any, awaitable: Any) -> None:
    """Makes TorchRec's request of a started exchange a :class:`_PromptRequest`; a forward hook, on CPUs only.

    Requests that an inner dist's hook has converted stay as they are.
    """
    if isinstance(awaitable, PooledEmbeddingsAwaitable | SequenceEmbeddingsAwaitable):
        request = awaitable._tensor_awaitable
        if type(request) is Request and request.dummy_tensor.device.type == "cpu":
            work = request.__dict__.pop("req")
            # autograd knows the request already, and will set the work of the backward exchange in it
            request.__class__ = _PromptRequest
            request.req = work


class _PromptRequest(Request[Any]):
    """TorchRec's request, whose ``req`` (the collective to wait for) is wrapped in :class:`_PromptWork` when it is set.

    The work has a name of its own: torch 2.11 does not compile a property that reads its own name in ``__dict__``.
    """

    @property
    def req(self) -> Any:
        return self._prompt_work

    @req.setter
    def req(self, work: Any) -> None:
        self._prompt_work = None if work is None else _PromptWork(work, self)


class _PromptWork:
    """A collective whose ``wait`` also waits until only its request holds the received tensors."""

    def __init__(self, work: Any, request: Request[Any]) -> None:
        self._work, self._request = work, request

    def wait(self) -> None:
        self._work.wait()
        os.sched_yield()  # lets the collective's thread release its tensors
        self._work = None
        received = [tensor for tensor in tree_leaves(self._request.tensor) if isinstance(tensor, Tensor)]
        for _ in range(_MOST_LOOKS):
            if all(tensor._use_count() == 1 for tensor in received):  # type: ignore[attr-defined]
                return
            time.sleep(0)
