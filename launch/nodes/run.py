"""Runs the ranks of a node: ``python -m launch.nodes.run --node N [...] -- OPTIONS OF torch.distributed.run``.

It takes the place of ``python -m torch.distributed.run``, which starts the ranks again whatever they ended of, and
ends with 1 whatever that was. Here a mistake of the user's and an interruption end the job on all nodes, and the exit
code says so; see :mod:`launch.nodes.exit_codes` and :mod:`launch.nodes.agent`.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from distembed.parent import PARENT_VARIABLE, end_with_parent
from launch.nodes.await_host import await_host
from launch.nodes.exit_codes import FAILED, INTERRUPTED, RETRIES_USED, RETRIES_VARIABLE, SIGNALS
from launch.nodes.starts import Starts


class ToldToEnd(BaseException):
    """A signal that asks the job to end, before any rank runs."""


def main() -> int:
    """Runs the ranks to their end, and returns the exit code for the scheduler."""
    given, launcher_arguments = _parse(sys.argv[1:])
    for name in SIGNALS.split(","):
        signal.signal(signal.Signals[name], _raise)
    retries = os.environ.get(RETRIES_VARIABLE)
    starts = None
    if retries is not None and (given.node == 0 or not given.elastic):  # else the others go on without this node
        starts = Starts(given.starts, int(retries))
    try:
        end_with_parent()
        code = _run(given, launcher_arguments, starts)
    except ToldToEnd:
        code = INTERRUPTED
    return code if starts is None else starts.end(code)


def _run(given: argparse.Namespace, launcher_arguments: list[str], starts: Starts | None) -> int:
    """Waits for the first node, or is it, and runs the ranks; returns the exit code of this node."""
    if given.node > 0:
        reason = await_host(given.host, given.port, given.seconds)
        if reason:
            _say(
                f"node 0 of the job ({given.host}:{given.port}) could not be reached within {given.seconds:g} s: "
                f"{reason}. See whether it has started and what it says, and that nodes may talk to each other on this "
                "port."
            )
            return FAILED
    elif starts is not None and not starts.begin():
        _say(f"the job has failed before, and its retries ({os.environ[RETRIES_VARIABLE]}) are all used")
        return RETRIES_USED
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks end with this process
    from launch.nodes.agent import run_ranks  # torch takes seconds to load

    return run_ranks(launcher_arguments, _say)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this module's own options, and those of ``torch.distributed.run`` after the ``--``."""
    at = arguments.index("--")
    parser = argparse.ArgumentParser(prog="python -m launch.nodes.run", description=__doc__)
    parser.add_argument("--node", type=int, required=True, help="number of this node within the job")
    parser.add_argument("--host", default="localhost", help="the first node, as the others reach it")
    parser.add_argument("--port", type=int, default=0, help="port of the first node at which nodes meet")
    parser.add_argument("--seconds", type=float, default=600, help="how long the first node is waited for")
    parser.add_argument("--elastic", action="store_true", help="the others can go on without this node")
    parser.add_argument("--starts", type=Path, required=True, help="folder in which starts are counted")
    return parser.parse_args(arguments[:at]), arguments[at + 1 :]


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    """Raises :class:`ToldToEnd`."""
    raise ToldToEnd(signal.Signals(number).name)


def _say(line: str) -> None:
    """Prints a line for the user; the prefix of a rank's lines is missing, so that it is shown on every node."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
