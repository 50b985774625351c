"""A checkpoint's files, written with a checksum of each block and read without believing any that is wrong.

``torch.distributed.checkpoint`` writes a file a rank, block after block, and a ``.metadata`` that says which bytes of
which file a block has. The checksum of a block stands there too, beside its place, and that of ``.metadata`` in
``progress.json``, which has its own. So a rank verifies what it reads and nothing else, in the one pass in which it
reads it, and each byte that has an effect is covered. Checkpoints of earlier versions have none; they are read as they
are.
"""

import io
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from distembed.base.checksums import checksum_of
from distembed.checkpoints.metadata import parse_metadata
from distembed.checkpoints.store import METADATA_FILE


class DamagedFile(ValueError):
    """A file of a checkpoint that does not hold what was written to it."""


class ChecksumWriter(FsspecWriter):
    """Writes a checkpoint's files and keeps the checksum of each block and of ``.metadata``.

    Args:
        checkpoint: Local path or URL of the folder to write to.

    Attributes:
        metadata_checksum: That of ``.metadata``, on the rank that has written it; None until then.
    """

    def __init__(self, checkpoint: str) -> None:
        super().__init__(checkpoint, per_thread_copy_ahead=0)
        self._files = _ChecksumFiles()
        self.path = self._files.init_path(checkpoint)
        self.fs = self._files  # type: ignore[assignment]  # torch itself puts another class here
        self.metadata_checksum: str | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _without_crc32():
            written = super().write_data(plan, planner)
        for result in written.value():
            info = result.storage_data
            info.checksum = self._files.checksums[info.relative_path][info.offset]
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.metadata_checksum = self._files.checksums[f"{METADATA_FILE}.tmp"][0]


class VerifyingReader(FsspecReader):
    """Reads a checkpoint's files, and refuses blocks that are not as they were written.

    Args:
        checkpoint: Local path or URL of the checkpoint.
        metadata: What its ``.metadata`` says, by :func:`read_verified_metadata`.
    """

    def __init__(self, checkpoint: str, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: IO[bytes], info: _StorageInfo) -> IO[bytes]:
        return io.BytesIO(read_block(file, info))


def read_verified_metadata(read: Callable[[str], bytes], checksum: str | None) -> Metadata:
    """Returns what a checkpoint's ``.metadata`` says, without executing anything.

    Args:
        read: Returns the bytes of a file of the checkpoint.
        checksum: That of the file; None for a checkpoint without checksums.

    Raises:
        Exception: The file cannot be read, or is damaged.
    """
    data = read(METADATA_FILE)
    if checksum is not None and checksum_of(data) != checksum:
        raise DamagedFile(f"{METADATA_FILE} does not have the checksum that it was written with")
    try:
        metadata = parse_metadata(data)
    except Exception as error:  # a damaged pickle may fail in any way
        raise DamagedFile(f"{METADATA_FILE}: {error}") from error
    if checksum is not None and not all(hasattr(info, "checksum") for info in metadata.storage_data.values()):
        raise DamagedFile(f"{METADATA_FILE} has no checksums of some blocks")
    return metadata


def require_sizes(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Makes sure that the files of all blocks are there and end where the last block does.

    Args:
        metadata: What ``.metadata`` says.
        sizes: Bytes of each file that is there, by name.

    Raises:
        DamagedFile: A file is missing, or is too short.
    """
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if name not in sizes:
            raise DamagedFile(f"{name} is missing")
        if sizes[name] < end:
            raise DamagedFile(f"{name} ends after {sizes[name]:,} of {end:,} bytes")


def read_block(file: IO[bytes], info: _StorageInfo) -> bytes:
    """Returns the bytes of a block of an open file.

    Raises:
        DamagedFile: The file ends before it, or it does not have its checksum.
    """
    file.seek(info.offset)
    data = file.read(info.length)
    if len(data) != info.length:
        raise DamagedFile(f"{_place(info)} ends after {len(data):,} of them")
    checksum = getattr(info, "checksum", None)
    if checksum is not None and checksum_of(data) != checksum:
        raise damaged_block(info)
    return data


def damaged_block(info: _StorageInfo) -> DamagedFile:
    """Returns the error of a block that is not as it was written."""
    return DamagedFile(f"{_place(info)} does not have the checksum that it was written with")


def _place(info: _StorageInfo) -> str:
    return f"{info.relative_path}, bytes {info.offset:,} to {info.offset + info.length:,},"


@contextmanager
def _without_crc32() -> Generator[None, None, None]:
    """Keeps torch from computing checksums of its own within the block, which take longer and are never verified."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _ChecksumFiles(FileSystem):
    """Fsspec's files; what is written to them has a checksum from each place that the writer asks for to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, Mapping[int, str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            checksummed = _ChecksumStream(stream)
            yield checksummed
            checksummed.end_block()
            self.checksums[str(path).rpartition("/")[2]] = checksummed.checksums


class _ChecksumStream:
    """A stream that is written to, with a checksum of each block: torch asks where it stands before and after one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_128()
        self._start = self._position = 0
        self.checksums: dict[int, str] = {}

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._position += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        self.end_block()
        return self._position

    def end_block(self) -> None:
        """Ends a block here, if there is any since the last one."""
        if self._position > self._start:
            self.checksums[self._start] = self._digest.hexdigest()
            self._digest, self._start = xxhash.xxh3_128(), self._position

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()
