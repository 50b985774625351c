"""Checksums against damage: of bytes, of files, and of JSON objects that carry their own.

XXH3 of 128 bits (https://xxhash.com) is as fast as memory can be read, and no accident passes it. It does not protect
from forgery: whoever may change a file may change its checksum too, so that nothing is executed for a checksum's sake.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

KEY = "checksum"
"""The key under which a JSON object carries the checksum of its other values."""

_PIECE_BYTES = 4 << 20


@dataclass
class Verification:
    """What was found when something was held against its checksums as a whole.

    Attributes:
        problems: What is wrong, a sentence each that names the file and the remedy; empty where all is as it was
            written.
        num_files: Number of files that were looked at.
        num_bytes: Number of bytes that were read.
        has_checksums: Whether there were checksums; what was made by older versions has none, and then only sizes,
            numbers of rows and what can be decoded were checked.
    """

    problems: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0
    has_checksums: bool = True


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the checksum of bytes, as 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def file_checksum(file: Path | IO[bytes]) -> str:
    """Returns the checksum of a file's bytes, or of what is left to read of an open file.

    Raises:
        OSError: The file cannot be read.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return file_checksum(opened)
    digest = xxhash.xxh3_128()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return str(digest.hexdigest())


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with the checksum of its values, which the order of keys leaves the same."""
    return {**values, KEY: _json_checksum(values)}


def checksum_differs(values: Mapping[str, Any]) -> bool:
    """Returns whether a JSON object carries a checksum that is not that of its other values."""
    return KEY in values and values[KEY] != _json_checksum({key: values[key] for key in values if key != KEY})


def _json_checksum(values: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
