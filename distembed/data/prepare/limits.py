"""The memory and the threads that a preparation of Criteo rows may use, and how it shares them out."""

from __future__ import annotations

import os
from dataclasses import dataclass

from distembed.errors import UserError

LEAST_MEMORY_BYTES = 64 << 20
MOST_THREADS = 1024

# Each thread has one block, one is being read and one waits; parsing takes up to 8 times a block's size.
_MEMORY_PER_BLOCK_BYTE = 8
_OTHER_BLOCKS = 2
_LEAST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ResourceLimits:
    """How much memory and how many threads a preparation may use.

    The figures in the properties are upper bounds, measured on Criteo rows.

    Attributes:
        memory_limit_bytes: Working memory above what the interpreter itself takes (about 150 MB); 64 MiB or more.
        threads: Threads that work, 1 to 1024; None for as many as there are processors for this process.

    Raises:
        UserError: A limit is too small.
    """

    memory_limit_bytes: int = 2 << 30
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"threads (--threads) is {self.threads}: it must be in 1 to {MOST_THREADS}")
        if self.memory_limit_bytes < LEAST_MEMORY_BYTES:
            raise UserError(f"memory_limit_bytes is {self.memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} (64 MiB)")

    @property
    def num_threads(self) -> int:
        """Number of threads that parse: as many as was asked for, else one for each core; fewer where memory is."""
        most = self.memory_limit_bytes // (_MEMORY_PER_BLOCK_BYTE * _LEAST_BLOCK_BYTES) - _OTHER_BLOCKS
        return min(self.threads or len(os.sched_getaffinity(0)), most, MOST_THREADS)

    @property
    def block_bytes(self) -> int:
        """Bytes of text in a block."""
        blocks = self.num_threads + _OTHER_BLOCKS
        return min(16 << 20, max(_LEAST_BLOCK_BYTES, self.memory_limit_bytes // (_MEMORY_PER_BLOCK_BYTE * blocks)))

    @property
    def vocabulary_keys(self) -> int:
        """Distinct keys that each thread may hold in memory; sorting and merging take up to 80 bytes a key."""
        return max(1 << 16, self.memory_limit_bytes // (160 * self.num_threads))

    @property
    def num_writers(self) -> int:
        """Files written at a time; two row groups and Parquet's buffers take up to 128 MiB for each."""
        return max(1, min(self.num_threads, self.memory_limit_bytes // (128 << 20)))
