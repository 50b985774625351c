"""What one training step takes of a rank's memory beside weights and states: buffers and activations, in bytes.

Memory is taken and given back within a step, so what counts is the fullest of its moments. Each is the sum of what is
alive then, of the networks (:mod:`distembed.planning.networks`) and of lookups (:mod:`distembed.sharding.groups`):

=================== =============================================================================================
lookup              received ids, their rows, the vectors of all partitions, what has been composed so far
output              what the lookups save for their gradients, vectors on their way to the rows' ranks
networks            the same, and the fullest moment of the networks' forward and backward
output gradients    the same, gradients of the networks, gradients of pooled vectors on their way back
lookup gradients    the same, gradients of all partitions' vectors
table gradients     the same, and gradients of replicated weights, in one piece
optimizer           gradients, and what torch's row-wise Adagrad takes for a replicated table
=================== =============================================================================================

Counted from TorchRec's ``comm_ops`` and from its pipelines; B is the rows of a step on all ranks, b on one. What an
operator takes within itself is not counted, but for the sorting of ids in FBGEMM's CUDA backward.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

from distembed.embedding.config import common_id_dtype
from distembed.planning.lookups import ExchangeKey, RankLookups, column_shards, exchange_key, is_on_every_rank
from distembed.planning.networks import NetworkEstimate
from distembed.planning.workload import Workload, pipeline_depth
from distembed.sharding.groups import GroupLoad, LookupMemory, group_type
from distembed.sharding.placement import Placement, is_pooled, width

_FLOAT, _LONG, _INT = 4, 8, 4


@dataclass(frozen=True)
class StepBuffers:
    """What a rank has in memory at the fullest moment of a step, beside weights and states, in bytes.

    Attributes:
        moment: Name of the moment.
        inputs: Bytes of batches, and of their ids on the way to the rank that owns their tables.
        outputs: Bytes of composed vectors, or their gradients, on the way between the ranks.
        lookups: Bytes of rows, vectors of partitions and all else that composing takes.
        activations: Bytes of the networks' activations and their gradients; with one rank also those of their
            weights, as they come.
        gradients: Bytes of the gradients of the networks' weights and of tables that are not updated within the
            backward pass; with several ranks, those that are averaged lie in buckets of DistributedDataParallel all the
            time.
    """

    moment: str
    inputs: int = 0
    outputs: int = 0
    lookups: int = 0
    activations: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "moment")


@dataclass(frozen=True)
class SentBytes:
    """What a rank sends to others in a step, in bytes.

    Attributes:
        ids: Bytes of ids, with how many of them each row has.
        vectors: Bytes of composed vectors, to the ranks that have the rows.
        gradients: Bytes of the gradients of these vectors, back again.
        all_reduce: Bytes of the gradients of weights that every rank has, around a ring.
    """

    ids: int = 0
    vectors: int = 0
    gradients: int = 0
    all_reduce: int = 0

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(
            self.ids + other.ids,
            self.vectors + other.vectors,
            self.gradients + other.gradients,
            self.all_reduce + other.all_reduce,
        )


class Step:
    """One training step on any rank of a plan.

    Args:
        placements: Placements of all compositional tables.
        world_size: Number of ranks.
        workload: Rows, ids and networks of the step.
        device_kind: ``cuda`` or ``cpu``.
    """

    def __init__(self, placements: Sequence[Placement], world_size: int, workload: Workload, device_kind: str) -> None:
        self._placements, self._world_size, self._device_kind = placements, world_size, device_kind
        self._workload, self._network = workload, workload.network or NetworkEstimate()
        self._num_rows = workload.rows_of_rank(world_size)
        self._lookups = RankLookups(placements, world_size, workload)
        self._by_exchange: dict[ExchangeKey, list[Placement]] = {}
        for placement in placements:
            self._by_exchange.setdefault(exchange_key(placement), []).append(placement)
        self._id_bytes = {
            path: common_id_dtype([own.table for own in placements if own.collection == path]).itemsize
            for path in {placement.collection for placement in placements}
        }
        self._received = {
            key: sum(self._num_vectors(placement) * width(placement.table) for placement in own) * _FLOAT
            for key, own in self._by_exchange.items()
        }
        self._common_exchanges = {
            key: self._exchange(key, loads) for key, loads in self._lookups.common_loads().items()
        }
        self._batches = pipeline_depth(device_kind, world_size) * self._batch_bytes()
        self._sent_ids = sum(self._sent_id_bytes(placement) for placement in placements)
        self._replicated = self._network.gradients + sum(
            part.num_parameters * (_FLOAT if part.is_function else _itemsize(placement))
            for placement in placements
            for part in placement.replicated
        )
        self._sent_by_all, self._sent_to_shards = self._sent_by_every_rank(), SentBytes()
        for rank in range(world_size):
            for placement, table_slice in self._lookups.column_slices(rank):
                self._sent_to_shards += self._sent_to_shard(placement, table_slice.num_columns)
        self._unfused = _unfused_gradients(placements, world_size)
        self._largest_replicated = max(
            (part.num_parameters for p in placements for part in p.replicated if not part.is_function), default=0
        )

    def buffers(self, rank: int) -> StepBuffers:
        """Returns the fullest moment of a step on one rank."""
        return max(self._moments(rank), key=lambda moment: moment.total)

    def sent_bytes(self, rank: int) -> SentBytes:
        """Returns what a rank sends in a step."""
        common, own = self._sent_by_all, SentBytes()
        for placement, table_slice in self._lookups.column_slices(rank):
            own += self._sent_to_shard(placement, table_slice.num_columns)
        return SentBytes(
            # what goes to the shards' owners, but for those that this rank owns, whose vectors it sends in turn
            common.ids + self._sent_to_shards.ids - own.ids,
            common.vectors + own.gradients * (self._world_size - 1),
            common.gradients + self._sent_to_shards.gradients - own.gradients,
            common.all_reduce,
        )

    def _sent_by_every_rank(self) -> SentBytes:
        """Returns what each rank sends for tables that are looked up on all of them, and for replicated weights."""
        others, share = self._world_size - 1, 1 - 1 / self._world_size
        sent = SentBytes(all_reduce=round(2 * share * self._replicated))
        for placement in self._placements:
            sharding_type = placement.unit.sharding_type
            if is_on_every_rank(sharding_type) and _is_sent(sharding_type, self._world_size):
                bags, ids = self._num_bags(placement), round(self._num_ids(placement) * share)
                # each rank gets the ids of its rows, and has a partial sum of every bag, or the vectors of these ids
                vectors = bags * others if is_pooled(placement.table) else ids
                vector_bytes = vectors * width(placement.table) * _FLOAT
                id_bytes = ids * self._id_bytes[placement.collection]
                sent += SentBytes(id_bytes + bags * _INT * others, vector_bytes, vector_bytes)
        return sent

    def _sent_to_shard(self, placement: Placement, columns: int) -> SentBytes:
        """Returns what a rank sends to the owner of some columns: ids of its rows, and gradients of their vectors."""
        return SentBytes(
            ids=math.ceil(self._num_ids(placement)) * self._id_bytes[placement.collection]
            + self._num_bags(placement) * _INT,
            gradients=self._num_vectors(placement) * columns * _FLOAT,
        )

    def _exchange(self, key: ExchangeKey, loads: Sequence[GroupLoad]) -> "_Exchange":
        output, (_, sharding_type) = sum(load.output_bytes for load in loads), key
        is_sent = _is_sent(sharding_type, self._world_size)
        # a reduce-scatter sends the output itself, an all-to-all a copy
        is_reduced = sharding_type == ShardingType.ROW_WISE.value and is_pooled(self._by_exchange[key][0].table)
        return _Exchange(
            output=output,
            sent=output if is_sent and not is_reduced else 0,
            received=self._received[key],
            arriving_ids=sum(load.num_ids * _LONG + load.num_bags * _INT for load in loads) if is_sent else 0,
            lookups=[group_type(load.table, is_pooled(load.table)).memory(load, self._device_kind) for load in loads],
            is_sent=is_sent,
        )

    def _exchanges(self, rank: int) -> list["_Exchange"]:
        """Returns a rank's exchanges, those of tables that it has no part of as well: it receives their vectors."""
        common, loads = self._common_exchanges, self._lookups.rank_loads(rank)
        return [common[key] if key in common else self._exchange(key, loads.get(key, [])) for key in self._by_exchange]

    def _moments(self, rank: int) -> Iterator[StepBuffers]:
        """Yields all moments of a step on one rank, in order."""
        exchanges = self._exchanges(rank)
        lookups = [lookup for exchange in exchanges for lookup in exchange.lookups]
        arriving = sum(exchange.arriving_ids for exchange in exchanges)
        received = sum(exchange.received for exchange in exchanges)
        saved = sum(lookup.saved_bytes for lookup in lookups)
        # gradients of what is on all ranks lie in buckets all the time, where there are other ranks
        unfused = self._unfused[rank]
        buckets, gradients = (self._replicated if self._world_size > 1 else 0), self._replicated + unfused
        # the task's outputs of the step before are still there, and those that wait for metrics
        inputs = self._batches + self._sent_ids + arriving
        output_bytes = math.ceil(self._network.output_bytes_per_row * self._num_rows)
        inputs += output_bytes * (1 + self._workload.logged_steps)
        # ids as received and sorted by feature; those that were sent, of this batch and of the next
        fullest = _fullest_lookup(exchanges)
        yield StepBuffers("lookup", inputs + arriving + self._sent_ids, 0, fullest, 0, buckets)
        yield StepBuffers("output", inputs, 2 * received + received * (len(exchanges) > 1), saved, 0, buckets)
        yield StepBuffers("networks", inputs, 0, saved, self._network.peak, buckets)
        back = sum(exchange.output for exchange in exchanges)
        copies = 1 + any(exchange.is_sent for exchange in exchanges)
        own = sum(lookup.gradient_bytes for lookup in lookups)
        yield StepBuffers("output gradients", inputs, copies * received + back, saved, 0, gradients - own - unfused)
        # lookups have their gradients one by one, the last first; tables after all that their vectors go through
        left, done, to_come = saved, gradients - own, unfused // max(1, len(lookups))
        for lookup in reversed(lookups):
            yield StepBuffers("lookup gradients", inputs, back, left + lookup.backward_bytes, 0, done - to_come)
            left -= lookup.saved_bytes
            done += lookup.gradient_bytes
            # gradients of pooled vectors, in one tensor, are needed until the last lookup's turn
            waiting = back if len(lookups) > 1 else 0
            yield StepBuffers("table gradients", inputs, waiting, left + lookup.update_bytes, 0, done)
        yield StepBuffers("optimizer", inputs, 0, self._largest_replicated * _FLOAT, 0, gradients)

    def _num_ids(self, placement: Placement) -> float:
        """Returns the number of ids of a table's features in a rank's batch."""
        return self._num_rows * self._ids_per_row(placement.table.feature_names)

    def _ids_per_row(self, features: Sequence[str]) -> float:
        return sum(self._workload.ids_per_row.get(name, 1.0) for name in features)

    def _num_bags(self, placement: Placement) -> int:
        """Returns the number of bags of a table's features in a rank's batch."""
        return self._num_rows * len(placement.table.feature_names)

    def _num_vectors(self, placement: Placement) -> int:
        """Returns how many vectors a rank's batch has of a table: one a bag, or one an id of sequences."""
        return self._num_bags(placement) if is_pooled(placement.table) else math.ceil(self._num_ids(placement))

    def _batch_bytes(self) -> int:
        """Returns the bytes of a rank's batch: ids, how many of them each row has, dense features and labels."""
        seen: set[str] = set()
        ids = 0.0
        for placement in self._placements:
            # several collections may read one feature
            ids += self._num_rows * self._ids_per_row(
                [name for name in placement.table.feature_names if name not in seen]
            )
            seen.update(placement.table.feature_names)
        numbers = (self._workload.num_dense + 1) * self._num_rows
        return math.ceil(ids) * _LONG + len(seen) * self._num_rows * _INT + numbers * _FLOAT

    def _sent_id_bytes(self, placement: Placement) -> int:
        """Returns the bytes of the next batch's ids in the order of their ranks; each column shard takes a copy."""
        if not _is_sent(placement.unit.sharding_type, self._world_size):
            return 0
        ids, bags = self._num_ids(placement) * _LONG, self._num_bags(placement) * _INT
        if placement.divided is not None:
            # where each goes is kept as well, and there is a length for each rank
            return math.ceil(2 * ids + bags * self._world_size)
        return len(column_shards(placement)) * math.ceil(ids + bags)


@dataclass(frozen=True)
class _Exchange:
    """Tables of one collection and one sharding type on a rank.

    Attributes:
        output: Bytes of all vectors that the lookups compose.
        sent: Bytes of a copy of these that is sent.
        received: Bytes of the vectors of this rank's rows.
        arriving_ids: Bytes of the ids that arrive, with their lengths.
        lookups: Memory of each lookup.
        is_sent: Whether the vectors are for other ranks too.
    """

    output: int
    sent: int
    received: int
    arriving_ids: int
    lookups: list[LookupMemory]
    is_sent: bool


def _fullest_lookup(exchanges: Sequence[_Exchange]) -> int:
    """Returns the most bytes that lookups, one exchange's after the other's, have in memory with their outputs."""
    waiting, fullest, saved = 0, 0, 0
    for exchange in exchanges:
        saved += sum(lookup.saved_bytes for lookup in exchange.lookups)
        forward = max((lookup.forward_bytes for lookup in exchange.lookups), default=0)
        # outputs of several lookups are put into one tensor
        copies = 2 if len(exchange.lookups) > 1 else 1
        fullest = max(
            fullest,
            waiting + saved + forward + copies * exchange.output,
            waiting + saved + exchange.output + exchange.sent + (exchange.received if exchange.is_sent else 0),
        )
        waiting += exchange.sent + exchange.received if exchange.is_sent else exchange.output
    return fullest


def _unfused_gradients(placements: Sequence[Placement], world_size: int) -> list[int]:
    """Returns the bytes of gradients of each rank's sharded tables that are not updated within the backward pass."""
    gradients = [0] * world_size
    for placement in placements:
        if placement.unit.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            for sharding in placement.sharded.values():
                for shard in sharding.sharding_spec.shards:
                    gradients[shard.placement.rank()] += math.prod(shard.shard_sizes) * _itemsize(placement)
    return gradients


def _itemsize(placement: Placement) -> int:
    return placement.table.bytes_per_number


def _is_sent(sharding_type: str, world_size: int) -> bool:
    return world_size > 1 and sharding_type != ShardingType.DATA_PARALLEL.value
