"""``tests/launch/mini_slurm.sh`` itself: a second Slurm beside the one of the other tests."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import MiniSlurm, free_ports, wait_until
from tests.launch.test_nodes import is_running


@pytest.fixture
def second(mini_slurm: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    """Not up yet; without accounting, which starts slowly."""
    folder = f"{mini_slurm.settings['MINI_SLURM_DIR']}-2"
    changes = {"MINI_SLURM_DIR": folder, "MINI_SLURM_PORT": str(free_ports()), "MINI_SLURM_ACCOUNTING": "0"}
    slurm = MiniSlurm({**mini_slurm.settings, **changes})
    yield slurm
    assert slurm("down", "--purge").returncode == 0
    assert not Path(folder).exists()


def daemons(slurm: MiniSlurm) -> dict[str, int]:
    run = Path(slurm.settings["MINI_SLURM_DIR"], "run")
    return {path.stem: int(path.read_text().split()[0]) for path in run.glob("*.pid")}


def hosts(slurm: MiniSlurm) -> list[str]:
    mark = f"# mini-slurm {slurm.settings['MINI_SLURM_DIR']}"
    return [line for line in Path("/etc/hosts").read_text().splitlines() if line.endswith(mark)]


def runs_job(slurm: MiniSlurm) -> bool:
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--immediate=60", "printenv", "SLURMD_NODENAME"]
    environment = {**os.environ, "SLURM_CONF": slurm.configuration}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    return sorted(done.stdout.split()) == ["mini1", "mini2"]


@pytest.mark.slow
def test_up_and_down_again_and_again(second: MiniSlurm, mini_slurm: MiniSlurm) -> None:
    others = daemons(mini_slurm)
    assert second("up").returncode == 0
    first = daemons(second)
    assert set(first) == {"munged", "slurmctld", "mini1", "mini2", "watch"}
    assert second("up").returncode == 0
    assert daemons(second) == first and len(hosts(second)) == 2
    assert runs_job(second)
    # the whole machine loses power, but for its disk
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, first.values())), "they are not gone at once")
    assert second("up").returncode == 0
    assert not set(daemons(second).values()) & set(first.values())
    assert runs_job(second)
    for _ in range(2):
        assert second("down").returncode == 0
        assert not daemons(second) and not hosts(second)
    assert second("status").returncode == 1
    assert daemons(mini_slurm) == others and len(hosts(mini_slurm)) == 2


@pytest.mark.thorough
def test_only_this_machine_is_listened_to(mini_slurm: MiniSlurm) -> None:
    first = int(mini_slurm.settings["MINI_SLURM_PORT"])
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    addresses = {int(port, 16) - first: address for address, port in listening if 0 <= int(port, 16) - first < 13}
    # controller, accounting, its database and two nodes; the address is 127.0.0.1 backwards
    assert addresses == dict.fromkeys((0, 1, 2, 11, 12), "0100007F")


def test_wrong_settings_are_refused() -> None:
    for name, value, message in (
        ("PORT", "x", "MINI_SLURM_PORT is 'x'"),
        ("NODES", "0", "MINI_SLURM_NODES is '0'"),
        ("REQUEUE_SECONDS", "2", "5 or more"),
        ("DIR", "here", "absolute path"),
        ("DIR", "/tmp/" + "a" * 100, "too long"),
    ):
        refused = MiniSlurm({f"MINI_SLURM_{name}": value})("up")
        assert refused.returncode == 1 and message in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    os.chown(folder, 65534, 65534)
    for command in ("up", "down", "env", "status", "kill-node", "start-node"):
        for place, message in ((link, "is a symbolic link"), (folder, "and not to root")):
            refused = MiniSlurm({"MINI_SLURM_DIR": str(place)})(command)
            assert refused.returncode == 1 and message in refused.stderr
    assert not list(folder.iterdir())
