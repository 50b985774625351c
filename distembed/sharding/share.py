"""Shares of sharded tables. A rank's *share* is the ids whose vectors it gets, each id on one rank, by placement.

::

    data_parallel             ranges of ids, one after the other on the ranks
    row_wise                  the ids whose row of the divided partition lies on the rank
    table_wise, column_wise   ranges of ids; each rank composes the columns that it has for all ranks' ids of a chunk,
                              and an all-to-all brings whole vectors together:

    chunk of 2 ranks    ids 0, 1, 2    ids 3, 4, 5              ids 0, 1, 2        ids 3, 4, 5
    rank 0              columns 0-7    columns 0-7      ->      columns 0-15
    rank 1              columns 8-15   columns 8-15                                columns 0-15

No rank ever holds all vectors of a divided table.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.share import ReadChunk, ShareColumns, ShareIds, ShareWeight, TableShare, require_one_vector
from distembed.partitions import Naive
from distembed.sharding.placement import BY_COLUMNS, BY_ROWS, WITHIN_NODES, Placement
from distembed.sharding.table_slice import column_range, shard_rank

_IDS_AT_ONCE = 2**20


@dataclass(frozen=True)
class OwnedIds:
    """The ids in one rank's share, and the size of the largest share, which all ranks know."""

    ids: ShareIds  # the ids
    most_ids: int  # largest number of ids on a rank


class ColumnShare(TableShare):
    """A share of a table that is divided by columns: ranks compose their columns for each other's ids.

    Args:
        table: The table.
        columns: The ranges of columns that this rank composes, with their weights; none on a rank without columns.
        columns_by_rank: First column, and last column + 1, of every range of each rank.
        device: Device of the weights.
        group: The ranks.
    """

    def __init__(
        self,
        table: CompositionalEmbeddingConfig,
        columns: Sequence[ShareColumns],
        columns_by_rank: Sequence[Sequence[tuple[int, int]]],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        ids = ShareIds(0, table.num_embeddings)
        super().__init__(table, ids, -(-len(ids) // group.size()), columns, device, group)
        self._process_group, self._columns_by_rank = group, columns_by_rank
        self._rank = group.rank()

    def read(self, chunk: int, most_ids: int, with_gradients: bool = False) -> ReadChunk:
        # chunk `number` of all ranks is one run of ids: rank r gets ids starts[r] to starts[r + 1], fewer at the end
        starts = [(chunk * self.world_size + rank) * most_ids for rank in range(self.world_size + 1)]
        composed_ranges = self._compose(self._ids.between(starts[0], starts[-1], self._device), with_gradients)
        ids_by_rank = [
            len(range(*slice(start, stop).indices(len(self._ids)))) for start, stop in itertools.pairwise(starts)
        ]
        own_ids = self._ids.between(starts[self._rank], starts[self._rank + 1], self._device)
        # [ids of all ranks, own columns]: the rows of rank r's ids go to rank r
        composed = (
            torch.cat([columns.vectors.detach() for columns in composed_ranges], dim=1) if composed_ranges else None
        )
        received = self._exchange(
            [] if composed is None else composed.split(ids_by_rank),
            [(ids_by_rank[self._rank], _num_columns(ranges)) for ranges in self._columns_by_rank],
        )
        vectors = torch.empty(ids_by_rank[self._rank], self.table.embedding_dim, device=self._device)
        for ranges, columns in zip(self._columns_by_rank, received, strict=True):
            for (start, stop), range_vectors in zip(
                ranges, columns.split([stop - start for start, stop in ranges], 1), strict=True
            ):
                vectors[:, start:stop] = range_vectors
        return ReadChunk(own_ids, vectors, composed_ranges if with_gradients else (), ids_by_rank)

    def add_gradients(
        self, chunk: ReadChunk, gradients: Float[Tensor, "ids dim"], totals: Sequence[Float[Tensor, "rows dim_j"]]
    ) -> None:
        # the way of read backward: each rank gets its own columns' gradients, for the ids of all ranks
        own_ranges = self._columns_by_rank[self._rank]
        received = self._exchange(
            [
                torch.cat([gradients[:, start:stop] for start, stop in ranges] or [gradients[:, :0]], dim=1)
                for ranges in self._columns_by_rank
            ],
            [(num_ids, _num_columns(own_ranges)) for num_ids in chunk.ids_by_rank],
        )
        if own_ranges:
            self._add(
                chunk.composed, torch.cat(received).split([stop - start for start, stop in own_ranges], 1), totals
            )

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Sends matrix r to rank r, or nothing; returns each rank's matrix, whose rows and columns ``received`` has."""
        sent_sizes = [matrix.numel() for matrix in sent] or [0] * self.world_size
        received_sizes = [rows * columns for rows, columns in received]
        flat = torch.cat([matrix.reshape(-1) for matrix in sent]) if sent else torch.empty(0, device=self._device)
        arrived = torch.empty(sum(received_sizes), device=self._device)
        dist.all_to_all_single(arrived, flat, received_sizes, sent_sizes, group=self._process_group)
        return [matrix.view(size) for matrix, size in zip(arrived.split(received_sizes), received, strict=True)]


def _num_columns(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def ids_of_block(placement: Placement, block: int, device: torch.device) -> OwnedIds:
    """Returns the ids whose row in the divided partition lies in a block; unless ids are rows, it goes over all ids."""
    assert placement.divided is not None
    num_ids, rows_per_block = placement.table.num_embeddings, placement.rows_per_block
    if isinstance(placement.table.scheme, Naive):
        first = min(block * rows_per_block, num_ids)
        return OwnedIds(ShareIds(first, min(first + rows_per_block, num_ids)), min(rows_per_block, num_ids))
    block_ids, counts = [], torch.zeros(placement.num_row_blocks, dtype=torch.int64, device=device)
    for start in range(0, num_ids, _IDS_AT_ONCE):
        ids = torch.arange(start, min(start + _IDS_AT_ONCE, num_ids), device=device)
        blocks = placement.table.scheme.rows(ids)[placement.divided] // rows_per_block
        counts += torch.bincount(blocks, minlength=len(counts))
        block_ids.append(ids[blocks == block].to(torch.int32 if num_ids <= 2**31 else torch.int64))
    return OwnedIds(ShareIds(0, 0, torch.cat(block_ids)), int(counts.max()))


def make_share(
    placement: Placement,
    env: ShardingEnv,
    device: torch.device,
    shards: Mapping[tuple[str, int], Tensor],
    replicated: Mapping[str, nn.Parameter],
    owned_ids: dict[str, OwnedIds],
) -> TableShare:
    """Returns this rank's share of a table; all ranks call it.

    Args:
        placement: The table and its placement.
        env: The ranks.
        device: Device of the weights.
        shards: This rank's shards, by partition table's name and first column.
        replicated: Weights that every rank has, by partition table's name.
        owned_ids: Cache of this rank's ids of row-divided tables, by table; the call adds to it.

    Raises:
        UserError: An id of the table has several vectors, or the rows are divided within nodes.
    """
    table, kind, num_ids = placement.table, placement.unit.sharding_type, placement.table.num_embeddings
    require_one_vector(table)
    if kind in WITHIN_NODES:
        raise UserError(
            f"table {table.name!r} is placed {kind}, in which its items cannot be scored; set plan.sharding_types, "
            f"or plan.tables.{table.name}.sharding_types, to table_wise, column_wise, row_wise or data_parallel."
        )
    group = env.process_group if env.world_size > 1 else None

    def columns_of(start: int, stop: int) -> ShareColumns:
        return _share_columns(placement, (start, stop), env.rank, shards, replicated)

    if kind in BY_COLUMNS and group is not None:
        assert placement.unit.sharding_spec is not None
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(env.world_size)]
        for shard in placement.unit.sharding_spec.shards:
            ranges[shard_rank(shard)].append(column_range(shard))
        return ColumnShare(table, [columns_of(*range_) for range_ in ranges[env.rank]], ranges, device, group)
    if kind in BY_ROWS:
        if table.name not in owned_ids:
            owned_ids[table.name] = ids_of_block(placement, env.rank, device)
        owned = owned_ids[table.name]
    else:
        most_ids = -(-num_ids // env.world_size)
        first_id = min(env.rank * most_ids, num_ids)
        owned = OwnedIds(ShareIds(first_id, min(first_id + most_ids, num_ids)), most_ids)
    columns = [columns_of(0, table.embedding_dim)] if len(owned.ids) else []
    return TableShare(table, owned.ids, owned.most_ids, columns, device, group)


def _share_columns(
    placement: Placement,
    columns: tuple[int, int],
    rank: int,
    shards: Mapping[tuple[str, int], Tensor],
    replicated: Mapping[str, nn.Parameter],
) -> ShareColumns:
    """Returns a range of a table's output columns, with the weights on this rank that compose them."""
    weights = []
    for part_slice in placement.slice(*columns).partitions:
        weight = shards.get((part_slice.part.name, part_slice.start))
        if weight is None:
            own_columns = replicated[part_slice.part.name][:, part_slice.start : part_slice.stop]
            weights.append(ShareWeight(part_slice.partition, own_columns, is_replicated=True))
        else:
            first_row = rank * placement.rows_per_block if part_slice.partition == placement.divided else 0
            weights.append(ShareWeight(part_slice.partition, weight, first_row))
    for j, part in enumerate(placement.parts):
        if part.is_function:
            weights.append(ShareWeight(j, replicated[part.name], is_function=True, is_replicated=True))
    return ShareColumns(*columns, weights)
