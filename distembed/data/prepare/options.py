"""Options and limits of a preparation, its progress, and its notes for the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.machine import usable_cores
from distembed.base.names import one_of
from distembed.base.units import format_bytes
from distembed.data.prepare.split import SplitRule


@dataclass(frozen=True)
class ProgressUpdate:
    """How far one stage of a preparation is."""

    stage: str  # ``read``, ``vocabulary`` (but of interactions), ``write`` in this order, or a small one beside these
    bytes_done: int  # of the stage's work
    bytes_total: int | None  # equals ``bytes_done`` when the stage is over; None where it is not known, as with pipes
    rows_done: int  # well-formed rows that the stage has dealt with


ProgressCallback = Callable[[ProgressUpdate], None]
NoteCallback = Callable[[str], None]
"""Takes one sentence about the input, for example that a header was left out."""


def ignore(_: object) -> None:
    """Takes a progress or a note, and does nothing."""


INTERPRETER_BYTES = 224 << 20
"""Memory of an idle process (Python, numpy, PyArrow and DuckDB: 140 MB), and memory that is kept when freed."""
LEAST_MEMORY_BYTES = INTERPRETER_BYTES + (96 << 20)
"""The least that a process can work in, everything included."""
MOST_THREADS = 1024
ENGINES = ("threads", "ray", "spark")
"""Who can run the tasks (``engine.py``)."""

# Each thread has one block, one is being read and one waits. Parsing takes so many times a block's size.
_MEMORY_PER_BLOCK_BYTE, _MEMORY_PER_BYTE_OF_LISTS = 10, 20
_OTHER_BLOCKS = 2
_LEAST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ResourceLimits:
    """How much memory and how many threads a preparation may use; on a cluster, each of its tasks."""

    memory_limit_bytes: int = 2 << 30  # of the process, everything included; 320 MiB or more
    threads: int | None = None  # 1 to 1024; None for as many as this process has processors, and for 1 on a cluster
    work: Path | None = None  # folder for the work, where the output is a URL; the workers of a cluster share it
    engine: str = "threads"  # who runs the tasks: threads of this process, or a ``ray`` or ``spark`` cluster

    def __post_init__(self) -> None:
        one_of("engine (--engine)", self.engine, ENGINES)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"threads (--threads) is {self.threads}: it must be in 1 to {MOST_THREADS}")
        if self.memory_limit_bytes < LEAST_MEMORY_BYTES:
            raise UserError(
                f"memory_limit_bytes (--memory-limit) is {self.memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} "
                f"({format_bytes(LEAST_MEMORY_BYTES)}) are needed, Python's own memory included"
            )

    @property
    def is_cluster(self) -> bool:
        return self.engine != "threads"

    @property
    def working_bytes(self) -> int:
        return self.memory_limit_bytes - INTERPRETER_BYTES

    @property
    def num_threads(self) -> int:
        """Number of threads that parse: as many as was asked for, else one for each core; fewer where memory is."""
        most = self.working_bytes // (_MEMORY_PER_BYTE_OF_LISTS * _LEAST_BLOCK_BYTES) - _OTHER_BLOCKS
        threads = self.threads or (1 if self.is_cluster else usable_cores())
        return min(threads, most, MOST_THREADS)

    def block_bytes(self, has_lists: bool) -> int:
        """Bytes of text in a block of rows with or without lists."""
        memory_per_byte = _MEMORY_PER_BYTE_OF_LISTS if has_lists else _MEMORY_PER_BLOCK_BYTE
        most = self.working_bytes // (memory_per_byte * (self.num_threads + _OTHER_BLOCKS))
        return min(16 << 20, max(_LEAST_BLOCK_BYTES, most))

    @property
    def num_counters(self) -> int:
        """Databases at a time in which columns are counted; each takes up to 80 MB more than its limit."""
        return max(1, min(self.num_threads, self.working_bytes // (160 << 20)))

    @property
    def counting_bytes(self) -> int:
        return self.working_bytes // (2 * self.num_counters)

    @property
    def num_writers(self) -> int:
        """Files written at a time; two row groups and Parquet's buffers take up to 128 MiB for each."""
        return max(1, min(self.num_threads, self.working_bytes // (128 << 20)))


@dataclass(frozen=True)
class PrepareOptions:
    """The options that a dataset's bytes depend on, besides the rows and the layout of their columns."""

    split: str = "0.8,0.1,0.1"  # how rows are divided (:class:`~distembed.data.prepare.split.SplitRule`)
    max_rejected: float = 0.01  # largest share of malformed rows that is no error; ``rejected.tsv`` lists them
    # a dataset, by folder or URL, or a run, whose ids and learnt transforms are applied; None learns new ones
    vocabulary: str | os.PathLike[str] | None = None
    grow: bool = False  # whether values that ``vocabulary`` lacks get ids behind those that are there
    recorded: Mapping[str, Any] = field(default_factory=dict)  # in the manifest, before what was learnt

    @property
    def rule(self) -> SplitRule:
        return SplitRule.parse(self.split)

    def __post_init__(self) -> None:
        if not 0 <= self.max_rejected <= 1:
            raise UserError(
                f"max_rejected (--max-rejected) is {self.max_rejected}: it is a share of the rows, between 0 and 1"
            )
        if self.grow and self.vocabulary is None:
            raise UserError("grow (--grow) is given without vocabulary (--vocabulary), the dataset or run to grow")
        if not self.rule.trains and (self.vocabulary is None or self.grow):
            remedy = "leave out --grow" if self.grow else "name a dataset or a run with vocabulary (--vocabulary)"
            raise UserError(
                f"split (--split) is {self.split!r}, so that no row trains, and ids are learnt on rows that train: "
                f"{remedy}, or give a split such as '0.8,0.1,0.1'"
            )
