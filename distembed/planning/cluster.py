"""The cluster to plan for: machines that are alike, with ranks on them."""

import math
from dataclasses import dataclass

from distembed.base.errors import UserError
from distembed.planning.devices import Device

MAX_RANKS = 2**16
"""Number of ranks up to which a plan is made; its time and memory grow with each of them."""


@dataclass(frozen=True)
class Cluster:
    """Machines and their devices."""

    device: Device  # of each rank; ranks on a CPU share their machine's memory
    nodes: int  # number of machines
    ranks_per_node: int
    host_memory_bytes: int = 0  # of a machine with CUDA devices, in which tables may lie
    # memory of each rank where ranks differ, in place of the device's; empty where they are alike
    memory_by_rank: tuple[int, ...] = ()
    # each rank's share of its machine's memory beside a CUDA device, likewise
    host_memory_by_rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for option, number in (("--nodes", self.nodes), ("--gpus", self.ranks_per_node)):
            if number < 1:
                raise UserError(f"{option} is {number}; it must be 1 or more.")
        if self.world_size > MAX_RANKS:
            raise UserError(
                f"--nodes {self.nodes} with --gpus {self.ranks_per_node} are {self.world_size:,} ranks; a plan has "
                f"{MAX_RANKS:,} at most."
            )
        for own in filter(None, (self.memory_by_rank, self.host_memory_by_rank)):
            if len(own) != self.world_size:
                raise UserError(f"memory is given for {len(own)} ranks; name all {self.world_size}, or one for all.")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks_at_once(self) -> float:
        """Number of ranks of a node whose steps its cores compute at once, each as fast as if it were alone."""
        return min(self.ranks_per_node, self.device.ranks_at_once or math.inf)

    @property
    def rank_bytes(self) -> int:
        """Memory of a rank's device, or a rank's share of the machine's where that is a CPU; the most of any rank."""
        if self.memory_by_rank:
            return max(self.memory_by_rank)
        return self.device.memory_bytes // (self.ranks_per_node if self.device.kind == "cpu" else 1)

    @property
    def host_bytes_per_rank(self) -> int:
        """Bytes of a rank's share of the machine's memory, beside a CUDA device, at most; 0 for ranks on CPUs."""
        if self.host_memory_by_rank:
            return max(self.host_memory_by_rank)
        return 0 if self.device.kind == "cpu" else self.host_memory_bytes // self.ranks_per_node

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Memory of each rank."""
        return self.memory_by_rank or (self.rank_bytes,) * self.world_size

    @property
    def host_bytes_by_rank(self) -> tuple[int, ...]:
        """Each rank's share of its machine's memory beside a CUDA device."""
        return self.host_memory_by_rank or (self.host_bytes_per_rank,) * self.world_size
