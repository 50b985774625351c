"""Memory that no shard counts, taken off every rank's before TorchRec's planner fills it."""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torchrec.distributed.planner.types import (
    DeviceHardware,
    ParameterConstraints,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning.storage import function_storage
from distembed.planning.storage_estimator import storage_on


class Reservation(StorageReservation):
    """Takes off every rank's memory what no shard counts: a share, the networks, and the tables' functions.

    Args:
        share: Share of the memory of a rank's device.
        tables: Compositional tables of the model.
        optimizers: Optimizers of the tables.
        num_bytes: Bytes for the networks and whatever else.
    """

    def __init__(
        self,
        share: float,
        tables: Sequence[CompositionalEmbeddingConfig],
        optimizers: TableOptimizers,
        num_bytes: int = 0,
    ) -> None:
        self._percentage = share  # TorchRec prints it, by this name, where nothing fits
        self._left: Topology | None = None
        self._num_bytes = num_bytes + sum(function_storage(table, optimizers).total for table in tables)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """Returns the topology with the memory that is left; TorchRec calls it."""
        left = copy.deepcopy(topology)
        for device in left.devices:
            free = storage_on(topology.compute_device, self._num_bytes)
            share = storage_on(topology.compute_device, math.ceil(self._percentage * _own_memory(topology, device)))
            device.storage.hbm = max(0, device.storage.hbm - share.hbm - free.hbm)
            device.storage.ddr = max(0, device.storage.ddr - share.ddr - free.ddr)
        self._left = left
        return left

    def fullness(self, plan: Iterable[ShardingOption]) -> float:
        """Returns the fullest rank's share of what :meth:`reserve` left; infinite where host memory is used."""
        assert self._left is not None
        is_cpu = self._left.compute_device == "cpu"
        loads, elsewhere = Counter[int](), 0
        for shard in (shard for option in plan for shard in option.shards):
            loads[shard.rank] += shard.storage.ddr if is_cpu else shard.storage.hbm
            elsewhere += 0 if is_cpu else shard.storage.ddr
        room = [device.storage.ddr if is_cpu else device.storage.hbm for device in self._left.devices]
        return math.inf if elsewhere else max(load / max(1, room[rank]) for rank, load in loads.items())

    @property
    def last_reserved_topology(self) -> Topology | None:
        """The topology that :meth:`reserve` returned last."""
        return self._left


def _own_memory(topology: Topology, device: DeviceHardware) -> int:
    return int(device.storage.ddr if topology.compute_device == "cpu" else device.storage.hbm)
