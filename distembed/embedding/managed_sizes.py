"""The numbers of slots, candidates, buckets and bytes of managed ids, computed without torch."""

import zlib
from dataclasses import dataclass

from distembed.embedding.settings import ManagedConfig

RESERVED = 2
"""Slots that no id is given: 0 for missing values, 1 for unknown ids."""
UNKNOWN = 1
NUM_COUNTERS = 6
"""Numbers that a bucket keeps besides its entries."""
_SLOTS_PER_BUCKET = 2**16
"""The least number of slots of a bucket where there are several: buckets then fill within 1% of each other."""
_MOST_BUCKETS = 64
_ENTRY_BYTES, _PLACE_BYTES = 16, 4
_SORTED_BYTES = 16  # an id and its slot, where ids are looked up and not counted


@dataclass(frozen=True)
class ManagedSizes:
    """The sizes of one table's identities."""

    name: str  # of the table
    config: ManagedConfig

    @property
    def num_buckets(self) -> int:
        """The number of buckets, a power of two; it depends on ``size`` alone."""
        buckets = 1
        while buckets < _MOST_BUCKETS and self.config.size - RESERVED >= 2 * buckets * _SLOTS_PER_BUCKET:
            buckets *= 2
        return buckets

    @property
    def slots_per_bucket(self) -> int:
        return (self.config.size - RESERVED) // self.num_buckets

    @property
    def candidates_per_bucket(self) -> int:
        candidates = self.config.admission.candidates
        return -(-(max(1, self.config.size // 4) if candidates is None else candidates) // self.num_buckets)

    @property
    def entries_per_bucket(self) -> int:
        return self.slots_per_bucket + self.candidates_per_bucket

    @property
    def places_per_bucket(self) -> int:
        """The size of a bucket's hash table: the power of two that is at least twice the number of its entries."""
        return 1 << (2 * self.entries_per_bucket - 1).bit_length()

    def first_slot(self, bucket: int) -> int:
        """Returns the first slot of a bucket."""
        return RESERVED + bucket * self.slots_per_bucket

    @property
    def first_rank(self) -> int:
        """The number of the rank of bucket 0, before it is divided by the number of ranks."""
        return zlib.crc32(self.name.encode())

    @property
    def saved_bytes(self) -> int:
        """The bytes of ids, counts and batches in a checkpoint."""
        return self.num_buckets * (self.entries_per_bucket * _ENTRY_BYTES + NUM_COUNTERS * 8)

    @property
    def serving_bytes(self) -> int:
        """The bytes of raw ids and slots in an export, which has no candidates and counts."""
        return self.config.size * _SORTED_BYTES

    @property
    def memory_bytes(self) -> int:
        """The bytes of identities in host memory while training: the saved ones and the hash tables."""
        return self.saved_bytes + self.num_buckets * self.places_per_bucket * _PLACE_BYTES

    def rank_bytes(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns a rank's part of :attr:`memory_bytes`, and the bytes that an evaluation copies to its device."""
        own_buckets = len(range((rank - self.first_rank) % world_size, self.num_buckets, world_size))
        copied = (own_buckets * self.slots_per_bucket + 1) * _SORTED_BYTES  # with the missing value
        return own_buckets * (self.memory_bytes // self.num_buckets), copied

    def as_json(self) -> dict[str, int]:
        """Returns the sizes in plain values; ``memory_bytes`` are of training, on all ranks together."""
        return {
            "slots": self.num_buckets * self.slots_per_bucket,
            "candidates": self.num_buckets * self.candidates_per_bucket,
            "buckets": self.num_buckets,
            "saved_bytes": self.saved_bytes,
            "memory_bytes": self.memory_bytes,
        }

    @property
    def description(self) -> str:
        """A line that is equal for two tables whose saved identities give equal slots."""
        return f"managed ids, {self.num_buckets} buckets of {self.slots_per_bucket} slots"
