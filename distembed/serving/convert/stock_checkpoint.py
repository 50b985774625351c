"""The tensors of a stock model's checkpoint, read one at a time; nothing that it holds is executed.

It is a folder that ``torch.distributed.checkpoint`` wrote, of any plan on any number of ranks, a file of ``torch.save``
with plain tensors, or a checkpoint of a distembed run.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distembed.base.errors import UserError, one_line
from distembed.checkpoints.blocks import SavedTensor, read_blocks
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import LAST_FILE, METADATA_FILE
from distembed.checkpoints.torch_format import parse_torch_index


class StockCheckpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by their names; a tensor in nested dictionaries is named ``outer.inner``.

    A tensor of a folder is read when it is asked for, so that memory holds one table at a time; the tensors of a file
    are mapped into memory.

    Args:
        path: A folder of ``torch.distributed.checkpoint``, or a file of ``torch.save``.

    Raises:
        UserError: The checkpoint does not exist, is damaged, or holds more than tensors and plain values.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._saved = _read_index(self.path) if self.path.is_dir() else {}
        self._loaded = {} if self.path.is_dir() else dict(_flat(_read_file(self.path)))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._loaded:
            return self._loaded[name]
        saved = self._saved[name]
        tensor = torch.empty(saved.size, dtype=saved.dtype)
        read_blocks(str(self.path), self._saved, {name: TensorShards.from_value(tensor)})
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in (self._saved or self._loaded)  # the mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved or self._loaded)

    def __len__(self) -> int:
        return len(self._saved or self._loaded)


def _read_index(folder: Path) -> Mapping[str, SavedTensor]:
    """Returns the tensors of a folder: of torch's own format, or of a run of distembed."""
    if (folder / LAST_FILE).exists():
        return SavedCheckpoint.read(str(folder)).tensors_for_use()
    try:
        return parse_torch_index((folder / METADATA_FILE).read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {METADATA_FILE}; give a folder that torch.distributed.checkpoint.save wrote, or a file "
            "of torch.save."
        ) from None
    except Exception as error:  # a damaged file may fail to read in any way
        raise UserError(
            f"{folder / METADATA_FILE} is not that of a checkpoint of tensors ({one_line(error)}); nothing of it was "
            "executed. Write it with torch.distributed.checkpoint.save."
        ) from error


def _read_file(file: Path) -> Any:
    """Returns the contents of a file of ``torch.save``; refuses other contents than tensors and plain values."""
    if not file.exists():
        raise UserError(f"{file} is not there; give a folder of torch.distributed.checkpoint, or a file of torch.save.")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file that is none may fail to read in any way
        raise UserError(
            f"{file} holds more than tensors and plain values, or is no file of torch.save ({type(error).__name__}); "
            "nothing of it was executed. Save a state dict of whole tensors, or write it with "
            "torch.distributed.checkpoint.save where tables are sharded."
        ) from error


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested dictionaries by their dotted names."""
    if isinstance(values, Tensor):
        yield prefix, values
    elif isinstance(values, Mapping):
        for key, inner in values.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
