"""The parts that ``tools/gpu.sh`` runs on a GPU, one module for each.

A part's module has ``measure(results, scale)``. It asks ``results`` for the missing cells, measures each, and adds its
rows. Added rows are on disk at once, so that a stopped part resumes with the next cell. :mod:`gpu.driver` gives each
part a process and a time limit, and :mod:`gpu.table` prints the rows; neither loads torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The title of a part's table, and the seconds after which the part is stopped on a GPU; it keeps its rows."""

    title: str
    seconds: int


PARTS = {
    "tests": Part("Tests marked `gpu`", 150),
    "embedding": Part("Tables alone: forward, backward, update", 85),
    "fused": Part("Tables in one pass, against a lookup of each partition", 50),
    "step": Part("Whole training steps of DLRM", 90),
    "launches": Part("What a step launches", 45),
    "sse": Part("Steps with replaced ids", 35),
    "memory": Part("Peak memory against the plan", 45),
    "checkpoint": Part("Checkpoints", 35),
}
"""Parts by the names of their modules, in the order in which they run: 535 seconds at most."""

DRY_SECONDS = 240
"""Time after which a part is stopped on a processor."""
