"""How long a step takes on each rank: an estimate, from bandwidths and operations a second that vendors state.

TorchRec's estimator knows a lookup of one vector an id. A composed table has rows of several partitions to read, which
takes so much longer, and composing them reads all again and writes one; the functions of a path compute. So::

    lookups      TorchRec's times of compute, x numbers read an id / columns of the output, + composing, + functions
    exchange     TorchRec's times of the exchanges of ids and vectors
    networks     operations at 40% of the device's best, or activations read and written twice, which is longer
    all-reduce   of gradients, around a ring

What starting kernels takes is not counted: it is most of the time of small batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType

from distembed.planning.buffers import SentBytes
from distembed.planning.devices import Device
from distembed.planning.workload import Workload

UTILISATION = 0.4
"""Share of a device's operations a second that networks of this kind reach."""
_MS = 1e3


@dataclass(frozen=True)
class StepTime:
    """Estimated time of a step on one rank, in milliseconds.

    Attributes:
        lookup: Time of looking tables up, of their gradients and their update.
        exchange: Time of exchanging ids, vectors and their gradients.
        networks: Time of the networks' forward and backward passes.
        all_reduce: Time of averaging the gradients of what every rank has.
        starts: Time of starting kernels and exchanges.
    """

    lookup: float
    exchange: float
    networks: float
    all_reduce: float
    starts: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all times, as if nothing overlapped."""
        return self.lookup + self.exchange + self.networks + self.all_reduce + self.starts

    def as_json(self) -> dict[str, float]:
        """Returns the times by name, in milliseconds."""
        return {**asdict(self), "total": self.total}


def step_times(
    options: Iterable[ShardingOption],
    sent: Sequence[SentBytes],
    workload: Workload,
    device: Device,
    local_world_size: int,
) -> list[StepTime]:
    """Returns the times of every rank.

    Args:
        options: Sharding options that the planner chose, with ranks and perf.
        sent: Bytes that each rank sends in a step.
        workload: Rows, ids and networks of the step.
        device: Device of each rank.
        local_world_size: Number of ranks on a machine.
    """
    world_size = len(sent)
    lookup, exchange, has_others = [0.0] * world_size, [0.0] * world_size, world_size > 1
    for option in options:
        # of data-parallel tables TorchRec counts their all-reduce, which is among the others here
        is_exchanged = has_others and option.sharding_type != ShardingType.DATA_PARALLEL.value
        for shard in option.shards:
            assert shard.perf is not None and shard.rank is not None
            lookup[shard.rank] += shard.perf.fwd_compute + shard.perf.bwd_compute + shard.perf.prefetch_compute
            communication = shard.perf.fwd_comms + shard.perf.bwd_comms + shard.perf.input_dist_comms
            exchange[shard.rank] += communication if is_exchanged else 0.0
    networks = _network_time(workload, device)
    bandwidth = device.node_bandwidth if world_size > local_world_size else device.local_bandwidth
    return [
        StepTime(lookup[rank], exchange[rank], networks, _MS * sent[rank].all_reduce / bandwidth)
        for rank in range(world_size)
    ]


def _network_time(workload: Workload, device: Device) -> float:
    if workload.network is None:
        return 0.0
    computing = workload.network.flops / reached_flops(device, workload.bf16)
    moving = 4 * workload.network.peak / device.memory_bandwidth
    return _MS * max(computing, moving)


def reached_flops(device: Device, bf16: bool) -> float:
    """Returns the operations a second that networks of this kind reach on a device."""
    return UTILISATION * (device.bf16_flops if bf16 else device.fp32_flops)
