"""The disk space of a preparation: refused before where it surely does not suffice, explained where it runs out."""

from __future__ import annotations

import errno
from pathlib import Path

from distembed.data.prepare.blocks import RowSource
from distembed.files import free_space, nearest_folder, require_free_space
from distembed.units import format_bytes

_LEAST_SHARE = 0.1
"""Disk space that rows take at least while preparing, by the bytes of the inputs; Criteo's take 0.6."""
_GZIP_RATIO = 3


def require_space(source: RowSource, output: Path) -> None:
    """Makes sure, before anything is written, that the disk does not surely lack the room.

    Raises:
        RunError: It does.
    """
    input_bytes = sum(each.num_bytes or 0 for each in source.inputs)
    require_free_space(
        output,
        int(_LEAST_SHARE * input_bytes),
        f"the inputs have {format_bytes(input_bytes)}. Free space, or name an output on another disk",
    )


def disk_is_full(error: Exception, source: RowSource, output: Path) -> str:
    """Returns the text of an error that says how much room is needed, given the system's error."""
    if getattr(error, "errno", None) == errno.EFBIG:
        return (
            f"{output} could not be written: this process may not write files so large (see `ulimit -f`); allow it to"
        )
    folder = nearest_folder(output.parent)
    needed = sum((each.num_bytes or 0) * (_GZIP_RATIO if each.is_compressed else 1) for each in source.inputs)
    said = f", about {format_bytes(needed)} are needed while preparing (a third of it for the dataset)"
    return (
        f"the disk of {folder} is full: {free_space(folder)} are free{said if needed else ''}. Nothing was left "
        f"behind of {output}; free some space or name an output elsewhere"
    )
