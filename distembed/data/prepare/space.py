"""The error of a preparation whose disk fills up."""

from __future__ import annotations

import errno
from pathlib import Path

from distembed.data.prepare.blocks import RowSource
from distembed.files import free_space, nearest_folder
from distembed.units import format_bytes

_GZIP_RATIO = 3


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
