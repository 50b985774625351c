"""What a job asks for, as values that travel from the command line to the scripts of the nodes.

The fields are arguments of TorchX's components under the same names, and their descriptions are those of
``torchx run ... --help``; see :mod:`launch.apps.component`.
"""

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class NodeRequest:
    """What every component asks of the nodes that it runs on.

    Attributes:
        image: Container image that holds distembed, for `bench` a checkout of it; a folder on Ray.
        h: Named resource of a node, such as gpu_8_h100, in place of cpu, gpu and memMB.
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
        """Returns the request with other values of some fields; None and what is empty change nothing.

        A named resource, ``h``, says all that a node has, and removes the numbers. Environment variables are added to
        those that there are.
        """
        given = {name: value for name, value in fields.items() if value not in (None, "", {}, [])}
        if "env" in given:
            given["env"] = {**(self.env or {}), **given["env"]}
        numbers: dict[str, Any] = dict.fromkeys(("cpu", "gpu", "memMB")) if "h" in given else {}
        return replace(self, **{**numbers, **given})


@dataclass(frozen=True)
class ElasticRequest(NodeRequest):
    """What training asks for besides: how ``torch.distributed.run`` starts its ranks, and starts them again.

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
