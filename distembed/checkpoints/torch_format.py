"""Reads the index of a checkpoint in torch's own format: of a stock model, or of an earlier version of distembed.

``torch.distributed.checkpoint`` writes its index, ``.metadata``, as a pickle, and a pickle may hold code. It is
unpickled with stand-ins for the few classes that belong there, which only keep their values. Any other name is refused
before it is looked up. Earlier versions of distembed wrote the checksum of each block into this file too.
"""

import io
import pickle
from typing import Any

import torch

from distembed.checkpoints.blocks import DamagedFile, SavedBlock, SavedTensor

_HOMES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_RECORDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_StorageInfo",
)
_DROPPED = {  # values that no reader needs
    ("torch.serialization", "_get_layout"),
    (_HOMES[0], "_MEM_FORMAT_ENCODING"),
    *((home, name) for home in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class _Record:
    """Stands in for a class of torch's index and keeps the values of an instance."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles torch's index with a :class:`_Record` for each class, and refuses any other name.

    A pickle can set attributes of a class, so each file gets new stand-ins and cannot change how another is read.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._records: dict[str, type[_Record]] = {name: type(name, (_Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if module in _HOMES and name in self._records:
            return self._records[name]
        if (module, name) in _DROPPED:
            return lambda *values: None
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        if value is torch.Size:
            return tuple
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has: loading it would run code")


def parse_torch_index(data: bytes) -> dict[str, SavedTensor]:
    """Returns the tensors that a ``.metadata`` file lists, by name, without its entries that are plain values.

    Raises an exception of any class for a file that is damaged or is no index.
    """
    index = _IndexUnpickler(data).load().state
    location_of_block: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for stored, info in index["storage_data"].items():
        location_of_block[stored.state["fqn"], stored.state.get("offset") or ()] = info.state
    # the index lists each block once; a small damaged file that repeats chunks would otherwise fill the memory
    room = len(location_of_block)
    tensors = {}
    for name, entry in index["state_dict_metadata"].items():
        if type(entry).__name__ != "TensorStorageMetadata":
            continue
        chunks = [chunk.state for chunk in entry.state["chunks"]]
        room -= len(chunks)
        if room < 0:
            raise DamagedFile("it lists the same blocks for many tensors")
        tensors[name] = SavedTensor(
            entry.state["properties"].state[0],
            entry.state["size"],
            [_block(location_of_block[name, chunk["offsets"]], chunk["offsets"], chunk["sizes"]) for chunk in chunks],
        )
    return tensors


def _block(info: dict[str, Any], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> SavedBlock:
    if info.get("transform_descriptors"):
        raise DamagedFile("its files are transformed")
    file, start, length = info["relative_path"], info["offset"], info["length"]
    return SavedBlock(file, start, length, info.get("checksum"), offsets, sizes, is_archive=True)
