"""Memory of one training step on a rank besides weights and states: buffers and activations, in bytes.

Memory is allocated and freed within a step, so the fullest of its moments counts. Each moment is the sum of all live
tensors, of the networks (:mod:`distembed.planning.networks`) and of lookups (:mod:`distembed.sharding.groups`):

=================== =============================================================================================
lookup              received ids, their rows, the vectors of all partitions, the vectors composed so far
output              tensors that the lookups save for their gradients, vectors on their way to the rows' ranks
networks            saved tensors, and the fullest moment of the networks' forward and backward
output gradients    saved tensors, gradients of the networks, gradients of pooled vectors on their way back
lookup gradients    saved tensors, gradients of all partitions' vectors
table gradients     saved tensors, gradients of replicated weights, in one piece
optimizer           gradients, and the temporaries of torch's row-wise Adagrad for a replicated table
=================== =============================================================================================

Counted from TorchRec's ``comm_ops`` and pipelines. Temporaries within an operator are not counted, except for the
sorting of ids in FBGEMM's CUDA backward.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

from distembed.embedding.config import common_id_dtype
from distembed.embedding.settings import VectorExchange
from distembed.optim.declared import TableOptimizers
from distembed.optim.table_storage import total_storage
from distembed.planning.networks import NetworkEstimate
from distembed.planning.request import PlanRequest, Workload, pipeline_depth
from distembed.planning.storage import DEFAULT_CACHE_RATIO, PlannedRank, SentBytes, storage_by_rank
from distembed.planning.times import (
    LENGTH_BYTES,
    ExchangeKey,
    TableTraffic,
    column_shards,
    exchange_key,
    is_exchanged,
    is_on_every_rank,
)
from distembed.sharding.groups import GroupLoad, LookupMemory, group_key, group_type
from distembed.sharding.groups.load import FLOAT_BYTES, LONG_BYTES
from distembed.sharding.placement import BY_ROWS, WITHIN_NODES, Placement
from distembed.sharding.table_slice import TableSlice, is_pooled, width

_PlacedSlice = tuple[Placement, TableSlice]


@dataclass(frozen=True)
class StepBuffers:
    """Bytes of a rank at one moment of a step, besides weights and states."""

    moment: str
    inputs: int = 0  # batches, and their ids on the way to the rank that owns their tables
    outputs: int = 0  # composed vectors, or their gradients, on the way between the ranks
    lookups: int = 0  # rows, vectors of partitions, and temporaries of composing
    activations: int = 0  # of the networks, and their gradients; with one rank also weights' gradients, as they come
    # of the networks' weights and of tables that torch updates after the backward pass. On several ranks the averaged
    # ones lie in buckets of DistributedDataParallel throughout the step
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.inputs + self.outputs + self.lookups + self.activations + self.gradients


@dataclass
class _Sum:
    """Bytes of a step summed over all tables and the networks, which every rank's moments start from."""

    replicated: int  # weights, and their gradients, that every rank has
    largest_replicated: int = 0  # numbers (not bytes) of the largest replicated partition; no functions
    ranks_per_node: int = 1  # ranks of a node that share the rows of a table; 1 where no rows are divided
    sent_ids: int = 0  # copy of a rank's ids, sorted by the rank that receives them
    sent: SentBytes = SentBytes()  # bytes that a rank without shards sends
    received: Counter[ExchangeKey] = field(default_factory=Counter)  # vectors of a rank's rows
    # by rank: gradients of shards that are not updated within the backward pass
    unfused: Counter[int] = field(default_factory=Counter)
    # by rank: float32 copies of weights of half precision, with gradients, in torch's update
    widened: Counter[int] = field(default_factory=Counter)
    # by rank: gradients of tables that networks read as a whole
    scanned: Counter[int] = field(default_factory=Counter)


class _RankLookups:
    """The lookups of each rank under the placements of all tables, in groups that share kernels."""

    def __init__(self, placements: Sequence[Placement], world_size: int, workload: Workload) -> None:
        self._world_size, self._workload = world_size, workload
        # slices with their groups' keys by rank, in the order of the tables; the key None has tables on every rank
        self._slices = defaultdict[int | None, list[tuple[_PlacedSlice, Hashable]]](list)
        for placement in placements:
            everywhere: list[tuple[int, int, int | None]] = [(0, width(placement.table), None)]
            is_everywhere = is_on_every_rank(placement.unit.sharding_type)
            for start, stop, rank in everywhere if is_everywhere else column_shards(placement.unit):
                columns = placement.slice(start, stop)
                self._slices[rank].append(((placement, columns), group_key(columns)))

    def column_slices(self, rank: int) -> list[_PlacedSlice]:
        """Returns a rank's slices of tables that are not on every rank: a range of columns each, or all columns."""
        return [placed for placed, _ in self._slices[rank]]

    def loads(self, rank: int | None) -> dict[ExchangeKey, list[GroupLoad]]:
        """Returns a rank's own lookup groups by exchange; for rank None, the groups that every rank looks up."""
        groups: dict[ExchangeKey, dict[Hashable, list[_PlacedSlice]]] = {}
        for placed, key in self._slices[rank]:
            groups.setdefault(exchange_key(placed[0]), {}).setdefault(key, []).append(placed)
        return {key: [self._load(group) for group in own_groups.values()] for key, own_groups in groups.items()}

    def _load(self, group: Sequence[_PlacedSlice]) -> GroupLoad:
        """Returns one group's work in a step: for the rank's own rows if replicated, else for all ranks' rows."""
        first, _ = group[0]
        is_local = first.unit.sharding_type == ShardingType.DATA_PARALLEL.value
        num_rows = self._workload.rows_of_rank(self._world_size) if is_local else self._workload.batch_size
        # where rows are divided, a rank has a share of the ids
        num_row_blocks = first.num_row_blocks
        features = [(table_slice, name) for _, table_slice in group for name in table_slice.table.feature_names]
        own_ids = [table_slice.table.ids_of(name).num_ids for table_slice, name in features]
        return GroupLoad(
            slices=[table_slice for table_slice, _ in features],
            possible_ids=[math.ceil(num_ids / num_row_blocks) for num_ids in own_ids],
            num_ids_per_feature=[num_rows * self._workload.mean_ids([name]) / num_row_blocks for _, name in features],
            multi_hot=[self._workload.has_bags(name) for _, name in features],
            num_rows=num_rows,
            averages_gradients=self._world_size > 1,
            num_threads=self._workload.num_threads,
            num_row_blocks=num_row_blocks,
        )


@dataclass(frozen=True)
class _Exchange:
    """Tables of one collection and sharding type on a rank; bytes of vectors are of float32 unless stated otherwise."""

    output: int  # bytes of all vectors that the rank's lookups compose, for all ranks
    sent: int  # bytes of a copy of the output for sending; 0 where the output itself is sent
    received: int  # bytes of the vectors of this rank's rows
    arriving_ids: int  # bytes of the ids that arrive, with their lengths
    lookups: list[LookupMemory]  # of each group, in forward order
    is_sent: bool  # whether the vectors are for other ranks too
    numbers: VectorExchange = VectorExchange()  # precision in which vectors and gradients are sent

    @property
    def is_rounded(self) -> bool:
        """Whether the lookups themselves return vectors of half precision, which are widened after the exchange."""
        return self.numbers.output_itemsize < FLOAT_BYTES

    def rounded(self, num_bytes: int) -> int:
        """Returns the bytes of vectors as lookups return them, before they are widened."""
        return num_bytes * self.numbers.output_itemsize // FLOAT_BYTES

    def travelling(self, num_bytes: int) -> int:
        """Returns the bytes of vectors on their way to another rank."""
        return math.ceil(self.numbers.vector_bytes(num_bytes / FLOAT_BYTES))

    @property
    def output_bytes(self) -> int:
        """Bytes at the moment when this rank joins its received vectors into one float32 tensor."""
        if self.numbers.comms.is_used:  # as received, decoded, and joined
            return self.travelling(self.received) + 2 * self.received
        return self.rounded(self.received) + (self.received if self.is_rounded else self.rounded(self.received))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of copies in which this rank's gradients are prepared for sending, without the gradients themselves."""
        if not self.is_sent:
            return 0
        if self.numbers.comms.is_used:  # put in the ranks' order, and encoded
            return self.received + math.ceil(self.numbers.gradient_bytes(self.received / FLOAT_BYTES))
        return 2 * self.rounded(self.received) if self.is_rounded else self.received


def _fullest_lookup(exchanges: Sequence[_Exchange]) -> int:
    """Returns the most bytes that the lookups hold at once, one exchange after the other in forward order."""
    # `waiting`: vectors of earlier exchanges, which stay until all are there; `saved`: tensors kept for the gradients
    waiting, fullest, saved = 0, 0, 0
    for exchange in exchanges:
        saved += sum(lookup.saved_bytes for lookup in exchange.lookups)
        forward = max((lookup.forward_bytes for lookup in exchange.lookups), default=0)
        # outputs of several lookups are joined into one tensor, and rounded into another
        copies = 2 if len(exchange.lookups) > 1 else 1
        rounded = exchange.rounded(exchange.output)
        encoded = exchange.travelling(exchange.output) if exchange.numbers.comms.is_used else 0
        travelling = exchange.travelling(exchange.sent) + exchange.travelling(exchange.received)
        fullest = max(
            fullest,
            waiting + saved + forward + copies * exchange.output,
            waiting + saved + (exchange.output + rounded if exchange.is_rounded else 0),
            waiting + saved + rounded + encoded + (travelling if exchange.is_sent else exchange.sent),
        )
        waiting += travelling if exchange.is_sent else exchange.output
    return fullest


class Step:
    """Memory and sent bytes of one training step, on any rank of a plan.

    Args:
        placements: All tables; TorchRec's own are placed as full tables.
        exchanges: Precision of sent vectors by collection path; float32 for missing paths.
        cache_ratio: Cached rows per row of a table in host memory.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        world_size: int,
        workload: Workload,
        optimizers: TableOptimizers,
        device_kind: str,
        exchanges: Mapping[str, VectorExchange] | None = None,
        cache_ratio: float = DEFAULT_CACHE_RATIO,
    ) -> None:
        self._world_size, self._device_kind, self._exchanges = world_size, device_kind, exchanges or {}
        self._optimizers, self._workload = optimizers, workload
        self._network = workload.network or NetworkEstimate()
        self._num_rows = workload.rows_of_rank(world_size)
        self._id_bytes = {
            path: common_id_dtype([placed.table for placed in placements if placed.collection == path]).itemsize
            for path in {placement.collection for placement in placements}
        }
        self._lookups = _RankLookups(placements, world_size, workload)
        self._storage = {
            placement.table.name: storage_by_rank(placement, world_size, optimizers, cache_ratio)
            for placement in placements
        }
        self._batches = pipeline_depth(device_kind, world_size) * self._batch_bytes(placements)
        self._sum = _Sum(replicated=self._network.gradients)
        for placement in placements:
            self._add(placement)

    @classmethod
    def of(cls, request: PlanRequest, placements: Sequence[Placement]) -> "Step":
        optimizers, kind = request.table_optimizers, request.cluster.device.kind
        world_size, exchanges = request.cluster.world_size, request.exchanges
        return cls(placements, world_size, request.workload, optimizers, kind, exchanges, request.cache_ratio)

    def ranks(self) -> list[PlannedRank]:
        return [self.rank(rank) for rank in range(self._world_size)]

    def rank(self, rank: int) -> PlannedRank:
        """Returns one rank at its fullest moment; times and capacities are left at their defaults."""
        rank_storage = {name: by_rank[rank] for name, by_rank in self._storage.items() if rank in by_rank}
        tables, buffers = total_storage(rank_storage.values()), self.buffers(rank)
        memory = {
            "table_weights": tables.weights,
            "table_optimizer_state": tables.optimizer_state,
            "table_cache": tables.cache,
            **self._workload.resting_bytes,
            "gradients": buffers.gradients,
            "inputs": buffers.inputs,
            "outputs": buffers.outputs,
            "lookups": buffers.lookups,
            "activations": buffers.activations,
        }
        return PlannedRank(rank, rank_storage, memory, buffers.moment, self.sent_bytes(rank))

    def buffers(self, rank: int) -> StepBuffers:
        """Returns the fullest moment of a step on one rank."""
        return max(self._moments(rank), key=lambda moment: moment.total)

    def sent_bytes(self, rank: int) -> SentBytes:
        """Returns the bytes that a rank sends in a step."""
        # bytes of a rank without shards + the difference that each of this rank's shards makes
        sent = self._sum.sent
        for placement, table_slice in self._lookups.column_slices(rank):
            sent += self._sent_by_owner(placement, table_slice.num_columns)
        return sent + SentBytes(all_reduce=round(2 * (1 - 1 / self._world_size) * self._sum.replicated))

    @cached_property
    def _common(self) -> dict[ExchangeKey, _Exchange]:
        """Exchanges of tables that every rank looks up."""
        loads = self._lookups.loads(None)
        return {key: self._exchange(key, self._sum.received[key], group_loads) for key, group_loads in loads.items()}

    def _add(self, placement: Placement) -> None:
        """Adds one table to ``_sum``, the bytes that do not depend on other tables' placements."""
        totals, itemsize, ranks = self._sum, placement.table.bytes_per_number, range(self._world_size)
        functions = sum(part.num_parameters for part in placement.replicated if part.is_function)
        vectors = [part.num_parameters for part in placement.replicated if not part.is_function]
        unfused: Counter[int] = Counter()
        if placement.unit.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            for sharding in placement.sharded.values():
                for shard in sharding.sharding_spec.shards:
                    unfused[shard.placement.rank()] += math.prod(shard.shard_sizes) * itemsize
        totals.unfused.update(unfused)
        totals.replicated += functions * FLOAT_BYTES + sum(vectors) * itemsize
        totals.largest_replicated = max(totals.largest_replicated, *vectors, 0)
        if placement.unit.sharding_type in WITHIN_NODES:
            totals.ranks_per_node = max(totals.ranks_per_node, placement.num_row_blocks)
        totals.sent_ids += self._sent_id_bytes(placement)
        totals.sent += self._sent(placement)
        num_received = math.ceil(self._traffic(placement).num_vectors) * width(placement.table)
        totals.received[exchange_key(placement)] += num_received * FLOAT_BYTES
        # torch updates half-precision weights through float32 copies of the weights and of their gradients
        for rank in ranks if itemsize < FLOAT_BYTES else ():
            totals.widened[rank] += 2 * FLOAT_BYTES * (sum(vectors) + unfused[rank] // itemsize)
        for rank in ranks if placement.table.dense_gradient else ():
            totals.scanned[rank] += unfused[rank] + FLOAT_BYTES * (functions + sum(vectors))

    def _sent(self, placement: Placement) -> SentBytes:
        """Returns the bytes that a rank without shards of a table sends for it."""
        sharding_type = placement.unit.sharding_type
        if not is_on_every_rank(sharding_type):
            # ids go to every row block's rank; gradients go to one rank of the node, counted at the first block
            return sum(
                (
                    self._sent_to_shard(placement, stop - start if rank % placement.num_row_blocks == 0 else 0)
                    for start, stop, rank in column_shards(placement.unit)
                ),
                SentBytes(),
            )
        if not is_exchanged(sharding_type, self._world_size):
            return SentBytes()
        batch, num_other_ranks = self._traffic(placement), self._world_size - 1
        ids = round(batch.num_ids * (1 - 1 / self._world_size))
        # row_wise: each rank gets the ids of its rows, and returns a partial sum of every bag, or a vector for each id
        numbers = width(placement.table) * (batch.num_bags * num_other_ranks if batch.is_pooled else ids)
        return SentBytes(
            ids * batch.itemsize + batch.num_bags * LENGTH_BYTES * num_other_ranks,
            math.ceil(batch.exchange.vector_bytes(numbers)),
            math.ceil(batch.exchange.gradient_bytes(numbers)),
        )

    def _sent_to_shard(self, placement: Placement, columns: int) -> SentBytes:
        """Returns the bytes that a rank sends to a shard's owner: its batch's ids, and gradients of ``columns``."""
        batch = self._traffic(placement)
        ids = math.ceil(batch.num_ids / placement.num_row_blocks) * batch.itemsize + batch.num_bags * LENGTH_BYTES
        gradients = batch.exchange.gradient_bytes(math.ceil(batch.num_vectors) * columns)
        return SentBytes(ids, gradients=math.ceil(gradients))

    def _sent_by_owner(self, placement: Placement, columns: int) -> SentBytes:
        """Returns the bytes that a shard's owner sends, minus the bytes that a rank without the shard sends for it.

        The owner sends vectors, and no ids or gradients to itself. Where rows are divided within a node, its ranks
        reduce their sums among them and send the results to the other nodes; gradients take the reverse way.
        """
        sent, batch = self._sent_to_shard(placement, columns), self._traffic(placement)
        vectors = math.ceil(batch.exchange.vector_bytes(math.ceil(batch.num_vectors) * columns))
        nodes = self._world_size // placement.num_row_blocks
        num_reduced = (placement.num_row_blocks - 1) * nodes
        return SentBytes(-sent.ids, (num_reduced + nodes - 1) * vectors, (num_reduced - 1) * sent.gradients)

    def _exchange(self, key: ExchangeKey, received: int, loads: Sequence[GroupLoad]) -> _Exchange:
        """Returns a rank's part of an exchange; ``loads`` is empty where the rank only receives vectors."""
        collection, sharding_type = key
        is_sent, device_kind = is_exchanged(sharding_type, self._world_size), self._device_kind
        optimizers = [self._optimizers.for_table(load.table).sparse for load in loads]
        groups = [group_type(load.slices[0], device_kind, name) for load, name in zip(loads, optimizers, strict=True)]
        id_bytes = sum(load.num_ids * LONG_BYTES + load.num_bags * LENGTH_BYTES for load in loads)
        output_bytes = sum(load.output_bytes for load in loads)
        # an all-to-all sends a copy, and so does gloo's reduce-scatter; NCCL's reduce-scatter sends the output itself
        sent_bytes = output_bytes if is_sent else 0
        if device_kind == "cuda" and sharding_type in BY_ROWS and all(is_pooled(load.table) for load in loads):
            # two levels: the sums after the node's reduce-scatter are sent to the other nodes
            sent_bytes = sent_bytes // self._sum.ranks_per_node if sharding_type in WITHIN_NODES else 0
        return _Exchange(
            output=output_bytes,
            sent=sent_bytes,
            received=received,
            arriving_ids=id_bytes if is_sent else 0,
            lookups=[group.memory(load, device_kind) for group, load in zip(groups, loads, strict=True)],
            is_sent=is_sent,
            numbers=self._exchange_of(collection) if is_sent else VectorExchange(),
        )

    def _moments(self, rank: int) -> Iterator[StepBuffers]:
        """Yields the moments of a step on one rank in order, as the module's table lists them."""
        totals, loads = self._sum, self._lookups.loads(rank)
        # also of tables without a part on this rank: it receives their vectors
        exchanges = [
            self._common[key] if key in self._common else self._exchange(key, received, loads.get(key, []))
            for key, received in totals.received.items()
        ]
        lookups = [lookup for exchange in exchanges for lookup in exchange.lookups]
        received, is_any_sent = sum(exchange.received for exchange in exchanges), any(x.is_sent for x in exchanges)
        saved = sum(lookup.saved_bytes for lookup in lookups)

        # The last argument of each StepBuffers, gradients, grows from `buckets` to `gradients`, which is the bytes of
        # replicated weights (`buckets` holds them throughout the step) and of shards with dense kernels. The lookups
        # make `from_lookups` of them; tables that networks read as a whole have `scanned` bytes before the lookups.
        dense_shards, scanned = totals.unfused[rank], totals.scanned[rank]
        buckets, gradients = (totals.replicated if self._world_size > 1 else 0), totals.replicated + dense_shards
        from_lookups = sum(lookup.gradient_bytes for lookup in lookups)
        before_lookups = gradients - from_lookups + scanned

        arriving_ids = sum(exchange.arriving_ids for exchange in exchanges)
        # the task's outputs of the step before are still there
        inputs = self._batches + totals.sent_ids + arriving_ids
        inputs += math.ceil(self._network.output_bytes_per_row * self._num_rows)
        # ids as received and sorted by feature, and the sent ids of this batch and of the next
        fullest = _fullest_lookup(exchanges)
        yield StepBuffers("lookup", inputs + arriving_ids + totals.sent_ids, 0, fullest, 0, buckets)
        outputs = sum(
            exchange.output_bytes + exchange.rounded(exchange.received) * (len(exchanges) > 1) for exchange in exchanges
        )
        yield StepBuffers("output", inputs, outputs, saved, 0, buckets)
        yield StepBuffers("networks", inputs, 0, saved, self._network.peak, buckets + scanned)
        pooled_gradients = sum(exchange.output for exchange in exchanges)
        returned = received + pooled_gradients + sum(exchange.gradient_bytes for exchange in exchanges)
        returned += sum(exchange.received for exchange in exchanges if not exchange.is_sent) * is_any_sent
        yield StepBuffers("output gradients", inputs, returned, saved, 0, before_lookups - dense_shards)
        # the lookups' backward passes run from the last to the first: each frees its saved tensors
        still_saved, made, dense_share = saved, before_lookups, dense_shards // max(1, len(lookups))
        for number, exchange in reversed([*enumerate(exchanges)]):
            # a replicated table, which awaits no gradients, runs while the earlier exchanges send theirs
            pending = [] if exchange.is_sent else [earlier for earlier in exchanges[:number] if earlier.is_sent]
            exchanged = received + sum(earlier.output + earlier.gradient_bytes for earlier in pending)
            held = exchanged if pending else pooled_gradients
            for lookup in reversed(exchange.lookups):
                lookup_bytes = still_saved + lookup.backward_bytes
                yield StepBuffers("lookup gradients", inputs, held, lookup_bytes, 0, made - dense_share)
                still_saved -= lookup.saved_bytes
                made += lookup.gradient_bytes
                # gradients of pooled vectors, in one tensor, are needed until the first lookup's backward pass
                waiting = held if len(lookups) > 1 else 0
                yield StepBuffers("table gradients", inputs, waiting, still_saved + lookup.update_bytes, 0, made)
        updating = totals.largest_replicated * FLOAT_BYTES + totals.widened[rank]
        yield StepBuffers("optimizer", inputs, 0, updating, 0, gradients)

    def _traffic(self, placement: Placement) -> TableTraffic:
        """Returns the ids and vectors of a table in a rank's batch."""
        exchange, itemsize = self._exchange_of(placement.collection), self._id_bytes[placement.collection]
        return TableTraffic.of(placement.table, self._workload, self._world_size, itemsize, exchange)

    def _exchange_of(self, collection: str) -> VectorExchange:
        return self._exchanges.get(collection, VectorExchange())

    def _batch_bytes(self, placements: Sequence[Placement]) -> int:
        """Returns the bytes of a rank's batch: ids, lengths, dense features and labels."""
        counted: set[str] = set()
        ids = 0.0
        for placement in placements:
            # several collections may read one feature
            new_names = [name for name in placement.table.feature_names if name not in counted]
            bytes_per_id = LONG_BYTES + self._workload.weight_bytes(new_names)
            ids += self._num_rows * self._workload.mean_ids(new_names) * bytes_per_id
            counted.update(new_names)
        num_dense_numbers = (self._workload.num_dense + 1) * self._num_rows
        return math.ceil(ids) + len(counted) * self._num_rows * LENGTH_BYTES + num_dense_numbers * FLOAT_BYTES

    def _sent_id_bytes(self, placement: Placement) -> int:
        """Returns the bytes of a table's ids sorted by the receiving rank; each range of columns has a copy."""
        if not is_exchanged(placement.unit.sharding_type, self._world_size):
            return 0
        batch, weight_bytes = self._traffic(placement), self._workload.weight_bytes(placement.table.feature_names)
        ids, bags = batch.num_ids * (LONG_BYTES + weight_bytes), batch.num_bags * LENGTH_BYTES
        if is_on_every_rank(placement.unit.sharding_type):
            # each id's destination is kept as well, and each bag has a length for each rank
            return math.ceil(2 * ids + bags * self._world_size)
        # for each range of columns: every id once, to the row block that has its row; each bag's length to every block
        shards = len(column_shards(placement.unit))
        return shards // placement.num_row_blocks * math.ceil(ids) + shards * bags
