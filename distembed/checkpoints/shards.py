"""Tensors of which each rank holds some shards, as ``torch.distributed.checkpoint`` saves and loads them.

Names and sizes are those of the whole tensor, whatever the plan, the kernel and the number of ranks, so that any layout
reads what any other has written. A table of 6 rows and 4 columns, on two ranks::

      row-wise      column-wise      replicated
    | 0 0 0 0 |    | 0 0 1 1 |      | * * * * |
    | 0 0 0 0 |    | 0 0 1 1 |      | * * * * |
    | 1 1 1 1 |    | 0 0 1 1 |      | * * * * |

Shards are saved in blocks of rows of at most :data:`MAX_BLOCK_BYTES`: a reader holds a whole saved block while it takes
its part out, so that a rank that needs half of a table never holds the other half. The cost is an entry of about 1 KB
in the metadata for each block.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from distembed.optim.local_shards import LocalShard, local_shards

MAX_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class AddedShard(LocalShard):
    """A shard to which what is loaded is added, instead of replacing it.

    Attributes:
        share: The factor on what is added.
    """

    share: float


class TensorShards:
    """What this rank holds of a tensor; it has the methods by which ``torch.distributed.checkpoint`` knows its own.

    Args:
        size: Size of the whole tensor.
        dtype: Type of the tensor's numbers.
        shards: The shards on this rank; those without elements are left out.
        replicated: Whether every rank holds the same.
    """

    def __init__(
        self, size: Sequence[int], dtype: torch.dtype, shards: Sequence[LocalShard], replicated: bool = False
    ) -> None:
        self._size = torch.Size(size)
        self.dtype = dtype
        self.shards = [shard for shard in shards if shard.tensor.numel()]
        self.replicated = replicated

    @classmethod
    def from_value(cls, value: Tensor | ShardedTensor) -> "TensorShards":
        """Returns views of a state dict's entry: a sharded tensor, or a tensor that every rank has."""
        if isinstance(value, ShardedTensor):
            metadata = value.metadata()
            return cls(metadata.size, metadata.tensor_properties.dtype, local_shards(value))
        return cls(value.size(), value.dtype, local_shards(value), replicated=True)

    def size(self) -> torch.Size:
        """Returns the size of the whole tensor."""
        return self._size

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards on this rank."""
        return sum(shard.tensor.nbytes for shard in self.shards)

    def to_save(self, name: str, rank: int, world_size: int) -> "TensorShards":
        """Returns the blocks that this rank saves: all of its own shards, or its part of what every rank has."""
        blocks = [block for shard in self.shards for block in _blocks(shard)]
        if self.replicated:
            first = zlib.crc32(name.encode())  # spreads tensors of one block over the ranks
            blocks = [block for i, block in enumerate(blocks) if (first + i) % world_size == rank]
        return TensorShards(self._size, self.dtype, blocks, self.replicated)

    def with_tensors(self, tensors: Iterable[Tensor]) -> "TensorShards":
        """Returns the same shards with other tensors of their sizes, in their order."""
        shards = [replace(shard, tensor=tensor) for shard, tensor in zip(self.shards, tensors, strict=True)]
        return TensorShards(self._size, self.dtype, shards, self.replicated)

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self._size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.tensor.size())) for shard in self.shards
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._tensors_by_offsets[index.offset]

    @cached_property
    def _tensors_by_offsets(self) -> dict[tuple[int, ...] | None, Tensor]:
        return {torch.Size(shard.offsets): shard.tensor for shard in self.shards}


def _blocks(shard: LocalShard) -> Iterator[LocalShard]:
    """Yields blocks of a shard's rows, each of at most :data:`MAX_BLOCK_BYTES` or of one row."""
    if shard.tensor.nbytes <= MAX_BLOCK_BYTES:
        yield shard
        return
    rows_per_block = max(1, MAX_BLOCK_BYTES * len(shard.tensor) // shard.tensor.nbytes)
    for start in range(0, len(shard.tensor), rows_per_block):
        rows = shard.tensor[start : start + rows_per_block]
        yield LocalShard((shard.offsets[0] + start, *shard.offsets[1:]), rows)


class ShardsSavePlanner(DefaultSavePlanner):
    """Saves :class:`TensorShards` in nested dictionaries."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class ShardsLoadPlanner(DefaultLoadPlanner):
    """Loads into :class:`TensorShards` in a flat dictionary."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._target(read_item)
        # shares are added once they are read
        return torch.empty_like(target.tensor) if isinstance(target, AddedShard) else target.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        target = self._target(read_item)
        if isinstance(target, AddedShard):
            target.tensor.add_(tensor, alpha=target.share)

    def _target(self, item: ReadItem) -> LocalShard:
        """Returns the part of a shard that is read."""
        # shards may begin at the same place, so they are known by their number
        whole: LocalShard = self.state_dict[item.dest_index.fqn].shards[item.dest_index.index]
        part = whole.tensor
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return replace(whole, tensor=part)
