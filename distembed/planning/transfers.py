"""What ranks send each other for one table in a step, in bytes, and how long it takes.

Bytes within a node and between nodes have bandwidths of their own, and their times are added. B is the rows of a step
on all ranks, b on one; W ranks lie on N nodes of L::

    by columns      each rank sends its ids to the owner of the columns, who sends their vectors back
    row_wise        each rank sends every other its share of the ids, and gets back partial sums of its b rows
    two levels      each rank sends its ids to the L ranks of a node that have their rows; these add their sums of all
                    B rows up among them, B / L for each, and send them to the other nodes
    data_parallel   nothing but gradients of the weights, which are averaged

A GPU sends while it receives: a phase takes the longer of the two. A CPU's ranks copy all messages with their own
cores: a phase takes half of both, for the bandwidth is that of a rank that sends as much as it receives.

Gradients go the way back. An average adds the gradients of P bytes up within nodes, then between them, each rank
``2 P (L - 1) / L`` and ``2 P (N - 1) / (N L)``, which is what a ring sends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchrec.distributed.types import ShardingType

from distembed.embedding.exchange import VectorExchange
from distembed.planning.cluster import Cluster
from distembed.planning.lookups import ExchangeKey
from distembed.sharding.groups.load import FLOAT_BYTES
from distembed.sharding.placement import WITHIN_NODES

_MS = 1e3
_LENGTH_BYTES = 4

Phase = tuple[ExchangeKey, str]
"""An exchange and its part: ``ids``, ``sums`` within a node, or ``vectors``; sums and vectors with their gradients. On
CPUs the ranks that are not the owner have parts of their own, ``ids of others`` and ``vectors of others``."""


class Transfer(NamedTuple):
    """What a shard has communicated in one phase.

    A rank's phase takes the longer of what it does for its own shards and what it does for those of others::

        max(sum of own shards' owner_ms, sum of all shards' other_ms - sum of own shards' other_ms)
    """

    owner_ms: float  # milliseconds of the rank that has the shard, to or from all others
    other_ms: float = 0.0  # milliseconds of each other rank, to or from the owner, as if that were any of the others


@dataclass(frozen=True)
class TableTraffic:
    """What a rank's batch has of one table."""

    num_ids: float
    num_bags: int
    itemsize: int  # bytes of an id
    is_pooled: bool  # whether ids of a bag have one vector together; else, in sequences, each has its own
    exchange: VectorExchange  # in which numbers vectors and gradients are sent

    def id_bytes(self, num_ranks: int) -> float:
        """Returns the bytes that go to one of several ranks which share the ids, each told how many a bag has."""
        return self.num_ids * self.itemsize / num_ranks + self.num_bags * _LENGTH_BYTES

    def vector_bytes(self, num_columns: int) -> float:
        """Returns the bytes in which the batch's composed vectors and their gradients are sent."""
        numbers = self.num_vectors * num_columns
        return self.exchange.vector_bytes(numbers) + self.exchange.gradient_bytes(numbers)

    @property
    def num_vectors(self) -> float:
        """Number of composed vectors of the batch."""
        return self.num_bags if self.is_pooled else self.num_ids

    def rounding_bytes(self, num_columns: int) -> float:
        """Returns the bytes that codecs read and write for the batch's vectors and gradients, on one side of the way.

        What lookups round is not sent through codecs.
        """
        if not self.exchange.comms.is_used:
            return 0.0
        return 2 * self.num_vectors * num_columns * FLOAT_BYTES + self.vector_bytes(num_columns)


class Traffic:
    """Times of what is sent on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        device, world_size, ranks_per_node = cluster.device, cluster.world_size, cluster.ranks_per_node
        self._nodes, self._ranks_per_node, self._world_size = cluster.nodes, ranks_per_node, world_size
        self._local, self._node = _MS / device.local_bandwidth, _MS / device.node_bandwidth
        self._reduced = _MS / device.reduce_bandwidth
        self._sends_while_receiving = device.kind != "cpu"
        # milliseconds of a byte to each of the other ranks, and of a byte to any of them
        self._to_all = (ranks_per_node - 1) * self._local + (world_size - ranks_per_node) * self._node
        self._to_any = self._to_all / max(1, world_size - 1)

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Returns the milliseconds in which all ranks average some bytes."""
        within = (self._ranks_per_node - 1) / self._ranks_per_node * self._local
        between = (self._nodes - 1) / (self._nodes * self._ranks_per_node) * self._node
        return 2 * num_bytes * (within + between)

    def transfers(
        self, table: TableTraffic, exchange: ExchangeKey, num_columns: int, num_with_rows: int
    ) -> Mapping[Phase, Transfer]:
        """Returns what is communicated for a rank that has some columns of a table, or a share of their rows.

        Of the ranks that the rows are divided over, so many have any, and get the ids of all others.
        """
        sharding_type, share = exchange[1], self._ranks_per_node
        if self._world_size == 1 or sharding_type == ShardingType.DATA_PARALLEL.value:
            return {}
        ids, vectors = (exchange, "ids"), (exchange, "vectors")
        vector_bytes = table.vector_bytes(num_columns)
        if sharding_type == ShardingType.ROW_WISE.value:
            vector_bytes /= 1 if table.is_pooled else self._world_size
            id_bytes = table.id_bytes(num_with_rows)
            # sums are scattered, and their gradients gathered
            added = (self._world_size - 1) * self._reduced if table.is_pooled else 0.0
            return {ids: Transfer(id_bytes * self._to_all), vectors: Transfer(vector_bytes * (self._to_all + added))}
        id_bytes = table.id_bytes(num_with_rows)
        sent_ids = self._phases(ids, id_bytes * self._to_all, id_bytes * self._to_any)
        if sharding_type not in WITHIN_NODES:
            return sent_ids | self._phases(vectors, vector_bytes * self._to_all, vector_bytes * self._to_any)
        summed = (share - 1) / share * self._world_size * vector_bytes
        between = vector_bytes * self._node
        return {
            **sent_ids,
            (exchange, "sums"): Transfer(summed * (self._local + self._reduced)),
            **self._phases(vectors, (self._nodes - 1) * between, between / share),
        }

    def _phases(self, phase: Phase, owner_ms: float, other_ms: float) -> dict[Phase, Transfer]:
        """Returns the phases of what a shard's owner sends, or receives, and each other rank receives, or sends."""
        if self._sends_while_receiving:
            return {phase: Transfer(owner_ms, other_ms)}
        exchange, part = phase
        return {phase: Transfer(owner_ms / 2), (exchange, f"{part} of others"): Transfer(0.0, other_ms / 2)}
