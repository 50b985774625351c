"""Builds the applications of the components."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from torchx import specs

from distembed.base.errors import UserError
from launch.apps.node_script import elastic_script, single_script
from launch.apps.request import ElasticRequest, NodeRequest
from launch.apps.roles import (
    GRACE_SECONDS,
    NodeRole,
    find_resource,
    job_name,
    on_gpus,
    parse_mounts,
    require_gpus,
    threads_per_process,
)
from launch.apps.shape import Shape, parse_shape


def training_app(
    config: str,
    overrides: Sequence[str],
    *,
    run_dir: str,
    j: str,
    plan: str | None,
    name: str | None,
    request: ElasticRequest,
) -> specs.AppDef:
    """Returns the application that trains, on every node and rank that ``j`` says.

    Args:
        config: YAML file, as the nodes see it.
        overrides: Settings that replace the config's; on nodes with GPUs the ranks train on these or fail.
        run_dir: Run folder, which every node must see.
        j: Nodes and processes, ``[MIN:]NODESxPROCESSES``.
        plan: File of the saved plan that places the tables; None for a plan of the run's own.
        name: Name of the job; None for that of the run folder.
        request: What the nodes must have, and how their ranks are started.

    Raises:
        UserError: An argument cannot be accepted.
    """
    shape = parse_shape(j)
    _require_elastic(request, shape, j)
    settings = on_gpus(overrides) if find_resource(request).gpu > 0 else overrides
    module = ["distembed", "train", config, *settings, "--run-dir", run_dir, "--resume-or-start"]
    script = elastic_script(shape, [*module, "--plan", plan] if plan else module, run_dir, request)
    role = _role("train", script, shape, request)
    if shape.max_nodes > 1:
        role.port_map = {"c10d": request.rdzv_port}
    role.metadata = {GRACE_SECONDS: request.grace_seconds}
    return specs.AppDef(name=_name(name or run_dir), roles=[role])


def single_node_app(
    role: str, command: Sequence[str], *, name: str, request: NodeRequest, j: str = "1x1"
) -> specs.AppDef:
    """Returns the application that runs ``distembed COMMAND...`` on one node, in as many processes as ``j`` says.

    Raises:
        UserError: An argument cannot be accepted.
    """
    shape = parse_shape(j)
    if shape.max_nodes > 1:
        raise UserError(
            f"j is {j!r}, {shape.max_nodes} nodes, and {role} runs on one; give 1x{shape.processes} or less"
        )
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(shape.processes), "-m"]
    module = [*(launcher if shape.processes > 1 else []), "distembed", *command]
    return _single_node_app(role, [request.python, "-m", *module], shape, name, request)


def benchmark_app(benchmark: str, arguments: Sequence[str], *, name: str | None, request: NodeRequest) -> specs.AppDef:
    """Returns the application that runs ``tools/bench_BENCHMARK.py`` on one node.

    Raises:
        UserError: An argument cannot be accepted.
    """
    if not re.fullmatch(r"[a-z_]+", benchmark):
        raise UserError(f"benchmark is {benchmark!r}; give the NAME of a file tools/bench_NAME.py, such as train")
    command = [request.python, f"tools/bench_{benchmark}.py", *arguments]
    return _single_node_app("bench", command, Shape(1, 1, 1), name or f"bench-{benchmark}", request)


def _single_node_app(role: str, command: Sequence[str], shape: Shape, name: str, request: NodeRequest) -> specs.AppDef:
    """Returns the application whose one node runs the command."""
    node = _role(role, single_script(command), shape, request)
    return specs.AppDef(name=_name(name), roles=[node])


def _role(name: str, script: str, shape: Shape, request: NodeRequest) -> NodeRole:
    """Returns the role whose nodes all run the script."""
    _require_at_least(0, max_retries=request.max_retries)
    node = find_resource(request)
    require_gpus(shape, node)
    # NCCL's and torch's own settings stay as they are: errors of NCCL have ended their process since torch 2.2.
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads_per_process(node, shape.processes)}
    return NodeRole(
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
    """Returns the name of a job: the given one, or the last part of the folder that it works on."""
    return job_name(PurePosixPath(text).name or text)


def _require_elastic(request: ElasticRequest, shape: Shape, j: str) -> None:
    """Refuses settings with which ``torch.distributed.run`` would not start, or not restart, the ranks.

    Raises:
        UserError: A number is out of its range, or an elastic job has no restarts.
    """
    _require_at_least(0, max_restarts=request.max_restarts, last_call_timeout=request.last_call_timeout)
    _require_at_least(1, join_timeout=request.join_timeout, grace_seconds=request.grace_seconds)
    if not 1024 <= request.rdzv_port <= 65535:
        raise UserError(f"rdzv_port is {request.rdzv_port}; give one from 1024 to 65535 that is free on the nodes")
    if shape.elastic and request.max_restarts == 0:
        raise UserError(
            f"j is {j!r} and max_restarts 0: when a node is lost, the processes on the others start again without it; "
            "give max_restarts 1 or more, or one number of nodes"
        )


def _require_at_least(least: int, **numbers: int) -> None:
    """Refuses numbers below the least one.

    Raises:
        UserError: A number is too small; the message has its name.
    """
    for field, value in numbers.items():
        if value < least:
            raise UserError(f"{field} is {value}; it starts at {least}")
