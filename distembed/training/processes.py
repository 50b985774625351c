"""The process group: joined from ``torch.distributed.run``'s environment, or made for one process alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distembed.errors import UserError
from distembed.training.memory import keep_freed_memory


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        rank: this process's number.
        world_size: how many there are.
        local_world_size: how many of them are on this machine.
        device: where this process computes.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of ``train.device`` for a local rank.

    Raises:
        UserError: where CUDA is asked for and absent.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise UserError(
            f"train.device is {name!r}, but local rank {local_rank} finds {torch.cuda.device_count()} CUDA devices; "
            "start fewer processes, or set train.device=cpu."
        )
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device_name: str) -> Iterator[Processes]:
    """Joins (or makes) the process group for the duration of the block; all ranks call it."""
    keep_freed_memory()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if launched else 0
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if launched else 1
    try:
        yield Processes(dist.get_rank(), world_size, local_world_size, device)
    finally:
        dist.destroy_process_group()
