"""State of torch's random number generators, rank by rank, in a checkpoint.

The rule on another number of ranks than saved it: no old state would do, since a rank without one would have to repeat
another's numbers. Each rank then starts a new stream, seeded by a hash of the first rank's saved state, the number of
ranks and its own number. So it is where a generator has no saved state, as CUDA's has none after a run on the CPU.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """Returns the state of this process's generators, as uint8 tensors, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(first: Tensor, own: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Sets this process's generators to continue from a saved state.

    Args:
        first: State of the CPU generator of the first rank that saved.
        own: States of this rank's generators, by device type; empty where another number of ranks has saved.
        rank: Number of this process.
        world_size: Number of ranks now.
    """
    digest = hashlib.sha256(first.numpy().tobytes() + f"{rank}/{world_size}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))  # CUDA's too
    if "cpu" in own:
        torch.set_rng_state(own["cpu"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
