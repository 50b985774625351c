"""Reads a checkpoint's weights straight into those of a module that is whole on this process, at the speed of the disk.

``torch.distributed.checkpoint`` reads a block, decodes it, and copies its numbers. A block is a zip archive whose
member ``data/0`` holds the numbers as they are in memory, uncompressed, so that they can be read to where they belong::

    block     | header | data.pkl: type, shape | ... | data/0: the numbers        | directory |
    read to   | scratch                              | the weight's own memory    | scratch   |

A few threads read. Each asks for the memory of a piece, reads it and takes its checksum while the piece is in the
processor's cache. No process group has a part in it. What is laid out otherwise, such as columns of a table, and what
does not lie on a local disk, is decoded by torch, block after block.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from distembed.base.checksums import running_checksum
from distembed.base.errors import UserError
from distembed.checkpoints.content import describe_tables, live_weights
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.store import open_file_system
from distembed.checkpoints.transfer import not_read
from distembed.checkpoints.verified_files import DamagedFile, damaged_block, read_block

_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
_MOST_THREADS = 4
_LOCAL_HEADER_BYTES = 30
_MADV_POPULATE_WRITE = 23
"""Linux's advice that memory is about to be written to, since 5.14; the module ``mmap`` has no name for it."""
_C_LIBRARY = ctypes.CDLL(None)


def load_weights_alone(checkpoint: str, model: nn.Module) -> dict[str, Any]:
    """Reads all weights of a model from a checkpoint, on this process alone and without any collective.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        model: A plain module with weights on one device, none of them on ``meta``; it is overwritten.

    Returns:
        What :func:`distembed.checkpoints.save_checkpoint` was given as ``progress``.

    Raises:
        UserError: The checkpoint is of another model, or cannot be reached.
        DamagedCheckpoint: It is damaged; some of the weights may be overwritten.
    """
    saved = SavedCheckpoint.read(checkpoint)
    if differences := saved.differences(live_weights(model), describe_tables(model), None):
        raise UserError(differences)
    weights = {f"model.{name}": weight.detach() for name, weight in model.state_dict().items()}
    on_host = {name: weight if weight.device.type == "cpu" else weight.cpu() for name, weight in weights.items()}
    try:
        _read_blocks(saved, on_host)
    except Exception as error:  # a damaged file may fail to read in any way
        raise not_read(checkpoint, error) from error
    for name, weight in weights.items():
        if on_host[name] is not weight:
            weight.copy_(on_host[name])
    return saved.progress


@dataclass(frozen=True)
class _Block:
    """A block of the checkpoint, and the part of a weight that it holds."""

    info: _StorageInfo
    target: Tensor


def _read_blocks(saved: SavedCheckpoint, weights: Mapping[str, Tensor]) -> None:
    """Fills the weights, a few files and blocks at a time."""
    by_file: dict[str, list[_Block]] = {}
    for index, info in saved.metadata.storage_data.items():
        if index.fqn in weights:
            target = _part(saved, index, weights[index.fqn])
            by_file.setdefault(info.relative_path, []).append(_Block(info, target))
    files, path = open_file_system(saved.path)
    if not isinstance(files, LocalFileSystem):
        for name, blocks in by_file.items():
            with files.open(f"{path}/{name}", "rb") as file:
                for block in blocks:
                    _decode(file, block)
        return
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "distembed-load") as pool:
        for name, blocks in by_file.items():
            with open(f"{path}/{name}", "rb", buffering=0) as opened:
                # list: the file stays open until all of its blocks are read
                list(pool.map(partial(_read_local, opened.fileno()), blocks))


def _part(saved: SavedCheckpoint, index: MetadataIndex, weight: Tensor) -> Tensor:
    """Returns the view of a weight that a block holds."""
    offsets = index.offset or torch.Size([0] * weight.dim())
    chunks = saved.tensors[index.fqn].chunks
    size = next((chunk.sizes for chunk in chunks if tuple(chunk.offsets) == tuple(offsets)), None)
    if size is None:
        raise DamagedFile(f"no part of {index.fqn} begins at {tuple(offsets)}")
    for dim, (start, length) in enumerate(zip(offsets, size, strict=True)):
        if not 0 <= start <= start + length <= weight.shape[dim]:
            raise DamagedFile(f"a part of {index.fqn} lies outside of it")
        weight = weight.narrow(dim, start, length)
    return weight


def _read_local(descriptor: int, block: _Block) -> None:
    """Fills a part of a weight from an open local file.

    Raises:
        DamagedFile: The file ends before the block does, or the block does not have its checksum.
    """
    place = _numbers_place(descriptor, block)
    if place is None:
        with closing(_Part(descriptor, 0, block.info.offset + block.info.length)) as file:
            _decode(file, block)
        return
    info, digest = block.info, running_checksum()
    end, numbers_end = info.offset + info.length, place + block.target.nbytes
    head, tail = bytearray(place - info.offset), bytearray(end - numbers_end)
    numbers = block.target.view(-1).view(torch.uint8).numpy().data
    for start, memory in ((info.offset, memoryview(head)), (place, numbers), (numbers_end, memoryview(tail))):
        for first in range(0, len(memory), _PIECE_BYTES):
            piece = memory[first : first + _PIECE_BYTES]
            _populate(piece)
            _fill(descriptor, start + first, piece, info)
            digest.update(piece)
    checksum = getattr(info, "checksum", None)
    if checksum is not None and digest.hexdigest() != checksum:
        raise damaged_block(info)


def _populate(memory: memoryview) -> None:
    """Has the system provide the pages of memory in one call; else each page interrupts the copy when it is reached.

    This is advice alone: where the system does not know it, pages come as they are written to.
    """
    if sys.platform == "linux":
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        num_bytes = address + len(memory) - start
        _C_LIBRARY.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)


def _fill(descriptor: int, offset: int, memory: memoryview, info: _StorageInfo) -> None:
    filled = 0
    while filled < len(memory):
        num_bytes = os.preadv(descriptor, [memory[filled:]], offset + filled)
        if not num_bytes:
            raise DamagedFile(f"{info.relative_path} ends after {offset + filled:,} bytes")
        filled += num_bytes


def _decode(file: BinaryIO | Any, block: _Block) -> None:
    """Fills a part of a weight by torch, from a block that is held against its checksum first."""
    data = read_block(file, block.info)
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or tensor.shape != block.target.shape:
        raise DamagedFile(f"{block.info.relative_path} holds something else than a part of its weight")
    block.target.copy_(tensor)


def _numbers_place(descriptor: int, block: _Block) -> int | None:
    """Returns where in the file the numbers of a block begin; None where they are not as they would be in memory."""
    info, target = block.info, block.target
    if info.length < _SMALL_BYTES or not target.is_contiguous() or sys.byteorder != "little":
        return None
    try:
        with closing(_Part(descriptor, info.offset, info.length)) as part, zipfile.ZipFile(part) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            numbers = members.get("data/0")
            if numbers is None or numbers.compress_type != zipfile.ZIP_STORED or numbers.file_size != target.nbytes:
                return None
            if not _is_plain(_member(part, members["data.pkl"]), target):
                return None
            if "byteorder" in members and _member(part, members["byteorder"]) != b"little":
                return None
            place = info.offset + _start(part, numbers)
    except (zipfile.BadZipFile, pickle.UnpicklingError, LookupError, EOFError, ValueError, TypeError):
        return None  # torch says what is wrong, after the checksum has
    return place if place + target.nbytes <= info.offset + info.length else None


def _start(part: _Part, member: zipfile.ZipInfo) -> int:
    """Returns where in the archive the bytes of a member begin."""
    part.seek(member.header_offset)
    header = part.read(_LOCAL_HEADER_BYTES)
    lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return member.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)


def _member(part: _Part, member: zipfile.ZipInfo) -> bytes:
    """Returns the bytes of a small member; zipfile itself would refuse them, since torch was kept from summing them."""
    part.seek(_start(part, member))
    return part.read(min(member.file_size, _SMALL_BYTES))


class _Described(pickle.Unpickler):
    """Reads how a tensor lies in its storage, and knows nothing else that could be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments[:4]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _is_plain(pickled: bytes, target: Tensor) -> bool:
    """Returns whether a pickled tensor has the target's type and shape, and its numbers in their order."""
    storage, offset, size, stride = _Described(io.BytesIO(pickled)).load()
    return (
        storage[1] == _STORAGES.get(target.dtype)
        and offset == 0
        and tuple(size) == tuple(target.shape)
        and tuple(stride) == target.stride()
    )


_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
}


class _Part(io.RawIOBase):
    """Bytes of an open file as a file of their own; several threads read several parts of one file at once."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length, self._position = descriptor, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        data = os.pread(
            self._descriptor, left if size is None or size < 0 else min(size, left), self._start + self._position
        )
        self._position += len(data)
        return data
