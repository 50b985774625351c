"""Kernels are compiled once for all processes that need them, and are had wherever numba can be imported."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from distembed.kernels import loading

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, json, sys, time
from numba.core import config, event
from distembed.kernels import loading

chosen, is_blocked = sys.argv[1], sys.argv[2] == "blocked"
if chosen != "real":
    small = importlib.import_module(chosen)
    sys.modules["distembed.kernels.compose"] = sys.modules["distembed.kernels.update"] = small

class Watch(event.Listener):
    times = []
    def on_start(self, event):
        self.times.append(time.monotonic())
        if is_blocked:
            print("compiling", flush=True)
            time.sleep(600)
    def on_end(self, event):
        self.times.append(time.monotonic())

assert loading.reason_unavailable() is None, loading.reason_unavailable()
print("ready", flush=True)
sys.stdin.readline()
with event.install_listener("numba:compile", Watch()):
    kernels = loading.load_kernels(8)
assert config.OPT == 3  # kernels alone are compiled at another level
if chosen != "real":
    assert kernels.update(5, 0, 0, 0, 7) == 17
print(json.dumps({
    "times": [min(Watch.times), max(Watch.times)] if Watch.times else [],
    "hits": [sum(kernel.stats.cache_hits.values()) for kernel in kernels],
    "misses": [sum(kernel.stats.cache_misses.values()) for kernel in kernels],
    "folders": [str(kernel.stats.cache_path) for kernel in kernels],
}))
"""
SMALL = "tests.fused.small_kernels"


class Loader:
    """A process that loads the kernels when it is told to.

    Args:
        folder: Where it has its lock and, unless others are named, its files.
        kernels: ``real``, or a module that stands in for them.
        is_blocked: Whether it stops as soon as it compiles.
        environment: More of its environment.
        root: The folder that it runs in.
    """

    def __init__(
        self, folder: Path, kernels: str = SMALL, is_blocked: bool = False, root: Path = ROOT, **environment: str
    ) -> None:
        given = {"TMPDIR": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(root)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kernels, "blocked" if is_blocked else "free"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={key: value for key, value in {**os.environ, **given, **environment}.items() if value},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.line() == "ready" and self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        answer = self.line()
        assert self.process.wait() == 0
        return json.loads(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(folder: Path, **settings: Any) -> dict[str, Any]:
    """What one process that loads the kernels alone tells."""
    loader = Loader(folder, **settings)
    try:
        loader.go()
        return loader.result()
    finally:
        loader.end()


def check_together(folder: Path, kernels: str, number: int) -> None:
    loaders = [Loader(folder, kernels) for _ in range(number)]
    try:
        for loader in loaders:
            loader.go()
        results = [loader.result() for loader in loaders]
    finally:
        for loader in loaders:
            loader.end()
    # one compiles both passes, and all others take them from its files
    assert sorted(result["misses"] for result in results) == [[0, 0]] * (number - 1) + [[1, 1]]
    assert sorted(result["hits"] for result in results) == [[0, 0]] + [[1, 1]] * (number - 1)
    spans = sorted(result["times"] for result in results if result["times"])
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert len(spans) == 1


@pytest.mark.thorough
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    check_together(tmp_path, SMALL, 3)


@pytest.mark.slow
def test_processes_that_start_together_compile_the_real_kernels_once(tmp_path: Path) -> None:
    check_together(tmp_path, "real", 4)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_compiles_lets_the_next_one_compile(tmp_path: Path) -> None:
    first = Loader(tmp_path, is_blocked=True)
    second = Loader(tmp_path)
    try:
        first.go()
        assert first.line() == "compiling"
        second.go()
        first.process.kill()
        assert second.result()["misses"] == [1, 1]
    finally:
        first.end()
        second.end()
    assert run(tmp_path)["hits"] == [1, 1]


@pytest.mark.slow
def test_a_damaged_file_is_compiled_anew_and_replaced(tmp_path: Path) -> None:
    run(tmp_path)
    files = sorted((tmp_path / "cache").rglob("*.nb[ci]"))
    assert len(files) == 4
    for damaged in files:
        damaged.write_bytes(damaged.read_bytes()[:-200])
        run(tmp_path)
        run(tmp_path)
        assert run(tmp_path)["hits"] == [1, 1], damaged


def copy_package(folder: Path) -> Path:
    """The package and the small kernels, in a folder of their own; returns that folder."""
    shutil.copytree(ROOT / "distembed", folder / "distembed", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "fused" / "small_kernels.py", folder / "distembed" / "kernels" / "small.py")
    return folder


@pytest.mark.slow
def test_kernels_are_compiled_anew_when_any_file_that_they_are_made_of_has_changed(tmp_path: Path) -> None:
    root = copy_package(tmp_path / "package")
    settings: dict[str, Any] = {"root": root, "kernels": "distembed.kernels.small"}
    assert run(tmp_path, **settings)["misses"] == [1, 1]
    assert run(tmp_path, **settings)["hits"] == [1, 1]
    for name in ("rows", "simd", "layout", "slots", "loading"):
        with (root / "distembed" / "kernels" / f"{name}.py").open("a") as file:
            file.write("\n# another line\n")
        assert run(tmp_path, **settings)["misses"] == [1, 1], name
        assert run(tmp_path, **settings)["hits"] == [1, 1], name


@pytest.mark.slow
def test_kernels_are_had_wherever_their_files_can_be_kept_and_where_they_cannot(tmp_path: Path) -> None:
    root = copy_package(tmp_path / "package")
    # no folder can be made beside a module, as in an installation that belongs to somebody else
    (root / "distembed" / "kernels" / "__pycache__").write_text("")
    own = tmp_path / "own"
    own.mkdir()
    settings: dict[str, Any] = {"root": root, "kernels": "distembed.kernels.small", "NUMBA_CACHE_DIR": ""}
    for hits in ([0, 0], [1, 1]):
        found = run(tmp_path, **settings, HOME=str(own), XDG_CACHE_HOME=str(own / "cache"))
        assert found["hits"] == hits and all(Path(one).is_relative_to(own) for one in found["folders"])
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        found = run(tmp_path, **settings, HOME=str(blocked), XDG_CACHE_HOME=str(blocked / "cache"))
        assert found["hits"] == [0, 0] and found["times"]
    # nor can the lock be opened
    (own / f"distembed-kernels-{os.getuid()}.lock").mkdir()
    assert run(own, **settings, HOME=str(blocked), XDG_CACHE_HOME=str(blocked))["times"]


def test_a_processor_that_cannot_convert_float16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("other processors convert float16")
    ask = loading.reason_unavailable.__wrapped__
    assert ask() is None
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,+fma")
    assert "cannot convert float16 (f16c)" in str(ask())


@pytest.mark.parametrize(
    "hindrance",
    [(loading.fcntl, "flock"), (loading.tempfile, "gettempdir"), (loading.os, "open")],
    ids=lambda own: own[1],
)
def test_without_a_lock_each_process_compiles_for_itself(
    hindrance: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> None:
        raise OSError(38, "Function not implemented")

    caplog.set_level("DEBUG", loading.__name__)
    monkeypatch.setattr(*hindrance, fail)
    with loading._one_at_a_time():
        monkeypatch.undo()
        assert "compiled without a lock ([Errno 38] Function not implemented)" in caplog.text


def test_a_process_that_is_stopped_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(loading, "_LONGEST_WAIT", 0.1)
    with loading._one_at_a_time(), loading._one_at_a_time():
        assert "it is not waited for" in caplog.text
    caplog.clear()
    with loading._one_at_a_time():
        assert not caplog.text
