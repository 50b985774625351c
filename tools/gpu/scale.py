"""The sizes of all measurements, on a GPU and in a dry run on a processor."""

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bench_common import NUM_IDS, surroundings


@dataclass(frozen=True)
class Scale:
    """The sizes of all parts.

    Attributes:
        device: ``cuda`` or ``cpu``.
        dims: Columns of the tables.
        batch_sizes: Rows of a step.
        num_ids: Ids of each of the 26 features.
        rounds: Number of turns of each contender.
        seconds_a_turn: Approximate time of one contender's turn.
        copied_bytes: Bytes of the copy that measures the memory's bandwidth.
        memory_cases: Number of cases of the part ``memory``.
        profiled_steps: Number of steps whose launches are counted.
    """

    device: str
    dims: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    num_ids: int
    rounds: int
    seconds_a_turn: float
    copied_bytes: int
    memory_cases: int
    profiled_steps: int


CARD = Scale("cuda", (16, 128), (2048, 8192, 65536), NUM_IDS, 5, 0.06, 2**31, 3, 10)
DRY = Scale("cpu", (4, 8), (16, 32), 2_000, 2, 0.0, 2**22, 2, 2)


def here(scale: Scale) -> dict[str, Any]:
    """Returns device, versions and scale, as read from JSON.

    Raises:
        UserError: There is no usable device of that kind; the message gives the reason.
    """
    from distembed.base.ranks import choose_device

    device = choose_device(scale.device, 0)
    return json.loads(json.dumps({**surroundings(device), "scale": scale.__dict__}))  # type: ignore[no-any-return]


def empty(held: Mapping[str, Any] | None = None) -> None:
    """Empties ``held`` and frees unreferenced memory, also on a GPU."""
    if isinstance(held, dict):
        held.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
