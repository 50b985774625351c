"""Nodes that are hosts of their own, with names and addresses: network namespaces of ``tools/two_hosts.sh``."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.specs import macros

from distembed.launch.components import train
from tests.small_runs import distembed

SCRIPT = Path(__file__).parents[2] / "tools" / "two_hosts.sh"
CANNOT_RUN = 3
SERVER = """
import socket, sys
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    peer, address = server.accept()
    received = 0
    while data := peer.recv(65536):
        received += len(data)
    print(received, address[0], socket.gethostname())
"""
CLIENT = 'import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(b"x" * 1_000_000)'


class Hosts:
    """Two hosts with a name of their own, so that several pairs can be up."""

    def __init__(self) -> None:
        number = random.SystemRandom().randrange(1, 250)
        self.name, self.subnet = f"test{number}-", f"10.79.{number}"
        self.environment = {**os.environ, "TWO_HOSTS_NAME": self.name, "TWO_HOSTS_SUBNET": self.subnet}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([SCRIPT, *arguments], env=self.environment, capture_output=True, text=True, timeout=60)

    def start(self, number: int, *command: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [SCRIPT, "exec", str(number), *command],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    pair = Hosts()
    started = pair("up")
    if started.returncode == CANNOT_RUN:
        pytest.skip(started.stderr)
    assert started.returncode == 0, started.stderr
    try:
        yield pair
    finally:
        pair("down").check_returncode()


def traces(hosts: Hosts) -> list[str]:
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    places = [*Path("/run/netns").glob(f"{hosts.name}*"), *Path("/etc/netns").glob(f"{hosts.name}*")]
    return [line for line in links if line.startswith(hosts.name)] + [str(place) for place in places]


def test_hosts_reach_each_other_by_name_and_leave_nothing_behind(hosts: Hosts) -> None:
    assert hosts("up").returncode == 0 and hosts("limit", "1gbit").returncode == 0
    server = hosts.start(1, sys.executable, "-c", SERVER)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    client = hosts.start(2, sys.executable, "-c", CLIENT, f"{hosts.name}1")
    said, _ = client.communicate(timeout=60)
    assert client.returncode == 0, said
    answer, _ = server.communicate(timeout=60)
    assert answer.split() == ["1000000", f"{hosts.subnet}.2", f"{hosts.name}1"]
    sent = int(hosts("exec", "2", "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)
    assert 1_000_000 < sent < 1_200_000
    assert "takes no rate 'fast'" in hosts("limit", "fast").stderr
    left_running = hosts.start(1, "sleep", "1000")
    hosts("exec", "1", "true").check_returncode()
    assert len(traces(hosts)) == 7  # two namespaces, two files of names, two interfaces and a bridge
    hosts("down").check_returncode()
    assert left_running.wait(timeout=60) != 0 and traces(hosts) == []


@pytest.mark.slow
@pytest.mark.distributed
def test_nodes_with_names_of_their_own_train_as_two_ranks_do(hosts: Hosts, tmp_path: Path, config: Path) -> None:
    run = tmp_path / "run"
    role = train(config=str(config), run_dir=str(run), j="2x1", python=sys.executable, max_restarts=0).roles[0]
    nodes = []
    for number in range(2):
        # as on a cluster, the second does not wait for the first to be up
        own = macros.Values(img_root="", app_id="job-1", replica_id=str(1 - number), rank0_env="FIRST").apply(role)
        nodes.append(hosts.start(2 - number, own.entrypoint, *own.args, **own.env, FIRST=f"{hosts.name}1"))
    for node in nodes:
        said, _ = node.communicate(timeout=200)
        assert node.returncode == 0, said
    distembed("train", config, "--run-dir", tmp_path / "here", ranks=2)
    results = [json.loads((folder / "evaluation.json").read_text()) for folder in (run, tmp_path / "here")]
    assert results[0].pop("seconds") and results[1].pop("seconds")
    assert results[0] == results[1]
