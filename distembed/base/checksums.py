"""Checksums against damage: of bytes, of files, and of JSON objects that carry their own.

XXH3 of 128 bits (https://xxhash.com) is as fast as memory can be read, and no accident passes it. It does not protect
from forgery: whoever can change a file can change its checksum too.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

KEY = "checksum"
"""The key under which a JSON object carries the checksum of its other values."""

_PIECE_BYTES = 4 << 20


@dataclass
class Verification:
    """The result of comparing a dataset, a checkpoint or a graph with its checksums.

    Attributes:
        problems: A sentence for each problem, with the file and the remedy.
    """

    problems: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0

    def add(self, problems: Iterable[str], file: Path) -> None:
        """Adds the problems of a file, and counts the file and its bytes."""
        self.problems.extend(problems)
        self.num_files += 1
        with suppress(OSError):
            self.num_bytes += file.stat().st_size


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the checksum of bytes, as 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def running_checksum() -> xxhash.xxh3_128:
    """Returns a checksum to ``update`` with bytes as they come."""
    return xxhash.xxh3_128()


def file_checksum(file: Path | IO[bytes], num_bytes: int | None = None) -> str:
    """Returns the checksum of a whole file, or of an open file from its position on; of ``num_bytes`` at most.

    An open file is left at the end of the bytes that were read.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return file_checksum(opened, num_bytes)
    digest = running_checksum()
    while chunk := file.read(_PIECE_BYTES if num_bytes is None else min(_PIECE_BYTES, num_bytes)):
        digest.update(chunk)
        num_bytes = None if num_bytes is None else num_bytes - len(chunk)
    return str(digest.hexdigest())


@dataclass(frozen=True)
class FileChecksum:
    """The size and the checksum of a whole file."""

    bytes: int
    checksum: str

    @classmethod
    def of(cls, path: Path) -> "FileChecksum":
        """Returns the size and the checksum of a file as it is."""
        return cls(path.stat().st_size, file_checksum(path))

    def problem(self, path: Path) -> str | None:
        """Compares a file with this size and checksum; returns the difference as a clause, None for an equal file."""
        try:
            if not path.is_file():
                return f"{path} is missing"
            size = path.stat().st_size
            if size != self.bytes:
                return f"{path} has {size:,} bytes where {self.bytes:,} were written: it was cut short or changed"
            if file_checksum(path) != self.checksum:
                return f"{path} is damaged: its checksum differs from the recorded one"
        except OSError as error:
            return f"{path} cannot be read ({error})"
        return None


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with the checksum of its values added; the order of keys does not matter to it."""
    return {**values, KEY: _json_checksum(values)}


def checksum_differs(values: Mapping[str, Any]) -> bool:
    """Returns whether a JSON object carries a wrong checksum of its other values; False where it carries none."""
    return KEY in values and values[KEY] != _json_checksum({key: values[key] for key in values if key != KEY})


def _json_checksum(values: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(values))  # keys that are numbers are text in JSON, and sort as text
    return checksum_of(json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode())
