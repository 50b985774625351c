"""Whether a graph's folder is whole, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from distembed.base.checksums import Verification
from distembed.base.errors import UserError
from distembed.graph.csr import Graph
from distembed.graph.folder import GRAPH_FILE, REMEDY, GraphDescription


def missing_checksums_note(folder: str | os.PathLike[str]) -> str | None:
    """Returns a sentence for the user where a graph was made before descriptions had checksums; None for others.

    Raises:
        UserError: The folder is no graph.
    """
    if GraphDescription.load(Path(folder)).has_own_checksum:
        return None
    return (
        f"the graph {folder} carries no checksum of its {GRAPH_FILE}, since an older version made it: damage there may "
        "pass unseen; prepare it again to have one."
    )


def verify_graph(folder: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Verification:
    """Holds every byte of every file of a graph against its checksums, and its neighbours against its ids.

    The memory does not grow with the graph.

    Args:
        folder: Folder that ``distembed prepare graph`` made.
        progress: Function that is called now and then with the number of bytes read so far.

    Returns:
        All problems, not only the first.

    Raises:
        UserError: The folder is no graph, or its description cannot be used, so that nothing can be held against it.
    """
    folder = Path(folder)
    description = GraphDescription.load(folder)
    found = Verification(has_checksums=description.has_own_checksum)
    found.add((), folder / GRAPH_FILE)
    for stored in description.arrays.values():
        problem = stored.problem(folder)
        found.add([] if problem is None else [f"{problem}; {REMEDY}."], folder / stored.file)
        if progress is not None:
            progress(found.num_bytes)
    if not found.problems:
        try:
            Graph.open(folder, verified=False).require_own_ids()
        except UserError as error:
            found.problems.append(str(error))
    return found
