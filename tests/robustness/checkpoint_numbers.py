"""All numbers of a checkpoint, read without a model, and checkpoints in the format of earlier versions of distembed."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata

from distembed.base.checksums import KEY, checksum_of, with_checksum
from distembed.checkpoints.blocks import read_blocks
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards


def saved_numbers(checkpoint: str) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint: weights, optimizer state and random state."""
    saved = SavedCheckpoint.read(checkpoint)
    tensors = {name: saved.empty(name) for name in saved.tensors}
    shards = {name: TensorShards.from_value(tensor) for name, tensor in tensors.items()}
    read_blocks(checkpoint, saved.tensors, shards)
    return tensors


def to_earlier_format(checkpoint: Path) -> None:
    """Rewrites a checkpoint as earlier versions did: files of torch's own, with checksums in ``.metadata``."""
    numbers = saved_numbers(str(checkpoint))
    progress = json.loads((checkpoint / "progress.json").read_text())
    for file in checkpoint.iterdir():
        file.unlink()
    dcp.save(numbers, storage_writer=FsspecWriter(str(checkpoint)), no_dist=True)
    kept = {key: value for key, value in progress.items() if key not in ("index_checksum", KEY)}
    (checkpoint / "progress.json").write_text(json.dumps(kept))
    change_metadata(checkpoint, lambda metadata: metadata)


def change_metadata(checkpoint: Path, change: Callable[[Metadata], Any]) -> None:
    """Replaces ``.metadata`` by what ``change`` returns, with the checksums of the blocks as they are now."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        whole = (checkpoint / info.relative_path).read_bytes()
        info.checksum = checksum_of(whole[info.offset : info.offset + info.length])
    write_metadata(checkpoint, pickle.dumps(change(metadata)))


def write_metadata(checkpoint: Path, data: bytes) -> None:
    """Writes ``.metadata``, and its checksum into the last file."""
    (checkpoint / ".metadata").write_bytes(data)
    values = json.loads((checkpoint / "progress.json").read_text())
    values = {**values, "metadata_checksum": checksum_of(data)}
    values.pop(KEY, None)
    (checkpoint / "progress.json").write_text(json.dumps(with_checksum(values)))
