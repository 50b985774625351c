"""The lookups of each rank in a step of a plan: groups of :mod:`distembed.sharding.groups` without their tensors."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.types import ParameterSharding, ShardingType

from distembed.embedding.settings import VectorExchange
from distembed.planning.request import Workload
from distembed.sharding.groups import GroupLoad, LookupMemory, group_key
from distembed.sharding.groups.load import FLOAT_BYTES
from distembed.sharding.placement import Placement
from distembed.sharding.table_slice import TableSlice, width

ExchangeKey = tuple[str, str]
"""Collection path and sharding type: tables with equal keys are sent together."""
PlacedSlice = tuple[Placement, TableSlice]
LENGTH_BYTES = 4


class RankLookups:
    """The lookups of each rank under the placements of all tables."""

    def __init__(self, placements: Sequence[Placement], world_size: int, workload: Workload) -> None:
        self._world_size, self._workload = world_size, workload
        # slices with their groups' keys by rank, in the order of the tables; rank None for tables on every rank
        self._slices = defaultdict[int | None, list[tuple[PlacedSlice, Hashable]]](list)
        for placement in placements:
            everywhere: list[tuple[int, int, int | None]] = [(0, width(placement.table), None)]
            is_everywhere = is_on_every_rank(placement.unit.sharding_type)
            for start, stop, rank in everywhere if is_everywhere else column_shards(placement.unit):
                own = placement.slice(start, stop)
                self._slices[rank].append(((placement, own), group_key(own)))

    def column_slices(self, rank: int) -> list[PlacedSlice]:
        """Returns the slices of tables with a range of columns, or all columns, on one rank alone."""
        return [placed for placed, _ in self._slices[rank]]

    def loads(self, rank: int | None) -> dict[ExchangeKey, list[GroupLoad]]:
        """Returns a rank's own lookups; for None, the lookups that all ranks do alike."""
        groups: dict[ExchangeKey, dict[Hashable, list[PlacedSlice]]] = {}
        for placed, key in self._slices[rank]:
            groups.setdefault(exchange_key(placed[0]), {}).setdefault(key, []).append(placed)
        return {key: [self._load(group) for group in own_groups.values()] for key, own_groups in groups.items()}

    def _load(self, group: Sequence[PlacedSlice]) -> GroupLoad:
        first, _ = group[0]
        is_local = first.unit.sharding_type == ShardingType.DATA_PARALLEL.value
        num_rows = self._workload.rows_of_rank(self._world_size) if is_local else self._workload.batch_size
        # where rows are divided, a rank has a share of the ids
        share = first.num_row_blocks
        features = [(table_slice, name) for _, table_slice in group for name in table_slice.table.feature_names]
        return GroupLoad(
            slices=[table_slice for table_slice, _ in features],
            possible_ids=[math.ceil(table_slice.table.num_embeddings / share) for table_slice, _ in features],
            num_ids_per_feature=[num_rows * self._workload.mean_ids([name]) / share for _, name in features],
            multi_hot=[self._workload.has_bags(name) for _, name in features],
            num_rows=num_rows,
            averages_gradients=self._world_size > 1,
            num_threads=self._workload.num_threads,
        )


def exchange_key(placement: Placement) -> ExchangeKey:
    """Returns the key of a table's exchange."""
    return placement.collection, placement.unit.sharding_type


def is_on_every_rank(sharding_type: str) -> bool:
    """Returns whether every rank looks up the tables of a sharding type, in equal shares."""
    return sharding_type in (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)


def is_exchanged(sharding_type: str, world_size: int) -> bool:
    """Returns whether ids and vectors of tables of a sharding type are sent to other ranks."""
    return world_size > 1 and sharding_type != ShardingType.DATA_PARALLEL.value


def column_shards(unit: ParameterSharding) -> list[tuple[int, int, int]]:
    """Returns first column, last column + 1, and rank of each shard of a table divided by columns."""
    spec: Any = unit.sharding_spec
    return [
        (shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1], shard.placement.rank())
        for shard in spec.shards
    ]


@dataclass(frozen=True)
class Exchange:
    """Tables of one collection and sharding type on a rank; vectors count as float32 unless stated otherwise."""

    output: int  # bytes of all vectors that the lookups compose
    sent: int  # bytes of a copy of these that is sent
    received: int  # bytes of the vectors of this rank's rows
    arriving_ids: int  # bytes of the ids that arrive, with their lengths
    lookups: list[LookupMemory]
    is_sent: bool  # whether the vectors are for other ranks too
    numbers: VectorExchange = VectorExchange()  # in which numbers they are sent

    @property
    def is_rounded(self) -> bool:
        """Whether lookups round vectors, so that they are not float32 until they are widened."""
        return self.numbers.output_itemsize < FLOAT_BYTES

    def rounded(self, num_bytes: int) -> int:
        """Returns the bytes of vectors as lookups return them, before they are widened."""
        return num_bytes * self.numbers.output_itemsize // FLOAT_BYTES

    def travelling(self, num_bytes: int) -> int:
        """Returns the bytes of vectors on their way to another rank."""
        return math.ceil(self.numbers.vector_bytes(num_bytes / FLOAT_BYTES))

    @property
    def output_bytes(self) -> int:
        """Bytes of this rank's received vectors while they are joined into one tensor."""
        if self.numbers.comms.is_used:  # and as decoded
            return self.travelling(self.received) + 2 * self.received
        return self.rounded(self.received) + (self.received if self.is_rounded else self.rounded(self.received))

    @property
    def gradient_bytes(self) -> int:
        """Bytes in which this rank's gradients are prepared for sending, besides the gradients."""
        if not self.is_sent:
            return 0
        if self.numbers.comms.is_used:  # put in the ranks' order, and encoded
            return self.received + math.ceil(self.numbers.gradient_bytes(self.received / FLOAT_BYTES))
        return 2 * self.rounded(self.received) if self.is_rounded else self.received


def fullest_lookup(exchanges: Sequence[Exchange]) -> int:
    """Returns the most bytes that the lookups hold at once, one exchange after the other."""
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
