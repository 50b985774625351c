"""A Slurm of two nodes on this machine, one for each process that runs tests."""

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mini_slurm.sh")
CANNOT_RUN = 3
NUM_PORTS = 13


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def processes(run: Path) -> dict[int, list[str]]:
    """Words of the command lines of launchers and ranks of a run, by their process ids."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(run) in words and "launch" not in words:
            found[int(process.name)] = words
    return found


@dataclass(frozen=True)
class MiniSlurm:
    """The daemons of ``tests/launch/mini_slurm.sh``, by the variables that select them."""

    settings: dict[str, str]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *arguments], env={**os.environ, **self.settings}, capture_output=True, text=True, timeout=280
        )

    @property
    def configuration(self) -> str:
        return f"{self.settings['MINI_SLURM_DIR']}/etc/slurm.conf"

    def kill_node(self, node: str) -> None:
        self("kill-node", node).check_returncode()

    def start_node(self, node: str) -> None:
        self("start-node", node).check_returncode()

    def wait_until_idle(self) -> None:
        """No job is left, and each node waits for one."""
        subprocess.run(["scancel", "--user=root"], check=True, timeout=30)
        for _ in range(600):
            rows = subprocess.run(
                ["sinfo", "-hN", "-p", "debug", "-o", "%T"], capture_output=True, text=True, timeout=30
            )
            jobs = subprocess.run(["squeue", "-h"], capture_output=True, text=True, timeout=30)
            if rows.stdout.split() == ["idle", "idle"] and not jobs.stdout:
                return
            time.sleep(0.1)
        raise AssertionError(f"jobs do not end:\n{rows.stdout}\n{jobs.stdout}")


@pytest.fixture(scope="session")
def mini_slurm() -> Iterator[MiniSlurm]:
    # not pytest's folder: the path of a socket may not be long
    folder = tempfile.mkdtemp(prefix="mini-slurm-")
    slurm = MiniSlurm(
        {
            "MINI_SLURM_DIR": folder,
            "MINI_SLURM_PORT": str(free_ports()),
            "MINI_SLURM_REQUEUE_SECONDS": "5",
            "MINI_SLURM_DEAD_SECONDS": "5",
            # however this process ends
            "MINI_SLURM_WHILE_PID": str(os.getpid()),
        }
    )
    try:
        started = slurm("up")
        if started.returncode == CANNOT_RUN:
            pytest.skip(started.stderr)
        assert started.returncode == 0, started.stderr
        yield slurm
    finally:
        if Path(folder, "run").is_dir():
            slurm("down", "--purge").check_returncode()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(mini_slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniSlurm]:
    """The Slurm of this process, found by the commands that a test runs, with no job in it."""
    monkeypatch.setenv("SLURM_CONF", mini_slurm.configuration)
    yield mini_slurm
    mini_slurm.wait_until_idle()


def free_ports() -> int:
    """The first of some ports in a row that nothing listens on, below those that jobs and connections are given."""
    for _ in range(100):
        first = random.SystemRandom().randrange(15000, 20000 - NUM_PORTS)
        try:
            with ExitStack() as stack:
                for port in range(first, first + NUM_PORTS):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise AssertionError(f"there are no {NUM_PORTS} free ports in a row")
