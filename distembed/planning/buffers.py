"""What one training step takes of a rank's memory beside weights and states: buffers and activations, in bytes.

Memory is taken and given back within a step, so what counts is the fullest of its moments. Each is the sum of what is
alive then, of the networks (:mod:`distembed.planning.networks`) and of lookups (:mod:`distembed.planning.lookups`):

=================== =============================================================================================
lookup              received ids, their rows, the vectors of all partitions, what has been composed so far
output              what the lookups keep for their gradients, vectors on their way to the rows' ranks
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
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS

from distembed.planning.lookups import Lookup, LookupCost, Lookups, exchange_key, is_everywhere, shards_of
from distembed.planning.networks import NetworkEstimate
from distembed.planning.workload import Workload, pipeline_depth
from distembed.sharding.placement import Placement, width

_FLOAT, _LONG, _INT = 4, 8, 4


@dataclass(frozen=True)
class StepBuffers:
    """What a rank has in memory at the fullest moment of a step, beside weights and states, in bytes.

    Attributes:
        moment: which of the moments it is.
        inputs: batches, and their ids on the way to the rank that owns their tables.
        outputs: pooled vectors, or their gradients, on the way between the ranks.
        lookups: rows, vectors of partitions and all else that composing takes.
        activations: of the networks, and their gradients; with one rank also those of their
            weights, as they come.
        gradients: of the networks' weights and of tables that are not updated within the backward pass; with several
            ranks, those that are averaged lie in buckets of DistributedDataParallel all the time.
    """

    moment: str
    inputs: int = 0
    outputs: int = 0
    lookups: int = 0
    activations: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "moment")


@dataclass(frozen=True)
class SentBytes:
    """What a rank sends to others in a step, in bytes.

    Attributes:
        ids: with how many of them each row has.
        vectors: pooled, to the ranks that have the rows.
        gradients: of pooled vectors, back again.
        all_reduce: gradients of what every rank has, in a ring.
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
    """One step of training, on any rank of a plan.

    Args:
        placements: of all tables.
        world_size: number of ranks.
        workload: what the step brings along.
        device_kind: ``cuda`` or ``cpu``.
    """

    def __init__(self, placements: Sequence[Placement], world_size: int, workload: Workload, device_kind: str) -> None:
        self._placements, self._world_size, self._device_kind = placements, world_size, device_kind
        self._workload, self._network = workload, workload.network or NetworkEstimate()
        self._num_rows = workload.rows_of_rank(world_size)
        self._lookups = Lookups(placements, world_size, workload)
        self._exchange_keys = list(dict.fromkeys(map(exchange_key, placements)))
        self._on_all_ranks = {
            key: self._exchange(key, lookups) for key, lookups in self._lookups.of_all_ranks().items()
        }
        self._batches = pipeline_depth(device_kind, world_size) * self._batch_bytes()
        self._sent_ids = sum(self._sent_id_bytes(placement) for placement in placements)
        self._replicated = self._network.gradients + sum(
            part.num_parameters * (_FLOAT if part.is_function else _itemsize(placement))
            for placement in placements
            for part in placement.replicated
        )
        self._sent_by_all, self._sent_to_shards = self._sent_for_all(), SentBytes()
        for rank in range(world_size):
            for placement, start, stop in self._lookups.columns_on(rank):
                self._sent_to_shards += self._sent_for_shard(placement, stop - start)
        self._unfused = _unfused_gradients(placements, world_size)
        self._largest_replicated = max(
            (part.num_parameters for p in placements for part in p.replicated if not part.is_function), default=0
        )

    def buffers(self, rank: int) -> StepBuffers:
        """The fullest moment of a step on one rank."""
        return max(self._moments(rank), key=lambda moment: moment.total)

    def sent_bytes(self, rank: int) -> SentBytes:
        """What a rank sends in a step."""
        everywhere, own = self._sent_by_all, SentBytes()
        for placement, start, stop in self._lookups.columns_on(rank):
            own += self._sent_for_shard(placement, stop - start)
        return SentBytes(
            # what goes to the shards' owners, but for those that this rank owns, whose vectors it sends in turn
            everywhere.ids + self._sent_to_shards.ids - own.ids,
            everywhere.vectors + own.gradients * (self._world_size - 1),
            everywhere.gradients + self._sent_to_shards.gradients - own.gradients,
            everywhere.all_reduce,
        )

    def _sent_for_all(self) -> SentBytes:
        """By every rank: for tables that are looked up on all of them, and for what is replicated."""
        others, share = self._world_size - 1, 1 - 1 / self._world_size
        sent = SentBytes(all_reduce=round(2 * share * self._replicated))
        for placement in self._placements:
            sharding_type = placement.unit.sharding_type
            if is_everywhere(sharding_type) and _is_sent(sharding_type, self._world_size):
                bags = self._num_rows * len(placement.table.feature_names)
                # each rank gets the ids of its rows, and gives a partial sum of every bag
                ids = round(self._ids_of(placement) * share) * _LONG + bags * _INT * others
                vectors = bags * width(placement.table) * _FLOAT * others
                sent += SentBytes(ids, vectors, vectors)
        return sent

    def _sent_for_shard(self, placement: Placement, columns: int) -> SentBytes:
        """By a rank to the owner of some columns: the ids of its rows, and the gradients of their vectors."""
        bags = self._num_rows * len(placement.table.feature_names)
        return SentBytes(
            ids=math.ceil(self._ids_of(placement)) * _LONG + bags * _INT, gradients=bags * columns * _FLOAT
        )

    def _exchange(self, key: tuple[str, str], lookups: Sequence[Lookup]) -> "_Exchange":
        tables, (_, sharding_type) = [p.table for p in self._placements if exchange_key(p) == key], key
        columns = sum(width(table) * len(table.feature_names) for table in tables)
        made = sum(lookup.output_bytes for lookup in lookups)
        is_sent = _is_sent(sharding_type, self._world_size)
        # a reduce-scatter sends what was made itself, an all-to-all a copy
        sent = made if is_sent and sharding_type != ShardingType.ROW_WISE.value else 0
        arriving = sum(lookup.num_ids * _LONG + lookup.num_bags * _INT for lookup in lookups) if is_sent else 0
        costs = [lookup.cost(self._device_kind) for lookup in lookups]
        return _Exchange(made, sent, self._num_rows * columns * _FLOAT, arriving, costs, is_sent)

    def _exchanges(self, rank: int) -> list["_Exchange"]:
        """Those of which the rank has no table as well, for it receives vectors."""
        of_rank = self._lookups.of_rank(rank)
        return [
            self._on_all_ranks[key] if key in self._on_all_ranks else self._exchange(key, of_rank.get(key, []))
            for key in self._exchange_keys
        ]

    def _moments(self, rank: int) -> Iterator[StepBuffers]:
        exchanges = self._exchanges(rank)
        costs = [cost for exchange in exchanges for cost in exchange.costs]
        arriving = sum(exchange.arriving for exchange in exchanges)
        received = sum(exchange.received for exchange in exchanges)
        held = sum(cost.held for cost in costs)
        # gradients of what is on all ranks lie in buckets all the time, where there are other ranks
        unfused = self._unfused[rank]
        buckets, gradients = (self._replicated if self._world_size > 1 else 0), self._replicated + unfused
        # logits and labels of the step before are still there, and those that wait for metrics
        inputs = self._batches + self._sent_ids + arriving
        inputs += 2 * self._num_rows * _FLOAT * (1 + self._workload.logged_steps)
        # ids as received and sorted by feature; those that were sent, of this batch and of the next
        lookups = _fullest_lookup(exchanges)
        yield StepBuffers("lookup", inputs + arriving + self._sent_ids, 0, lookups, 0, buckets)
        yield StepBuffers("output", inputs, 2 * received + received * (len(exchanges) > 1), held, 0, buckets)
        yield StepBuffers("networks", inputs, 0, held, self._network.peak, buckets)
        back = sum(exchange.made for exchange in exchanges)
        copies = 1 + any(exchange.is_sent for exchange in exchanges)
        own = sum(cost.own for cost in costs)
        yield StepBuffers("output gradients", inputs, copies * received + back, held, 0, gradients - own - unfused)
        # lookups have their gradients one by one, the last first; tables after all that their vectors go through
        kept, done, to_come = held, gradients - own, unfused // max(1, len(costs))
        for cost in reversed(costs):
            yield StepBuffers("lookup gradients", inputs, back, kept + cost.backward, 0, done - to_come)
            kept -= cost.held
            done += cost.own
            # gradients of pooled vectors, in one piece, are needed until the last lookup's turn
            waiting = back if len(costs) > 1 else 0
            yield StepBuffers("table gradients", inputs, waiting, kept + cost.at_end, 0, done)
        yield StepBuffers("optimizer", inputs, 0, self._largest_replicated * _FLOAT, 0, gradients)

    def _ids_of(self, placement: Placement) -> float:
        """Ids of a table's features in a rank's batch."""
        per_row = sum(self._workload.ids_per_row.get(name, 1.0) for name in placement.table.feature_names)
        return self._num_rows * per_row

    def _batch_bytes(self) -> int:
        """A rank's batch: ids, how many of them each row has, dense features and labels."""
        ids = sum(self._ids_of(placement) for placement in self._placements)
        num_features = sum(len(placement.table.feature_names) for placement in self._placements)
        numbers = (self._workload.num_dense + 1) * self._num_rows
        return math.ceil(ids) * _LONG + num_features * self._num_rows * _INT + numbers * _FLOAT

    def _sent_id_bytes(self, placement: Placement) -> int:
        """Copies of the next batch's ids in the order of their ranks; column shards each take one."""
        if not _is_sent(placement.unit.sharding_type, self._world_size):
            return 0
        ids, bags = self._ids_of(placement) * _LONG, self._num_rows * len(placement.table.feature_names) * _INT
        if placement.divided is not None:
            # where each goes is kept as well, and there is a length for each rank
            return math.ceil(2 * ids + bags * self._world_size)
        return len(shards_of(placement)) * math.ceil(ids + bags)


@dataclass(frozen=True)
class _Exchange:
    """Tables of one sharding type on a rank, in bytes.

    Attributes:
        made: pooled vectors that its lookups give, one behind the other; and each by itself, where there are several.
        sent: a copy that is sent.
        received: vectors of this rank's rows.
        arriving: ids.
        costs: of the lookups.
        is_sent: whether the vectors are for other ranks too.
    """

    made: int
    sent: int
    received: int
    arriving: int
    costs: list[LookupCost]
    is_sent: bool


def _fullest_lookup(exchanges: Sequence[_Exchange]) -> int:
    """The most that lookups, one sharding type's after the other's, have in memory with what they have given."""
    waiting, fullest, kept = 0, 0, 0
    for exchange in exchanges:
        kept += sum(cost.held for cost in exchange.costs)
        most = max((cost.forward for cost in exchange.costs), default=0)
        parts = 2 if len(exchange.costs) > 1 else 1
        fullest = max(
            fullest,
            waiting + kept + most + parts * exchange.made,
            waiting + kept + exchange.made + exchange.sent + (exchange.received if exchange.is_sent else 0),
        )
        waiting += exchange.sent + exchange.received if exchange.is_sent else exchange.made
    return fullest


def _unfused_gradients(placements: Sequence[Placement], world_size: int) -> list[int]:
    """Of each rank's sharded tables that are not updated within the backward pass."""
    gradients = [0] * world_size
    for placement in placements:
        if placement.unit.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            for sharding in placement.sharded.values():
                for shard in sharding.sharding_spec.shards:
                    gradients[shard.placement.rank()] += math.prod(shard.shard_sizes) * _itemsize(placement)
    return gradients


def _itemsize(placement: Placement) -> int:
    return DATA_TYPE_NUM_BITS[placement.table.data_type] // 8


def _is_sent(sharding_type: str, world_size: int) -> bool:
    return world_size > 1 and sharding_type != ShardingType.DATA_PARALLEL.value
