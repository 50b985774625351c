"""All numbers of a checkpoint, read without a model."""

import torch
from torch import Tensor

from distembed.base.ranks import Collectives
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.transfer import read_tensors


def saved_numbers(checkpoint: str) -> dict[str, Tensor]:
    """Returns every tensor of a checkpoint: weights, optimizer state and random state."""
    saved = SavedCheckpoint.read(checkpoint)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.tensors.items()}
    shards = {name: TensorShards.from_value(tensor) for name, tensor in tensors.items()}
    read_tensors(checkpoint, saved.metadata, shards, Collectives())
    return tensors
