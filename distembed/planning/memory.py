"""Each rank's memory under a plan, at the fullest moment of a step, item by item, in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distembed.embedding.exchange import VectorExchange
from distembed.optim.declared import TableOptimizers
from distembed.planning.buffers import SentBytes, Step, StepBuffers
from distembed.planning.networks import NetworkEstimate
from distembed.planning.storage import DEFAULT_CACHE_RATIO, TableStorage, storage_by_rank, total
from distembed.planning.workload import Workload
from distembed.sharding.placement import Placement


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        tables: Storage of all tables, TorchRec's own included, which stays from step to step, by table.
        network: Memory of the networks, the same on every rank.
        graph_bytes: Bytes of all knowledge graphs.
        step: Bytes beside these at the fullest moment of a step, with all gradients.
        sent: Bytes that the rank sends in a step.
    """

    tables: Mapping[str, TableStorage]
    network: NetworkEstimate
    graph_bytes: int
    step: StepBuffers
    sent: SentBytes

    def items(self) -> dict[str, int]:
        """Returns the bytes on the device, by item; on a CPU that is the machine's memory."""
        tables = total(self.tables)
        return {
            "table_weights": tables.weights,
            "table_optimizer_state": tables.optimizer_state,
            "table_cache": tables.cache,
            "sse_graphs": self.graph_bytes,
            "network_weights": self.network.parameters + self.network.buffers,
            "network_optimizer_state": self.network.optimizer_state,
            "gradients": self.step.gradients,
            "inputs": self.step.inputs,
            "outputs": self.step.outputs,
            "lookups": self.step.lookups,
            "activations": self.step.activations,
        }

    @property
    def total(self) -> int:
        """Sum of all bytes on the device."""
        return sum(self.items().values())

    @property
    def host(self) -> int:
        """Bytes in the machine's memory beside a CUDA device."""
        return total(self.tables).host


def rank_memories(
    placements: Sequence[Placement],
    world_size: int,
    workload: Workload,
    optimizers: TableOptimizers,
    device_kind: str,
    cache_ratio: float = DEFAULT_CACHE_RATIO,
    exchanges: Mapping[str, VectorExchange] | None = None,
) -> list[RankMemory]:
    """Returns the memory of every rank.

    Args:
        placements: Placements of all tables, TorchRec's own as the full tables that they are.
        world_size: Number of ranks.
        workload: Rows, ids and networks of a training step.
        optimizers: Optimizers of the tables.
        device_kind: ``cuda`` or ``cpu``.
        cache_ratio: Slots of a cache to rows of a table that lies in host memory.
        exchanges: How vectors are sent, by collection's path; in float32 those of collections that are not named.
    """
    memory = PlanMemory(placements, world_size, workload, optimizers, device_kind, cache_ratio, exchanges)
    return [memory.rank(rank) for rank in range(world_size)]


class PlanMemory:
    """The memory of ranks under a plan of which tables can be placed anew, one by one.

    A rank is counted when it is asked for, so that after a change only those that matter take time.

    Args:
        placements: Placements of all tables, TorchRec's own as the full tables that they are.
        world_size: Number of ranks.
        workload: Rows, ids and networks of a training step.
        optimizers: Optimizers of the tables.
        device_kind: ``cuda`` or ``cpu``.
        cache_ratio: Slots of a cache to rows of a table that lies in host memory.
        exchanges: How vectors are sent, by collection's path; in float32 those of collections that are not named.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        world_size: int,
        workload: Workload,
        optimizers: TableOptimizers,
        device_kind: str,
        cache_ratio: float = DEFAULT_CACHE_RATIO,
        exchanges: Mapping[str, VectorExchange] | None = None,
    ) -> None:
        self._world_size, self._optimizers, self._cache_ratio = world_size, optimizers, cache_ratio
        self._network, self._graph_bytes = workload.network or NetworkEstimate(), sum(workload.graph_bytes.values())
        self._step = Step(placements, world_size, workload, optimizers, device_kind, exchanges)
        self._storage = {placement.table.name: self._storage_by_rank(placement) for placement in placements}

    def place(self, placement: Placement) -> None:
        """Places one table anew, with all others where they are; it is told by its name."""
        self._step.place(placement)
        self._storage[placement.table.name] = self._storage_by_rank(placement)

    def rank(self, rank: int) -> RankMemory:
        """Returns the memory of one rank."""
        tables = {name: by_rank[rank] for name, by_rank in self._storage.items() if rank in by_rank}
        step, sent = self._step.buffers(rank), self._step.sent_bytes(rank)
        return RankMemory(tables, self._network, self._graph_bytes, step, sent)

    def _storage_by_rank(self, placement: Placement) -> dict[int, TableStorage]:
        return storage_by_rank(placement, self._world_size, self._optimizers, self._cache_ratio)
