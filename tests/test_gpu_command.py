"""``tools/gpu.sh``: what it counts and writes, what ends a part, and in the slow tests all of it on a processor."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HERE = {"machine": {"device": "cpu", "threads": 1}, "versions": {"torch": "2.13.0"}, "scale": {"dims": [4]}}
LAUNCH_ROW = {"what": "tables alone", "contender": "x", "kernels": 3, "copies": 1, "fills": 0, "waits": 0.5}
LAUNCH_ROW |= {"device_milliseconds": 0.25, "operators": 7}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from gpu import driver

    return driver


def event(category: str, name: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread}


def test_a_trace_is_counted(driver: Any) -> None:
    from gpu.launches import count

    trace = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "counted step", 100, 100),
        event("user_annotation", "counted step", 300, 100),
        event("user_annotation", "## forward ##", 100, 500),
        event("cpu_op", "aten::linear", 110, 30),
        event("cpu_op", "aten::addmm", 115, 10),  # within the one before
        event("cpu_op", "aten::relu", 150, 5),
        event("cpu_op", "MulBackward0", 120, 50, thread=2),
        event("cpu_op", "aten::mul", 130, 10, thread=2),
        event("cpu_op", "aten::add", 310, 10),
        event("cpu_op", "aten::add", 250, 10),  # between the steps
        event("cuda_runtime", "cudaLaunchKernel", 116, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 160, 30),
        event("cuda_runtime", "cudaDeviceSynchronize", 450, 30),  # the profiler's own
        event("cuda_runtime", "cudaStreamWaitEvent", 161, 1),
        event("kernel", "gemm", 170, 40, thread=7),
        event("kernel", "relu", 420, 10, thread=7),  # late, as kernels are
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 330, 5, thread=7),
        event("gpu_memset", "Memset (Device)", 335, 1, thread=7),
        event("gpu_user_annotation", "counted step", 170, 300, thread=7),
    ]
    assert count(trace) == {
        "kernels": 2,
        "copies": 1,
        "fills": 1,
        "device_milliseconds": pytest.approx(0.056),
        "waits": 1,
        "operators": 4,
    }


def test_rows_are_kept_from_call_to_call_of_the_same_surroundings(driver: Any, tmp_path: Path) -> None:
    from gpu.results import Results, end, read

    path = tmp_path / "launches.json"
    first = Results(path, HERE)
    assert first.lacks(what="tables alone", contender="x")
    first.add([LAUNCH_ROW])
    assert read(path)["status"] == "running" and read(path)["rows"] == [LAUNCH_ROW]
    end(path, HERE, "failed", "why")
    assert read(path)["rows"] == [LAUNCH_ROW] and read(path)["error"] == "why"
    again = Results(path, HERE)
    assert not again.lacks(what="tables alone", contender="x") and again.lacks(what="tables alone", contender="y")
    again.finish()
    assert read(path)["status"] == "done" and "error" not in read(path)
    elsewhere = Results(path, {**HERE, "versions": {"torch": "2.11.0"}})
    assert elsewhere.rows == [] and read(path)["rows"] == []
    path.write_text('{"rows": [')  # what a full disk leaves
    assert read(path) == {}


def run_all(driver: Any, folder: Path, minutes: float = 9.0, fresh: bool = False) -> int:
    names = ["launches", "sse", "checkpoint"]
    return driver.run_all(folder, argparse.Namespace(dry=True, fresh=fresh, only=names, minutes=minutes))


def test_a_part_that_fails_is_noted_and_the_others_go_on(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu.results import Results, read

    ran: list[str] = []
    fails = {"sse": 1, "checkpoint": None}

    def run(name: str, folder: Path, dry: bool, seconds: float) -> int | None:
        ran.append(name)
        (folder / f"{name}.log").write_text("Traceback\nRuntimeError: CUDA error | none")
        if name == "surroundings":
            (folder / "surroundings.json").write_text(json.dumps(HERE))
            return 0
        results = Results(folder / f"{name}.json", HERE)
        if name == "launches":
            results.add([LAUNCH_ROW])
        if fails.get(name, 0) == 0:
            results.finish()
        return fails.get(name, 0)

    monkeypatch.setattr(driver, "_run", run)
    assert run_all(driver, tmp_path) == 1
    assert ran == ["surroundings", "launches", "sse", "checkpoint"]
    statuses = {name: read(tmp_path / f"{name}.json")["status"] for name in ran[1:]}
    assert statuses == {"launches": "done", "sse": "failed", "checkpoint": "out of time"}
    table = (tmp_path / "table.md").read_text()
    assert "| tables alone | x | 3 | 1 | 0 | 0.5 | 0.250 | 7 |" in table
    assert "**failed**: RuntimeError: CUDA error" in table and "**out of time**: stopped after" in table
    assert table in capsys.readouterr().out

    ran.clear()
    fails.clear()
    assert run_all(driver, tmp_path) == 0
    assert ran == ["surroundings", "sse", "checkpoint"]  # what is done is not repeated
    ran.clear()
    assert run_all(driver, tmp_path, minutes=0, fresh=True) == 1
    assert ran == ["surroundings"] and read(tmp_path / "sse.json")["status"] == "out of time"


def command(folder: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "DISTEMBED_PYTHON_READY": sys.executable, "OMP_NUM_THREADS": "1"}
    return [str(ROOT / "tools" / "gpu.sh"), "--dry", "--results", str(folder), *options], environment


def call(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments, environment = command(folder, *options)
    return subprocess.run(arguments, env=environment, capture_output=True, text=True)


def contents(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_runs_everything_and_a_second_call_repeats_nothing(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = contents(tmp_path)
    parts = ["tests", "embedding", "step", "launches", "sse", "memory", "checkpoint"]
    assert {name: found[name]["status"] for name in parts} == dict.fromkeys(parts, "done")
    assert all(found[name]["rows"] for name in parts)
    outcomes = [row["outcome"] for row in found["tests"]["rows"]]
    assert set(outcomes) == {"passed"} and len(outcomes) >= 60
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n### ") == len(parts) and "Not run" not in table and table in done.stdout
    assert sum(line.startswith("|") for line in table.splitlines()) > 70

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json") if path.stem in parts}
    again = call(tmp_path)
    assert again.returncode == 0 and again.stdout.count("is done already") == len(parts)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments, environment = command(tmp_path, "--only", "sse", "embedding")
    started = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
    path, rows = tmp_path / "sse.json", []
    while not rows:  # the first of two cells
        assert started.poll() is None, "it ended before anything was measured"
        time.sleep(0.05)
        rows = rows_of(tmp_path / "embedding.json") if path.exists() else []
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    part = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_part(entry, tmp_path)]
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in part):
        assert time.monotonic() < deadline, "the part outlives the run"
        time.sleep(0.05)
    killed = rows_of(tmp_path / "embedding.json")
    assert rows == killed[: len(rows)]
    sse = path.read_text()

    done = call(tmp_path, "--only", "sse", "embedding")
    assert done.returncode == 0 and done.stdout.count("is done already") == 1
    assert path.read_text() == sse
    whole = rows_of(tmp_path / "embedding.json")
    assert whole[: len(killed)] == killed and len(whole) > len(killed)
    cells = [(row["dim"], row["batch_size"], row["contender"]) for row in whole]
    assert len(set(cells)) == len(cells) == 32


def rows_of(path: Path) -> list[Any]:
    try:
        return json.loads(path.read_text())["rows"]  # type: ignore[no-any-return]
    except FileNotFoundError:
        return []


def is_part(process: Path, folder: Path) -> bool:
    try:
        line = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--part" in line and str(folder).encode() in line


@pytest.mark.slow
def test_without_a_card_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    arguments, environment = command(tmp_path)
    done = subprocess.run([a for a in arguments if a != "--dry"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "finds 0 CUDA devices" in done.stderr
