"""Runs the ranks of a node.

    python -m distembed.launch.nodes.run --node N [...] -- OPTIONS OF torch.distributed.run

``python -m torch.distributed.run`` starts the ranks again after every exit code but 0, and ends with 1 in the end. Here
a mistake of the user's and an interruption end the job on all nodes, and the exit code tells the scheduler; see
:mod:`distembed.launch.nodes.exit_codes` and :mod:`distembed.launch.nodes.agent`. A node first waits until the first
node can be reached: on Kubernetes its name resolves only some time after the other pods have started, and torch gives
up after a minute.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from distembed.base.process import PARENT_VARIABLE, end_with_parent
from distembed.launch.nodes.exit_codes import (
    AGAIN_VARIABLE,
    FAILED,
    INTERRUPTED,
    MISTAKES,
    RETRIES_USED,
    RETRIES_VARIABLE,
    ToldToEnd,
    ignore_signals,
    raise_when_told,
)

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_POLL_SECONDS = 1.0
_LEAVING_SECONDS = 20.0
_LAST = (0, *MISTAKES, RETRIES_USED)
"""Exit codes after which a job does not start again."""
_INTERRUPTED = "interrupted"
_FAILED = "failed"


class Starts:
    """The starts of a job, counted in files that all nodes see; a failed job starts again ``max_retries`` times.

    Kubernetes and AWS Batch count every start of a job alike, and stop at a number that is given in advance. So they
    are given a large number, and the nodes count failures themselves, by empty files. For the third start::

        3                  it has begun
        3.interrupted      a node says that it was interrupted
        3.failed           a node says that it failed

    A start with the first file alone ended with its node, which counts as a failure.
    """

    def __init__(self, folder: Path, max_retries: int) -> None:
        self._folder = folder
        self._max_retries = max_retries
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> bool:
        """Notes another start on the first node, before the nodes meet; returns False after too many failures."""
        if self._num_failed() > self._max_retries:
            return False
        self._number = self._newest() + 1
        (self._folder / str(self._number)).touch()
        return True

    def join(self) -> None:
        """Takes the number of the newest start, on nodes other than the first, after the first node has begun it."""
        self._number = self._newest()

    def end(self, code: int) -> int:
        """Notes how this start ended on this node, and returns the exit code for the scheduler.

        It is ``code``, or :data:`RETRIES_USED` after one failure more than the retries.
        """
        if code == 0 or code in MISTAKES:
            return code
        (self._folder / f"{self._number}.{_INTERRUPTED if code == INTERRUPTED else _FAILED}").touch()
        return RETRIES_USED if code != INTERRUPTED and self._num_failed() > self._max_retries else code

    def _newest(self) -> int:
        """Returns the number of the newest start; 0 before the first."""
        return max((int(file.name) for file in self._folder.iterdir() if file.name.isdecimal()), default=0)

    def _num_failed(self) -> int:
        """Returns how many starts have failed; a failure of one node outweighs interruptions of other nodes."""
        names = {file.name for file in self._folder.iterdir()}
        starts = [name for name in names if name.isdecimal()]
        return sum(f"{name}.{_FAILED}" in names or f"{name}.{_INTERRUPTED}" not in names for name in starts)


def main() -> int:
    """Runs the ranks to their end, and returns the exit code for the scheduler."""
    options, launcher_arguments = _parse(sys.argv[1:])
    retries = os.environ.get(RETRIES_VARIABLE)
    starts, can_go_on = None, False
    try:
        raise_when_told()
        # nodes but the first of an elastic job do not count: the job continues without them
        if retries is not None and (options.node == 0 or not options.elastic):
            starts = Starts(options.starts, int(retries))
        end_with_parent()
        code = _await_turn(options, starts)
        if code is None:
            code = _run(launcher_arguments, options.grace)
            can_go_on = AGAIN_VARIABLE in os.environ and starts is not None
    except ToldToEnd as told:
        code = INTERRUPTED if told.has_saved else FAILED
    try:
        code = code if starts is None else starts.end(code)
        if can_go_on and code not in _LAST:
            _start_again(options)
        ignore_signals()
    except ToldToEnd:  # the ranks have ended, and their end is noted: this node does not start again
        code = code if starts is None else starts.end(code)
        code = code if code in _LAST else INTERRUPTED
    return code


def _await_turn(options: argparse.Namespace, starts: Starts | None) -> int | None:
    """Waits until the first node is reachable, then joins its start; the first node itself begins a start.

    Returns None where the ranks may start, else the exit code: the first node stayed away, or all retries are used.
    """
    if options.node > 0:
        reason = await_host(options.host, options.port, options.seconds)
        if reason:
            _say(
                f"node 0 of the job ({options.host}:{options.port}) could not be reached within {options.seconds:g} s: "
                f"{reason}. See whether it has started, read its log, and let nodes connect to each other on this "
                "port."
            )
            return FAILED
        if starts is not None:
            starts.join()
    elif starts is not None and not starts.begin():
        _say(f"the job has failed before, and its retries ({os.environ[RETRIES_VARIABLE]}) are all used")
        return RETRIES_USED
    return None


def await_host(host: str, port: int, seconds: float) -> str:
    """Waits until a port of a host accepts connections; does not wait where the host is this one.

    Returns:
        "" once it accepts connections, else the last error after ``seconds``.
    """
    if host in _LOCAL_HOSTS:
        return ""
    deadline = time.monotonic() + seconds
    printed = ""
    while True:
        reason = unreachable(host, port)
        if not reason or time.monotonic() >= deadline:
            return reason
        if reason != printed:
            _say(f"waiting up to {seconds:g} s for {host}:{port}: {reason}")
            printed = reason
        time.sleep(min(_POLL_SECONDS, max(deadline - time.monotonic(), 0)))


def unreachable(host: str, port: int) -> str:
    """Returns why a port accepts no connections; "" where it does."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except socket.gaierror as error:
        return f"the name does not resolve ({error.strerror})"
    except OSError as error:
        return f"it takes no connections ({error.strerror or error})"
    return ""


def _run(launcher_arguments: list[str], grace_seconds: int) -> int:
    """Runs the ranks, which end with this process, and returns the exit code of this node."""
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from distembed.launch.nodes.agent import run_ranks  # torch takes seconds to load

    return run_ranks(launcher_arguments, grace_seconds, _say)


def _start_again(options: argparse.Namespace) -> NoReturn:
    """Replaces this process by a new start of this program, with equal arguments; never returns.

    Other nodes first wait up to 20 seconds until the first node has left the port where nodes meet.
    """
    _say("this node starts again")
    os.environ.pop(PARENT_VARIABLE, None)
    deadline = time.monotonic() + _LEAVING_SECONDS
    while options.node > 0 and not unreachable(options.host, options.port) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a child would inherit the port at which the nodes met
    os.execv(sys.executable, [sys.executable, "-m", "distembed.launch.nodes.run", *sys.argv[1:]])


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this module's own options, and the options of ``torch.distributed.run`` after the ``--``."""
    at = arguments.index("--")
    parser = argparse.ArgumentParser(prog="python -m distembed.launch.nodes.run", description=__doc__)
    parser.add_argument("--node", type=int, required=True, help="number of this node within the job")
    parser.add_argument("--host", default="localhost", help="the first node, as other nodes reach it")
    parser.add_argument("--port", type=int, default=0, help="port of the first node at which nodes meet")
    parser.add_argument("--seconds", type=float, default=600, help="how long to wait for the first node")
    parser.add_argument(
        "--grace", type=int, default=30, help="how many seconds ranks have to save and end when told to"
    )
    parser.add_argument("--elastic", action="store_true", help="the other nodes can continue without this node")
    parser.add_argument("--starts", type=Path, required=True, help="folder in which starts are counted")
    return parser.parse_args(arguments[:at]), arguments[at + 1 :]


def _say(line: str) -> None:
    """Prints a line for the user; without the prefix of a rank's lines it is shown for every node."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a signal that arrives while the interpreter ends would change the code
