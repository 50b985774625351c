"""Each rank's memory under a plan, at the fullest moment of a step, item by item, in bytes."""

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
    """Memory of one rank.

    Attributes:
        tables: Storage of compositional tables, which stays from step to step, by table.
        plain_tables: Bytes of TorchRec's own tables with their buffers, as TorchRec counts them.
        network: Memory of the networks, the same on every rank.
        graph_bytes: Bytes of all knowledge graphs.
        step: Bytes beside these at the fullest moment of a step, with all gradients.
        sent: Bytes that the rank sends in a step.
    """

    tables: Mapping[str, TableStorage]
    plain_tables: int
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
    plain_tables: Sequence[int] | None = None,
    cache_ratio: float = DEFAULT_CACHE_RATIO,
) -> list[RankMemory]:
    """Returns the memory of every rank.

    Args:
        placements: Placements of all compositional tables.
        world_size: Number of ranks.
        workload: Rows, ids and networks of a training step.
        optimizers: Optimizers of the tables.
        device_kind: ``cuda`` or ``cpu``.
        plain_tables: Bytes of each rank's tables that are not compositional; None where there are none.
        cache_ratio: Slots of a cache to rows of a table that lies in host memory.
    """
    tables = table_storage(placements, world_size, optimizers, cache_ratio)
    plain = plain_tables if plain_tables is not None else [0] * world_size
    step, graphs = Step(placements, world_size, workload, device_kind), sum(workload.graph_bytes.values())
    network = workload.network or NetworkEstimate()
    return [
        RankMemory(tables[rank], plain[rank], network, graphs, step.buffers(rank), step.sent_bytes(rank))
        for rank in range(world_size)
    ]
