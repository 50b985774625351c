"""How a node's ranks are started, and with which exit code it ends, by what its ranks end of; with real processes."""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing import ProcessExitedException

from distembed.base.process import PARENT_VARIABLE
from distembed.launch.nodes.run import Starts
from tests.launch.conftest import wait_until
from tests.processes import run_processes, start_processes
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "ROOT": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(240)

# What a rank does by its number, as a Python expression over `start`, the number of times that it was started.
RANK = """
import json, os, signal, sys, time
rank, plan = os.environ["RANK"], json.loads(os.environ["PLAN"])
with open(f"starts-{rank}", "a") as file:
    file.write(f"{os.getpid()}\\n")
start = len(open(f"starts-{rank}").readlines())

sys.path.insert(0, os.environ["ROOT"])
from distembed.base.process import end_with_parent
end_with_parent()

def fail(code, text="", after=0.0):
    time.sleep(after)
    if text:
        from distembed.commands.error_file import record_error
        from distembed.base.errors import UserError
        record_error(UserError(text), code)
    os._exit(code)

def save(code=75):
    def end(*_):
        open(f"saved-{rank}", "w").close()
        os._exit(code)
    signal.signal(signal.SIGTERM, end)
    open(f"ready-{rank}", "w").close()
    time.sleep(600)

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"ready-{rank}", "w").close()
    time.sleep(600)

eval(plan.get(rank, "0"))
"""


class Node:
    """A node's launcher, started in a folder that all nodes of a job share.

    ``plan`` has an expression for each rank, and ``j`` is ``--nnodes`` and ``--nproc-per-node``. Nodes meet at ``port``
    of the first node, or at ``meet``.
    """

    def __init__(
        self,
        folder: Path,
        plan: dict[int, str],
        number: int = 0,
        j: tuple[str, int] = ("1", 2),
        port: int = 0,
        max_restarts: int = 3,
        grace: int = 20,
        host: str = "",
        meet: str = "",
        **environment: str,
    ) -> None:
        (folder / "rank.py").write_text(RANK)
        host = host or ("127.0.0.2" if port else "localhost")  # which is waited for
        own = ["--node", str(number), "--starts", "starts", "--host", host, "--port", str(port)]
        is_host = f",is_host={int(number == 0)}" if port and not meet else ""
        arguments = [*own, "--grace", str(grace), "--"]
        arguments += ["--nnodes", j[0], "--nproc-per-node", str(j[1]), "--rdzv-id", "job", "--rdzv-backend", "c10d"]
        arguments += ["--rdzv-endpoint", meet or f"{host}:{port}", "--max-restarts", str(max_restarts)]
        arguments += ["--rdzv-conf", f"join_timeout=60,last_call_timeout=1{is_host}"]
        arguments += ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--log-dir", f"logs-{number}", "rank.py"]
        output = folder / f"printed-{number}-{len(list(folder.glob('printed-*')))}"
        self.output = output.open("w+")
        variables = {**ENVIRONMENT, "PLAN": json.dumps(plan), **environment}
        (self.process,) = start_processes(1, run_node, arguments, folder, output, variables).processes

    def line(self) -> str:
        """The next line that it or its ranks print."""
        wait_until(lambda: self._ends_a_line(), "it prints nothing")
        return self.output.readline()

    def _ends_a_line(self) -> bool:
        at = self.output.tell()
        has_line = self.output.readline().endswith("\n")
        self.output.seek(at)
        return has_line

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it and its ranks have printed since the last line that was read."""
        self.process.join(timeout=200)
        return self.process.exitcode, self.output.read()


def run_node(_: int, arguments: list[str], folder: Path, output: Path, environment: dict[str, str]) -> None:
    """Does what ``python -m distembed.launch.nodes.run`` does, in a process that has loaded torch."""
    os.chdir(folder)
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), descriptor)
    from distembed.launch.nodes import run

    sys.argv[1:] = arguments
    code = run.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def starts(folder: Path, *ranks: int) -> list[int]:
    """How often each rank was started."""
    return [len((folder / f"starts-{rank}").read_text().split()) for rank in ranks]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.thorough
def test_a_mistake_is_told_once_and_not_tried_again_whichever_rank_ends_first(tmp_path: Path) -> None:
    # rank 0 has lost its connection to rank 1, which is slow to end
    code, printed = Node(tmp_path, {0: "fail(1)", 1: "fail(2, 'no dataset: there', after=1)"}).end()
    assert code == 2
    assert printed.count("no dataset: there") == 1 and "error: no dataset: there\n" in printed, printed
    assert "Traceback" not in printed
    assert starts(tmp_path, 0, 1) == [1, 1]


@pytest.mark.thorough
def test_a_failure_is_tried_again_and_then_ends_the_node(tmp_path: Path) -> None:
    code, printed = Node(tmp_path, {0: "fail(9)", 1: "fail(1, after=0.5)"}, max_restarts=1).end()
    assert code == 1 and "exitcode  : 9" in printed, printed
    assert starts(tmp_path, 0) == [2]


@pytest.mark.thorough
def test_an_interruption_is_one_for_the_scheduler_and_not_tried_again(tmp_path: Path) -> None:
    # the second rank has still to write something after the first has ended
    slowly = "(time.sleep(1), open('saved-1', 'w').close(), os._exit(75))"
    code, printed = Node(tmp_path, {0: "fail(75)", 1: slowly}).end()
    assert code == 75, printed
    assert (tmp_path / "saved-1").exists() and starts(tmp_path, 0, 1) == [1, 1]


@pytest.mark.parametrize(
    ("plan", "grace", "expected"),
    [
        ("save()", 20, 75),
        pytest.param("save(1)", 20, 1, marks=pytest.mark.slow),
        pytest.param("hang()", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_node_that_is_told_to_end_says_whether_its_ranks_have_saved(
    tmp_path: Path, plan: str, grace: int, expected: int
) -> None:
    node = Node(tmp_path, {0: plan, 1: plan}, grace=grace)
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "the ranks do not start")
    node.process.terminate()
    code, printed = node.end()
    assert code == expected, printed
    assert starts(tmp_path, 0, 1) == [1, 1]


def storm(process: BaseProcess) -> None:
    """Tells a process to end, again and again, until it has ended."""
    while process.is_alive():
        process.terminate()


def test_a_node_that_is_told_to_end_twice_has_ended_by_the_first_time(tmp_path: Path) -> None:
    """While it waits for the first node, which is not there, and while it notes its end."""
    node = Node(tmp_path, {}, 1, ("2", 1), free_port(), DISTEMBED_MAX_RETRIES="3")
    assert "waiting up to 600 s" in node.line()
    storm(node.process)
    assert node.end() == (75, "")
    assert [file.name for file in (tmp_path / "starts").iterdir()] == ["0.interrupted"]


def test_a_node_that_is_told_to_end_while_it_starts_again_does_not(tmp_path: Path) -> None:
    """Its ranks were interrupted, and it waits until the first node has left, which this one does not."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        again = {"DISTEMBED_START_AGAIN": "1", "DISTEMBED_MAX_RETRIES": "3"}
        node = Node(tmp_path, {0: "fail(75)"}, 1, ("1", 1), port, host="127.0.0.1", meet="localhost:0", **again)
        lines = [node.line()]
        while "starts again" not in lines[-1]:
            lines.append(node.line())
        storm(node.process)
        code, printed = node.end()
    assert (code, printed) == (75, ""), lines
    assert starts(tmp_path, 0) == [1] and (tmp_path / "starts" / "0.interrupted").exists()


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("mistaken", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_mistake_on_one_node_ends_all_nodes_and_is_told_once(tmp_path: Path, mistaken: int) -> None:
    """The other rank hears nothing of it: it hangs, as in a collective."""
    plan = {mistaken: "fail(2, 'no dataset here')", 1 - mistaken: "time.sleep(600)"}
    port = free_port()
    nodes = [Node(tmp_path, plan, number, ("2", 1), port) for number in range(2)]
    ends = [node.end() for node in nodes]
    assert [code for code, _ in ends] == [2, 2], ends
    assert "".join(printed for _, printed in ends).count("no dataset here") == 1
    assert starts(tmp_path, 0, 1) == [1, 1]


def run_slow_agent(_: int, folder: Path) -> None:
    """Runs one rank, which ends by a mistake after the agent has looked at the exit codes and before torch does."""
    os.chdir(folder)
    from torch.distributed.run import config_from_args, parse_args

    from distembed.launch.nodes.agent import NodeAgent

    class Slow(NodeAgent):
        def _judge(self, failed: Sequence[int], is_early: bool) -> int | None:
            verdict = super()._judge(failed, is_early)
            open("judged", "w").close()
            while self._exit_codes() != [2]:
                time.sleep(0.01)
            return verdict

    rank = "echo 0 >> starts-0; until [ -e judged ]; do sleep 0.01; done; exit 2"
    node = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    arguments = [*node, "--max-restarts=3", "--no-python", "bash", "-c", rank]
    config, entrypoint, program = config_from_args(parse_args(arguments))
    os._exit(Slow(config, entrypoint, tuple(program), 20, print).run_to_end())


def test_a_rank_that_ends_while_it_is_looked_at_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException) as ended:
        run_processes(1, run_slow_agent, tmp_path)
    assert ended.value.exit_code == 2
    assert starts(tmp_path, 0) == [1]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("nnodes", "codes"), [("2", [75, 75]), ("1:2", [0, 75])])
def test_when_a_node_is_told_to_end_a_fixed_job_ends_and_an_elastic_one_goes_on_without_it(
    tmp_path: Path, nnodes: str, codes: list[int]
) -> None:
    # ranks agree: the rank of the other node saves as well, and ends
    other = "[time.sleep(0.1) for _ in iter(lambda: os.path.exists('saved-0') or os.path.exists('saved-1'), True)]"
    first = f"({other}, os._exit(75)) if os.environ['WORLD_SIZE'] == '2' else print('alone')"
    plan = {rank: f"save() if os.environ['NODE'] == '1' else {first}" for rank in range(2)}
    port = free_port()
    nodes = [Node(tmp_path, plan, number, (nnodes, 1), port, max_restarts=0, NODE=str(number)) for number in range(2)]
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 1, "the ranks do not start")
    nodes[1].process.terminate()
    ends = [node.end() for node in nodes]
    assert [code for code, _ in ends] == codes, ends
    assert ("alone" in ends[0][1]) == (codes[0] == 0)
    assert codes[0] == 0 or starts(tmp_path, 0, 1) == [1, 1]


def test_ranks_end_with_the_launcher_that_is_killed_and_save_before(tmp_path: Path) -> None:
    node = Node(tmp_path, {0: "save()", 1: "save()"})
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "the ranks do not start")
    ranks = [int((tmp_path / f"starts-{rank}").read_text()) for rank in range(2)]
    node.process.kill()
    node.process.join()
    wait_until(lambda: not any(map(is_running, ranks)), "ranks are left", seconds=20)
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_launcher_whose_parent_is_gone_before_it_could_listen_starts_no_ranks(tmp_path: Path) -> None:
    code, _ = Node(tmp_path, {}, **{PARENT_VARIABLE: "1"}).end()
    assert code == 75 and not list(tmp_path.glob("starts-*"))


@pytest.mark.slow
def test_a_job_that_has_failed_too_often_starts_no_ranks(tmp_path: Path) -> None:
    limit = {"DISTEMBED_MAX_RETRIES": "1"}
    ends = [Node(tmp_path, {0: "fail(9)"}, j=("1", 1), max_restarts=0, **limit).end()[0] for _ in range(3)]
    assert ends == [1, 70, 70]
    assert starts(tmp_path, 0) == [2]


@pytest.mark.slow
@pytest.mark.distributed
def test_nodes_that_no_scheduler_starts_again_do_so_themselves(tmp_path: Path) -> None:
    """After an interruption, and not after a failure; the node that is slower to end meets the other all the same."""
    again = {"DISTEMBED_START_AGAIN": "1", "DISTEMBED_MAX_RETRIES": "0"}
    plan = {0: "fail({1: 75}.get(start, 9))", 1: "fail({1: 75}.get(start, 9), after=1)"}
    port = free_port()
    nodes = [Node(tmp_path, plan, number, ("2", 1), port, 0, **again) for number in range(2)]
    ends = [node.end() for node in nodes]
    assert [code for code, _ in ends] == [70, 70], ends
    assert starts(tmp_path, 0, 1) == [2, 2], ends


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["done", "mistake", "interrupted", "failed", "lost", "one failed"]), max_size=12))
def test_interruptions_are_no_failures(tmp_path_factory: pytest.TempPathFactory, ends: list[str]) -> None:
    """Two nodes; a job ends with 70 at its first failure above the limit, and does not begin after it."""
    folder = tmp_path_factory.mktemp("starts")
    max_retries, failures = 2, 0
    for end in ends:
        first, second = Starts(folder, max_retries), Starts(folder, max_retries)
        assert first.begin() == (failures <= max_retries)
        if failures > max_retries:
            return
        second.join()
        codes = {"done": (0, 0), "mistake": (2, 3), "interrupted": (75, 75), "failed": (1, 1), "one failed": (75, 9)}
        failures += end in ("failed", "lost", "one failed")
        if end in ("done", "mistake"):
            assert (first.end(codes[end][0]), second.end(codes[end][1])) == codes[end]
            return
        if end != "lost":
            last = second.end(codes[end][1])
            assert last == (70 if failures > max_retries and codes[end][1] != 75 else codes[end][1])
            first.end(codes[end][0])
