"""Lookups on the rank that owns the tables: ids -> rows -> vectors -> composed -> pooled.

Ids come in and composed vectors, summed over bags, go out, as with a plain table. Tables with the same scheme,
composition and dimensions form a *group*, which is looked up in one go: one FBGEMM table-batched embedding (TBE) a
partition serves the T features of the group's tables::

    p_1 rows of all T features -> TBE 1 -> vectors [B, T, dim_1] \
    p_2 rows of all T features -> TBE 2 -> vectors [B, T, dim_2] / composed [B, T, width]

Replicated weights are stacked, one table's below the other's, and looked up by torch in the place of a TBE.

Where composing commutes with summing, bags are pooled by the TBEs themselves. Else each id becomes a bag of its own and
is composed first: FBGEMM's unpooled mode has a backward 40 times slower on the CPU than its pooled one. One TBE for the
tables of all partitions is slower too: the gradients of its output have to be put together again. Products over large
bags are pooled in buckets of ids that have a factor in common (:mod:`distembed.sharding.bucket_pool`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import CommOpGradientScaling
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import PathComposition, Product
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.sharding.bucket_pool import Buckets, buckets_are_faster, count_codes, split_bags
from distembed.sharding.distinct import DistinctIds, distinct_ids, take_once
from distembed.sharding.placement import Piece, width


@dataclass(frozen=True)
class LocalTable:
    """What one rank holds of a table: all of it, or a range of its output's columns.

    Attributes:
        table: the table.
        pieces: the partitions' columns that take part.
        sharded: by partition, TorchRec's description of the shard in a TBE; other pieces are replicated.
        first_row: of the shard of the partition that is divided by rows.
    """

    table: CompositionalEmbeddingConfig
    pieces: list[Piece]
    sharded: dict[int, ShardedEmbeddingTable]
    first_row: int = 0


def group_key(local: LocalTable) -> Hashable:
    """What tables share that one TBE a partition and one formula can serve."""
    pieces = tuple(
        (piece.partition, piece.stop - piece.start, piece.partition in local.sharded) for piece in local.pieces
    )
    first = next(iter(local.sharded.values()), None)
    held = None if first is None else (first.compute_kernel, _settings(first))
    return (*kind(local.table), pieces, held)


def kind(table: CompositionalEmbeddingConfig) -> tuple[Hashable, ...]:
    """What tables of one group have in common before they are placed."""
    combine = table.combine
    # where there is nothing to compose, compositions do not differ
    formula = (combine.name, *[getattr(combine, name) for name in combine.settings])
    return (
        table.scheme.name,
        len(table.scheme.num_rows),
        formula if len(table.scheme.num_rows) > 1 else None,
        table.embedding_dim,
        getattr(table, "pooling", None) == "max",
        table.data_type,
    )


def _settings(shard: ShardedEmbeddingTable) -> Hashable:
    return tuple(sorted((key, str(value)) for key, value in (shard.fused_params or {}).items()))


def make_group(
    tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], scale: int, pools: bool
) -> "Group":
    """The group of tables that are alike."""
    table = tables[0].table
    if not tables[0].pieces:
        return _AbsentGroup(tables, pools)
    if not pools:
        kind_of_group: Callable[..., Group] = _SequenceGroup
    elif table.function_tables():
        kind_of_group = _PathGroup
    else:
        assert isinstance(table, CompositionalEmbeddingBagConfig)
        if table.pooling == "max":
            kind_of_group = _PerIdGroup
        elif table.combine.commutes_with_sum or len(table.scheme.num_rows) == 1:
            kind_of_group = _PooledGroup
        else:
            kind_of_group = _ProductGroup if isinstance(table.combine, Product) else _PerIdGroup
    return kind_of_group(tables, replicated, scale)


class _Stack:
    """Replicated weights of a group's tables in one partition, one below the other."""

    def __init__(self, weights: Sequence[nn.Parameter], scale: int) -> None:
        self._weights = weights
        self._scale = scale

    def rows(self) -> Float[Tensor, "rows dim"]:
        """All weights; in float32, whose gradients on the way back are multiplied by the number of ranks."""
        stacked = (torch.cat(list(self._weights)) if len(self._weights) > 1 else self._weights[0]).float()
        return CommOpGradientScaling.apply(stacked, self._scale) if self._scale > 1 else stacked

    def first_rows(self) -> list[int]:
        """Where each table's weight begins."""
        return list(accumulate([len(weight) for weight in self._weights], initial=0))[:-1]


@dataclass
class Request:
    """What a group asks of its TBEs and stacks for a batch, and what it needs to put the answer together.

    Attributes:
        rows: of each piece, and of each function partition after these.
        offsets: of each piece, where the bags that are looked up begin and where the last ends.
        weights: of each piece, those of its rows if it is pooled with weights.
        features: the batch's.
        distinct: the batch's distinct ids, where these are looked up.
        buckets: the batch's bags by code, where these are looked up.
    """

    rows: Int64[Tensor, "pieces rows"] | list[Int64[Tensor, " rows"]]
    offsets: Sequence[Int64[Tensor, " bags_plus_1"]]
    weights: Sequence[Float[Tensor, " rows"] | None]
    features: KeyedJaggedTensor
    distinct: DistinctIds | None = None
    buckets: Buckets | None = None

    def record_stream(self, stream: Any) -> None:
        """Keeps what will be looked up alive until a stream of the device has used it."""
        for tensor in (*self.rows, *self.offsets, *self.weights):
            if tensor is not None:
                tensor.record_stream(stream)


class Group(ABC):
    """Tables of one scheme and composition, held in the same way."""

    def __init__(self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], scale: int) -> None:
        first = tables[0]
        per_feature = [local for local in tables for _ in local.table.feature_names]
        self.partitions = [local.table.scheme for local in per_feature]
        self.scheme = type(first.table.scheme)
        self.combine = first.table.combine
        self.takes_max = getattr(first.table, "pooling", None) == "max"
        self.num_embeddings = max(local.table.num_embeddings for local in tables)
        self.num_features = len(per_feature)
        self.num_pieces = len(first.pieces)
        self.num_tbes = len(first.sharded)
        functions = first.table.function_tables()
        used = [piece.partition for piece in first.pieces] + [len(first.pieces) + j for j in range(len(functions))]
        self._stacks: dict[int, _Stack] = {}
        shifts = []
        for position, partition in enumerate(used):
            if partition in first.sharded:
                shifts.append([-local.first_row for local in per_feature])
                continue
            names = [local.table.partition_tables()[partition].name for local in tables]
            self._stacks[position] = stack = _Stack([replicated[name] for name in names], scale)
            shifts.append(
                [row for row, local in zip(stack.first_rows(), tables, strict=True) for _ in local.table.feature_names]
            )
        self.num_used = len(used)
        self._used = torch.tensor(used) if used != list(range(len(first.table.scheme.num_rows))) else None
        self._shifts = torch.tensor(shifts) if any(map(any, shifts)) else None

    @abstractmethod
    def request(self, features: KeyedJaggedTensor) -> Request:
        """What to look up for a batch."""

    def request_each_bag(self, features: KeyedJaggedTensor, weights: Sequence[Tensor | None]) -> Request:
        """Asks for the sum over each of the batch's bags."""
        rows = self.rows(features.values().long(), features.length_per_key())
        return Request(rows, [features.offsets().long()] * self.num_pieces, weights, features)

    @abstractmethod
    def finish(
        self, request: Request, vectors: Sequence[Float[Tensor, "bags_of_a_feature features dim_j"]]
    ) -> Float[Tensor, "..."]:
        """Composes and pools what was looked up."""

    def look_up(
        self, request: Request, tbes: Sequence[nn.Module]
    ) -> list[Float[Tensor, "bags_of_a_feature features dim_j"]]:
        """Summed vectors of each piece for the request's bags.

        Where distinct ids are asked for, replicated pieces give these ids' vectors themselves, unpadded.
        """
        held: Iterator[Any] = iter(tbes)
        return [
            self._sum_replicated(position, request)
            if position in self._stacks
            else next(held)(
                indices=request.rows[position],
                offsets=request.offsets[position],
                per_sample_weights=request.weights[position],
            ).unflatten(1, (self.num_features, -1))
            for position in range(self.num_pieces)
        ]

    def prefetch(self, request: Request, tbes: Sequence[nn.Module], forward_stream: Any) -> None:
        """Tells the TBEs which rows come."""
        held: Iterator[Any] = iter(tbes)
        for position in range(self.num_pieces):
            if position not in self._stacks:
                next(held).prefetch(
                    indices=request.rows[position], offsets=request.offsets[position], forward_stream=forward_stream
                )

    def _sum_replicated(self, position: int, request: Request) -> Tensor:
        weight, row = self._stacks[position].rows(), request.rows[position]
        if request.distinct is not None:
            return nn.functional.embedding(row, weight)
        vectors = nn.functional.embedding_bag(
            row,
            weight,
            request.offsets[position],
            mode="sum",
            per_sample_weights=request.weights[position],
            include_last_offset=True,
        )
        return vectors.unflatten(0, (self.num_features, -1)).transpose(0, 1)

    def rows(self, ids: Int64[Tensor, " ids"], counts: Sequence[int]) -> Int64[Tensor, "used ids"]:
        """Rows of every id in each partition that is used, counted as they lie in this rank's TBEs and stacks.

        Ids lie feature after feature, ``counts`` says how many of each.
        """
        if len(set(counts)) == 1:
            rows = self.scheme.rows_of_tables(self.partitions, ids.view(self.num_features, -1))
        else:
            pieces = ids.split(list(counts))
            rows = torch.cat([p.rows(piece) for p, piece in zip(self.partitions, pieces, strict=True)], dim=1)
        if self._used is not None:
            self._used = self._used.to(ids.device)  # copied once
            rows = rows.index_select(0, self._used)
        if self._shifts is None:
            return rows.flatten(1)
        self._shifts = self._shifts.to(ids.device)
        if rows.dim() == 3:
            return (rows + self._shifts.unsqueeze(2)).flatten(1)
        lengths = torch.tensor(counts, device=ids.device)
        return rows + self._shifts.repeat_interleave(lengths, dim=1, output_size=rows.shape[1])


class _PooledGroup(Group):
    """Pools each piece's vectors where it is looked up and composes the sums."""

    def request(self, features: KeyedJaggedTensor) -> Request:
        return self.request_each_bag(features, [features.weights_or_none()] * self.num_pieces)

    def finish(self, request: Request, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        return self.combine.compose(vectors).flatten(1)


class _PerIdGroup(Group):
    """Looks each id up as a bag of its own, composes, then pools."""

    def __init__(self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], scale: int) -> None:
        super().__init__(tables, replicated, scale)
        # empty bags are looked up as zeros, which have to stay zeros
        self._zero_stays_zero = self.combine.commutes_with_sum or isinstance(self.combine, Product)

    def request(self, features: KeyedJaggedTensor) -> Request:
        if self._zero_stays_zero and self._has_at_most_one_id_each(features):
            # a product is weighted by weighting one of its factors
            return self.request_each_bag(features, [features.weights_or_none(), *[None] * (self.num_pieces - 1)])
        return self.request_distinct(features)

    def request_distinct(self, features: KeyedJaggedTensor) -> Request:
        """Asks for each distinct id once: ids repeat within a batch, as those of clicks do.

        The i-th ids of all features lie side by side; features with fewer are padded with empty bags.
        """
        distinct = distinct_ids(features.values().long(), features.length_per_key(), self.num_embeddings)
        rows, counts = self.rows(distinct.ids, distinct.counts), distinct.counts
        longest = torch.arange(max(1, *counts), device=rows.device)
        filled = longest < torch.tensor(counts, device=rows.device).unsqueeze(1)
        offsets = rows.new_zeros(filled.numel() + 1)
        torch.cumsum(filled.flatten(), dim=0, out=offsets[1:])
        # weights are for when these are pooled
        return Request(rows, [offsets] * self.num_pieces, [None] * self.num_pieces, features, distinct)

    def finish(self, request: Request, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        if request.distinct is None:
            return self.combine.compose(vectors).flatten(1)
        composed = self.compose_distinct(request, request.distinct, vectors)
        features = request.features
        pooled = request.distinct.pool(
            composed, features.offsets().long(), "max" if self.takes_max else "sum", features.weights_or_none()
        )
        return pooled.unflatten(0, (self.num_features, -1)).transpose(0, 1).flatten(1)

    def compose_distinct(
        self, request: Request, distinct: DistinctIds, vectors: Sequence[Tensor]
    ) -> Float[Tensor, "distinct width"]:
        """Composed vector of every distinct id."""
        slots = distinct.slots()
        of_ids = [
            vector if position in self._stacks else take_once(vector.flatten(0, 1), slots)
            for position, vector in enumerate(vectors)
        ]
        if not isinstance(self.combine, PathComposition) or self.num_used == self.num_pieces:
            return self.combine.compose(of_ids)
        assert isinstance(request.rows, Tensor)
        functions = [self._stacks[position].rows() for position in range(self.num_pieces, self.num_used)]
        return self.combine.apply(of_ids[0], functions, request.rows[self.num_pieces :])

    def _has_at_most_one_id_each(self, features: KeyedJaggedTensor) -> bool:
        """Whether no bag has more, so that there is nothing to pool."""
        lengths = features.lengths()
        return features.values().numel() <= lengths.numel() and bool((lengths <= 1).all())

    def _has_one_id_each(self, features: KeyedJaggedTensor) -> bool:
        return features.values().numel() == features.lengths().numel() and self._has_at_most_one_id_each(features)


class _ProductGroup(_PerIdGroup):
    """Splits bags by the rows of the small partitions where these are few for the ids that there are."""

    def __init__(self, tables: Sequence[LocalTable], replicated: Mapping[str, nn.Parameter], scale: int) -> None:
        super().__init__(tables, replicated, scale)
        self._num_rows = [max(rows) for rows in zip(*[scheme.num_rows for scheme in self.partitions], strict=True)]
        self._num_codes = count_codes(self._num_rows)

    def request_distinct(self, features: KeyedJaggedTensor) -> Request:
        ids, lengths = features.values().long(), features.lengths()
        if not buckets_are_faster(len(ids), len(lengths), self._num_codes):
            return super().request_distinct(features)
        rows = self.rows(ids, features.length_per_key())
        buckets = split_bags(rows, lengths.view(self.num_features, -1), self._num_rows, self._shifts)
        weights: list[Tensor | None] = [None] * self.num_pieces
        if (of_ids := features.weights_or_none()) is not None:
            weights[buckets.largest] = of_ids.index_select(0, buckets.order)
        return Request(buckets.rows, buckets.offsets, weights, features, buckets=buckets)

    def finish(self, request: Request, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        return super().finish(request, vectors) if request.buckets is None else request.buckets.pool(vectors).flatten(1)


class _PathGroup(_PerIdGroup):
    """Looks up the first partition only; the rows of the others are functions."""

    def request(self, features: KeyedJaggedTensor) -> Request:
        # functions cost more than finding out which ids are the same
        return self.request_distinct(features)

    def finish(self, request: Request, vectors: Sequence[Tensor]) -> Float[Tensor, "batch width"]:
        features, distinct = request.features, request.distinct
        if distinct is None or features.weights_or_none() is not None or not self._has_one_id_each(features):
            return super().finish(request, vectors)
        by_row = distinct.of_id.view(self.num_features, -1).t().flatten()
        composed = self.compose_distinct(request, distinct, vectors)
        return composed.index_select(0, by_row).unflatten(0, (-1, self.num_features)).flatten(1)


class _SequenceGroup(_PerIdGroup):
    """Gives each id's composed vector, in the order of ids."""

    def request(self, features: KeyedJaggedTensor) -> Request:
        return self.request_distinct(features)

    def finish(self, request: Request, vectors: Sequence[Tensor]) -> Float[Tensor, "ids width"]:
        assert request.distinct is not None
        return self.compose_distinct(request, request.distinct, vectors).index_select(0, request.distinct.of_id)


class _AbsentGroup(Group):
    """Tables that are divided by rows of which this rank has none: only empty bags come, which give zeros."""

    def __init__(self, tables: Sequence[LocalTable], pools: bool) -> None:
        self.num_features = sum(len(local.table.feature_names) for local in tables)
        self.num_pieces = self.num_tbes = 0
        self._width = width(tables[0].table) * (self.num_features if pools else 1)
        self._pools = pools

    def request(self, features: KeyedJaggedTensor) -> Request:
        return Request([], [], [], features)

    def finish(self, request: Request, vectors: Sequence[Tensor]) -> Float[Tensor, "rows width"]:
        device = request.features.device()
        # with a gradient, since the other ranks wait for this one in the backward pass too
        nothing = torch.zeros(0, device=device, requires_grad=True)
        return torch.zeros(request.features.stride() if self._pools else 0, self._width, device=device) + nothing.sum()
