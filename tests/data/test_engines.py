"""Preparations on a Ray and on a Spark cluster of two workers on loopback: the bytes and errors of threads."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import UserError, one_line
from distembed.data.prepare import CriteoOptions, ResourceLimits, prepare_criteo
from distembed.data.prepare.work import run_tasks
from tests.data import reference
from tests.data.killed import prepare_with_kills, start
from tests.data.reference import folder_bytes
from tests.data.small_work import TROUBLE, prepare

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]

# Prepares and tells how each preparation ended; standard output has one JSON list.
PREPARE = """
import json, sys
from pathlib import Path
from distembed.data.prepare import CriteoOptions, ResourceLimits, prepare_criteo
from tests.data.small_work import prepare
engine, folder, troubles, rows = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:]
ended = []
for trouble in troubles:
    try:
        ended.append(prepare(folder / "small", trouble=trouble or None, engine=engine))
    except Exception as error:
        ended.append([type(error).__name__, str(error)])
if rows:
    limits = ResourceLimits(1 << 30, engine=engine)
    prepare_criteo(rows, folder / "criteo", CriteoOptions(split="days"), limits)
print(json.dumps(ended))
"""


@pytest.fixture(params=["ray", "spark"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster of two workers, which the environment names."""
    if find_spec({"ray": "ray", "spark": "pyspark"}[request.param]) is None:
        pytest.skip(f"{request.param} is not installed: tools/setup.sh {request.param}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    if request.param == "spark":
        for name, value in {"MASTER": "local-cluster[2,1,1024]", "SPARK_LOCAL_IP": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SPARK_WORKER_DIR", str(tmp_path / "spark"))
        yield request.param
        return
    with ray_cluster(monkeypatch):
        yield request.param


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields a Ray cluster of two workers, which the environment names."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's name for: on loopback
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.1"})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


def begin(engine: str, folder: Path, troubles: str, *rows: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREPARE, engine, str(folder), troubles, *map(str, rows)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: "subprocess.Popen[str]") -> list[Any]:
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0
    found: list[Any] = json.loads(next(line for line in said.split("\n") if line.startswith("[[")))  # Ray says more
    return found


def test_a_cluster_makes_the_bytes_and_errors_of_threads(engine: str, tmp_path: Path) -> None:
    """Also where a worker dies; where one dies each time, finished tasks are kept."""
    days = [tmp_path / f"day_{day}.tsv" for day in range(3)]
    for day, path in enumerate(days):
        path.write_bytes(reference.content(300 + 40 * day, day, malformed=0.005))
    prepare_criteo(days, tmp_path / "threads", CriteoOptions(split="days"), ResourceLimits(1 << 30))
    manifest = prepare(tmp_path / "small-threads")["manifest"]
    *errors, lost, once = ended(begin(engine, tmp_path, ",".join([*TROUBLE, "die", "die once"]), *days))
    user, (kind, full), key = errors
    assert [user, key] == [["UserError", "rows are bad"], ["KeyError", "'key'"]]
    assert kind == "RunError" and full.startswith(f"{tmp_path}/small could not be written (No space left on device)")
    assert isinstance(lost, list) and lost[0] == "TemporaryFailure" and "finished tasks are kept" in lost[1]
    assert isinstance(once, dict) and once["manifest"] == manifest
    assert folder_bytes(tmp_path / "criteo") == folder_bytes(tmp_path / "threads")
    assert not list(tmp_path.glob(".*.preparing"))


def test_ray_without_a_cluster_starts_one_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that it has no room for is refused, rather than waited for."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code = """
import sys; from pathlib import Path
from distembed.data.prepare import ResourceLimits
from distembed.data.prepare.work import run_tasks
from distembed.base.errors import UserError
results = run_tasks(str, [1, 2], ResourceLimits(320 << 20, engine="ray"), 1)
assert sorted(each for some in results for each in some) == ["1", "2"]
import ray
assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
try: list(run_tasks(str, [1], ResourceLimits(1 << 50, 900, engine="ray"), 1))
except UserError as error: assert "no machine of the Ray cluster has as much" in str(error)
else: assert False
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_spark_master_that_does_not_answer_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's errors, which are in colours, are said without them."""
    pytest.importorskip("pyspark")
    monkeypatch.setenv("MASTER", "spark://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(UserError, match="MASTER=spark://127.0.0.1:1,127.0.0.1:2 does not answer: .*refused"):
        list(run_tasks(str, [1], ResourceLimits(engine="spark"), 1))
    assert one_line(RuntimeError("\x1b[36mray::task()\x1b[39m\nis lost")) == "RuntimeError: ray::task() is lost"


KILLS = 100
PREPARE_ON_RAY = """
import sys
from distembed.data.prepare import ResourceLimits, prepare_criteo
prepare_criteo(sys.argv[2:], sys.argv[1], limits=ResourceLimits(1 << 30, engine="ray"))
"""


def running(node: Any) -> list[int]:
    """Returns the processes that run a task on a Ray node."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for child in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split():
        with suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::_attempt"):
                found.append(int(child))
    return found


def test_commands_workers_and_machines_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often, each dataset has the bytes of threads, and nothing is left."""
    pytest.importorskip("ray")
    days, draw, killed = [tmp_path / f"day_{day}.tsv" for day in range(5)], random.Random(7), 0
    for day, path in enumerate(days):
        path.write_bytes(reference.content(1000, day))
    prepare_criteo(days, tmp_path / "threads", limits=ResourceLimits(1 << 30))
    with ray_cluster(monkeypatch) as cluster:
        while killed < KILLS:
            output = tmp_path / f"out-{killed}"
            begin = partial(start, PREPARE_ON_RAY, output, *days)
            if killed < KILLS // 4:
                killed += prepare_with_kills(begin, output, draw, KILLS // 4 - killed)[0]
            while not output.exists():
                process = begin()
                while process.poll() is None:
                    node = draw.choice(list(cluster.worker_nodes))
                    if killed < KILLS and (workers := running(node)):
                        if draw.random() < 0.2:
                            cluster.remove_node(node, allow_graceful=False)
                            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")
                        else:
                            os.kill(workers[0], signal.SIGKILL)
                        killed += 1
                        time.sleep(draw.uniform(0, 1))
                    time.sleep(0.01)
                said = process.communicate()[1]
                assert not process.returncode or b"finished tasks are kept" in said, said
            if list(tmp_path.glob(".*")):  # killed when the dataset was in place
                assert begin().wait(60)  # refused, since it is there
            assert folder_bytes(output) == folder_bytes(tmp_path / "threads")
            assert not list(tmp_path.glob(".*"))
