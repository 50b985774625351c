"""Builds the applications of TorchX's components, and the script that each node runs by ``bash -c``.

TorchX fills in its macros once on each scheduler, and ``$$`` then becomes ``$``. There is no ``$(command)`` in the
scripts: Kubernetes takes that for the name of a variable of its own. The application's id and the node's number are
only between double quotes: on Slurm and AWS Batch they are variables of the shell.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from torchx import specs
from torchx.specs import macros

from distembed.base.errors import UserError
from distembed.launch.apps.request import ElasticRequest, NodeRequest, Shape, parse_shape
from distembed.launch.apps.roles import (
    GRACE_SECONDS,
    NodeRole,
    find_resource,
    job_name,
    on_gpus,
    parse_mounts,
    require_gpus,
)
from distembed.launch.nodes.exit_codes import SIGNALS


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
    """Returns the application that trains on ``j``, ``[MIN:]NODESxPROCESSES``; see the component ``train``.

    On nodes with GPUs the ranks train on GPUs or fail. Without ``plan``, a saved plan's file, the run plans itself.
    """
    shape = parse_shape(j)
    _require_elastic(request, shape, j)
    settings = on_gpus(overrides) if find_resource(request).gpu > 0 else overrides
    module = ["distembed", "train", config, *settings, "--run-dir", run_dir, "--resume-or-start"]
    script = _elastic_script(shape, [*module, "--plan", plan] if plan else module, run_dir, request)
    role = _role("train", script, shape, request)
    if shape.max_nodes > 1:
        role.port_map = {"c10d": request.rdzv_port}
    role.metadata = {GRACE_SECONDS: request.grace_seconds}
    return specs.AppDef(name=_name(name or run_dir), roles=[role])


def single_node_app(
    role: str, command: Sequence[str], *, name: str, request: NodeRequest, j: str = "1x1"
) -> specs.AppDef:
    """Returns the application that runs ``distembed COMMAND...`` on one node, in the processes of ``j``."""
    shape = parse_shape(j)
    if shape.max_nodes > 1:
        raise UserError(
            f"j is {j!r}, {shape.max_nodes} nodes, and {role} runs on one; give 1x{shape.processes} or less"
        )
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(shape.processes), "-m"]
    module = [*(launcher if shape.processes > 1 else []), "distembed", *command]
    return _single_node_app(role, [request.python, "-m", *module], shape, name, request)


def benchmark_app(benchmark: str, arguments: Sequence[str], *, name: str | None, request: NodeRequest) -> specs.AppDef:
    """Returns the application that runs ``tools/bench_BENCHMARK.py`` on one node."""
    if not re.fullmatch(r"[a-z_]+", benchmark):
        raise UserError(f"benchmark is {benchmark!r}; give the NAME of a file tools/bench_NAME.py, such as train")
    command = [request.python, f"tools/bench_{benchmark}.py", *arguments]
    return _single_node_app("bench", command, Shape(1, 1, 1), name or f"bench-{benchmark}", request)


def _single_node_app(role: str, command: Sequence[str], shape: Shape, name: str, request: NodeRequest) -> specs.AppDef:
    node = _role(role, f"exec {' '.join(map(_quoted, command))}\n", shape, request)
    return specs.AppDef(name=_name(name), roles=[node])


def _role(name: str, script: str, shape: Shape, request: NodeRequest) -> NodeRole:
    """Returns the role whose nodes all run the script."""
    _require_at_least(0, max_retries=request.max_retries)
    node = find_resource(request)
    require_gpus(shape, node)
    # NCCL's and torch's own settings stay as they are: errors of NCCL have ended their process since torch 2.2.
    # A process's share of the CPUs: else each would take all of them, or one under ``torch.distributed.run``.
    threads = max(1, int(node.cpu) // shape.processes)
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
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
    """Returns the name of a job: the given name, or the last part of its folder."""
    return job_name(PurePosixPath(text).name or text)


def _require_elastic(request: ElasticRequest, shape: Shape, j: str) -> None:
    """Refuses settings with which ``torch.distributed.run`` would not start, or not restart, the ranks."""
    _require_at_least(0, max_restarts=request.max_restarts, last_call_timeout=request.last_call_timeout)
    _require_at_least(1, join_timeout=request.join_timeout, grace_seconds=request.grace_seconds)
    if not 1024 <= request.rdzv_port <= 65535:
        raise UserError(f"rdzv_port is {request.rdzv_port}; give one from 1024 to 65535 that is free on the nodes")
    if shape.elastic and request.max_restarts == 0:
        raise UserError(
            f"j is {j!r} and max_restarts 0: when a node is lost, the processes on other nodes start again without it; "
            "give max_restarts 1 or more, or one number of nodes"
        )


def _require_at_least(least: int, **numbers: int) -> None:
    """Refuses arguments, given by their names for the error, below ``least``."""
    for field, value in numbers.items():
        if value < least:
            raise UserError(f"{field} is {value}; it starts at {least}")


def _quoted(word: object) -> str:
    """Returns a word that the shell takes literally, with every ``$`` kept from TorchX's macros."""
    return shlex.quote(str(word)).replace("$", "$$")


def log_dir(run_dir: str) -> str:
    """Returns a shell word: the folder of a node's logs, ``RUN/launch/logs/JOB/node-N``; a requeued job keeps it."""
    return f'{_quoted(PurePosixPath(run_dir) / "launch" / "logs")}/"{macros.app_id}"/node-"{macros.replica_id}"'


def _elastic_script(shape: Shape, module: Sequence[str], run_dir: str, request: ElasticRequest) -> str:
    """Returns the script that runs ``python -m MODULE ...`` on every rank under :mod:`distembed.launch.nodes.run`."""
    lines = ["set -u", f"logs={log_dir(run_dir)}", 'mkdir -p "$$logs" || exit', 'rm -f "$$logs/error.json"']
    # the launcher writes the error of its ranks here
    lines += ['export TORCHELASTIC_ERROR_FILE="$$logs/error.json"']
    # Else ranks meet in the agents' store under a number of restarts that nodes count differently: a rank that did not
    # fail itself looks for addresses of the previous start.
    lines += ["export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    # marks the lines of rank 0, which may be on any node
    lines += ["export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank $${rank}]:'"]
    # A single node takes any free port, so that several jobs fit on one machine.
    endpoint, awaited = "localhost:0", ""
    conf = f"join_timeout={request.join_timeout},last_call_timeout={request.last_call_timeout}"
    if shape.max_nodes > 1:
        # Empty on node 0 itself on AWS Batch.
        lines += [f'host="$${{{macros.rank0_env}:-localhost}}"']
        endpoint = f'"$$host":{request.rdzv_port}'
        awaited = f' --host "$$host" --port {request.rdzv_port} --seconds {request.join_timeout}'
        awaited += " --elastic" if shape.elastic else ""
        # torch would guess is_host from names, and a node may have several. And where another program has the port,
        # this node fails and does not join it.
        lines += [f'if test "{macros.replica_id}" = 0; then is_host=1; else is_host=0; fi']
        conf += ',is_host="$$is_host"'
    launcher = [
        f'--node "{macros.replica_id}" --starts "$$logs/../starts" --grace {request.grace_seconds}{awaited} --',
        f"--nnodes {shape.nodes} --nproc-per-node {shape.processes}",
        f'--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id "{macros.app_id}"',
        f"--rdzv-conf {conf}",
        f"--max-restarts {request.max_restarts} --signals-to-handle {SIGNALS}",
        '--tee 3 --log-dir "$$logs"',
        f"-m {' '.join(map(_quoted, module))}",
    ]
    # exec: signals are for the launcher, not for a shell
    lines += [" \\\n    ".join([f"exec {_quoted(request.python)} -m distembed.launch.nodes.run", *launcher])]
    return "\n".join(lines) + "\n"
