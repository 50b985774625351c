"""The disk space that a preparation takes, which is checked before it begins.

The spool lies there as a whole while the dataset is written, so the spool is the least that is needed. How large it
becomes is known from the first block of the largest file (of the largest plain one and of the largest compressed one),
which is parsed for it: on real rows 0.4 of the text, and the dataset 0.2 to 0.3. Files whose first block says little of
the rest are allowed for: what is less than ``_SURE`` of the estimate is refused, what is less than the estimate noted.

Pipes are not counted, since nothing is known of them. Where there is plenty of space nothing is estimated.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distembed.data.prepare.blocks import Part, RowSource
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.progress import NoteCallback
from distembed.data.prepare.spool import spooled_bytes
from distembed.files import free_space, nearest_folder, require_free_space
from distembed.units import format_bytes

# So many times the size of the files is more than any rows take.
_PLENTY = 20
_SURE = 0.7
_DATASET_SHARE = 0.3
_GZIP_RATIO = 3


@dataclass(frozen=True)
class _Need:
    """What the files take: the spool, and about what the dataset beside it takes."""

    spool_bytes: float
    dataset_bytes: float


def require_space(source: RowSource, output: Path, limits: ResourceLimits, note: NoteCallback) -> None:
    """Makes sure that the output's disk has room for the preparation, as far as the files tell.

    Args:
        source: The inputs.
        output: Dataset folder to be made.
        limits: Memory and threads that will be used.
        note: Function that is told where the room may not suffice.

    Raises:
        UserError: A file cannot be read.
        RunError: The room does not suffice.
    """
    free_bytes = shutil.disk_usage(nearest_folder(output)).free
    if free_bytes > _PLENTY * sum(each.num_bytes or 0 for each in source.inputs):
        return
    needs = [_need(source, kind, limits) for kind in _by_kind(source)]
    spool_bytes = sum(need.spool_bytes for need in needs)
    about_bytes = int(spool_bytes + sum(need.dataset_bytes for need in needs))
    require_free_space(
        output,
        int(_SURE * spool_bytes),
        f"about {format_bytes(about_bytes)} are needed in all while preparing, by the first rows. Free space, or name "
        "an output on another disk",
    )
    if free_bytes < about_bytes:
        note(
            f"{output} may not fit on its disk: about {format_bytes(about_bytes)} are needed while preparing, by the "
            f"first rows, and {format_bytes(free_bytes)} are free"
        )


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


def _need(source: RowSource, numbers: Sequence[int], limits: ResourceLimits) -> _Need:
    """Returns what inputs of one kind take, as far as the first block of the first of them tells."""
    opened = source.open(Part(numbers[0]), limits.block_bytes)
    blocks = opened.raw_blocks()
    first = next(blocks, None)
    blocks.close()
    if first is None:
        return _Need(0, 0)
    share = sum(source.inputs[number].num_bytes or 0 for number in numbers) / max(1, opened.bytes_read)
    spooled = spooled_bytes(source.parse(first), source.layout)
    return _Need(share * spooled, share * _DATASET_SHARE * len(first))
