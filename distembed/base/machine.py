"""The processor cores and the memory of this machine, as far as this process may use them."""

import ctypes
import os
import sys
from collections.abc import Set
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For both versions of control groups the files of limit, use and details, and the name in the details of memory that
the kernel may drop again.
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 2**30


def usable_cores() -> int:
    """Returns the number of cores that this process may run on, fewer than all in a container or a Slurm job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_intel_processor() -> bool:
    """Returns whether the processor is Intel's, by its vendor: its name may be anything on a virtual machine."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def multiplies_faster_in_bf16(flags: Set[str], is_intel: bool) -> bool:
    """Returns whether a processor multiplies matrices faster in bfloat16 than in float32.

    ``flags`` are the processor's features, as Linux and torch name them. An Intel processor does so by AMX, which
    virtual machines often lack: its ``avx512_bf16`` alone reached 160 GFLOP/s where float32 reached 280 (two cores of a
    Xeon of 2023). AMD's ``avx512_bf16`` is twice as fast as float32.
    """
    return not flags.isdisjoint(("amx_bf16", "bf16")) or ("avx512_bf16" in flags and not is_intel)


def host_memory_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or the container's where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number(_CGROUP / limit) for limit, *_ in _LIMITS)
    return min([physical, *(limit for limit in limits if limit is not None)])


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Returns the bytes that are available without swapping, by ``meminfo`` and the limit of the control group.

    Page cache that the kernel can drop counts as available. The result is 0 where the system does not say.
    """
    available = _numbers(meminfo).get("MemAvailable:", 0) * 1024
    for limit, used, details, droppable in _LIMITS:
        limit_bytes = _number(cgroup / limit)
        if limit_bytes is not None:
            in_use = (_number(cgroup / used) or 0) - _numbers(cgroup / details).get(droppable, 0)
            available = min(available, limit_bytes - in_use)
    return max(0, available)


def keep_freed_memory() -> None:
    """Has glibc keep freed blocks of up to 1 GiB for reuse; does nothing where the C library is another.

    Each training step allocates and frees tens of megabytes of activations. By default glibc maps and unmaps each block
    above 128 KiB, at a page fault per 4 KiB. Measured with ``tools/bench_train.py`` at batch 2048 in bf16: 660 faults
    and 31 ms a step by default, none and 28 ms so.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    set_option(_M_MMAP_THRESHOLD, _KEEP_BYTES)
    set_option(_M_TRIM_THRESHOLD, 2 * _KEEP_BYTES - 1)


def give_back_freed_memory() -> None:
    """Has glibc return all freed memory to the system, once; does nothing where the C library is another."""
    if sys.platform.startswith("linux") and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _number(file: Path) -> int | None:
    """Returns the number that a file holds; None where there is no file, or no number in it."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """Reads lines like ``MemAvailable:  123 kB`` and ``inactive_file 123``; none from a missing file."""
    words = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
