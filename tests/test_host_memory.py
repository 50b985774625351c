"""How much host memory there is, as Linux and containers say."""

from pathlib import Path

from distembed.base.machine import available_memory_bytes


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
