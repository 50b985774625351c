"""The NVIDIA driver of this machine, and which driver a build for CUDA needs; torch is not asked.

Training and ``distembed doctor`` ask here, and so does ``tools/setup.sh``, which runs this file without the package::

    python distembed/base/cuda_driver.py 13.0    fails where this machine's driver is too old for a build for CUDA 13.0

A build runs on each driver from the oldest one that supports its major version on ("CUDA Compatibility", NVIDIA:
minor-version compatibility); with the package ``cuda-compat`` on the path of libraries, older drivers do.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Major version of CUDA -> the oldest driver for Linux on which its builds run."""

_NVIDIA_SMI_SECONDS = 60
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def nvidia_smi_works() -> bool:
    """Returns whether there is an NVIDIA driver with at least one device."""
    return _nvidia_smi("-L") is not None


def has_nvidia_device() -> bool:
    """Returns whether this machine, or this container, has an NVIDIA device, whether or not CUDA can use it."""
    # In a container without devices the kernel's files still tell of the driver.
    return nvidia_smi_works() or any(Path("/dev").glob("nvidia[0-9]*"))


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver by ``nvidia-smi`` or else the kernel, as ``570.86.15``; or None."""
    answer = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") or ""
    if matched := re.match(r"\s*(\d+(?:\.\d+)+)\s*$", answer.partition("\n")[0]):
        return matched[1]
    try:
        matched = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _KERNEL_MODULE.read_text())
    except OSError:
        return None
    return matched[1] if matched else None


def driver_shortage(cuda: str, driver: str | None) -> str | None:
    """Returns why a build for a CUDA release, like ``13.0``, cannot run on a driver, as a clause.

    None if it can, or if driver or release is unknown. ``cuda-compat`` may make up for an old driver.
    """
    oldest = OLDEST_DRIVERS.get(_numbers(cuda)[0])
    if driver is None or oldest is None or _numbers(driver) >= _numbers(oldest):
        return None
    if (_library_cuda() or 0) >= _numbers(cuda)[0]:
        return None
    return f"the NVIDIA driver {driver} is too old for CUDA {cuda}, which needs driver {oldest} or newer"


def hides_devices() -> bool:
    """Returns whether the environment hides all CUDA devices from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")


def _library_cuda() -> int | None:
    """Returns the newest major version of CUDA that ``libcuda`` runs; with ``cuda-compat`` it exceeds the driver's."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _nvidia_smi(*options: str) -> str | None:
    """Returns the output of ``nvidia-smi``; None where it is missing, fails, or does not answer."""
    try:
        process = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def _numbers(version: str) -> tuple[int, ...]:
    """Returns a version's numbers, which compare as versions do."""
    return tuple(int(number) for number in version.split("."))


if __name__ == "__main__":
    if shortage := driver_shortage(sys.argv[1], driver_version()):
        sys.exit(shortage)
