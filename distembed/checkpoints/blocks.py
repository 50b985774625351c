"""A checkpoint's numbers on disk: one file of raw blocks a rank, and an index in JSON of where each block lies.

::

    rank-0.blocks   | block | block | block |     numbers as in memory, little-endian
    rank-1.blocks   | block | block |
    index.json      NAME: dtype, size, blocks: [file, first byte, bytes, checksum, offsets, sizes]

A block is a rectangle of a tensor: it begins at ``offsets`` and has ``sizes``. A reader looks up which saved blocks
overlap its own shards and reads these blocks alone, under any layout and on any number of ranks::

    saved    |  block 0  |  block 1  |  block 2  |        rows of one tensor
    live           |        a shard        |

A block that is one contiguous part of a live tensor on the host is read straight into the tensor's memory. Neither the
index nor the blocks can hold code. Each block is verified against its checksum in the pass that reads it.
"""

import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from distembed.base.checksums import checksum_of
from distembed.checkpoints.shards import AddedShard, TensorShards
from distembed.checkpoints.store import open_file_system
from distembed.optim.local_shards import LocalShard

_MOST_THREADS = 4


class DamagedFile(ValueError):
    """A file of a checkpoint whose contents have changed since it was written."""


@dataclass(frozen=True)
class Block:
    """A part of a tensor in a file.

    Attributes:
        file: Name of the file within the checkpoint.
        start: Place of the first byte.
        length: Number of bytes.
        checksum: Checksum of the bytes; None where the writer computed none.
        offsets: Place of the first element within the whole tensor, one number a dimension.
        sizes: Numbers of elements, one a dimension.
        is_archive: Whether the bytes are an archive of ``torch.save``, and not raw numbers.
    """

    file: str
    start: int
    length: int
    checksum: str | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_archive: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.file, str) or "/" in self.file or "\\" in self.file:
            raise DamagedFile(f"it reads from {self.file!r}")
        numbers = (self.start, self.length, *self.offsets, *self.sizes)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise DamagedFile(f"it reads {self.length!r} bytes at {self.start!r}")

    def require_intact(self, data: bytes | bytearray | memoryview, num_bytes: int) -> None:
        """Verifies the bytes of the block that were read.

        Raises:
            DamagedFile: The file ended before the block, or the checksum differs.
        """
        place = f"{self.file}, bytes {self.start:,} to {self.start + self.length:,},"
        if num_bytes != self.length:
            raise DamagedFile(f"{place} ends after {num_bytes:,} of them")
        if self.checksum is not None and checksum_of(data) != self.checksum:
            raise DamagedFile(f"{place} does not have the checksum that it was written with")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint: its type and size, and the blocks that hold its numbers."""

    dtype: torch.dtype
    size: tuple[int, ...]
    blocks: Sequence[Block]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or any(
            type(number) is not int or number < 0 for number in self.size
        ):
            raise DamagedFile("it has a tensor without a type or a size")
        for block in self.blocks:
            ends = [start + length for start, length in zip(block.offsets, block.sizes, strict=True)]
            if any(end > size for end, size in zip(ends, self.size, strict=True)):
                raise DamagedFile(f"{block.file} holds a block that lies outside of its tensor")
            if not block.is_archive and block.length != math.prod(block.sizes) * self.dtype.itemsize:
                raise DamagedFile(f"it reads {block.length:,} bytes for a block of {block.sizes}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.size) * self.dtype.itemsize


def write_blocks(checkpoint: str, rank: int, tensors: Mapping[str, TensorShards]) -> dict[str, SavedTensor]:
    """Writes this rank's shards to a file of its own, one block a shard, and returns where they lie."""
    files, path = open_file_system(checkpoint)
    name, start = f"rank-{rank}.blocks", 0
    saved: dict[str, SavedTensor] = {}
    with files.open(f"{path}/{name}", "wb") as file:
        for key, shards in tensors.items():
            blocks = []
            for shard in shards.shards:
                data = _memory(shard.tensor.cpu().contiguous())
                file.write(data)
                blocks.append(
                    Block(name, start, len(data), checksum_of(data), shard.offsets, tuple(shard.tensor.shape))
                )
                start += len(data)
            saved[key] = SavedTensor(shards.dtype, tuple(shards.size), blocks)
        file.flush()
        if isinstance(files, LocalFileSystem):
            os.fsync(file.fileno())
    return saved


def index_bytes(parts: Iterable[Mapping[str, SavedTensor]]) -> bytes:
    """Returns the contents of ``index.json`` for the parts that all ranks wrote.

    A block that several ranks wrote, for example a replicated step count, is listed once.
    """
    index: dict[str, dict[str, Any]] = {}
    for part in parts:
        for key, tensor in part.items():
            entry = index.setdefault(key, {"dtype": dtype_name(tensor.dtype), "size": tensor.size, "blocks": {}})
            for block in tensor.blocks:
                entry["blocks"].setdefault(block.offsets, astuple(block)[:-1])
    return json.dumps({key: {**entry, "blocks": [*entry["blocks"].values()]} for key, entry in index.items()}).encode()


def parse_index(data: bytes) -> dict[str, SavedTensor]:
    """Returns the tensors that ``index.json`` lists.

    Raises:
        Exception: The contents are no index.
    """
    return {
        key: SavedTensor(
            getattr(torch, entry["dtype"]),
            tuple(entry["size"]),
            [
                Block(file, start, length, checksum, tuple(offsets), tuple(sizes))
                for file, start, length, checksum, offsets, sizes in entry["blocks"]
            ],
        )
        for key, entry in json.loads(data).items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a type's name without its module."""
    return str(dtype).removeprefix("torch.")


def require_sizes(tensors: Mapping[str, SavedTensor], sizes: Mapping[str, int]) -> None:
    """Makes sure that every file with blocks is there and is long enough.

    Args:
        tensors: The tensors of a checkpoint.
        sizes: Bytes of each file of the checkpoint, by name.

    Raises:
        DamagedFile: A file is missing, or is too short.
    """
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        for block in tensor.blocks:
            ends[block.file] = max(ends.get(block.file, 0), block.start + block.length)
    for name, end in ends.items():
        if name not in sizes:
            raise DamagedFile(f"{name} is missing")
        if sizes[name] < end:
            raise DamagedFile(f"{name} ends after {sizes[name]:,} of {end:,} bytes")


def read_blocks(checkpoint: str, tensors: Mapping[str, SavedTensor], live: Mapping[str, TensorShards]) -> None:
    """Fills this rank's live shards with a checkpoint's numbers, in place, by a few threads.

    Args:
        checkpoint: Local path or URL of the checkpoint.
        tensors: The tensors that the checkpoint holds.
        live: The shards to fill, by the name of the saved tensor.

    Raises:
        Exception: A file cannot be read, or is damaged; some shards may be filled by then.
    """
    reads: list[_Read] = []
    added: list[_Read] = []
    for key, shards in live.items():
        if key not in tensors:
            raise DamagedFile(f"it has no tensor {key}")
        found = _reads(key, tensors[key], shards)
        (added if any(isinstance(shard, AddedShard) for shard in shards.shards) else reads).extend(found)
    files, path = open_file_system(checkpoint)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "distembed-load") as pool:
        list(pool.map(partial(_Read.run, files=files, path=path), reads))
    for read in added:  # one after the other: they add to the same numbers
        read.run(files, path)


@dataclass(frozen=True)
class _Part:
    """The overlap of a block and a live shard: a view of the live numbers, and their place within the block."""

    target: Tensor
    source: tuple[slice, ...]
    share: float | None

    @classmethod
    def shared(cls, block: Block, shard: LocalShard) -> "_Part | None":
        target, source = shard.tensor.detach(), []
        places = zip(block.offsets, block.sizes, shard.offsets, shard.tensor.shape, strict=True)
        for dim, (start, size, live_start, live_size) in enumerate(places):
            low, high = max(start, live_start), min(start + size, live_start + live_size)
            if low >= high:
                return None
            target = target.narrow(dim, low - live_start, high - low)
            source.append(slice(low - start, high - start))
        return cls(target, tuple(source), shard.share if isinstance(shard, AddedShard) else None)

    def fill(self, values: Tensor) -> None:
        """Copies, or adds, the values of the block to the live numbers."""
        if self.share is None:
            self.target.copy_(values[self.source])
        else:
            self.target.add_(values[self.source].to(self.target.device), alpha=self.share)


@dataclass(frozen=True)
class _Read:
    """A block to read and the live parts that it fills."""

    block: Block
    dtype: torch.dtype
    parts: Sequence[_Part]

    def run(self, files: Any, path: str) -> None:
        """Reads the block, verifies it and fills the parts."""
        if self.block.is_archive:
            values = _unpacked(files, path, self.block)
            if values.dtype != self.dtype or tuple(values.shape) != self.block.sizes:
                raise DamagedFile(f"{self.block.file} holds something else than a part of its tensor")
        elif self._is_in_place():
            read_block(files, path, self.block, _memory(self.parts[0].target))
            return
        else:
            values = torch.empty(self.block.sizes, dtype=self.dtype)
            read_block(files, path, self.block, _memory(values))
        for part in self.parts:
            part.fill(values)

    def _is_in_place(self) -> bool:
        """Returns whether the block can be read straight into the memory of its only live part."""
        target = self.parts[0].target
        return (
            len(self.parts) == 1
            and self.parts[0].share is None
            and tuple(target.shape) == self.block.sizes
            and target.dtype == self.dtype
            and target.device.type == "cpu"
            and target.is_contiguous()
        )


def _reads(key: str, tensor: SavedTensor, shards: TensorShards) -> list[_Read]:
    """Returns the blocks of a saved tensor that the live shards need.

    Raises:
        DamagedFile: No block holds some of the live numbers.
    """
    reads = []
    for block in tensor.blocks:
        parts = [part for shard in shards.shards if (part := _Part.shared(block, shard)) is not None]
        if parts:
            reads.append(_Read(block, tensor.dtype, parts))
    num_found = sum(part.target.numel() for read in reads for part in read.parts)
    num_needed = sum(shard.tensor.numel() for shard in shards.shards)
    if num_found < num_needed:
        raise DamagedFile(f"{num_needed - num_found:,} numbers of {key} are in none of its blocks")
    return reads


def read_block(files: Any, path: str, block: Block, memory: memoryview) -> None:
    """Reads the bytes of a block into memory and verifies them.

    Raises:
        Exception: The file cannot be read, or is damaged.
    """
    if isinstance(files, LocalFileSystem):
        with open(f"{path}/{block.file}", "rb") as file:
            file.seek(block.start)
            num_bytes = file.readinto(memory)
    else:
        data = files.cat_file(f"{path}/{block.file}", start=block.start, end=block.start + block.length)
        num_bytes = len(data)
        memory[:num_bytes] = data
    block.require_intact(memory, num_bytes)


def _unpacked(files: Any, path: str, block: Block) -> Tensor:
    """Returns the tensor of a block that ``torch.save`` wrote; nothing of the block is executed."""
    data = bytearray(block.length)
    read_block(files, path, block, memoryview(data))
    values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(values, Tensor):
        raise DamagedFile(f"{block.file} holds something else than a tensor")
    return values


def _memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host, which may be written to."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
