"""Judges each fact: it is well, worth a note, or wrong with the command that mends it."""

import fcntl
import importlib
import os
import shlex
import site
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distembed.base.cuda_driver import driver_shortage
from distembed.base.machine import multiplies_faster_in_bf16
from distembed.base.units import format_bytes
from distembed.base.version import __version__
from distembed.reports.doctor import trio
from distembed.reports.doctor.facts import Facts, LoadResult, MachineFacts, gather_facts, normalised_name
from distembed.reports.doctor.trio import Trio, trio_of

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["ok", "note", "wrong"]

OLDEST_PYTHON = min(trio.DEFAULT.pythons)
"""Minor version of the oldest Python 3 that distembed runs on."""
LOW_DISK_BYTES = 10 * 2**30
DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the NVIDIA driver that FBGEMM's build for CUDA loads."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str  # the examined part
    status: Status  # `note` is worth knowing and hinders nothing; `wrong` has to be mended
    detail: str  # the observation
    remedy: str = ""  # the command that mends it; empty where there is nothing to mend


def judge(facts: Facts, device: str | None = None) -> list[Finding]:
    """Returns a finding for everything that was looked at, in the order in which to read them.

    ``device`` is the device that FBGEMM is needed for, ``cpu`` or ``cuda``; :func:`chosen_device` unless given.
    """
    device = device or chosen_device(facts.installed, facts.has_gpu)
    tested = trio_of(facts.installed)
    versions = check_trio_versions(facts.installed, device)
    wrong_versions = {finding.subject for finding in versions if finding.status == "wrong"}
    return [
        check_python(facts.python_version, tested),
        Finding("distembed", "ok", f"{__version__} in {Path(__file__).parents[2]}"),
        name_trio(facts.installed),
        *versions,
        *check_loads(facts.loads, tested.pins(device), already_wrong=wrong_versions),
        _check_version("torchx", trio.TORCHX, facts.installed.get("torchx")),
        *check_dependencies(facts.installed, facts.requirements, tested),
        check_fused_lookup(facts.fused_lookup),
        *check_extras(facts.installed),
        *check_accelerators(facts.loads["torch"].facts, device, facts.has_gpu, facts.driver, tested),
        *check_machine(facts.machine),
    ]


def check_python(version: tuple[int, ...], tested: Trio = trio.DEFAULT) -> Finding:
    """Judges this Python: ok if the trio is tested on it, wrong if older than distembed's oldest, else a note."""
    detail = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version[0] == 3 and version[1] in tested.pythons:
        return Finding("python", "ok", detail)
    if version >= (3, OLDEST_PYTHON):
        return Finding("python", "note", f"{detail}; the trio {tested.name} is tested on {tested.python_names}")
    remedy = f"DISTEMBED_PYTHON=python3.{OLDEST_PYTHON} tools/setup.sh"
    return Finding("python", "wrong", f"{detail}; 3.{OLDEST_PYTHON} or later is needed", remedy)


def chosen_device(installed: Mapping[str, str], has_gpu: bool) -> str:
    """Returns ``cpu`` or ``cuda``, by the installed build of FBGEMM; by ``has_gpu`` where no or both are installed."""
    builds = [device for device, name in trio.FBGEMM_DISTRIBUTIONS.items() if name in installed]
    return builds[0] if len(builds) == 1 else "cuda" if has_gpu else "cpu"


def name_trio(installed: Mapping[str, str]) -> Finding:
    """Names the tested trio of the installed torch, by which installed versions are judged."""
    tested = trio_of(installed)
    other_trios = " or ".join(name for name in trio.TRIOS if name != tested.name)
    members = f"torch {tested.torch}, torchrec {tested.torchrec}, FBGEMM {tested.fbgemm}"
    installed_torch = installed.get("torch")
    if installed_torch is not None and not tested.is_named_by(installed_torch):
        detail = f"torch {installed_torch} is of no tested trio; judged by {tested.name}: {members}"
        return Finding("trio", "note", detail)
    return Finding("trio", "ok", f"{tested.name}: {members} (tested too: {other_trios})")


def check_trio_versions(installed: Mapping[str, str], device: str) -> list[Finding]:
    """Judges the versions of torch, torchrec and FBGEMM by the tested trio of the installed torch."""
    tested = trio_of(installed)
    findings = [_check_version(name, pinned, installed.get(name)) for name, pinned in tested.pins(device).items()]
    if device == "cuda" and installed.get("torch", "").endswith("+cpu"):
        detail = f"{installed['torch']} is built for processors only"
        findings[0] = Finding("torch", "wrong", detail, _install_member("torch", tested.torch, "--force-reinstall"))
    right_build = trio.FBGEMM_DISTRIBUTIONS[device]
    builds = [name for name in trio.FBGEMM_DISTRIBUTIONS.values() if name in installed]
    if builds in ([], [right_build]):
        return findings
    detail = f"{' and '.join(builds)} are both installed; the later one has overwritten the other's files"
    if right_build not in builds:
        detail = f"{builds[0]} is installed, which is not built for {device}"
    return [*findings[:-1], Finding(right_build, "wrong", detail, _replace(builds, right_build, tested.fbgemm))]


def _replace(builds: Sequence[str], name: str, pinned: str) -> str:
    """Returns the command that removes builds of FBGEMM and installs one, which it downloads before."""
    writable = sys.prefix if os.access(sys.prefix, os.W_OK) else site.getuserbase()
    downloads = str(Path(writable, "fbgemm-download"))
    commands = (
        _pip("download", "--no-deps", "--dest", downloads, f"{name}=={pinned}"),
        _pip("uninstall", "-y", *builds),
        _install_member(name, pinned, "--no-index", "--find-links", downloads),
        shlex.join(["rm", "-r", downloads]),
    )
    return " && ".join(commands)


def _check_version(name: str, pinned: str, version: str | None) -> Finding:
    """Judges one member's version, None where it is not installed."""
    if version is not None and version.split("+")[0] == pinned:
        return Finding(name, "ok", version)
    detail = f"{version} is installed, {pinned} is tested" if version else f"not installed; {pinned} is tested"
    return Finding(name, "wrong", detail, _install_member(name, pinned))


def _install_member(name: str, pinned: str, *options: str) -> str:
    """Returns the command that installs one member of the trio, or TorchX."""
    # torch brings libraries of its own; torchrec would bring the wrong FBGEMM, and TorchX an old urllib3.
    return _pip("install", *options, *(() if name == "torch" else ("--no-deps",)), f"{name}=={pinned}")


def check_loads(
    loads: Mapping[str, LoadResult], pins: Mapping[str, str], already_wrong: Collection[str] = ()
) -> list[Finding]:
    """Judges whether each member can be imported and used; ``pins`` are the versions of the tested trio.

    A failure is only a note where a member that it builds on fails to load too, where ``already_wrong`` holds the name
    of its distribution, whose version another finding mends, and where this machine lacks a library of the driver.
    """
    findings = []
    below: list[str] = []
    for (member, result), (name, pinned) in zip(loads.items(), _in_load_order(pins), strict=True):
        subject = f"{member} loads"
        failed = [lower_member for lower_member in below if loads[lower_member].error]
        if not result.error:
            findings.append(Finding(subject, "ok", "yes"))
        elif failed:
            findings.append(Finding(subject, "note", f"not known: {failed[0]} does not load"))
        elif name in already_wrong:
            findings.append(Finding(subject, "note", result.error))
        elif any(library in result.error for library in DRIVER_LIBRARIES):
            findings.append(Finding(subject, "note", f"not known: no NVIDIA driver here ({result.error})"))
        else:
            findings.append(Finding(subject, "wrong", result.error, _install_member(name, pinned, "--force-reinstall")))
        below.append(member)
    return findings


def _in_load_order(pins: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the pins in the order torch, FBGEMM, torchrec: each is built on the members before it."""
    return sorted(pins.items(), key=lambda pin: ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec").index(pin[0]))


def check_dependencies(
    installed: Mapping[str, str], required: Sequence[str] | None, tested: Trio = trio.DEFAULT
) -> list[Finding]:
    """Judges installed packages by the requirements of distembed and the trio; all that are well share a finding."""
    torch_pin = f"torch=={tested.torch}"
    if required is None:
        return [Finding("dependencies", "wrong", "distembed itself is not installed here", "tools/setup.sh")]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [Finding("dependencies", "wrong", "packaging is not installed", _pip("install", "packaging"))]
    findings, met = [], []
    for requirement in map(Requirement, [*required, *tested.needs]):
        version = installed.get(normalised_name(requirement.name))
        if requirement.name == "torch" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            detail = f"{version or 'nothing'} is installed, {requirement.specifier or 'any version'} is needed"
            # torch is named again so that pip cannot answer with another torch.
            remedy = _pip("install", f"{requirement.name}{requirement.specifier}", torch_pin)
            findings.append(Finding(requirement.name, "wrong", detail, remedy))
        else:
            met.append(f"{requirement.name} {version}")
    return [*findings, Finding("dependencies", "ok", ", ".join(met))] if met else findings


def check_fused_lookup(result: LoadResult) -> Finding:
    """Judges whether tables on the processor can be looked up in one pass; without it FBGEMM looks them up."""
    reason = result.error or result.facts["reason"]
    if reason:
        return Finding("fused lookup", "note", f"no: {reason}; until then FBGEMM looks tables up")
    return Finding("fused lookup", "ok", f"yes, by numba {result.facts['numba']}")


def check_extras(installed: Mapping[str, str]) -> list[Finding]:
    """Tells which extras are installed: Ray and Spark for `prepare`, HiGHS for plans, Optuna for sweeps."""
    findings = []
    extras = (
        ("prepare on ray", "ray", "ray"),
        ("prepare on spark", "spark", "pyspark"),
        ("plan --polish", "polish", "highspy"),
        ("sweep", "sweep", "optuna"),
    )
    for feature, extra, distribution in extras:
        version = installed.get(distribution)
        absent = f"no: {distribution} is not installed; `pip install 'distembed[{extra}]'` adds it"
        detail = f"yes, by {distribution} {version}" if version else absent
        findings.append(Finding(feature, "ok" if version else "note", detail))
    return findings


def check_accelerators(
    torch_facts: Mapping[str, Any],
    device: str,
    has_gpu: bool,
    driver: str | None = None,
    tested: Trio = trio.DEFAULT,
) -> list[Finding]:
    """Judges CUDA devices and the transports between ranks by the output of torch's program."""
    if not torch_facts:
        return []
    findings = [
        Finding(f"cuda:{index}", "ok", _describe_gpu(gpu)) for index, gpu in enumerate(torch_facts["devices"])
    ] or [_no_cuda(torch_facts["cuda_build"], device, has_gpu, driver, tested)]
    if torch_facts["devices"] and device == "cpu":
        detail = "FBGEMM is the CPU build: train with train.device=cpu, or take the CUDA members"
        findings.append(Finding("cuda", "note", f"{detail} ({_fix_for('cuda')})"))
    usable = torch_facts["nccl" if torch_facts["devices"] else "gloo"]
    listed = ", ".join(f"{name} {'yes' if torch_facts[name] else 'no'}" for name in ("gloo", "nccl"))
    remedy = "" if usable else _install_member("torch", tested.torch, "--force-reinstall")
    return [*findings, Finding("several ranks", "ok" if usable else "wrong", listed, remedy)]


def _describe_gpu(gpu: Mapping[str, Any]) -> str:
    """Returns a device's name, memory, and whether it computes in bf16."""
    bf16 = "yes" if tuple(gpu["capability"]) >= (8, 0) else "no"
    return f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}, bf16 {bf16}"


def _no_cuda(cuda_build: str | None, device: str, has_gpu: bool, driver: str | None, tested: Trio) -> Finding:
    """Judges that torch finds no CUDA device, by the GPU, its driver and the CUDA release of the torch build."""
    if not has_gpu:
        return Finding("cuda", "note", "no device; training runs on the processor")
    if cuda_build is None and device == "cpu":
        return Finding("cuda", "note", f"there is a device, unused by the CPU members of the trio ({_fix_for('cuda')})")
    if cuda_build is None:
        detail = "there is a device, and the installed torch is built for processors only"
        return Finding("cuda", "wrong", detail, _install_member("torch", tested.torch, "--force-reinstall"))
    shortage = driver_shortage(cuda_build, driver)
    if device == "cpu":
        why = shortage or "and the members of the trio are those for processors"
        return Finding("cuda", "note", f"there is a device, unused by torch, built for CUDA {cuda_build}: {why}")
    detail = f"there is a device, and torch, built for CUDA {cuda_build}, cannot use it"
    if shortage:
        remedy = f"{_fix_for('cpu')}  # or install a newer driver, and keep the CUDA members"
        return Finding("cuda", "wrong", f"{detail}: {shortage}", remedy)
    return Finding("cuda", "wrong", detail, "nvidia-smi  # and `torch.cuda.init()` say more")


def check_machine(machine: MachineFacts) -> list[Finding]:
    """Judges processor, memory and disk."""
    bf16 = ", ".join(sorted(machine.processor_flags & {"avx512_bf16", "amx_bf16", "bf16"}))
    free = format_bytes(machine.free_disk_bytes)
    return [
        Finding("platform", "ok", f"{machine.platform}, {machine.usable_cores} cores"),
        Finding("processor bf16", "ok", bf16)
        if multiplies_faster_in_bf16(machine.processor_flags, machine.is_intel)
        else Finding("processor bf16", "note", f"{bf16 or 'no'}, without amx_bf16; train.precision=auto is fp32"),
        Finding("memory", "ok", f"{format_bytes(machine.available_memory_bytes)} available"),
        Finding("disk", "ok", f"{free} free in {machine.folder}")
        if machine.free_disk_bytes >= LOW_DISK_BYTES
        else Finding("disk", "note", f"only {free} free in {machine.folder}"),
    ]


def _pip(*arguments: str) -> str:
    """Returns the command that runs this Python's pip."""
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def _fix_for(device: str | None) -> str:
    """Returns the command that changes to the members of the trio for a device; None keeps the doctor's own choice."""
    options = () if device is None else ("--device", device)
    return shlex.join([sys.executable, "-m", "distembed.reports.doctor", "--fix", *options])


_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def run_doctor(console: "Console | None", device: str | None = None) -> int:
    """Prints the findings, without a console as plain text; returns the exit code, 1 where something is wrong."""
    return print_findings(judge(gather_facts(), device), console)


def print_findings(findings: Sequence[Finding], console: "Console | None") -> int:
    """Prints findings, without a console as plain text; returns the exit code, 1 where something is wrong."""
    if console is None:
        print(*(f"{finding.subject:20} {finding.status:6} {finding.detail}" for finding in findings), sep="\n")
        print(*remedy_lines(findings), sep="\n")
    else:
        print_doctor_report(findings, console)
    return int(any(finding.status == "wrong" for finding in findings))


def run_fix(console: "Console | None", device: str | None = None, *, dry_run: bool = False) -> int:
    """Runs the commands of pip that mend the faults, and prints each before; returns the exit code of the doctor.

    Runs further commands where a mended fault had hidden another. Ends at the first command that fails, with 1, and
    with 1 before any command where :func:`reason_not_to_fix` has one. Waits for a doctor that mends this environment.

    Prints the commands alone with ``dry_run``, and returns 0.
    """
    lock = None if dry_run else _lock_environment()
    begun: set[str] = set()
    try:
        while True:
            facts = gather_facts()
            found = judge(facts, device)
            commands = [command for command in fixing_commands(found) if command not in begun]
            if not commands:
                break
            if reason := reason_not_to_fix(facts, device):
                print(reason, file=sys.stderr)
                return 1
            if not _has_pip():
                commands.insert(0, shlex.join([sys.executable, "-m", "ensurepip"]))
            if dry_run:
                print(*commands, sep="\n")
                return 0
            for position, command in enumerate(commands):
                print(command, flush=True)
                # pip inherits the lock, and holds it where it outlives a killed doctor
                if subprocess.run(command, shell=True, pass_fds=() if lock is None else (lock,)).returncode != 0:
                    print(_tell_failure(command, commands[position + 1 :], device), file=sys.stderr)
                    return 1
            begun.update(commands)
            importlib.invalidate_caches()
    finally:
        if lock is not None:
            os.close(lock)
    if dry_run:
        others = remedy_lines(found)
        print(
            "No command of pip mends these faults:" if others else "Nothing is wrong.",
            *others,
            sep="\n",
            file=sys.stderr,
        )
        return 0
    return print_findings(found, console)


def reason_not_to_fix(facts: Facts, device: str | None = None) -> str | None:
    """Returns why no command of pip would give an installation that runs, with a remedy; None where there is no reason.

    A Python on which the trio is not tested has no wheels of its members. The members for CUDA are gigabytes, and do
    not run on a driver that is too old.
    """
    tested = trio_of(facts.installed)
    if facts.python_version[0] != 3 or facts.python_version[1] not in tested.pythons:
        return (
            f"This is Python {'.'.join(map(str, facts.python_version))}; the trio {tested.name} is tested on "
            f"{tested.python_names}. Nothing was changed: install distembed in an environment of one of them, such as "
            f"`python3.{max(tested.pythons)} -m venv environment`."
        )
    if (device or chosen_device(facts.installed, facts.has_gpu)) == "cuda":
        shortage = driver_shortage(facts.loads["torch"].facts.get("cuda_build") or tested.cuda, facts.driver)
        if shortage:
            return (
                f"{shortage[0].upper()}{shortage[1:]}. Nothing was changed: install a newer driver, or take the "
                f"trio's members for processors by:\n  {_fix_for('cpu')}"
            )
    return None


def _lock_environment() -> int:
    """Waits until no other doctor changes this environment; returns a descriptor that holds others off until closed."""
    lock = os.open(sys.prefix, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"Another `distembed doctor --fix` changes {sys.prefix}; waiting for its end.", file=sys.stderr)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks
    return lock


def _has_pip() -> bool:
    """Returns whether this Python has pip, which some environments are made without."""
    return subprocess.run([sys.executable, "-c", "import pip"], capture_output=True).returncode == 0


def _tell_failure(failed: str, remaining: Sequence[str], device: str | None) -> str:
    """Returns the command that failed, the commands that have not run, and the command that continues."""
    lines = ["This command failed:", f"  {failed}"]
    if remaining:
        lines += ["These commands have not run:", *(f"  {command}" for command in remaining)]
    return "\n".join(
        [*lines, "Mend the cause, such as an index that pip cannot reach, then run:", f"  {_fix_for(device)}"]
    )


def fixing_commands(findings: Sequence[Finding]) -> list[str]:
    """Returns the remedies of wrong findings that are commands of pip, each once, in the order in which to run them."""
    remedies = dict.fromkeys(finding.remedy for finding in findings if finding.status == "wrong")
    return [remedy for remedy in remedies if remedy.startswith(_pip())]


def print_doctor_report(findings: Sequence[Finding], console: "Console") -> None:
    """Prints the findings as a table, and below it the commands that mend them."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, Text(finding.status, style=_STYLES[finding.status]), finding.detail)
    console.print(table, markup=False, highlight=False)
    remedies = remedy_lines(findings)
    console.print("\nAll is well." if not remedies else "\nTo mend what is wrong:", markup=False)
    for line in remedies:
        # unwrapped, so that it can be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def remedy_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a comment and a command for each wrong finding, in the order in which to run them."""
    wrong = [finding for finding in findings if finding.status == "wrong"]
    return [line for finding in wrong for line in (f"  # {finding.subject}: {finding.detail}", f"  {finding.remedy}")]
