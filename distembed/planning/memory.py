"""What a plan takes of each rank's memory at the fullest moment of a step, item by item, in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distembed.optim.declared import TableOptimizers
from distembed.planning.buffers import SentBytes, Step, StepBuffers
from distembed.planning.networks import NetworkEstimate
from distembed.planning.storage import DEFAULT_CACHE_RATIO, TableStorage, table_storage, total
from distembed.planning.workload import Workload
from distembed.sharding.placement import Placement


@dataclass(frozen=True)
class RankMemory:
    """One rank's.

    Attributes:
        tables: what stays from step to step, by compositional table.
        plain_tables: what TorchRec counts of others, with their buffers, in bytes.
        network: the networks, as on every rank.
        graph_bytes: of all knowledge graphs.
        step: what comes beside at the fullest moment, with all gradients.
        sent: to other ranks in a step.
    """

    tables: Mapping[str, TableStorage]
    plain_tables: int
    network: NetworkEstimate
    graph_bytes: int
    step: StepBuffers
    sent: SentBytes

    def items(self) -> dict[str, int]:
        """All that is on the device, by name; on a CPU that is host memory."""
        tables = total(self.tables)
        return {
            "table_weights": tables.weights,
            "table_optimizer_state": tables.optimizer_state,
            "table_cache": tables.cache,
            "plain_tables": self.plain_tables,
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
        """All of it."""
        return sum(self.items().values())

    @property
    def host(self) -> int:
        """What lies in the machine's memory beside the device's."""
        return total(self.tables).host


def rank_memories(
    placements: Sequence[Placement],
    world_size: int,
    workload: Workload,
    optimizers: TableOptimizers,
    device_kind: str,
    plain_tables: Sequence[int] | None = None,
    cache_ratio: float = DEFAULT_CACHE_RATIO,
) -> list[RankMemory]:
    """Of every rank.

    Args:
        placements: of all tables.
        world_size: number of ranks.
        workload: what a step brings along.
        optimizers: what trains the tables.
        device_kind: ``cuda`` or ``cpu``.
        plain_tables: bytes of each rank's tables that are not compositional; None where there are none.
        cache_ratio: slots of a cache to rows of a table that lies in host memory.
    """
    tables = table_storage(placements, world_size, optimizers.sparse, optimizers.dense, cache_ratio)
    plain = plain_tables if plain_tables is not None else [0] * world_size
    step, graphs = Step(placements, world_size, workload, device_kind), sum(workload.graph_bytes.values())
    network = workload.network or NetworkEstimate()
    return [
        RankMemory(tables[rank], plain[rank], network, graphs, step.buffers(rank), step.sent_bytes(rank))
        for rank in range(world_size)
    ]
