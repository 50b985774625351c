"""The memory, the threads and the processes that a preparation may use, and how it shares them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distembed.cores import usable_cores
from distembed.errors import UserError
from distembed.units import format_bytes

INTERPRETER_BYTES = 200 << 20
"""Memory of a process before it works (Python, numpy, PyArrow and DuckDB: 140 MB), and of what is kept when freed."""
LEAST_MEMORY_BYTES = INTERPRETER_BYTES + (88 << 20)
"""The least that a process can work in, everything included."""
MOST_THREADS = 1024
MOST_PROCESSES = 4096

# Each thread has one block, one is being read and one waits; parsing takes up to 8 times a block's size.
_MEMORY_PER_BLOCK_BYTE = 8
_OTHER_BLOCKS = 2
_LEAST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ResourceLimits:
    """How much memory, and how many threads and processes, a preparation may use on this machine.

    The figures in the properties are for one process; they are upper bounds, measured on Criteo rows.

    Attributes:
        memory_limit_bytes: Memory of all processes of this machine, everything included; 288 MiB for each or more.
        threads: Threads that work in all processes of this machine, 1 to 1024; None for as many as there are
            processors for this process.
        processes: Number of processes on this machine, and on each of the others.
        node: Number of this machine, from 0.
        num_nodes: Number of machines that prepare the same dataset, in a folder that all of them share.
        work: Folder for what is needed only meanwhile, where the output is a URL; all machines share it.

    Raises:
        UserError: A limit is too small, or a number is not in its range.
    """

    memory_limit_bytes: int = 2 << 30
    threads: int | None = None
    processes: int = 1
    node: int = 0
    num_nodes: int = 1
    work: Path | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"threads (--threads) is {self.threads}: it must be in 1 to {MOST_THREADS}")
        if not 1 <= self.processes <= MOST_PROCESSES:
            raise UserError(f"processes (--processes) is {self.processes}: it must be in 1 to {MOST_PROCESSES}")
        if not 0 <= self.node < self.num_nodes <= MOST_PROCESSES:
            raise UserError(
                f"node (--node) is {self.node}/{self.num_nodes}: of 4 machines they are 0/4, 1/4, 2/4 and 3/4, and "
                f"there may be {MOST_PROCESSES}"
            )
        if self.memory_limit_bytes < self.processes * LEAST_MEMORY_BYTES:
            least = self.processes * LEAST_MEMORY_BYTES
            raise UserError(
                f"memory_limit_bytes (--memory-limit) is {self.memory_limit_bytes}: at least {least} "
                f"({format_bytes(least)}) are needed by {self.processes} processes, Python's own memory included"
            )

    @property
    def working_bytes(self) -> int:
        """Memory that a process may use above what the interpreter takes."""
        return self.memory_limit_bytes // self.processes - INTERPRETER_BYTES

    @property
    def num_threads(self) -> int:
        """Number of threads that parse: as many as was asked for, else one for each core; fewer where memory is."""
        most = self.working_bytes // (_MEMORY_PER_BLOCK_BYTE * _LEAST_BLOCK_BYTES) - _OTHER_BLOCKS
        threads = (self.threads or usable_cores()) // self.processes
        return min(max(1, threads), most, MOST_THREADS)

    @property
    def block_bytes(self) -> int:
        """Bytes of text in a block."""
        blocks = self.num_threads + _OTHER_BLOCKS
        return min(16 << 20, max(_LEAST_BLOCK_BYTES, self.working_bytes // (_MEMORY_PER_BLOCK_BYTE * blocks)))

    @property
    def num_counters(self) -> int:
        """Databases at a time in which columns are counted; each takes up to 80 MB more than its limit."""
        return max(1, min(self.num_threads, self.working_bytes // (160 << 20)))

    @property
    def counting_bytes(self) -> int:
        """Memory limit of each database."""
        return self.working_bytes // (2 * self.num_counters)

    @property
    def num_writers(self) -> int:
        """Files written at a time; two row groups and Parquet's buffers take up to 128 MiB for each."""
        return max(1, min(self.num_threads, self.working_bytes // (128 << 20)))
