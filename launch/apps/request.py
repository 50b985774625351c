"""The request of a job: its nodes and processes, ``-j [MIN:]NODESxPROCESSES``, and their resources.

Fields of requests become arguments of TorchX's components, with their descriptions in ``torchx run ... --help``; see
:mod:`distembed.launch.components`.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Self

from distembed.base.errors import UserError

_FORM = re.compile(r"(?:(?:([0-9]+):)?([0-9]+)x)?([0-9]+)")


@dataclass(frozen=True)
class NodeRequest:
    """Resources of the nodes of a job, and its retries.

    Attributes:
        image: Container image that holds distembed, for `bench` a checkout of it; a folder on Ray.
        h: Named resource of a node, like gpu_8_h100, in place of cpu, gpu and memMB.
        cpu: Number of CPUs of a node.
        gpu: Number of GPUs of a node.
        memMB: Memory of a node in MB.
        env: Environment variables, K1=V1,K2=V2.
        mounts: Mounts of a container, type=bind,src=/host,dst=/container[,readonly].
        max_retries: How often the whole job is started again.
        python: Interpreter on the nodes.
    """

    image: str = ""
    h: str | None = None
    cpu: int | None = None
    gpu: int | None = None
    memMB: int | None = None
    env: dict[str, str] | None = None
    mounts: list[str] | None = None
    max_retries: int = 0
    python: str = "python"

    def changed(self, **fields: Any) -> Self:
        """Returns the request with other values of some fields; None and empty values change nothing.

        A named resource, ``h``, removes the numbers. Environment variables are added to the present ones.
        """
        changes = {name: value for name, value in fields.items() if value not in (None, "", {}, [])}
        if "env" in changes:
            changes["env"] = {**(self.env or {}), **changes["env"]}
        numbers: dict[str, Any] = dict.fromkeys(("cpu", "gpu", "memMB")) if "h" in changes else {}
        return replace(self, **{**numbers, **changes})


@dataclass(frozen=True)
class ElasticRequest(NodeRequest):
    """A request for training: also how ``torch.distributed.run`` starts its ranks, and starts them again.

    Attributes:
        max_restarts: How often processes that died are started again on the nodes that they run on.
        rdzv_port: Port of the first node at which nodes meet.
        join_timeout: Seconds that nodes wait for one another.
        last_call_timeout: Seconds that an elastic job waits for more nodes than it needs.
        grace_seconds: Seconds that processes have to save their state when the job is asked to end.
    """

    __pydantic_config__ = {"extra": "forbid"}  # a job that was kept in a file is read with pydantic

    max_restarts: int = 3
    rdzv_port: int = 29500
    join_timeout: int = 600
    last_call_timeout: int = 30
    grace_seconds: int = 120


@dataclass(frozen=True)
class Shape:
    """Nodes of a job, and processes on each of them; it starts and continues with ``min_nodes`` or more."""

    min_nodes: int
    max_nodes: int
    processes: int

    @property
    def elastic(self) -> bool:
        """Whether the job can run on fewer nodes than it asks for."""
        return self.min_nodes < self.max_nodes

    @property
    def nodes(self) -> str:
        """The nodes as ``torch.distributed.run --nnodes`` takes them: ``4`` or ``2:4``."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.elastic else str(self.max_nodes)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.processes}"


def parse_shape(j: str) -> Shape:
    """Reads ``4x8`` (4 nodes, 8 processes each), ``2:4x8`` (2 to 4 nodes) or ``8`` (8 processes on one node)."""
    forms = "give NODESxPROCESSES such as 4x8, MIN:NODESxPROCESSES such as 2:4x8, or PROCESSES of one node such as 8"
    matched = _FORM.fullmatch(j.strip())
    if matched is None:
        raise UserError(f"j is {j!r}; {forms}")
    least, nodes, processes = matched.groups()
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
