"""Finds out facts about this machine and its Python, without a judgement.

torch, FBGEMM and TorchRec are only ever imported in processes of their own: a library built against another torch may
end its process instead of raising.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distembed.base.cuda_driver import driver_version, nvidia_smi_works
from distembed.base.machine import available_memory_bytes, is_intel_processor, usable_cores

LOAD_TIMEOUT_SECONDS = 180

# Each program imports one member and has it do something small; it prints one JSON value.
_LOAD_PROGRAMS = {
    "torch": """
import json, torch
torch.ones(2, 2) @ torch.ones(2, 2)
cuda = torch.cuda.is_available()
print(json.dumps({
    "cuda_build": torch.version.cuda,
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
    "devices": [
        {"name": p.name, "memory_bytes": p.total_memory, "capability": [p.major, p.minor]}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ] if cuda else [],
}))""",
    "fbgemm": """
import torch, fbgemm_gpu
import fbgemm_gpu.split_table_batched_embeddings_ops_training
offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 3]))
assert offsets.tolist() == [0, 2, 5], f"asynchronous_complete_cumsum([2, 3]) is {offsets.tolist()}"
print("{}")""",
    "torchrec": """
import torch, torchrec
tables = [torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=3, feature_names=["f"])]
ids = torchrec.KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 2]), lengths=torch.tensor([1, 1]))
torchrec.EmbeddingBagCollection(tables=tables)(ids)
print("{}")""",
}

_FUSED_LOOKUP_PROGRAM = """
import importlib.metadata, json
from distembed.kernels.loading import reason_not_compiled, reason_unavailable
reason = reason_unavailable() or reason_not_compiled(8)
print(json.dumps({"reason": reason, "numba": importlib.metadata.version("numba") if reason is None else None}))"""


@dataclass(frozen=True)
class LoadResult:
    """How the import of one member of the trio ended."""

    facts: Mapping[str, Any]  # the output of the member's program; for torch `cuda_build`, `gloo`, `nccl` and `devices`
    error: str = ""  # why it failed; empty where it did not


@dataclass(frozen=True)
class MachineFacts:
    """The machine that this process runs on."""

    platform: str  # the operating system and its version, as one line
    usable_cores: int  # number of cores that this process may run on
    processor_flags: frozenset[str]  # feature flags, like `avx512_bf16`
    is_intel: bool  # whether the processor is Intel's
    available_memory_bytes: int  # memory that can be had without swapping; 0 where the system does not say
    folder: Path  # the current folder
    free_disk_bytes: int  # room left on the disk of that folder


@dataclass(frozen=True)
class Facts:
    """Everything that the doctor judges."""

    python_version: tuple[int, ...]  # major, minor and micro version of this Python
    installed: Mapping[str, str]  # normalised name -> version of every installed distribution
    requirements: Sequence[str] | None  # of distembed's metadata; None where it is not installed
    has_gpu: bool  # whether there is an NVIDIA driver with at least one device
    # version of the NVIDIA driver, such as `570.86.15`; None where there is none, or it is not known
    driver: str | None
    # name of a member of the trio -> how its import ended, in the order in which they build on each other
    loads: Mapping[str, LoadResult]
    # how it ended to ask for the fused lookup's kernels on the processor: `reason` says why they cannot be had, and is
    # None where they can, by the version of `numba`
    fused_lookup: LoadResult
    machine: MachineFacts  # the machine that this process runs on


def gather_facts() -> Facts:
    """Looks at everything; takes as long as importing the trio three times, twice at a time."""
    return Facts(
        python_version=sys.version_info[:3],
        installed=installed_versions(),
        requirements=distembed_requirements(),
        has_gpu=nvidia_smi_works(),
        driver=driver_version(),
        loads=load_trio(),
        fused_lookup=run_load_program(_FUSED_LOOKUP_PROGRAM),
        machine=MachineFacts(
            platform=platform.platform(),
            usable_cores=usable_cores(),
            processor_flags=processor_flags(_read("/proc/cpuinfo")),
            is_intel=is_intel_processor(),
            available_memory_bytes=available_memory_bytes(),
            folder=Path.cwd(),
            free_disk_bytes=shutil.disk_usage(".").free,
        ),
    )


def installed_versions() -> dict[str, str]:
    """Returns the version of every installed distribution by its :func:`normalised_name`."""
    return {
        normalised_name(package.metadata["Name"]): package.version
        for package in importlib.metadata.distributions()
        if package.metadata["Name"]
    }


def normalised_name(distribution: str) -> str:
    """Returns the one spelling of a distribution's name that all its spellings have in common."""
    return distribution.lower().replace("_", "-").replace(".", "-")


def distembed_requirements() -> list[str] | None:
    """Returns the requirements of distembed's metadata, without extras; None where distembed is not installed."""
    try:
        requirements = importlib.metadata.requires("distembed") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return [line for line in requirements if "extra ==" not in line]


def load_trio() -> dict[str, LoadResult]:
    """Imports each member of the trio in a process of its own, two at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(_LOAD_PROGRAMS, pool.map(run_load_program, _LOAD_PROGRAMS.values()), strict=True))


def run_load_program(program: str) -> LoadResult:
    """Runs ``program`` in a new Python; returns the JSON object on its last printed line, or the error.

    A time-out, a signal and an exit code other than 0 are errors; none is raised.
    """
    command = [sys.executable, "-W", "ignore", "-c", program]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return LoadResult({}, f"did not end within {LOAD_TIMEOUT_SECONDS} s")
    if process.returncode < 0:
        return LoadResult({}, f"the process was ended by signal {-process.returncode}")
    if process.returncode > 0:
        last_line = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        # the first error of a chain of exceptions has caused the others
        cause = re.search(r"^[\w.]+(?:Error|Exception): .*", process.stderr, re.MULTILINE)
        return LoadResult({}, last_line if cause is None or cause[0] == last_line else f"{last_line} ({cause[0]})")
    return LoadResult(json.loads(process.stdout.strip().splitlines()[-1]))


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """Returns the feature flags of the first processor in the text of ``/proc/cpuinfo``.

    They follow ``flags`` on x86 and ``Features`` on Arm.
    """
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _read(path: str) -> str:
    """Returns a file's text; an empty one where the file is missing, as on another system than Linux."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
