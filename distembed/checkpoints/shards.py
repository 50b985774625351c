"""Tensors of which each rank holds some boxes, as ``torch.distributed.checkpoint`` saves and loads them.

Names and sizes are those of the whole tensor, whatever the plan, the kernel and the number of ranks, so that any layout
reads what any other has written. A table of 6 rows and 4 columns, on two ranks::

      row-wise      column-wise      replicated
    | 0 0 0 0 |    | 0 0 1 1 |      | * * * * |
    | 0 0 0 0 |    | 0 0 1 1 |      | * * * * |
    | 1 1 1 1 |    | 0 0 1 1 |      | * * * * |

Boxes are saved in blocks of rows of at most :data:`MAX_BLOCK_BYTES`: a reader holds a whole saved block while it takes
its part out, so that a rank that needs half of a table never holds the other half. The cost is an entry of about 1 KB
in the metadata for each block.
"""

import zlib
from collections.abc import Iterator, Sequence
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

MAX_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Box:
    """One box of a tensor.

    Attributes:
        offsets: of its first element within the whole.
        tensor: its elements; loading writes into it.
        share: where given, what is loaded is added to ``tensor``, times this, instead of replacing it.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    share: float | None = None


class TensorShards:
    """What this rank holds of a tensor; it has the methods by which ``torch.distributed.checkpoint`` knows its own.

    Args:
        size: of the whole.
        dtype: of the whole.
        boxes: on this rank; empty ones are left out.
        replicated: whether every rank holds the same.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box], replicated: bool = False) -> None:
        self._size = torch.Size(size)
        self.dtype = dtype
        self.boxes = [box for box in boxes if box.tensor.numel()]
        self.replicated = replicated

    @classmethod
    def of(cls, value: Tensor | ShardedTensor) -> "TensorShards":
        """Views of a state dict's entry: a sharded tensor's local shards, or a tensor that every rank has."""
        if isinstance(value, ShardedTensor):
            metadata = value.metadata()
            shards = [Box(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in value.local_shards()]
            return cls(metadata.size, metadata.tensor_properties.dtype, shards)
        whole = Box((0,) * value.dim(), value.detach())
        return cls(value.size(), value.dtype, [whole], replicated=True)

    def size(self) -> torch.Size:
        """Of the whole."""
        return self._size

    @property
    def num_bytes(self) -> int:
        """Of the boxes on this rank."""
        return sum(box.tensor.nbytes for box in self.boxes)

    def to_save(self, name: str, rank: int, world_size: int) -> "TensorShards":
        """The blocks that this rank saves: all of its own, and its part of what every rank has."""
        blocks = [block for box in self.boxes for block in _blocks(box)]
        if self.replicated:
            first = zlib.crc32(name.encode())  # spreads tensors of one block over the ranks
            blocks = [block for i, block in enumerate(blocks) if (first + i) % world_size == rank]
        return TensorShards(self._size, self.dtype, blocks, self.replicated)

    def copied_to_host(self) -> "TensorShards":
        """The same in memory of its own."""
        copies = [replace(box, tensor=box.tensor.to("cpu", copy=True)) for box in self.boxes]
        return TensorShards(self._size, self.dtype, copies, self.replicated)

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
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.tensor.size())) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._tensor_of_offsets[index.offset]

    @cached_property
    def _tensor_of_offsets(self) -> dict[tuple[int, ...] | None, Tensor]:
        return {torch.Size(box.offsets): box.tensor for box in self.boxes}


def _blocks(box: Box) -> Iterator[Box]:
    if box.tensor.nbytes <= MAX_BLOCK_BYTES:
        yield box
        return
    rows_per_block = max(1, MAX_BLOCK_BYTES * len(box.tensor) // box.tensor.nbytes)
    for start in range(0, len(box.tensor), rows_per_block):
        rows = box.tensor[start : start + rows_per_block]
        yield Box((box.offsets[0] + start, *box.offsets[1:]), rows)


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
        box = self._box(read_item)
        # shares are added once they are read
        return box.tensor if box.share is None else torch.empty_like(box.tensor)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        box = self._box(read_item)
        if box.share is not None:
            box.tensor.add_(tensor, alpha=box.share)

    def _box(self, item: ReadItem) -> Box:
        """The part of a box that is read."""
        # boxes may begin at the same place, so they are known by their number
        whole: Box = self.state_dict[item.dest_index.fqn].boxes[item.dest_index.index]
        part = whole.tensor
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return replace(whole, tensor=part)
