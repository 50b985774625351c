"""How many nodes and processes a job takes: ``-j [MIN:]NODESxPROCESSES``."""

import re
from dataclasses import dataclass

from distembed.base.errors import UserError

_FORM = re.compile(r"(?:(?:([0-9]+):)?([0-9]+)x)?([0-9]+)")


@dataclass(frozen=True)
class Shape:
    """Nodes of a job and processes on each of them.

    Args:
        min_nodes: Fewest nodes that the job starts and continues with.
        max_nodes: Most nodes that the job takes.
        processes: Ranks on each node.
    """

    min_nodes: int
    max_nodes: int
    processes: int

    @property
    def elastic(self) -> bool:
        """Whether it can run on fewer nodes than it asks for."""
        return self.min_nodes < self.max_nodes

    @property
    def nodes(self) -> str:
        """The nodes as ``torch.distributed.run --nnodes`` takes them: ``4`` or ``2:4``."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.elastic else str(self.max_nodes)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.processes}"


def parse_shape(j: str) -> Shape:
    """Reads ``4x8`` (4 nodes, 8 processes each), ``2:4x8`` (2 to 4 nodes) or ``8`` (8 processes on one node).

    Raises:
        UserError: The text has another form, holds a zero, or asks for more nodes at least than at most.
    """
    forms = "give NODESxPROCESSES such as 4x8, MIN:NODESxPROCESSES such as 2:4x8, or PROCESSES of one node such as 8"
    found = _FORM.fullmatch(j.strip())
    if found is None:
        raise UserError(f"j is {j!r}; {forms}")
    least, nodes, processes = found.groups()
    most = int(nodes or 1)
    shape = Shape(int(least or most), most, int(processes))
    if shape.min_nodes < 1 or shape.processes < 1:
        raise UserError(f"j is {j!r}: nodes and processes start at 1; {forms}")
    if shape.min_nodes > shape.max_nodes:
        raise UserError(
            f"j is {j!r}: at least {shape.min_nodes} nodes are more than the {shape.max_nodes} at most; "
            f"the fewest come first, as in {shape.max_nodes}:{shape.min_nodes}x{shape.processes}"
        )
    return shape
