"""What each node of a job runs, as a script for ``bash -c``.

TorchX fills in its macros once on each scheduler, and ``$$`` then stands for ``$``. There is no ``$(command)`` in the
scripts: Kubernetes takes that for the name of a variable of its own. The application's id and the node's number stand
between double quotes only, for on Slurm and AWS Batch they are variables of the shell.
"""

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from torchx.specs import macros

from launch.apps.request import ElasticRequest
from launch.apps.shape import Shape
from launch.nodes.exit_codes import SIGNALS


def quoted(word: object) -> str:
    """Returns the word as the shell takes it literally, with every ``$`` kept from TorchX's macros."""
    return shlex.quote(str(word)).replace("$", "$$")


def log_dir(run_dir: str) -> str:
    """Returns the folder of a node's logs within the run folder, for the shell; a requeued job keeps it."""
    return f'{quoted(PurePosixPath(run_dir) / "launch" / "logs")}/"{macros.app_id}"/node-"{macros.replica_id}"'


def elastic_script(shape: Shape, module: Sequence[str], run_dir: str, request: ElasticRequest) -> str:
    """Returns the script that runs ``python -m MODULE ...`` on every rank under :mod:`launch.nodes.run`.

    Args:
        shape: Nodes and processes.
        module: Name of the module, and its arguments.
        run_dir: Run folder; the logs of every rank go to ``launch/logs/APP/node-N`` in it, and ``error.json`` there is
            the traceback of the rank that failed first on this node.
        request: How the ranks are started, and started again.
    """
    lines = ["set -u", f"logs={log_dir(run_dir)}", 'mkdir -p "$$logs" || exit', 'rm -f "$$logs/error.json"']
    # the launcher writes here what its ranks died of
    lines += ['export TORCHELASTIC_ERROR_FILE="$$logs/error.json"']
    # Else ranks meet in the agents' store under a number of restarts that nodes count differently: one whose own
    # process did not fail looks where ranks of the start before have left their addresses, and finds nobody there.
    lines += ["export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    # so that the lines of rank 0 can be told from others, whichever node it is on
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
        # Set here, not guessed from names: a node may have several. And where the port is taken this node fails, in
        # place of joining whoever has it.
        lines += [f'if test "{macros.replica_id}" = 0; then is_host=1; else is_host=0; fi']
        conf += ',is_host="$$is_host"'
    launcher = [
        f'--node "{macros.replica_id}" --starts "$$logs/../starts" --grace {request.grace_seconds}{awaited} --',
        f"--nnodes {shape.nodes} --nproc-per-node {shape.processes}",
        f'--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id "{macros.app_id}"',
        f"--rdzv-conf {conf}",
        f"--max-restarts {request.max_restarts} --signals-to-handle {SIGNALS}",
        '--tee 3 --log-dir "$$logs"',
        f"-m {' '.join(map(quoted, module))}",
    ]
    # exec: signals are for the launcher, not for a shell
    lines += [" \\\n    ".join([f"exec {quoted(request.python)} -m launch.nodes.run", *launcher])]
    return "\n".join(lines) + "\n"


def single_script(command: Sequence[str]) -> str:
    """Returns the script that runs one command in the place of the shell."""
    return f"exec {' '.join(map(quoted, command))}\n"
