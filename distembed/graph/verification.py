"""Whether a graph's folder is whole, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from distembed.checksums import Verification
from distembed.errors import UserError
from distembed.graph.folder import GRAPH_FILE, GraphDescription, map_array, require_checksum


def verify_graph(folder: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Verification:
    """Holds every byte of every file of a graph against its checksums.

    Args:
        folder: Folder that ``distembed prepare graph`` made.
        progress: Function that is called now and then with the number of bytes read so far.

    Returns:
        All problems, not only the first.

    Raises:
        UserError: The folder is no graph.
    """
    folder = Path(folder)
    description = GraphDescription.load(folder)
    found = Verification(num_files=1, num_bytes=(folder / GRAPH_FILE).stat().st_size)
    for stored in description.arrays.values():
        found.num_files += 1
        try:
            map_array(folder, stored)
            require_checksum(folder, stored)
        except UserError as error:
            found.problems.append(str(error))
        found.num_bytes += stored.bytes
        if progress is not None:
            progress(found.num_bytes)
    return found
