"""Copies of tensors in host memory, taken from a GPU through two page-locked buffers.

A GPU copies into page-locked memory at the speed of the bus, and into other memory at a fraction of that speed, while
the host waits. Page-locked memory of the size of all tables would leave too little for the rest of the machine. So
tensors are packed into one buffer while the contents of the other buffer are moved to their places::

    GPU     | A  B  C |         | D  E  F |         | G  ...
    buffer 1   A  B  C  -> host     |         G ...
    buffer 2                D  E  F  -> host

Tensors on the host are copied directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BUFFER_BYTES = 64 << 20
"""Bytes of each of the two buffers."""
_ALIGNMENT = 64


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous copies in pageable host memory, of the values after all work queued on the GPU's stream."""
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    pairs = list(zip((tensor.detach() for tensor in tensors), copies, strict=True))
    staged = [pair for pair in pairs if is_on_gpu(pair[0])]
    for tensor, copy in pairs:
        if not is_on_gpu(tensor):
            copy.copy_(tensor)
    if staged:
        _copy_staged(staged, min(BUFFER_BYTES, sum(_room(tensor.nbytes) for tensor, _ in staged)))
    return copies


def _copy_staged(pairs: Sequence[tuple[Tensor, Tensor]], num_bytes: int) -> None:
    """Fills the second tensor of each pair, on the host, from the first, on a GPU, by two buffers of ``num_bytes``."""
    # when `filling` is full, its copies run on the GPU while the host empties `moving`; then they swap
    filling, moving = _Buffer(num_bytes), _Buffer(num_bytes)
    for tensor, copy in pairs:
        for part, target in zip(_parts(tensor, num_bytes), _parts(copy, num_bytes), strict=True):
            if not filling.has_room(part.nbytes):
                filling.send()
                moving.move()
                filling, moving = moving, filling
            filling.add(part, target)
    filling.send()
    moving.move()
    filling.move()


def _parts(tensor: Tensor, num_bytes: int) -> Sequence[Tensor]:
    """Returns a tensor, or its numbers in pieces of at most ``num_bytes``."""
    if tensor.nbytes <= num_bytes:
        return [tensor]
    return tensor.reshape(-1).split(num_bytes // tensor.itemsize)


def _room(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Buffer:
    """A page-locked buffer of pieces of tensors, each held with the host tensor that it is moved to."""

    num_bytes: int
    _num_used: int = 0
    _queued: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._memory = page_locked(self.num_bytes)
        self._filled = torch.cuda.Event()

    def has_room(self, num_bytes: int) -> bool:
        return self._num_used + num_bytes <= self.num_bytes

    def add(self, part: Tensor, target: Tensor) -> None:
        """Queues, on the GPU's stream, a copy of a piece into the buffer; :meth:`move` brings it to ``target``."""
        room = self._memory[self._num_used : self._num_used + part.nbytes].view(part.dtype).view(part.shape)
        room.copy_(part, non_blocking=True)
        self._queued.append((room, target))
        self._num_used += _room(part.nbytes)

    def send(self) -> None:
        """Marks the point in the GPU's stream after the queued copies, for which :meth:`move` waits."""
        self._filled.record()

    def move(self) -> None:
        """Waits until the GPU has filled the buffer, copies each piece to its place, and empties the buffer."""
        if self._queued:
            self._filled.synchronize()
        for room, target in self._queued:
            target.copy_(room)
        self._queued, self._num_used = [], 0


def is_on_gpu(tensor: Tensor) -> bool:
    """Returns whether a GPU copies the tensor to the host."""
    return tensor.device.type == "cuda"


def page_locked(num_bytes: int) -> Tensor:
    """Returns uninitialised page-locked bytes [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
