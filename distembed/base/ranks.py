"""The ranks of a run: joining their process group, and collectives on Python objects.

The process group is joined by the environment of ``torch.distributed.run``, or made for one process alone. A failure of
rank 0 in :meth:`Collectives.on_first` fails on every rank, so that no rank waits for ever.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from distembed.base.cuda_driver import driver_shortage, driver_version, has_nvidia_device, hides_devices
from distembed.base.errors import UserError
from distembed.base.machine import keep_freed_memory

T = TypeVar("T")
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GATHERED_BYTES = 2**28
"""Most bytes of all ranks' rows that are gathered at once."""
_OWN_GROUP_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run; ``local_world_size`` counts the ranks on this machine."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def any(self, flag: bool, group: dist.ProcessGroup | None = None) -> bool:
        """Returns whether the flag is set on any rank; all ranks call it.

        ``group`` may be a gloo group of all ranks, by which no rank waits for a GPU.
        """
        if self.world_size == 1:
            return flag
        flags = torch.tensor([int(flag)], device=self.device if group is None else "cpu")
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return bool(flags.item())

    def sum(self, numbers: Tensor) -> Tensor:
        """Sums the tensors of all ranks, equal in shape, to rank 0; all ranks call it, others get meaningless values.

        A tensor that is on the ranks' device already is overwritten.
        """
        numbers = numbers.to(self.device)
        if self.world_size > 1 and numbers.numel():
            dist.reduce(numbers, dst=0)
        return numbers

    def sum_all(self, numbers: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
        """Sums tensors by name to rank 0, in one reduction and one copy to the host for each dtype.

        All ranks call it with equal names, shapes and types; other ranks get an empty dictionary.
        """
        sums: dict[str, npt.NDArray[Any]] = {}
        for dtype in sorted({tensor.dtype for tensor in numbers.values()}, key=str):
            of_dtype = {name: tensor for name, tensor in numbers.items() if tensor.dtype == dtype}
            totals = self.sum(torch.cat([tensor.flatten() for tensor in of_dtype.values()]))
            if self.is_first:
                flat_sums = totals.cpu().split([tensor.numel() for tensor in of_dtype.values()])
                for (name, tensor), flat_sum in zip(of_dtype.items(), flat_sums, strict=True):
                    sums[name] = flat_sum.view(tensor.shape).numpy()
        return sums

    def any_set(self, flags: Tensor) -> npt.NDArray[np.bool_]:
        """Returns, on rank 0, whether each boolean is set on any rank; all ranks call it with equal shapes.

        Other ranks get all booleans unset.
        """
        numbers = flags.to(self.device, torch.uint8)  # no backend reduces booleans
        if self.world_size > 1 and numbers.numel():
            dist.reduce(numbers, dst=0, op=dist.ReduceOp.MAX)
        is_set: npt.NDArray[np.bool_] = numbers.bool().cpu().numpy()
        return is_set if self.is_first else np.zeros_like(is_set)

    def gather_rows(self, rows: Tensor) -> npt.NDArray[Any]:
        """Returns the rows [n, ...] of all ranks, joined in rank order, on rank 0; 0 rows on other ranks.

        All ranks call it, each with its own number of rows.
        """
        rows_by_rank = self.gather_parts(rows)
        if len(rows_by_rank) == 1:
            return rows_by_rank[0]
        return np.concatenate(rows_by_rank) if rows_by_rank else rows[:0].cpu().numpy()

    def gather_parts(self, rows: Tensor) -> list[npt.NDArray[Any]]:
        """Returns the rows [n, ...] of each rank as a list on rank 0, and [] on other ranks.

        All ranks call it, each with its own number of rows. Rows are gathered in pieces of :data:`GATHERED_BYTES` and
        copied to the host, so that rank 0 never has all rows in the memory of its GPU.
        """
        if self.world_size == 1:
            return [rows.cpu().numpy()]
        num_rows = torch.tensor([len(rows)], device=self.device)
        sizes = [torch.zeros_like(num_rows) for _ in range(self.world_size)]
        dist.all_gather(sizes, num_rows)
        counts: list[int] = torch.cat(sizes).tolist()
        row_bytes = max(1, rows[:0].new_empty(1, *rows.shape[1:]).nbytes)
        step = max(1, GATHERED_BYTES // (row_bytes * self.world_size))
        starts = range(0, max(counts), step)
        gathered = [self._gather_range(rows, counts, slice(start, min(start + step, max(counts)))) for start in starts]
        if not self.is_first:
            return []
        no_rows = rows[:0].cpu().numpy()
        return [np.concatenate([no_rows, *(ranges[rank] for ranges in gathered)]) for rank in range(len(counts))]

    def _gather_range(self, rows: Tensor, counts: Sequence[int], range_: slice) -> list[npt.NDArray[Any]]:
        """Gathers the rows of a range of places from every rank; returns each rank's rows on rank 0, [] elsewhere."""
        # gather needs equal shapes: ranks with fewer rows pad with zeros, which are cut off by `counts`
        sent = rows[range_].to(self.device)
        padded = torch.cat([sent, sent.new_zeros(range_.stop - range_.start - len(sent), *sent.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in counts] if self.is_first else None
        dist.gather(padded, gathered, dst=0)
        counts_in_range = [max(0, min(count, range_.stop) - range_.start) for count in counts]
        return [rank_rows[:n].cpu().numpy() for rank_rows, n in zip(gathered or [], counts_in_range, strict=False)]


def choose_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of a local rank: ``cpu``, ``cuda``, or ``auto`` for CUDA where it is available.

    Raises:
        UserError: There is no CUDA device for this rank, or there is one that torch's build for CUDA cannot use.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _require_usable_driver(name)
        if name == "auto":
            return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise UserError(
            f"train.device is {name!r}, but local rank {local_rank} finds {torch.cuda.device_count()} CUDA devices; "
            "start fewer processes, or set train.device=cpu."
        )
    return torch.device("cuda", local_rank)


def _require_usable_driver(name: str) -> None:
    """Refuses an NVIDIA device that torch's build for CUDA does not find: a run for GPUs would crawl.

    It refuses nothing where the user wants no GPU: builds for CPUs are installed, or the devices are hidden.
    """
    cuda = torch.version.cuda
    if cuda is None or hides_devices() or not has_nvidia_device():
        return
    import fbgemm_gpu  # here alone: runs without tables need no FBGEMM

    if fbgemm_gpu.__variant__ == "cpu" and name == "auto":
        return
    reason = driver_shortage(cuda, driver_version())
    because = f": {reason}" if reason else " and does not say why; `nvidia-smi` and `torch.cuda.init()` may"
    raise UserError(
        f"train.device is {name!r}, this machine has an NVIDIA device, and torch {torch.__version__}, built for CUDA "
        f"{cuda}, cannot use it{because}. Install a newer driver, or a torch built for an older CUDA; or run on the "
        "processor by train.device=cpu or, where nothing is trained, with CUDA_VISIBLE_DEVICES= in the environment."
    )


def _let_segments_grow() -> None:
    """Has torch's CUDA allocator grow its segments, unless the user has set it otherwise.

    Batches of lists have unequal sizes: segments of fixed sizes are left with gaps that nothing fits into.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


@contextmanager
def process_group(device_name: str, device_index: int = 0) -> Iterator[Ranks]:
    """Initialises the default process group for the block and destroys it afterwards; all ranks call it.

    Without the variables of ``torch.distributed.run`` the group has one rank. Memory settings are set first, and stay:
    malloc keeps freed memory, and CUDA segments may grow.

    Collectives run by nccl on CUDA and by gloo elsewhere. A process alone uses the CUDA device ``device_index``, modulo
    the number of devices; see :func:`choose_device`.
    """
    keep_freed_memory()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if launched else device_index % max(1, torch.cuda.device_count())
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        _let_segments_grow()
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # nccl is told the device: else it guesses it from the rank, and makes its communicator in the first step
    device_id = device if device.type == "cuda" else None
    if launched:
        dist.init_process_group(backend, device_id=device_id)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    world_size = dist.get_world_size()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if launched else 1
    try:
        yield Ranks(dist.get_rank(), world_size, local_world_size, device)
    finally:
        dist.destroy_process_group()


class Collectives:
    """Collectives on Python objects over the ranks of a process group, or on this process alone where there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1

    @classmethod
    def alone(cls) -> "Collectives":
        """Returns collectives of this process alone, also where it has joined a process group."""
        collectives = cls.__new__(cls)
        collectives.group, collectives.rank, collectives.world_size = None, 0, 1
        return collectives

    @classmethod
    def in_own_group(cls) -> "Collectives":
        """Returns collectives in a new gloo group: for a thread, or so that no rank waits for a GPU; all ranks call it.

        Its timeout is hours: a rank may write its part of a checkpoint long after other ranks have finished theirs.
        """
        return cls(dist.new_group(backend="gloo", timeout=_OWN_GROUP_TIMEOUT) if dist.is_initialized() else None)

    def gather(self, value: T) -> list[T]:
        """Returns each rank's value, on every rank; all ranks call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: T) -> list[T] | None:
        """Returns each rank's value on rank 0, and None on other ranks; all ranks call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def gather_counts(self, count: int) -> list[int]:
        """Returns each rank's count, on every rank, in one collective of a gloo group; all ranks call it."""
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        dist.all_gather(list(counts.split(1)), torch.tensor([count]), group=self.group)
        return counts.tolist()

    def scatter(self, values: Sequence[T] | None) -> T:
        """Returns element ``rank`` of rank 0's ``values``, one for each rank; all ranks call it, others with None."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if values is None else list(values), src=0, group=self.group)
        return received[0]

    def on_first(self, function: Callable[[], T]) -> T:
        """Calls ``function`` on rank 0; all ranks call it, and return its (pickled) result or raise its error."""
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = sendable(error)
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def sendable(error: Exception) -> Exception:
    """Returns the error, or a RuntimeError with its type and message if pickling and unpickling it fails."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
