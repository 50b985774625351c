"""What one rank of a plan holds, sends and takes: bytes and milliseconds by item."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from operator import add

from distembed.planning.storage import TableStorage, total


@dataclass(frozen=True)
class SentBytes:
    """What a rank sends to others in a step, in bytes."""

    ids: int = 0  # with the number of them in each row
    vectors: int = 0  # composed, to the ranks that have the rows
    gradients: int = 0  # of these vectors, back again
    all_reduce: int = 0  # gradients of weights that every rank has, around a ring

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(astuple(self))

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class StepTime:
    """Estimated time of a step on one rank, in milliseconds."""

    lookup: float = 0.0  # looking tables up, their gradients and their update
    exchange: float = 0.0  # exchanging ids, vectors and their gradients
    networks: float = 0.0  # forward and backward passes of the networks
    all_reduce: float = 0.0  # averaging the gradients of weights that every rank has
    starts: float = 0.0  # starting kernels and exchanges
    waiting: float = 0.0  # waiting for cores that other ranks of the node use

    @property
    def total(self) -> float:
        """Sum of all times, as if nothing overlapped."""
        return sum(astuple(self))


@dataclass(frozen=True)
class PlannedRank:
    """One rank at the fullest moment of a step."""

    rank: int
    tables: Mapping[str, TableStorage]  # of all tables with a part on the rank, by name
    memory: Mapping[str, int]  # bytes on the device by item; a CPU's are in the machine's memory
    moment: str  # name of the fullest moment
    sent: SentBytes
    times: StepTime = StepTime()
    capacity_bytes: int = 0
    host_capacity_bytes: int = 0  # of the node's host memory, for this rank's tables

    @cached_property
    def storage(self) -> TableStorage:
        """Storage of all tables on this rank."""
        return total(self.tables.values())

    @cached_property
    def total_bytes(self) -> int:
        """Sum of all bytes on the device."""
        return sum(self.memory.values())

    @property
    def excess_bytes(self) -> tuple[int, int]:
        """Bytes that the device and the host lack; negative where they have room."""
        return self.total_bytes - self.capacity_bytes, self.storage.host - self.host_capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the device and the host have room."""
        return max(self.excess_bytes) <= 0
