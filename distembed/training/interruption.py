"""Ctrl-C, SIGTERM and SIGUSR1 as a request to stop after a step, agreed on by all ranks."""

import os
import signal
from types import FrameType

import torch.distributed as dist

from distembed.base.ranks import Ranks

_STEPS_BETWEEN_AGREEMENTS = 10


class Interruption:
    """A context manager that catches the first signal; a second one ends the process at once.

    Schedulers send SIGUSR1 before a time limit, if the job asks for it. Under ``torch.distributed.run`` one request
    arrives several times, from the terminal or the scheduler and from the launcher, so later signals are ignored there;
    the launcher kills processes that do not end. All ranks construct it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # a collective of the GPUs would wait for the steps in progress: ranks agree over gloo, on their CPUs
        is_apart = ranks.world_size > 1 and ranks.device.type == "cuda"
        self._group = dist.new_group(backend="gloo") if is_apart else None
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Remembers the first signal; raises KeyboardInterrupt on a second one outside of ``torch.distributed.run``."""
        if self._received is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self._received = number

    def requested(self, step: int) -> bool:
        """Returns whether to stop after ``step``, the same on all ranks; all of them call it after every step."""
        if self._ranks.world_size > 1 and step % _STEPS_BETWEEN_AGREEMENTS:
            return False
        return self.requested_now()

    def requested_now(self) -> bool:
        """Returns whether to stop, the same on all ranks; all of them call it at once."""
        return self._ranks.any(self._received is not None, self._group)
