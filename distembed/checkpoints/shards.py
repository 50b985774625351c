"""Tensors whose shards are divided among ranks.

A saved tensor has the name and size of the whole tensor under any plan, kernel and number of ranks, so that any layout
reads a checkpoint of any other. A table of 6 rows and 4 columns, on two ranks::

      row-wise      column-wise      replicated
    | 0 0 0 0 |    | 0 0 1 1 |      | * * * * |
    | 0 0 0 0 |    | 0 0 1 1 |      | * * * * |
    | 1 1 1 1 |    | 0 0 1 1 |      | * * * * |

Shards are saved in blocks of rows of at most :data:`MAX_BLOCK_BYTES`. A reader that needs a part of a block holds the
whole block while it copies the part, so that a rank that needs half of a table never holds the other half.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from distembed.optim.live_state import LocalShard, local_shards

MAX_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class AddedShard(LocalShard):
    """A shard to which the saved numbers are added, times ``share``, instead of replacing its own."""

    share: float


class TensorShards:
    """The shards of one tensor on this rank; shards without elements are dropped.

    ``size`` is the size of the whole tensor over all ranks. If ``replicated``, every rank holds the whole tensor.
    """

    def __init__(
        self, size: Sequence[int], dtype: torch.dtype, shards: Sequence[LocalShard], replicated: bool = False
    ) -> None:
        self.size = torch.Size(size)
        self.dtype = dtype
        self.shards = [shard for shard in shards if shard.tensor.numel()]
        self.replicated = replicated

    @classmethod
    def from_value(cls, value: Tensor | ShardedTensor) -> "TensorShards":
        """Returns views of a state dict's entry; a plain tensor counts as replicated on all ranks."""
        if isinstance(value, ShardedTensor):
            metadata = value.metadata()
            return cls(metadata.size, metadata.tensor_properties.dtype, local_shards(value))
        return cls(value.size(), value.dtype, local_shards(value), replicated=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards on this rank."""
        return sum(shard.tensor.nbytes for shard in self.shards)

    def to_save(self, name: str, rank: int, world_size: int) -> "TensorShards":
        """Returns the blocks that this rank saves: of its shards all, of a replicated tensor every world_size-th."""
        blocks = [block for shard in self.shards for block in _blocks(shard)]
        if self.replicated:
            first = zlib.crc32(name.encode())  # spreads tensors of one block over the ranks
            blocks = [block for i, block in enumerate(blocks) if (first + i) % world_size == rank]
        return TensorShards(self.size, self.dtype, blocks, self.replicated)

    def with_tensors(self, tensors: Iterable[Tensor]) -> "TensorShards":
        """Returns a copy in which the i-th shard has the i-th of ``tensors``, for example a copy on the host."""
        shards = [replace(shard, tensor=tensor) for shard, tensor in zip(self.shards, tensors, strict=True)]
        return TensorShards(self.size, self.dtype, shards, self.replicated)


def _blocks(shard: LocalShard) -> Iterator[LocalShard]:
    """Yields blocks of a shard's rows, each of at most :data:`MAX_BLOCK_BYTES` or of one row."""
    if shard.tensor.nbytes <= MAX_BLOCK_BYTES:
        yield shard
        return
    rows_per_block = max(1, MAX_BLOCK_BYTES * len(shard.tensor) // shard.tensor.nbytes)
    for start in range(0, len(shard.tensor), rows_per_block):
        rows = shard.tensor[start : start + rows_per_block]
        yield LocalShard((shard.offsets[0] + start, *shard.offsets[1:]), rows)
