"""Whether a stream of Arrow is compressed, which pyarrow tells nobody before it has unpacked what may be any size.

A message's metadata is a FlatBuffer: a table begins with the distance back to its vtable, which has the offset of each
field, or 0 where it is not there (https://flatbuffers.dev/internals, and format/Message.fbs of Arrow).
"""

from __future__ import annotations

import struct

import pyarrow as pa

_HEADER_TYPE, _HEADER = 1, 2
"""Fields of a message."""
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Types of its header."""
_DATA, _COMPRESSION = 1, 3
"""Field of a batch of a dictionary that has its values, and field of a batch that says how it is compressed."""


def is_compressed(stream: bytes) -> bool:
    """Returns whether a batch of a stream of Arrow is compressed.

    Raises:
        ArrowException: The stream is damaged; OSError: or it is none.
    """
    messages = pa.ipc.MessageReader.open_stream(stream)
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return False
        try:
            if _is_compressed(memoryview(message.metadata)):
                return True
        except struct.error as error:
            raise pa.ArrowInvalid(f"damaged metadata: {error}") from error


def _is_compressed(metadata: memoryview) -> bool:
    message = _follow(metadata, 0)
    kind_at = _field(metadata, message, _HEADER_TYPE)
    header_at = _field(metadata, message, _HEADER)
    kind = metadata[kind_at] if kind_at else 0
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or not header_at:
        return False
    batch = _follow(metadata, header_at)
    if kind == _DICTIONARY_BATCH:
        batch = _follow(metadata, _field(metadata, batch, _DATA))
    return _field(metadata, batch, _COMPRESSION) > 0


def _follow(metadata: memoryview, place: int) -> int:
    """Returns where the table is that an offset at a place points at."""
    return place + int(struct.unpack_from("<I", metadata, place)[0])


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Returns where a field of a table is; 0 where it is not there."""
    vtable = table - int(struct.unpack_from("<i", metadata, table)[0])
    size = int(struct.unpack_from("<H", metadata, vtable)[0])
    place = 4 + 2 * number
    offset = int(struct.unpack_from("<H", metadata, vtable + place)[0]) if place < size else 0
    return table + offset if offset else 0
