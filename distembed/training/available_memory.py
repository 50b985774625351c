"""How much memory this machine, or the container that this process is in, has to give."""

from pathlib import Path

_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of both versions of control groups: limit, use, details, and what of the use the kernel may drop again."""


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had without swapping, as Linux estimates it, within the container's limit if there is one.

    Args:
        meminfo: of the machine.
        cgroup: of the container.
    """
    available = _numbers(meminfo)["MemAvailable:"] * 1024
    for limit, used, details, droppable in _LIMITS:
        if (cgroup / limit).is_file() and (cgroup / limit).read_text().strip().isdigit():
            in_use = int((cgroup / used).read_text()) - _numbers(cgroup / details).get(droppable, 0)
            available = min(available, int((cgroup / limit).read_text()) - in_use)
    return max(0, available)


def _numbers(path: Path) -> dict[str, int]:
    """Lines such as ``MemAvailable:  123 kB`` and ``inactive_file 123``."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
