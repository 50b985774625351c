"""Builds the applications of the components. Those are one list of arguments each, as TorchX wants them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from torchx import specs

from distembed.errors import UserError
from launch.apps.node_script import elastic_script, single_script
from launch.apps.roles import (
    GRACE_SECONDS,
    Nodes,
    find_resource,
    job_name,
    parse_mounts,
    require_gpus,
    threads_per_process,
)
from launch.apps.shape import Shape, parse_shape


@dataclass(frozen=True)
class Request:
    """What every component asks of its nodes.

    Attributes:
        resource: named resource, CPUs, GPUs and MB, each None where it was not given.
        image: container image; "" for none.
        env: environment variables.
        mounts: of a container, as :func:`launch.apps.roles.parse_mounts` takes them.
        max_retries: how often the job is started again.
    """

    resource: tuple[str | None, int | None, int | None, int | None]
    image: str
    env: Mapping[str, str] | None
    mounts: list[str] | None
    max_retries: int


def training_app(
    config: str,
    overrides: Sequence[str],
    *,
    run_dir: str,
    j: str,
    plan: str | None,
    name: str | None,
    request: Request,
    max_restarts: int,
    rdzv_port: int,
    join_timeout: int,
    last_call_timeout: int,
    grace_seconds: int,
    python: str,
) -> specs.AppDef:
    """The application of ``launch.components.train``, whose docstring says what the arguments are.

    Raises:
        UserError: An argument that cannot be accepted.
    """
    shape = parse_shape(j)
    _require_at_least(0, max_restarts=max_restarts, last_call_timeout=last_call_timeout)
    _require_at_least(1, join_timeout=join_timeout, grace_seconds=grace_seconds)
    if not 1024 <= rdzv_port <= 65535:
        raise UserError(f"rdzv_port is {rdzv_port}; give one from 1024 to 65535 that is free on the nodes")
    if shape.elastic and max_restarts == 0:
        raise UserError(
            f"j is {j!r} and max_restarts 0: when a node is lost, the processes on the others start again without it; "
            "give max_restarts 1 or more, or one number of nodes"
        )
    module = ["distembed", "train", config, *overrides, "--run-dir", run_dir, "--resume-or-start"]
    script = elastic_script(
        shape,
        [*module, "--plan", plan] if plan else module,
        run_dir=run_dir,
        python=python,
        max_restarts=max_restarts,
        rdzv_port=rdzv_port,
        join_timeout=join_timeout,
        last_call_timeout=last_call_timeout,
        grace_seconds=grace_seconds,
    )
    role = _role("train", script, shape, request)
    if shape.max_nodes > 1:
        role.port_map = {"c10d": rdzv_port}
    role.metadata = {GRACE_SECONDS: grace_seconds}
    return specs.AppDef(name=_name(name or run_dir), roles=[role])


def single_node_app(
    role: str,
    command: Sequence[str],
    *,
    name: str,
    request: Request,
    python: str,
    j: str = "1x1",
) -> specs.AppDef:
    """Runs ``distembed COMMAND...`` on one node, in as many processes as ``j`` says.

    Raises:
        UserError: An argument that cannot be accepted.
    """
    shape = parse_shape(j)
    if shape.max_nodes > 1:
        raise UserError(
            f"j is {j!r}, {shape.max_nodes} nodes, and {role} runs on one; give 1x{shape.processes} or less"
        )
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(shape.processes), "-m"]
    module = [*(launcher if shape.processes > 1 else []), "distembed", *command]
    return _single_node_app(role, [python, "-m", *module], shape, name, request)


def benchmark_app(
    benchmark: str,
    arguments: Sequence[str],
    *,
    name: str | None,
    request: Request,
    python: str,
) -> specs.AppDef:
    """Runs ``tools/bench_BENCHMARK.py`` on one node.

    Raises:
        UserError: An argument that cannot be accepted.
    """
    if not re.fullmatch(r"[a-z_]+", benchmark):
        raise UserError(f"benchmark is {benchmark!r}; give the NAME of a file tools/bench_NAME.py, such as train")
    command = [python, f"tools/bench_{benchmark}.py", *arguments]
    return _single_node_app("bench", command, Shape(1, 1, 1), name or f"bench-{benchmark}", request)


def _single_node_app(role: str, command: Sequence[str], shape: Shape, name: str, request: Request) -> specs.AppDef:
    node = _role(role, single_script(command), shape, request)
    return specs.AppDef(name=_name(name), roles=[node])


def _role(name: str, script: str, shape: Shape, request: Request) -> Nodes:
    _require_at_least(0, max_retries=request.max_retries)
    node = find_resource(*request.resource)
    require_gpus(shape, node)
    # NCCL's and torch's own settings stay as they are: errors of NCCL have ended their process since torch 2.2.
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads_per_process(node, shape.processes)}
    return Nodes(
        name=name,
        image=request.image,
        entrypoint="bash",
        args=["-c", script],
        env={**environment, **(request.env or {})},
        num_replicas=shape.max_nodes,
        min_replicas=shape.min_nodes,
        max_retries=request.max_retries,
        retry_policy=specs.RetryPolicy.APPLICATION,
        resource=node,
        mounts=parse_mounts(request.mounts),
    )


def _name(text: str) -> str:
    """The name of a job that was given, or of the folder that it works on."""
    return job_name(PurePosixPath(text).name or text)


def _require_at_least(least: int, **numbers: int) -> None:
    for field, value in numbers.items():
        if value < least:
            raise UserError(f"{field} is {value}; it starts at {least}")
