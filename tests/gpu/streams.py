"""Streams of a card, by which memory is handed out while it is waited for; on a processor all is in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SLEPT_CYCLES = 200_000_000
"""A tenth of a second, about."""
_PATTERN = -(2**62)
"""An id and a row that lie outside of every table, and as float32 bits a huge number."""


class SideStream:
    """A second stream beside the one that computes, as TorchRec's pipelines have one for the coming batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.main: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Within the block work goes to the side stream."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def meet(self) -> None:
        """Has the computing stream wait for what the side stream was given; the host does not wait."""
        if self._side is not None:
            self.main.wait_stream(self._side)

    def delay(self) -> None:
        """Keeps the computing stream busy, so that what it is given next is late."""
        if self._side is not None:
            torch.cuda._sleep(_SLEPT_CYCLES)

    def litter(self, sizes: list[int]) -> int:
        """Takes, fills with garbage and gives back memory of the side stream, at once; returns how many bytes.

        What was made on the side stream and is not held any more lies there, unless it was recorded elsewhere.

        Args:
            sizes: Bytes of the blocks to take; each is taken several times.
        """
        with self.ahead():
            taken = [
                torch.full((max(1, size // 8),), _PATTERN, dtype=torch.int64, device=self.device)
                for size in sizes
                for _ in range(8)
            ]
        return sum(block.nbytes for block in taken)
