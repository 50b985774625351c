"""The memory of this machine by Linux and containers, and loggers that are silent for a while."""

import logging
from pathlib import Path

import pytest

from distembed.base.machine import available_memory_bytes
from distembed.base.process import silenced_loggers


def test_available_memory_is_that_of_the_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    (cgroup / "memory").mkdir(parents=True)
    assert available_memory_bytes(meminfo, cgroup) == 5000 * 1024
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("3000000\n")
    (cgroup / "memory" / "memory.usage_in_bytes").write_text("2000000\n")
    (cgroup / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 500000\n")
    assert available_memory_bytes(meminfo, cgroup) == 1_500_000
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000000\n")
    (cgroup / "memory.stat").write_text("inactive_file 100000\n")
    assert available_memory_bytes(meminfo, cgroup) == 1_500_000
    (cgroup / "memory.max").write_text("2000000\n")
    assert available_memory_bytes(meminfo, cgroup) == 1_100_000
    (cgroup / "memory.max").write_text("800000\n")
    assert available_memory_bytes(meminfo, cgroup) == 0
    assert available_memory_bytes() > 0


def test_the_block_alone_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    fx, root = logging.getLogger("torch.fx._symbolic_trace"), logging.getLogger()
    caplog.set_level(logging.WARNING, fx.name)  # a command that ran in this process has left it silent
    before = fx.level, list(root.filters)
    with silenced_loggers():
        fx.warning("is_fx_tracing will return true")
        root.warning("Sharding spec not found for C1")
        fx.error("heard within")
    fx.warning("heard afterwards")
    assert [record.message for record in caplog.records] == ["heard within", "heard afterwards"]
    assert (fx.level, list(root.filters)) == before


def test_an_error_leaves_the_logging_as_it_was() -> None:
    fx = logging.getLogger("torch.fx._symbolic_trace")
    level = fx.level
    with pytest.raises(KeyError), silenced_loggers():
        raise KeyError
    assert fx.level == level
