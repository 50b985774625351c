"""What the lookups of a rank take of its memory within a step, counted from how they are done.

Counted from :mod:`distembed.sharding.groups` and what it calls; B is the rows of a step on all ranks, N the ids that a
rank looks up. How often ids repeat is not known: as many distinct ones are reckoned with as uniform ids would have, the
most that any distribution has on average.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import NormalDist
from typing import Any

import torch
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType

from distembed.composition import Product
from distembed.composition.grouped import BLOCK_BYTES, chunk_sizes
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.planning.workload import Workload
from distembed.sharding.bucket_pool import buckets_are_faster, count_codes
from distembed.sharding.groups import kind
from distembed.sharding.placement import Placement, width

_FLOAT, _LONG = 4, 8
_TIE = 0.06
"""Share by which one size of chunks may cost more than another and yet be the better one for the ids that are drawn."""
_SPREAD = 0.1
"""Share by which the number of chunks differs from its mean, at most."""
_DEVIATIONS = [NormalDist().inv_cdf((i + 0.5) / 16) for i in (0, 15, 7, 8, 3, 12, 5, 10, 1, 14, 6, 9, 2, 13, 4, 11)]
"""The middles of a normal distribution's sixteenths, in an order of which each beginning is balanced."""
_SORT_BYTES = 64
"""Of each id in FBGEMM's backward on CUDA, which sorts them: places in the table and in the batch, both of them sorted,
the rows that are left, how often each comes and where it begins, and the sorting itself."""


@dataclass(frozen=True)
class LookupCost:
    """Bytes of one lookup.

    Attributes:
        held: what it keeps from its forward to its backward.
        forward: what it takes beside in its forward.
        backward: what it takes beside in its backward, at most.
        at_end: the same when gradients reach the tables, and what was held is free again.
        own: gradients of tables that stay in memory from then on, and are in no bucket.
    """

    held: int
    forward: int
    backward: int
    at_end: int
    own: int = 0


@dataclass(frozen=True)
class Lookup:
    """Tables of one rank that are looked up in one go, a ``Group`` of :mod:`distembed.sharding.groups`.

    Attributes:
        tables: of each feature.
        domains: of each feature, how many different ids can come to this rank.
        occurrences: of each feature, how many ids come to this rank.
        bags_per_feature: rows whose ids come to this rank.
        partitions: those whose vectors take part.
        dims: how many of each one's columns do.
        replicated: which partitions' weights are the same on every rank, of those that hold vectors.
        columns: of a composed vector that are composed here.
        are_bags: of each feature, whether a row may have more than one id.
        copies_gradients: whether those of replicated weights go into buckets; else they become the weights' own.
    """

    tables: list[CompositionalEmbeddingConfig]
    domains: list[int]
    occurrences: list[float]
    bags_per_feature: int
    partitions: tuple[int, ...]
    dims: tuple[int, ...]
    replicated: tuple[int, ...]
    columns: int
    are_bags: list[bool]
    copies_gradients: bool

    @property
    def num_ids(self) -> int:
        """N of all features."""
        return math.ceil(sum(self.occurrences))

    @property
    def num_bags(self) -> int:
        """Of all features."""
        return self.bags_per_feature * len(self.tables)

    @property
    def output_bytes(self) -> int:
        """Pooled vectors."""
        return self.num_bags * self.columns * _FLOAT

    def distinct(self) -> list[int]:
        """How many different ids each feature has, were they uniform."""
        return [
            math.ceil(-n * math.expm1(ids * math.log1p(-1 / n))) if n > 1 else 1
            for n, ids in zip(self.domains, self.occurrences, strict=True)
        ]

    def cost(self, device_kind: str) -> LookupCost:
        """What it takes, replicated weights with it."""
        cost, stacked = self._cost_of_way(device_kind), self.stacked_bytes()
        at_end = cost.at_end + (stacked if self.copies_gradients else 0)
        # weights are stacked while they are looked up: of what is held only rows are there, and nothing is pooled yet
        indices = len(self.partitions) * self.num_ids * _LONG
        stacking = stacked + cost.at_end + indices - cost.held - self.output_bytes if self.stacks else 0
        own = 0 if self.copies_gradients else stacked
        if device_kind == "cuda":
            at_end += self.num_ids * _SORT_BYTES
        return LookupCost(cost.held, max(cost.forward, stacking), cost.backward, at_end, own)

    def _cost_of_way(self, device_kind: str) -> LookupCost:
        table = self.tables[0]
        composes = len(table.scheme.num_rows) > 1
        if table.function_tables():
            return _add(_distinct_cost(self), _functions_cost(self, device_kind))
        if getattr(table, "pooling", None) == "max" or not (table.combine.commutes_with_sum or not composes):
            return self._per_id_cost(isinstance(table.combine, Product))
        return _pooled_cost(self)

    def _per_id_cost(self, is_product: bool) -> LookupCost:
        if is_product and not any(self.are_bags):
            return _pooled_cost(self)
        num_rows = [max(rows) for rows in zip(*[table.scheme.num_rows for table in self.tables], strict=True)]
        takes_max = getattr(self.tables[0], "pooling", None) == "max"
        if is_product and not takes_max and buckets_are_faster(self.num_ids, self.num_bags, count_codes(num_rows)):
            return _bucket_cost(self, count_codes(num_rows))
        return _distinct_cost(self)

    def stacked_bytes(self, functions: bool = False) -> int:
        """Replicated weights of one kind, which are put together where several tables have them."""
        own = {table.name: table for table in self.tables}.values()
        parts = [[part for part in table.partition_tables() if part.is_function == functions] for table in own]
        return sum(
            part.num_parameters * _FLOAT
            for of_table in parts
            for j, part in enumerate(of_table)
            if functions or j in self.replicated
        )

    @property
    def stacks(self) -> bool:
        """Whether replicated weights are copied into one, in float32."""
        return len({table.name for table in self.tables}) > 1 or self.tables[0].data_type != DataType.FP32


def _add(lookup: LookupCost, functions: LookupCost) -> LookupCost:
    """What functions take comes beside what is held, but not beside the gradients of what is looked up."""
    return LookupCost(
        lookup.held + functions.held,
        max(lookup.forward, functions.forward),
        max(lookup.backward, functions.backward),
        lookup.at_end,
    )


def _pooled_cost(lookup: Lookup) -> LookupCost:
    """Sums over bags of every partition's vectors, which are then composed."""
    vectors = lookup.num_bags * sum(lookup.dims) * _FLOAT
    num_pieces, combine = len(lookup.dims), lookup.tables[0].combine
    keeps = num_pieces > 1 and isinstance(combine, Product)
    # rows of all partitions; where bags begin, of what came and in 64 bits
    indices = num_pieces * lookup.num_ids * _LONG + lookup.num_bags * _LONG
    # a product of three keeps that of the first two as well
    kept = vectors + max(0, num_pieces - 2) * lookup.output_bytes if keeps else 0
    # FBGEMM keeps the indices of the batch before
    forward = indices + lookup.num_ids * _LONG + (0 if keeps or num_pieces == 1 else vectors)
    return LookupCost(indices + kept + _bags_bytes(lookup, lookup.num_bags), forward, vectors, vectors)


def _bags_bytes(lookup: Lookup, num_bags: int) -> int:
    """What ``embedding_bag`` keeps where weights are replicated: each bag's number of ids and its largest."""
    return len(lookup.replicated) * num_bags * 2 * _LONG


def _bucket_cost(lookup: Lookup, num_codes: int) -> LookupCost:
    """Sums over buckets of the largest partition's vectors; their gradient is as large (``bucket_pool``)."""
    num_buckets = lookup.num_bags * num_codes
    vectors = num_buckets * lookup.dims[0] * _FLOAT
    indices = lookup.num_ids * _LONG + num_buckets * _LONG
    # all partitions' rows, keys, their order, the buckets and how many ids each has
    sorting = lookup.num_ids * _LONG * (len(lookup.dims) + 4) + num_buckets * _LONG
    largest_is_replicated = len(lookup.replicated) == len(lookup.dims)
    held = indices + vectors + (_bags_bytes(lookup, num_buckets) if largest_is_replicated else 0)
    # bags are split before there are vectors; those of replicated weights come in another order, and are copied
    splitting = indices + sorting - vectors - lookup.output_bytes
    forward = max(0, splitting, vectors if largest_is_replicated else 0)
    return LookupCost(held, forward, vectors + lookup.output_bytes, vectors)


def _distinct_cost(lookup: Lookup) -> LookupCost:
    """Each distinct id is looked up, composed and then pooled (``distinct``)."""
    table, counts, num_ids = lookup.tables[0], lookup.distinct(), lookup.num_ids
    total, padded = sum(counts), max(counts) * len(counts)
    from_stacks = sum(lookup.dims[j] for j in range(len(lookup.dims)) if lookup.partitions[j] in lookup.replicated)
    from_tbes = sum(lookup.dims) - from_stacks
    # what TBEs give is padded, and taken out of that
    looked_up, vectors = padded * from_tbes * _FLOAT, total * sum(lookup.dims) * _FLOAT
    composed, pooled = total * lookup.columns * _FLOAT, lookup.output_bytes
    is_product = isinstance(table.combine, Product)
    kept = vectors if is_product or table.function_tables() else 0
    # rows, offsets of the padded lookup, where each id stands in it, its first occurrence, and the order of what came
    held = ((len(table.scheme.num_rows) + 2) * total + padded + num_ids + lookup.num_bags) * _LONG + kept
    if getattr(table, "pooling", None) == "max":
        # which id has each number of a maximum, which bag each id is in, and the ids
        held += lookup.num_bags * lookup.columns * _LONG + 2 * num_ids * _LONG
    forward = looked_up + composed + pooled + 2 * (num_ids + total) * _LONG + vectors - kept
    products = composed + (vectors if is_product else 0)
    taken_out = vectors + (padded * max(lookup.dims) * _FLOAT if from_tbes else 0) - kept
    backward = max(composed + pooled + 2 * num_ids * _LONG, products, taken_out)
    return LookupCost(held, forward, backward, looked_up + total * from_stacks * _FLOAT)


def _functions_cost(lookup: Lookup, device_kind: str) -> LookupCost:
    """The functions of a path, in chunks of ids of one function (``grouped``)."""
    table, counts = lookup.tables[0], lookup.distinct()
    held = forward = backward = 0
    for function in table.function_tables():
        partition = [part.name for part in table.partition_tables()].index(function.name)
        buckets = [t.scheme.num_rows[partition] for t in lookup.tables]
        choices = chunk_sizes(torch.tensor(_spread(counts, buckets)))
        # where sizes cost about the same, the ids that are drawn decide
        likely = [it for it in choices if it[0] <= (1 + _TIE) * choices[0][0]]
        costs = [_chunks_cost(lookup, function.dim, sum(counts), *it[1:], device_kind) for it in likely]
        # the first function's inputs are the vectors, which are counted there
        held += _mean(cost.held for cost in costs) + (sum(counts) * lookup.dims[0] * _FLOAT if partition > 1 else 0)
        forward = max(forward, _mean(cost.forward for cost in costs))
        of_functions = sum(buckets) * function.dim * _FLOAT
        backward = max(backward, _mean(cost.backward for cost in costs) + of_functions)
    stacked = lookup.stacked_bytes(functions=True) if lookup.stacks else 0
    return LookupCost(held + stacked, forward, backward, 0)


def _chunks_cost(
    lookup: Lookup, function_size: int, total: int, size: int, num_chunks: int, device_kind: str
) -> LookupCost:
    """One function of a path, if ``total`` ids are in ``num_chunks`` chunks of ``size``."""
    dim, hidden_sizes = lookup.dims[0], getattr(lookup.tables[0].combine, "hidden", ())
    places, widest, hidden = size * num_chunks, max(dim, *hidden_sizes, 1), sum(hidden_sizes)
    step = max(1, BLOCK_BYTES.get(device_kind, BLOCK_BYTES["cpu"]) // (size * widest * _FLOAT))
    in_block, is_one_block = min(step, num_chunks), step >= num_chunks
    # hidden values are kept where all chunks are one block; near that, the ids that are drawn decide
    kept = min(1.0, max(0.0, 0.5 + (step - num_chunks) / (2 * _SPREAD * step)))
    of_block, of_chunks = in_block * size * _FLOAT, in_block * function_size * _FLOAT
    # the inputs and functions of a block, and its hidden values
    block = of_block * (dim + hidden) + of_chunks
    held = places * _LONG + places + total * _LONG + math.ceil(kept * block)
    forward = (places + total) * dim * _FLOAT + block
    # gradients of a block's outputs, of its values and of its functions, these apart and put together
    of_values = of_block * (dim + widest) + 2 * of_chunks
    if not is_one_block:
        # what a block starts from, and from the second on what the one before has given
        second = min(1.0, num_chunks / step - 1)
        before = of_block * dim + of_chunks
        of_values = max(of_values + block, math.ceil((of_values + block) * second) + before)
    return LookupCost(held, forward, (total + places) * dim * _FLOAT + of_values, 0)


def _mean(values: Iterable[int]) -> int:
    listed = list(values)
    return math.ceil(sum(listed) / len(listed))


def _spread(counts: Sequence[int], buckets: Sequence[int]) -> list[int]:
    """Ids of each feature's buckets, that vary as the numbers of independent draws do, which are binomial."""
    cases = [(count / rows, 1 - 1 / rows) for count, rows in zip(counts, buckets, strict=True) for _ in range(rows)]
    return [
        max(0, round(mean + deviation * math.sqrt(mean * others)))
        for (mean, others), deviation in zip(cases, cycle(_DEVIATIONS), strict=False)
    ]


class Lookups:
    """What each rank looks up.

    Args:
        placements: of all tables.
        world_size: number of ranks.
        workload: what a step brings along.
    """

    def __init__(self, placements: Sequence[Placement], world_size: int, workload: Workload) -> None:
        self._world_size, self._workload = world_size, workload
        self._everywhere: list[tuple[Placement, int, int]] = []
        self._on_rank: list[list[tuple[Placement, int, int]]] = [[] for _ in range(world_size)]
        for placement in placements:
            if is_everywhere(placement.unit.sharding_type):
                self._everywhere.append((placement, 0, width(placement.table)))
                continue
            for start, stop, rank in shards_of(placement):
                self._on_rank[rank].append((placement, start, stop))

    def columns_on(self, rank: int) -> list[tuple[Placement, int, int]]:
        """Tables of which a rank has a range ``[start, stop)`` of the output's columns, or all of them."""
        return self._on_rank[rank]

    def of_all_ranks(self) -> dict[tuple[str, str], list[Lookup]]:
        """By collection and sharding type, lookups that are the same on every rank."""
        return self._grouped(self._everywhere)

    def of_rank(self, rank: int) -> dict[tuple[str, str], list[Lookup]]:
        """By collection and sharding type, all others of a rank."""
        return self._grouped(self._on_rank[rank])

    def _grouped(self, ranges: Sequence[tuple[Placement, int, int]]) -> dict[tuple[str, str], list[Lookup]]:
        groups: dict[tuple[str, str], dict[Any, Lookup]] = {}
        for placement, start, stop in ranges:
            lookup = self._empty(placement, start, stop)
            shape = (lookup.partitions, lookup.dims, lookup.replicated, lookup.columns)
            key = (*kind(placement.table), *shape, placement.unit.compute_kernel)
            lookup = groups.setdefault(exchange_key(placement), {}).setdefault(key, lookup)
            share = self._world_size if placement.divided is not None else 1
            for name in placement.table.feature_names:
                lookup.tables.append(placement.table)
                lookup.domains.append(math.ceil(placement.table.num_embeddings / share))
                ids_per_row = self._workload.ids_per_row.get(name, 1.0)
                lookup.occurrences.append(lookup.bags_per_feature * ids_per_row / share)
                lookup.are_bags.append(self._workload.has_bags(name))
        return {key: list(lookups.values()) for key, lookups in groups.items()}

    def _empty(self, placement: Placement, start: int, stop: int) -> Lookup:
        pieces = placement.pieces(start, stop)
        is_local = placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value
        return Lookup(
            tables=[],
            domains=[],
            occurrences=[],
            bags_per_feature=self._workload.rows_of_rank(self._world_size) if is_local else self._workload.batch_size,
            partitions=tuple(piece.partition for piece in pieces),
            dims=tuple(piece.stop - piece.start for piece in pieces),
            replicated=tuple(piece.partition for piece in pieces if piece.part.name not in placement.sharded),
            columns=stop - start,
            are_bags=[],
            copies_gradients=self._world_size > 1,
        )


def exchange_key(placement: Placement) -> tuple[str, str]:
    """Returns collection and sharding type, which a table shares with those that are communicated together."""
    return placement.collection, placement.unit.sharding_type


def is_everywhere(sharding_type: str) -> bool:
    """Whether tables that are placed so are looked up on every rank, and alike."""
    return sharding_type in (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)


def shards_of(placement: Placement) -> list[tuple[int, int, int]]:
    """Columns ``[start, stop)`` of the output and their rank, of each shard of a table that is divided by columns."""
    spec: Any = placement.unit.sharding_spec
    return [
        (shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1], shard.placement.rank())
        for shard in spec.shards
    ]
