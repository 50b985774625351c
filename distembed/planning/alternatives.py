"""What other placements of a table would cost: the reason why a plan is as it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alternative:
    """Another placement of one table, all other tables staying where they are.

    Attributes:
        sharding_type: TorchRec's name of the way in which the table would be divided.
        compute_kernel: TorchRec's name of the kernel that would look rows up.
        num_shards: In how many shards it would be; 0 where every rank would hold the whole table.
        milliseconds: How much longer the step of the slowest rank would take; negative where it would be shorter.
        memory_bytes: How much more the fullest rank would hold; negative where it would be less.
        sent_bytes: How much more all ranks together would send in a step.
        fits: Whether every rank would have room.
    """

    sharding_type: str
    compute_kernel: str
    num_shards: int
    milliseconds: float
    memory_bytes: int
    sent_bytes: int
    fits: bool
