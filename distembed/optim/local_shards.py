"""The parts of a tensor that lie on this rank."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class LocalShard:
    """A part of a tensor that lies on this rank.

    Attributes:
        offsets: Place of its first element within the whole tensor, one number a dimension.
        tensor: Its elements, a view of the live tensor.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


def local_shards(value: Tensor | ShardedTensor) -> list[LocalShard]:
    """Returns the parts on this rank of an entry of a state dict: the whole where every rank has it.

    Parts without elements are left out.
    """
    if isinstance(value, ShardedTensor):
        shards = [LocalShard(tuple(it.metadata.shard_offsets), it.tensor.detach()) for it in value.local_shards()]
    else:
        shards = [LocalShard((0,) * value.dim(), value.detach())]
    return [shard for shard in shards if shard.tensor.numel()]
