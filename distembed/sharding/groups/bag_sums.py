"""What summing every partition's vectors over bags takes: time, memory and launches, for the groups that do it."""

from distembed.composition import Product
from distembed.sharding.groups.base import composing_bytes
from distembed.sharding.groups.load import (
    FLOAT_BYTES,
    LONG_BYTES,
    GroupLoad,
    Launches,
    LookupMemory,
    LookupWork,
    TableLoad,
)

BAG_SUMS_LAUNCHES = Launches(group=1, partition=10)


def bag_sums_work(load: TableLoad) -> LookupWork:
    """Returns the work of summing every partition's vectors over bags and composing the sums."""
    lookups = [(load.num_ids, load.num_bags)] * len(load.slice.partitions)
    return LookupWork(lookups, composing_bytes(load.slice, load.num_bags))


def bag_sums_memory(load: GroupLoad) -> LookupMemory:
    """Returns the bytes of summing every partition's vectors over bags and composing the sums."""
    vectors = load.num_bags * sum(load.dims) * FLOAT_BYTES
    num_slices, combine = len(load.dims), load.table.combine
    saves_vectors = num_slices > 1 and isinstance(combine, Product)
    # rows of all partitions; where bags begin, as they came and in 64 bits
    indices = num_slices * load.num_ids * LONG_BYTES + load.num_bags * LONG_BYTES
    # a product of three saves that of the first two as well
    saved = vectors + max(0, num_slices - 2) * load.output_bytes if saves_vectors else 0
    # FBGEMM keeps the indices of the batch before
    forward = indices + load.num_ids * LONG_BYTES + (0 if saves_vectors or num_slices == 1 else vectors)
    saved += indices + embedding_bag_bytes(load, load.num_bags)
    return LookupMemory(saved, forward, backward_bytes=vectors, update_bytes=vectors)


def embedding_bag_bytes(load: GroupLoad, num_bags: int) -> int:
    """Returns what torch's ``embedding_bag`` saves for replicated weights: each bag's number of ids and its largest."""
    return sum(load.is_replicated) * num_bags * 2 * LONG_BYTES
