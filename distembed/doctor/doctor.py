"""``distembed doctor``: what this machine has, what does not work, and the command that mends it.

Facts are gathered first, then judged by pure functions, so that every judgement can be tested without the machine that
it speaks of. torch, FBGEMM and TorchRec are only ever imported in processes of their own: a library built against
another torch may end its process instead of raising. For the same reason this module needs nothing but the standard
library to be imported, and ``python -m distembed.doctor`` works where the rest of the package does not.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distembed import __version__
from distembed.doctor import trio

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["ok", "note", "wrong"]

OLDEST_PYTHON = (3, 11)
LOW_DISK_BYTES = 10 * 2**30
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


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        status: ``ok``; ``note`` for what is worth knowing and hinders nothing; ``wrong`` for what has to be mended.
        detail: what was found.
        remedy: the command that mends it; empty where there is nothing to mend.
    """

    subject: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class LoadResult:
    """How the import of one member ended: ``facts`` that its program printed, or the ``error``."""

    facts: Mapping[str, Any]
    error: str = ""


def diagnose() -> list[Finding]:
    """Looks at everything; takes as long as importing the trio three times, twice at a time."""
    installed = installed_versions()
    has_gpu = nvidia_smi_works()
    device = chosen_device(installed, has_gpu)
    versions = check_trio_versions(installed, device)
    loads = load_trio()
    return [
        check_python(sys.version_info[:3]),
        Finding("distembed", "ok", f"{__version__} in {Path(__file__).parent}"),
        *versions,
        *check_loads(loads, device, already_wrong={found.subject for found in versions if found.status == "wrong"}),
        *check_dependencies(installed, requirements()),
        *check_accelerators(loads["torch"].facts, device, has_gpu),
        *check_machine(),
    ]


# Gathering ------------------------------------------------------------------------------------------------------------


def installed_versions() -> dict[str, str]:
    """Normalised name -> version of every installed distribution."""
    return {
        _normal(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions()
        if found.metadata["Name"]
    }


def requirements() -> list[str] | None:
    """What distembed's metadata asks for, without the extras; None where distembed is not installed."""
    try:
        found = importlib.metadata.requires("distembed") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return [line for line in found if "extra ==" not in line]


def nvidia_smi_works() -> bool:
    """Whether there is an NVIDIA driver with at least one device."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def load_trio() -> dict[str, LoadResult]:
    """Imports each member in a process of its own, two at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(_LOAD_PROGRAMS, pool.map(load, _LOAD_PROGRAMS.values()), strict=True))


def load(program: str) -> LoadResult:
    """Runs ``program`` in a new Python and reads the JSON object on its last line."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return LoadResult({}, f"did not end within {LOAD_TIMEOUT_SECONDS} s")
    if done.returncode < 0:
        return LoadResult({}, f"the process was ended by signal {-done.returncode}")
    if done.returncode > 0:
        return LoadResult({}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return LoadResult(json.loads(done.stdout.strip().splitlines()[-1]))


# Judging --------------------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, ...]) -> Finding:
    """Python's version."""
    detail = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version >= OLDEST_PYTHON:
        return Finding("python", "ok", detail)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return Finding(
        "python", "wrong", f"{detail}; {oldest} or later is needed", "DISTEMBED_PYTHON=python3.11 tools/setup.sh"
    )


def chosen_device(installed: Mapping[str, str], has_gpu: bool) -> str:
    """``cpu`` or ``cuda``: that of the installed FBGEMM, and the machine's where none or both are installed."""
    there = [device for device, name in trio.FBGEMM_DISTRIBUTIONS.items() if name in installed]
    return there[0] if len(there) == 1 else "cuda" if has_gpu else "cpu"


def check_trio_versions(installed: Mapping[str, str], device: str) -> list[Finding]:
    """Versions of torch, torchrec and FBGEMM against the tested ones."""
    findings = [_check_version(name, pinned, installed.get(name)) for name, pinned in trio.pins(device).items()]
    builds = list(trio.FBGEMM_DISTRIBUTIONS.values())
    if not all(name in installed for name in builds):
        return findings
    wanted = trio.FBGEMM_DISTRIBUTIONS[device]
    remedy = f"{_pip('uninstall', '-y', *builds)} && {_pip('install', '--no-deps', f'{wanted}=={trio.FBGEMM}')}"
    detail = f"{' and '.join(builds)} are both installed; the later one has overwritten the other's files"
    return [*findings[:-1], Finding(wanted, "wrong", detail, remedy)]


def _check_version(name: str, pinned: str, found: str | None) -> Finding:
    if found is not None and found.split("+")[0] == pinned:
        return Finding(name, "ok", found)
    detail = f"{found} is installed, {pinned} is tested" if found else f"not installed; {pinned} is tested"
    return Finding(name, "wrong", detail, _install_member(name, pinned))


def _install_member(name: str, pinned: str, *options: str) -> str:
    # torch brings libraries of its own; the other two would bring the wrong FBGEMM.
    return _pip("install", *options, *(() if name == "torch" else ("--no-deps",)), f"{name}=={pinned}")


def check_loads(loads: Mapping[str, LoadResult], device: str, already_wrong: Collection[str] = ()) -> list[Finding]:
    """Whether each member can be imported and used.

    A member is not blamed where one below it fails to load, nor where ``already_wrong`` has a remedy for it.
    """
    findings = []
    below: list[str] = []
    for (member, result), (name, pinned) in zip(loads.items(), _in_load_order(trio.pins(device)), strict=True):
        subject = f"{member} loads"
        failed = [other for other in below if loads[other].error]
        if not result.error:
            findings.append(Finding(subject, "ok", "yes"))
        elif failed:
            findings.append(Finding(subject, "note", f"not known: {failed[0]} does not load"))
        elif name in already_wrong:
            findings.append(Finding(subject, "note", result.error))
        else:
            findings.append(Finding(subject, "wrong", result.error, _install_member(name, pinned, "--force-reinstall")))
        below.append(member)
    return findings


def _in_load_order(pins: Mapping[str, str]) -> list[tuple[str, str]]:
    """torch, FBGEMM, torchrec: each is built on those before it."""
    return sorted(pins.items(), key=lambda pin: ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec").index(pin[0]))


def check_dependencies(installed: Mapping[str, str], required: Sequence[str] | None) -> list[Finding]:
    """What distembed's metadata asks for against what is installed; one line for all that are well."""
    if required is None:
        return [Finding("dependencies", "wrong", "distembed itself is not installed here", "tools/setup.sh")]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [Finding("dependencies", "wrong", "packaging is not installed", _pip("install", "packaging"))]
    findings, met = [], []
    for requirement in map(Requirement, required):
        found = installed.get(_normal(requirement.name))
        if requirement.name in trio.pins("cpu") or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            detail = f"{found or 'nothing'} is installed, {requirement.specifier or 'any version'} is needed"
            # torch is named again so that pip cannot answer with another torch.
            remedy = _pip("install", f"{requirement.name}{requirement.specifier}", f"torch=={trio.TORCH}")
            findings.append(Finding(requirement.name, "wrong", detail, remedy))
        else:
            met.append(f"{requirement.name} {found}")
    return [*findings, Finding("dependencies", "ok", ", ".join(met))] if met else findings


def check_accelerators(torch_facts: Mapping[str, Any], device: str, has_gpu: bool) -> list[Finding]:
    """CUDA devices and the transports between ranks, from what torch's program printed."""
    if not torch_facts:
        return []
    findings = [
        Finding(f"cuda:{index}", "ok", _describe_gpu(gpu)) for index, gpu in enumerate(torch_facts["devices"])
    ] or [_no_cuda(torch_facts["cuda_build"], device, has_gpu)]
    if torch_facts["devices"] and device == "cpu":
        detail = "FBGEMM is the CPU build: train with train.device=cpu, or take the CUDA members"
        findings.append(Finding("cuda", "note", f"{detail} (DISTEMBED_DEVICE=cuda tools/setup.sh)"))
    usable = torch_facts["nccl" if torch_facts["devices"] else "gloo"]
    listed = ", ".join(f"{name} {'yes' if torch_facts[name] else 'no'}" for name in ("gloo", "nccl"))
    remedy = "" if usable else _install_member("torch", trio.TORCH, "--force-reinstall")
    return [*findings, Finding("several ranks", "ok" if usable else "wrong", listed, remedy)]


def _describe_gpu(gpu: Mapping[str, Any]) -> str:
    bf16 = "yes" if tuple(gpu["capability"]) >= (8, 0) else "no"
    return f"{gpu['name']}, {_gibibytes(gpu['memory_bytes'])}, bf16 {bf16}"


def _no_cuda(cuda_build: str | None, device: str, has_gpu: bool) -> Finding:
    if not has_gpu:
        return Finding("cuda", "note", "no device; training runs on the processor")
    cuda_members = "DISTEMBED_DEVICE=cuda tools/setup.sh"
    if cuda_build is None and device == "cpu":
        return Finding("cuda", "note", f"there is a device, unused by the CPU members of the trio ({cuda_members})")
    if cuda_build is None:
        detail = "there is a device, and the installed torch is built for processors only"
        return Finding("cuda", "wrong", detail, cuda_members)
    detail = f"there is a device, and torch (built for CUDA {cuda_build}) cannot use it; the driver may be too old"
    return Finding("cuda", "wrong", detail, "nvidia-smi  # compare its 'CUDA Version' with the one named here")


def check_machine() -> list[Finding]:
    """Processor, memory and disk."""
    flags = processor_flags(_read("/proc/cpuinfo"))
    bf16 = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    free = shutil.disk_usage(".").free
    return [
        Finding("platform", "ok", f"{platform.platform()}, {usable_cores()} cores"),
        Finding("processor bf16", "ok", ", ".join(bf16))
        if bf16
        else Finding("processor bf16", "note", "no (avx512_bf16, amx_bf16); the dense part runs in fp32"),
        Finding("memory", "ok", f"{_gibibytes(available_memory_bytes(_read('/proc/meminfo')))} available"),
        Finding("disk", "ok", f"{_gibibytes(free)} free in {Path.cwd()}")
        if free >= LOW_DISK_BYTES
        else Finding("disk", "note", f"only {_gibibytes(free)} free in {Path.cwd()}"),
    ]


def processor_flags(cpuinfo: str) -> set[str]:
    """Feature flags of the first processor in the text of ``/proc/cpuinfo`` (``flags`` on x86, ``Features`` on Arm)."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def available_memory_bytes(meminfo: str) -> int:
    """``MemAvailable`` in the text of ``/proc/meminfo``, 0 where it is not told."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def usable_cores() -> int:
    """Cores that this process may run on, which in a container or a Slurm job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", *arguments])


# Telling --------------------------------------------------------------------------------------------------------------


def run_doctor(console: Console) -> int:
    """Prints the findings and the commands that mend what is wrong; returns 0 where nothing is, else 1."""
    from rich.table import Table
    from rich.text import Text

    findings = diagnose()
    styles = {"ok": "green", "note": "yellow", "wrong": "bold red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, Text(finding.status, style=styles[finding.status]), finding.detail)
    console.print(table, markup=False, highlight=False)
    remedies = remedy_lines(findings)
    console.print("\nAll is well." if not remedies else "\nTo mend what is wrong:", markup=False)
    for line in remedies:
        # unwrapped, so that it can be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if remedies else 0


def remedy_lines(findings: Sequence[Finding]) -> list[str]:
    """A comment and a command for each wrong finding, in the order in which to run them."""
    wrong = [finding for finding in findings if finding.status == "wrong"]
    return [line for finding in wrong for line in (f"  # {finding.subject}: {finding.detail}", f"  {finding.remedy}")]
