"""The disk space and the time that a preparation takes, which are estimated before it begins.

The first block of the largest input is parsed (of the largest plain one and of the largest compressed one), and the
rest is taken to be like it:

- *Disk*. The spool lies there as a whole while the dataset is written, so the spool is the least that is needed: of
  Criteo's rows 0.4 of the text, and the dataset 0.2 to 0.3. What is less than ``_SURE`` of the estimate is refused,
  what is less than the estimate noted.
- *Time*, in seconds of one core::

      bytes * (read and parsed, as measured)  +  values * 16 ns  +  keys of blocks * 0.25 us

  The values (rows times columns) are written; the keys of blocks (distinct values of each column in each block) are
  sorted, counted and looked up. It is divided by the threads of all processes of all machines. A disk that is slower
  than that decides instead: the spool is written and read once, and the dataset written.

The two constants were measured on Criteo's rows on a core of an Intel Xeon (``tools/RESULTS.md``), where text is parsed
in 13 ns a byte. Inputs of no known size, such as pipes, are not counted. Where there is plenty of space and little to
do nothing is estimated.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distembed.data.prepare.blocks import Part, RowSource
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.progress import NoteCallback
from distembed.data.prepare.spool import spooled_bytes
from distembed.files import free_bytes, free_space, nearest_folder, require_free_space
from distembed.units import format_bytes, format_duration

# So many times the size of the files is more than any rows take.
_PLENTY = 20
_SURE = 0.7
_DATASET_SHARE = 0.6
_GZIP_RATIO = 3
_SECONDS_PER_VALUE = 16e-9
_SECONDS_PER_KEY = 250e-9
# What is smaller takes seconds.
_WORTH_ESTIMATING_BYTES = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """What a preparation takes.

    Attributes:
        num_rows: Rows of the inputs.
        spool_bytes: Disk space of what waits for its ids.
        dataset_bytes: Disk space of the dataset.
        core_seconds: Seconds that one core would take.
    """

    num_rows: float = 0
    spool_bytes: float = 0
    dataset_bytes: float = 0
    core_seconds: float = 0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> Estimate:
        return Estimate(*(times * each for each in vars(self).values()))


def estimate(source: RowSource, limits: ResourceLimits) -> Estimate:
    """Returns what a preparation takes, as far as the first blocks of its inputs tell.

    Raises:
        UserError: An input cannot be read.
    """
    return sum((_estimate(source, kind, limits) for kind in _by_kind(source)), Estimate())


def require_space(
    source: RowSource, output: Path, limits: ResourceLimits, note: NoteCallback, begun: Path | None = None
) -> None:
    """Makes sure that the disk has room for the preparation, and says how long it takes, as far as the inputs tell.

    Args:
        source: The inputs.
        output: Dataset folder to be made.
        limits: Memory, threads and processes that will be used.
        note: Function that is told of a long preparation, and where the room may not suffice.
        begun: Folder with what is written already, if there is one.

    Raises:
        UserError: An input cannot be read.
        RunError: The room does not suffice.
    """
    input_bytes = sum(each.num_bytes or 0 for each in source.inputs)
    free = free_bytes(output)
    if free > _PLENTY * input_bytes and input_bytes < _WORTH_ESTIMATING_BYTES:
        return
    found = estimate(source, limits)
    about = int(found.spool_bytes + found.dataset_bytes)
    if input_bytes >= _WORTH_ESTIMATING_BYTES:
        threads = limits.num_threads * limits.processes * limits.num_nodes
        note(
            f"by the first rows there are about {found.num_rows:,.0f}, which take about "
            f"{format_duration(found.core_seconds / threads)} with {threads} threads, {format_bytes(about)} of disk "
            f"while preparing, and {format_bytes(int(found.dataset_bytes))} as a dataset"
        )
    there = 0 if begun is None else _bytes_in(begun)
    require_free_space(
        output,
        int(_SURE * found.spool_bytes) - there,
        f"about {format_bytes(about)} are needed in all while preparing, by the first rows. Free space, or name "
        "an output on another disk",
    )
    if free + there < about:
        note(
            f"{output} may not fit on its disk: about {format_bytes(about)} are needed while preparing, by the "
            f"first rows, and {format_bytes(free)} are free"
        )


def _bytes_in(folder: Path) -> int:
    """Returns the size of all files in a folder, in which other processes may be at work."""
    num_bytes = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(path, file)).st_size
    return num_bytes


def disk_is_full(error: Exception, source: RowSource, output: Path) -> str:
    """Returns the text of an error that says how much room is needed, given the system's error."""
    if getattr(error, "errno", None) == errno.EFBIG:
        return (
            f"{output} could not be written: this process may not write files so large (see `ulimit -f`); allow it to"
        )
    folder = nearest_folder(output.parent)
    sizes = [
        each.num_bytes * (_GZIP_RATIO if each.is_compressed else 1)
        for each in source.inputs
        if each.num_bytes is not None
    ]
    needed = f", about {format_bytes(sum(sizes))} are needed while preparing (a third of it for the dataset)"
    return (
        f"the disk of {folder} is full: {free_space(folder)} are free{needed if sizes else ''}. Nothing was left "
        f"behind of {output}; free some space or name an output elsewhere"
    )


def _by_kind(source: RowSource) -> list[list[int]]:
    """Returns the numbers of the plain inputs and of the compressed ones, the largest first, and no empty list."""
    sizes = {number: each.num_bytes for number, each in enumerate(source.inputs) if each.num_bytes is not None}
    ordered = sorted(sizes, key=lambda number: -sizes[number])
    kinds = [
        [number for number in ordered if source.inputs[number].is_compressed == packed] for packed in (False, True)
    ]
    return [kind for kind in kinds if kind]


def _estimate(source: RowSource, numbers: Sequence[int], limits: ResourceLimits) -> Estimate:
    """Returns what inputs of one kind take, as far as the first block of the first of them tells."""
    started = time.thread_time()
    opened = source.open(Part(numbers[0]), limits.block_bytes)
    blocks = opened.raw_blocks()
    first = next(blocks, None)
    if first is None:
        return Estimate()
    parsed = source.parse(first)
    seconds = time.thread_time() - started
    blocks.close()
    spooled = spooled_bytes(parsed, source.layout)
    num_values = parsed.num_rows * len(source.layout.numbers) + sum(len(ids.codes) for ids in parsed.ids)
    num_keys = sum(len(ids.keys) for ids in parsed.ids)
    seconds += num_values * _SECONDS_PER_VALUE + num_keys * _SECONDS_PER_KEY
    read = sum(source.inputs[number].num_bytes or 0 for number in numbers) / max(1, opened.bytes_read)
    return Estimate(parsed.num_rows, spooled, _DATASET_SHARE * spooled, seconds) * read
