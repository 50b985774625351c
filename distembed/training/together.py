"""What ranks find out and decide together: an error on one of them is an error on all, and no rank waits for it."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)


class Together:
    """The ranks of a process group, or this process alone where there is none.

    Args:
        group: of the collectives; the default group unless given.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1

    @classmethod
    def apart(cls) -> "Together":
        """All ranks in a gloo group of their own, for a thread beside training; all ranks call it.

        A rank may write its part of a checkpoint for long while the others have none to write.
        """
        return cls(dist.new_group(backend="gloo", timeout=_PATIENCE) if dist.is_initialized() else None)

    def gather(self, value: T) -> list[T]:
        """Each rank's value, on every rank; all ranks call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises on rank 0, on every rank; all ranks call it."""
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = _sendable(error)
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def _sendable(error: Exception) -> Exception:
    """The error itself, or where it cannot be pickled one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
