"""Reading ``.metadata`` of a checkpoint, which torch writes as a pickle, without executing anything.

Whoever hands over a pickle hands over code, if it is loaded as it comes. Here only the classes that
``torch.distributed.checkpoint`` puts there are known, all of which only hold values; anything else that a file names is
refused before it is looked up. What comes out is then held against what torch's classes promise, since a pickle may
give any attribute any value.
"""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_KNOWN: dict[tuple[str, str], Any] = {
    (home.__name__, name): getattr(home, name)
    for home, names in (
        (
            metadata,
            (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (filesystem, ("_StorageInfo",)),
        (torch, ("Size",)),
        (torch.serialization, ("_get_layout",)),
    )
    for name in names
}
_KNOWN |= {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of ``torch.distributed.checkpoint`` and no other."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which no checkpoint has: loading it would run code"
            ) from None


def parse_metadata(data: bytes) -> Metadata:
    """Returns what the bytes of a ``.metadata`` file say.

    Raises:
        Exception: They are damaged, name a class that has no place there, or describe what no checkpoint can be.
    """
    found = _MetadataUnpickler(io.BytesIO(data)).load()
    _require(type(found) is Metadata, "it holds no metadata")
    _require(type(found.state_dict_metadata) is dict and type(found.storage_data) is dict, "it lists no tensors")
    for name, entry in found.state_dict_metadata.items():
        if type(entry) is TensorStorageMetadata:
            _require_tensor(name, entry)
    for index, info in found.storage_data.items():
        _require(type(index) is MetadataIndex and type(info) is _StorageInfo, "it lists what is no part of a file")
        path, offset, length = info.relative_path, info.offset, info.length
        _require(
            type(path) is str and "/" not in path and "\\" not in path and path.endswith(".distcp"),
            f"it reads from {path!r}",
        )
        _require(
            type(offset) is int and type(length) is int and offset >= 0 <= length,
            f"it reads {length!r} bytes at {offset!r}",
        )
        _require(not getattr(info, "transform_descriptors", None), "its files are transformed")
    return found


def _require_tensor(name: object, entry: TensorStorageMetadata) -> None:
    sizes = [entry.size, *(size for chunk in entry.chunks if _is_chunk(chunk) for size in (chunk.offsets, chunk.sizes))]
    _require(
        type(name) is str
        and type(entry.properties) is TensorProperties
        and isinstance(entry.properties.dtype, torch.dtype)
        and len(sizes) == 1 + 2 * len(entry.chunks)
        and all(
            type(size) is torch.Size and len(size) == len(entry.size) and min(size, default=0) >= 0 for size in sizes
        ),
        f"{name!r} is no tensor",
    )


def _is_chunk(value: object) -> bool:
    return type(value) is ChunkStorageMetadata


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(what)
