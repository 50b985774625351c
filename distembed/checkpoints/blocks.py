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
index nor the blocks can hold code. Each block is read once, and verified against its checksum from the same bytes.
"""

import io
import json
import math
import os
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from distembed.base.checksums import checksum_of
from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.checkpoints.shards import AddedShard, TensorShards
from distembed.checkpoints.store import CheckpointStore, open_file_system
from distembed.optim.live_state import LocalShard

_MOST_THREADS = 4


class DamagedFile(ValueError):
    """A file of a checkpoint whose contents have changed since it was written."""


@dataclass(frozen=True)
class SavedBlock:
    """A rectangle of a tensor, ``length`` bytes from byte ``start`` of ``file``; refuses a file in another folder.

    The rectangle begins at ``offsets`` of the whole tensor and has ``sizes``. ``checksum`` is None in stock
    checkpoints. ``is_archive`` says that the bytes are an archive of ``torch.save``, and not raw numbers.
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


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint: its type and size, and the blocks that hold its numbers.

    Refuses blocks that reach outside of the tensor, and raw blocks whose bytes do not match their sizes.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    blocks: Sequence[SavedBlock]

    def __post_init__(self) -> None:
        sizes_are_counts = all(type(number) is int and number >= 0 for number in self.size)
        if not isinstance(self.dtype, torch.dtype) or not sizes_are_counts:
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


def write_blocks(
    store: CheckpointStore, checkpoint: str, rank: int, tensors: Mapping[str, TensorShards]
) -> dict[str, SavedTensor]:
    """Writes this rank's shards by tensor, a block each, to ``rank-RANK.blocks``; returns the places of the blocks."""
    files, path = open_file_system(store.checkpoint_path(checkpoint))
    name, start = f"rank-{rank}.blocks", 0
    saved: dict[str, SavedTensor] = {}
    try:
        with files.open(f"{path}/{name}", "wb") as file:
            for key, shards in tensors.items():
                blocks = []
                for shard in shards.shards:
                    data = _memory(shard.tensor.cpu().contiguous())
                    file.write(data)
                    sizes = tuple(shard.tensor.shape)
                    blocks.append(SavedBlock(name, start, len(data), checksum_of(data), shard.offsets, sizes))
                    start += len(data)
                saved[key] = SavedTensor(shards.dtype, tuple(shards.size), blocks)
            file.flush()
            if isinstance(files, LocalFileSystem):
                os.fsync(file.fileno())
    except Exception as error:  # file systems raise errors of their own kinds
        raise store.not_written(checkpoint, error, sum(shards.num_bytes for shards in tensors.values())) from error
    return saved


def index_bytes(tensors_by_rank: Iterable[Mapping[str, SavedTensor]]) -> bytes:
    """Returns ``index.json`` for the tensors that each rank wrote; of blocks at equal offsets the first is listed."""
    index: dict[str, dict[str, Any]] = {}
    for rank_tensors in tensors_by_rank:
        for key, tensor in rank_tensors.items():
            entry = index.setdefault(key, {"dtype": dtype_name(tensor.dtype), "size": tensor.size, "blocks": {}})
            for block in tensor.blocks:
                entry["blocks"].setdefault(block.offsets, astuple(block)[:-1])  # all fields but is_archive
    return json.dumps({key: {**entry, "blocks": [*entry["blocks"].values()]} for key, entry in index.items()}).encode()


def parse_index(data: bytes) -> dict[str, SavedTensor]:
    """Returns the tensors that ``index.json`` lists; on other contents the error may be of any class."""
    return {
        key: SavedTensor(
            getattr(torch, entry["dtype"]),
            tuple(entry["size"]),
            [
                SavedBlock(file, start, length, checksum, tuple(offsets), tuple(sizes))
                for file, start, length, checksum, offsets, sizes in entry["blocks"]
            ],
        )
        for key, entry in json.loads(data).items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a type's name without its module."""
    return str(dtype).removeprefix("torch.")


def require_files(tensors: Mapping[str, SavedTensor], file_bytes: Mapping[str, int]) -> None:
    """Raises a :class:`DamagedFile` where a file with blocks is missing, or is too short."""
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        for block in tensor.blocks:
            ends[block.file] = max(ends.get(block.file, 0), block.start + block.length)
    for name, end in ends.items():
        if name not in file_bytes:
            raise DamagedFile(f"{name} is missing")
        if file_bytes[name] < end:
            raise DamagedFile(f"{name} ends after {file_bytes[name]:,} of {end:,} bytes")


def map_tensor(checkpoint: str, tensor: SavedTensor) -> Tensor | None:
    """Returns a tensor whose memory is its file, mapped; a page that is written to is copied.

    None for a tensor on another file system, or whose rows do not lie one after another in one file.
    """
    files, path = open_file_system(checkpoint)
    # block 0: rows 0 ... 99    block 1: rows 100 ... 199    and so on, each where the one before ends
    rows, end = 0, tensor.blocks[0].start if tensor.blocks else 0
    for block in tensor.blocks:
        is_next = block.start == end and block.file == tensor.blocks[0].file and not block.is_archive
        if not tensor.size or not is_next or block.offsets[0] != rows or block.sizes[1:] != tensor.size[1:]:
            return None
        rows, end = rows + block.sizes[0], end + block.length
    if not rows or rows != tensor.size[0] or end % tensor.dtype.itemsize or not isinstance(files, LocalFileSystem):
        return None
    try:
        content = torch.from_file(f"{path}/{tensor.blocks[0].file}", size=end, dtype=torch.uint8)
    except RuntimeError:  # a file that cannot be opened: reading it says why
        return None
    return content[tensor.blocks[0].start :].view(tensor.dtype).view(tensor.size)


def read_blocks(
    checkpoint: str,
    tensors: Mapping[str, SavedTensor],
    live: Mapping[str, TensorShards],
    mapped: Collection[str] = (),
) -> None:
    """Fills this rank's live shards with a checkpoint's numbers, in place, with up to 4 threads.

    An :class:`AddedShard` is not overwritten: the saved numbers are added to it.

    Args:
        checkpoint: Local path or URL of the checkpoint.
        tensors: The tensors that the checkpoint holds.
        live: The shards to fill, by the name of the saved tensor.
        mapped: Names of tensors whose live memory is the file (:func:`map_tensor`), which are verified alone.

    Raises:
        UserError: The checkpoint may not be read.
        RunError: It cannot be reached.
        DamagedCheckpoint: It is damaged, or lacks a tensor; some of the shards may be filled by then.
    """
    try:
        reads: list[BlockRead] = []
        added: list[BlockRead] = []
        for key, shards in live.items():
            if key not in tensors:
                raise DamagedFile(f"it has no tensor {key}")
            adds = any(isinstance(shard, AddedShard) for shard in shards.shards)
            (added if adds else reads).extend(_reads(key, tensors[key], shards, key in mapped))
        files, path = open_file_system(checkpoint)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "distembed-load") as pool:
            list(pool.map(partial(BlockRead.run, files=files, path=path), reads))
        for read in added:  # one after the other: several blocks add to the same live numbers
            read.run(files, path)
    except Exception as error:  # a damaged file may fail to read in any way
        raise not_read(checkpoint, error) from error


@dataclass(frozen=True)
class _Part:
    """The overlap of a block and a live shard: a view of the live numbers, and their place within the block.

    ``share`` is the factor of numbers that are added (:class:`AddedShard`); None if they replace the live ones.
    """

    target: Tensor
    source: tuple[slice, ...]
    share: float | None

    @classmethod
    def shared(cls, block: SavedBlock, shard: LocalShard) -> "_Part | None":
        # block    |  start ............ start + size  |
        # shard             |  live_start ......................  live_start + live_size  |
        # overlap           |  low ............. high  |             in every dimension, else there is none
        target, source = shard.tensor.detach(), []
        dimensions = zip(block.offsets, block.sizes, shard.offsets, shard.tensor.shape, strict=True)
        for dim, (start, size, live_start, live_size) in enumerate(dimensions):
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
class BlockRead:
    """A block to read and the live parts that it fills; without parts, or if it is mapped, it is only verified."""

    block: SavedBlock
    dtype: torch.dtype
    parts: Sequence[_Part] = ()
    is_mapped: bool = False

    def run(self, files: Any, path: str) -> None:
        """Reads the block, verifies its checksum and then fills the parts; numbers read in place are verified after.

        Raises a :class:`DamagedFile` where the file is too short, the checksum differs, or an archive is broken.
        """
        block, in_place = self.block, self._is_in_place()
        if block.is_archive:
            values = torch.empty(block.length, dtype=torch.uint8)
        else:
            values = self.parts[0].target if in_place else torch.empty(block.sizes, dtype=self.dtype)
        memory = _memory(values)
        if self.is_mapped:
            num_bytes = block.length
        elif isinstance(files, LocalFileSystem):
            with open(f"{path}/{block.file}", "rb") as file:
                file.seek(block.start)
                num_bytes = file.readinto(memory)
        else:
            data = files.cat_file(f"{path}/{block.file}", start=block.start, end=block.start + block.length)
            num_bytes = len(data)
            memory[:num_bytes] = data
        location = f"{block.file}, bytes {block.start:,} to {block.start + block.length:,},"
        if num_bytes != block.length:
            raise DamagedFile(f"{location} ends after {num_bytes:,} of them")
        if block.checksum is not None and checksum_of(memory) != block.checksum:
            raise DamagedFile(f"{location} does not have the checksum that it was written with")
        if block.is_archive and self.parts:
            values = self._unpacked(memory)
        if not in_place:
            for part in self.parts:
                part.fill(values)

    def _unpacked(self, data: memoryview) -> Tensor:
        """Returns the tensor in an archive of ``torch.save``, without executing code; requires the block's sizes."""
        try:
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's own text says how to run the code that may be in there
            raise DamagedFile("a block holds something else than a tensor") from error
        except (RuntimeError, EOFError) as error:
            if "alloc" in str(error):  # torch has no type of its own for a lack of host memory, which may pass
                raise
            raise DamagedFile(f"{self.block.file} holds a broken archive: {error}") from error
        if not isinstance(values, Tensor) or values.dtype != self.dtype or tuple(values.shape) != self.block.sizes:
            raise DamagedFile(f"{self.block.file} holds something else than a part of its tensor")
        return values

    def _is_in_place(self) -> bool:
        """Returns whether the block can be read straight into the memory of its only live part."""
        if self.block.is_archive or len(self.parts) != 1 or self.parts[0].share is not None:
            return False
        target = self.parts[0].target
        is_alike = tuple(target.shape) == self.block.sizes and target.dtype == self.dtype
        return is_alike and target.device.type == "cpu" and target.is_contiguous()


def _reads(key: str, tensor: SavedTensor, shards: TensorShards, is_mapped: bool) -> list[BlockRead]:
    """Returns the saved blocks that overlap live shards; blocks that leave a gap are a :class:`DamagedFile`."""
    reads = []
    for block in tensor.blocks:
        parts = [part for shard in shards.shards if (part := _Part.shared(block, shard)) is not None]
        if parts:
            reads.append(BlockRead(block, tensor.dtype, parts, is_mapped))
    # the blocks of a tensor do not overlap, so that equal numbers of elements mean that every element is covered
    num_found = sum(part.target.numel() for read in reads for part in read.parts)
    num_needed = sum(shard.tensor.numel() for shard in shards.shards)
    if num_found < num_needed:
        raise DamagedFile(f"{num_needed - num_found:,} numbers of {key} are in none of its blocks")
    return reads


def _memory(tensor: Tensor) -> memoryview:
    """Returns a writable view of the bytes of a contiguous tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def not_read(checkpoint: str, error: BaseException) -> DamagedCheckpoint | RunError | UserError:
    """Returns, without raising it, the error for a checkpoint whose reading failed with ``error``.

    ``DamagedCheckpoint`` for contents that do not parse and for missing files, ``UserError`` for a lack of permission
    or of a file system's package, and ``RunError`` for any other error, which a retry may mend.
    """
    reason = str(error) if isinstance(error, DamagedFile) else f"{type(error).__name__}: {error}".strip()
    if isinstance(error, ValueError | LookupError | TypeError | AttributeError | FileNotFoundError):
        return DamagedCheckpoint(f"{checkpoint} is damaged: {reason}.")
    kind = UserError if isinstance(error, PermissionError | ImportError) else RunError
    return kind(f"{checkpoint} cannot be reached ({reason}); see that every rank may read it.")
