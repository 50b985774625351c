"""The disk space that a preparation of Criteo rows takes, which is checked before it begins.

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

from distembed.data.prepare.inputs import is_pipe
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.parse_rows import parse_block
from distembed.data.prepare.progress import NoteCallback
from distembed.data.prepare.source_files import SourceReader, is_gzip
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


def require_space(sources: Sequence[Path], output: Path, limits: ResourceLimits, note: NoteCallback) -> None:
    """Makes sure that the output's disk has room for the preparation, as far as the files tell.

    Args:
        sources: Files to prepare.
        output: Dataset folder to be made.
        limits: Memory and threads that will be used.
        note: Function that is told where the room may not suffice.

    Raises:
        UserError: A file cannot be read.
        RunError: The room does not suffice.
    """
    files = [source for source in sources if not is_pipe(source)]
    free_bytes = shutil.disk_usage(nearest_folder(output)).free
    if free_bytes > _PLENTY * sum(file.stat().st_size for file in files):
        return
    needs = [_need(kind, limits) for kind in _by_kind(files)]
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


def disk_is_full(error: Exception, sources: Sequence[Path], output: Path) -> str:
    """Returns the text of an error that says how much room is needed, given the system's error."""
    if getattr(error, "errno", None) == errno.EFBIG:
        return (
            f"{output} could not be written: this process may not write files so large (see `ulimit -f`); allow it to"
        )
    folder = nearest_folder(output.parent)
    sizes = [
        source.stat().st_size * (_GZIP_RATIO if is_gzip(source) else 1) for source in sources if not is_pipe(source)
    ]
    needed = f", about {format_bytes(sum(sizes))} are needed while preparing (a third of it for the dataset)"
    return (
        f"the disk of {folder} is full: {free_space(folder)} are free{needed if sizes else ''}. Nothing was left "
        f"behind of {output}; free some space or name an output elsewhere"
    )


def _by_kind(files: Sequence[Path]) -> list[list[Path]]:
    """Returns the plain files and the compressed ones, of each kind the largest first, and no empty list."""
    ordered = sorted(files, key=lambda file: -file.stat().st_size)
    kinds = [[file for file in ordered if is_gzip(file) == packed] for packed in (False, True)]
    return [kind for kind in kinds if kind]


def _need(files: Sequence[Path], limits: ResourceLimits) -> _Need:
    """Returns what files of one kind take, as far as the first block of the first of them tells."""
    reader = SourceReader(files[0], limits.block_bytes)
    blocks = reader.blocks()
    text = next(blocks, b"")
    blocks.close()
    share = sum(file.stat().st_size for file in files) / max(1, reader.bytes_read if reader.is_gzip else len(text))
    return _Need(share * spooled_bytes(parse_block(text)) if text else 0, share * _DATASET_SHARE * len(text))
