"""What ``tools/gpu.sh`` runs on a card: one file a part, and the names of all of them.

A part's module has ``measure(results, scale)``: it asks ``results`` for the cells that are missing, measures each, and
adds its rows; what has been added is on the disk, so that a part which was stopped goes on with the next cell.
:mod:`gpu.driver` gives each part a process and its time, and :mod:`gpu.table` shows the rows; neither loads torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of the whole.

    Attributes:
        title: Title of its table.
        seconds: Time after which it is stopped on a card; what it has by then is kept, and the next call goes on.
    """

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
"""All parts by the names of their modules, in the order in which they run: 535 seconds at most."""

DRY_SECONDS = 240
"""Time after which any part is stopped on a processor."""
