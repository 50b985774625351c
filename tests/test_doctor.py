"""Laws of the doctor: it starts on a broken install, blames what is broken, and every remedy is a command."""

import ensurepip
import io
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console

from distembed.base import cuda_driver
from distembed.base.machine import available_memory_bytes
from distembed.reports.doctor import facts, findings, trio
from distembed.reports.doctor.facts import Facts, LoadResult, MachineFacts
from distembed.reports.doctor.findings import Finding, Status
from distembed.reports.doctor.trio import Trio
from tests.processes import output_of

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[1]
WELL = LoadResult({"cuda_build": None, "gloo": True, "nccl": False, "devices": []})
EACH_TRIO = pytest.mark.parametrize("tested", trio.TRIOS.values(), ids=list(trio.TRIOS))
GPU = {"name": "A100", "memory_bytes": 80 * 2**30, "capability": [8, 0]}


def facts_of(
    installed: Mapping[str, str] = MappingProxyType({}),
    cuda_build: str | None = None,
    python_version: tuple[int, ...] = (3, 11, 9),
    has_gpu: bool = False,
    driver: str | None = None,
) -> Facts:
    torch = LoadResult({"cuda_build": cuda_build})
    machine = MachineFacts("", 1, frozenset(), False, 0, ROOT, 0)
    return Facts(python_version, installed, [], has_gpu, driver, {"torch": torch}, WELL, machine)


def wrong(found: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found if finding.status == "wrong"}


def test_it_can_be_imported_without_any_other_package_and_does_not_import_torch() -> None:
    program = """
import os, sys
for missing in sys.argv[1:]:
    if not os.fork():
        if missing != "nothing":
            sys.modules[missing] = None
        import distembed.reports.doctor
        os._exit(sys.modules.get("torch") is not None)
    assert os.wait()[1] == 0, missing
"""
    missing = ["nothing", "torch", "torchrec", "fbgemm_gpu", "rich", "packaging", "numpy", "pydantic"]
    done = subprocess.run([sys.executable, "-c", program, *missing], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def about_trio(*arguments: str) -> str:
    command = [sys.executable, "-I", "distembed/reports/doctor/trio.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@EACH_TRIO
def test_pins_are_what_setup_installs(tested: Trio, device: str) -> None:
    pins = tested.pins(device)
    packages = {**pins, "torchx": trio.TORCHX}
    assert about_trio(tested.name, device) == " ".join(f"{name}=={version}" for name, version in packages.items())
    assert about_trio(tested.name, "needs") == " ".join(tested.needs)
    assert list(pins)[0] == "torch", "torch comes first: what follows would take the newest one"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@EACH_TRIO
def test_an_environment_stands_on_a_trio_if_it_has_its_members(
    tested: Trio, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stands(name: str) -> bool:
        command = [sys.executable, "distembed/reports/doctor/trio.py", name, "stands", device]
        return subprocess.run(command, cwd=ROOT).returncode == 0

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # before what is installed here
    for member, version in tested.pins(device).items():
        folder = tmp_path / f"{member.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        local = "+cpu" if member == "torch" else ""
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {member}\nVersion: {version}{local}\n")
    assert {name for name in trio.TRIOS if stands(name)} == {tested.name}
    (tmp_path / f"torchrec-{tested.torchrec}.dist-info" / "METADATA").write_text("Name: torchrec\nVersion: 1.7.0\n")
    assert not stands(tested.name)


def test_pyproject_asks_for_the_torch_of_a_tested_trio_and_for_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    tested = [each.torch for each in trio.TRIOS.values()]
    others = [f"2.{minor}.{patch}" for minor in range(9, 17) for patch in range(2)]
    admitted = {version for version in others if asked["torch"].contains(version)}
    assert about_trio("default", "name") == max(trio.TRIOS, key=Version)  # where the set-up names none
    assert all(asked["torch"].contains(f"{version}{local}") for version in tested for local in ("", "+cpu"))
    # a release of the older trio's torch with its mistakes mended is not kept out
    assert {version.rpartition(".")[0] for version in admitted} == set(trio.TRIOS)
    assert max(admitted, key=Version) == trio.DEFAULT.torch
    assert not {"torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"} & asked.keys()
    oldest = Requirement(f"python{project['requires-python']}").specifier
    pythons = {f"3.{minor}" for each in trio.TRIOS.values() for minor in each.pythons}
    assert all(oldest.contains(python) for python in pythons) and not oldest.contains("3.10")


@pytest.mark.parametrize(
    ("torch", "name"), [("2.11.0", "2.11"), ("2.11.0+cu130", "2.11"), ("2.11.1", "2.11"), ("2.13.0", "2.13")]
)
def test_what_is_installed_is_judged_by_the_trio_of_its_torch(torch: str, name: str) -> None:
    assert trio.trio_of({"torch": torch}).name == name
    found = findings.name_trio({"torch": torch})
    assert found.status == "ok" and found.detail.startswith(f"{name}: torch {trio.TRIOS[name].torch}")


@pytest.mark.parametrize("torch", ["2.12.0", "2.1.1", "2.110.0", "3.0"])
def test_a_torch_of_no_trio_is_judged_by_the_newest_and_said_to_be_of_none(torch: str) -> None:
    found = findings.name_trio({"torch": torch})
    assert found.status == "note" and torch in found.detail and f"judged by {trio.DEFAULT.name}" in found.detail
    assert "torch" in wrong(findings.check_trio_versions({"torch": torch}, "cpu"))


@EACH_TRIO
def test_a_member_of_another_trio_is_wrong(tested: Trio) -> None:
    (other,) = (each for each in trio.TRIOS.values() if each != tested)
    installed = other.pins("cpu") | {"torch": tested.torch}
    blamed = wrong(findings.check_trio_versions(installed, "cpu"))
    assert blamed.keys() == {"torchrec", "fbgemm-gpu-cpu"}
    assert f"torchrec=={tested.torchrec}" in blamed["torchrec"].remedy


def test_a_python_that_the_trio_is_not_tested_on_is_worth_a_note_and_one_too_old_for_all_is_wrong() -> None:
    second = trio.TRIOS["2.11"]
    statuses = {minor: findings.check_python((3, minor, 1), second).status for minor in (10, 11, 12, 13)}
    assert statuses == {10: "wrong", 11: "note", 12: "ok", 13: "note"}
    assert findings.check_python((3, 11, 0)).status == "ok"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@EACH_TRIO
def test_the_pinned_versions_are_well(tested: Trio, device: str) -> None:
    installed = tested.pins(device) | {"torch": f"{tested.torch}+local"}
    assert findings.chosen_device(installed, has_gpu=device == "cpu") == device
    assert {finding.status for finding in findings.check_trio_versions(installed, device)} == {"ok"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("found", [None, "1.7.0", "1.8.1", "2.13.0rc1", "1.8.00"])
def test_a_missing_or_other_version_is_blamed_by_name_with_the_command_that_installs_the_pinned_one(
    device: str, found: str | None
) -> None:
    pins = trio.DEFAULT.pins(device)
    for name, pinned in pins.items():
        installed = {other: version for other, version in (pins | {name: found}).items() if version is not None}
        blamed = wrong(findings.check_trio_versions(installed, device))
        assert list(blamed) == [name]
        assert f"{name}=={pinned}" in blamed[name].remedy
        # torchrec's metadata would bring the CUDA build, and torch needs the packages that it brings
        assert ("--no-deps" in blamed[name].remedy) == (name != "torch")


@pytest.mark.parametrize("has_gpu", [True, False])
@EACH_TRIO
def test_both_builds_of_fbgemm_are_wrong_and_the_machines_own_is_kept(tested: Trio, has_gpu: bool) -> None:
    installed = tested.pins("cpu") | tested.pins("cuda")
    device = findings.chosen_device(installed, has_gpu)
    assert device == ("cuda" if has_gpu else "cpu")
    (blamed,) = wrong(findings.check_trio_versions(installed, device)).values()
    downloaded, removed, reinstalled, _ = blamed.remedy.split(" && ")
    assert "uninstall" in removed and removed.endswith("fbgemm-gpu-cpu fbgemm-gpu")
    member = f" {trio.FBGEMM_DISTRIBUTIONS[device]}=={tested.fbgemm}"
    assert "pip download " in downloaded and downloaded.endswith(member), "without a network nothing is removed"
    assert "--no-index" in reinstalled and reinstalled.endswith(member)


@EACH_TRIO
def test_the_members_for_another_device_replace_those_that_are_installed(tested: Trio) -> None:
    for device, other in (("cpu", "cuda"), ("cuda", "cpu")):
        blamed = wrong(findings.check_trio_versions(tested.pins(other), device))
        assert blamed.keys() == {trio.FBGEMM_DISTRIBUTIONS[device]}
        _, removed, installed, _ = blamed.popitem()[1].remedy.split(" && ")
        assert removed.endswith(f"uninstall -y {trio.FBGEMM_DISTRIBUTIONS[other]}")
        assert installed.endswith(f"--no-deps {trio.FBGEMM_DISTRIBUTIONS[device]}=={tested.fbgemm}")
    for device in ("cpu", "cuda"):
        installed_here = tested.pins(device) | {"torch": f"{tested.torch}+cpu"}
        blamed = wrong(findings.check_trio_versions(installed_here, device))
        assert blamed.keys() == ({"torch"} if device == "cuda" else set())


@pytest.mark.parametrize("broken", ["torch", "fbgemm", "torchrec"])
def test_only_the_lowest_member_that_does_not_load_is_blamed(broken: str) -> None:
    order = ["torch", "fbgemm", "torchrec"]
    failing = order[order.index(broken) :]
    loads = {member: LoadResult({}, "undefined symbol") if member in failing else WELL for member in order}
    judged = findings.check_loads(loads, trio.DEFAULT.pins("cpu"))
    assert list(wrong(judged)) == [f"{broken} loads"]
    assert [finding.status for finding in judged].count("ok") == order.index(broken)
    # a member whose version has a remedy gets no second one
    names = {"torch": "torch", "fbgemm": "fbgemm-gpu-cpu", "torchrec": "torchrec"}
    assert not wrong(findings.check_loads(loads, trio.DEFAULT.pins("cpu"), already_wrong={names[broken]}))


@pytest.mark.parametrize("library", findings.DRIVER_LIBRARIES)
def test_the_cuda_members_are_not_blamed_for_a_machine_without_a_driver(library: str) -> None:
    loads = {
        "torch": WELL,
        "fbgemm": LoadResult({}, f"OSError: {library}: cannot open"),
        "torchrec": LoadResult({}, "x"),
    }
    judged = findings.check_loads(loads, trio.DEFAULT.pins("cuda"))
    assert [finding.status for finding in judged] == ["ok", "note", "note"] and library in judged[1].detail


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os.abort()", "signal 6"),
        ("import sys; sys.exit(3)", "exit code 3"),
        (
            "try: open('none.so')\nexcept OSError as error: raise OSError('broken') from error",
            "OSError: broken (FileNot",
        ),
    ],
)
def test_a_member_that_fails_to_load_is_reported_and_not_fatal(program: str, error: str) -> None:
    assert error in facts.run_load_program(program).error
    # lines before the facts are passed over
    assert facts.run_load_program("print('hello'); print('{\"a\": 1}')") == LoadResult({"a": 1})


def test_dependencies_are_checked_against_the_metadata() -> None:
    required = ["numpy>=2", "Torchmetrics==1.0.3", "typing_extensions", "torch==0.1", "absent>=1; python_version < '3'"]
    well = findings.check_dependencies({"numpy": "2.1", "torchmetrics": "1.0.3", "typing-extensions": "4"}, required)
    assert not wrong(well)
    for tested in trio.TRIOS.values():
        installed = {"numpy": "1.26", "typing-extensions": "4", "torch": f"{tested.torch}+cpu"}
        blamed = wrong(findings.check_dependencies(installed, required, tested))
        needed = {Requirement(each).name for each in tested.needs}
        assert blamed.keys() == {"numpy", "Torchmetrics"} | needed
        for finding in blamed.values():
            assert f" torch=={tested.torch}" in finding.remedy, "a dependency must not bring another torch"
    (unknown,) = findings.check_dependencies({}, None)  # without the metadata of distembed
    assert unknown.status == "wrong" and unknown.remedy == "tools/setup.sh"


def test_it_says_which_extras_there_are() -> None:
    ray, spark, polish, sweep = findings.check_extras({"ray": "2.60.0", "highspy": "1.16.0"})
    assert polish == Finding("plan --polish", "ok", "yes, by highspy 1.16.0")
    assert ray == Finding("prepare on ray", "ok", "yes, by ray 2.60.0")
    assert sweep.status == "note" and "optuna is not installed" in sweep.detail
    assert spark.status == "note" and spark.detail.endswith(
        "pyspark is not installed; `pip install 'distembed[spark]'` adds it"
    )


def test_it_says_why_tables_cannot_be_looked_up_in_one_pass() -> None:
    broken = {
        "import sys; sys.modules['numba'] = None": ["numba cannot be imported", "pip install numba"],
        # as where it was built for another NumPy
        "import numpy; numpy.__version__ = '99.0'": ["numba cannot be", "99.0"],
        "import os; os.abort()": ["signal 6"],
    }
    for before, words in broken.items():
        result = facts.run_load_program(f"{before}\n{facts._FUSED_LOOKUP_PROGRAM}")
        found = findings.check_fused_lookup(result)
        assert found.status == "note" and found.detail.startswith("no: ") and "FBGEMM" in found.detail
        assert all(word in found.detail for word in words), found.detail


@pytest.mark.parametrize(
    ("devices", "cuda_build", "device", "has_gpu", "is_wrong"),
    [
        ([], None, "cpu", False, False),
        ([], "13.0", "cpu", False, False),
        ([], None, "cpu", True, False),  # chosen: the CPU members agree with each other
        ([], None, "cuda", True, True),
        ([], "13.0", "cuda", True, True),
        ([GPU], "13.0", "cuda", True, False),
        ([GPU, GPU], "13.0", "cpu", True, False),
    ],
)
def test_devices(devices: list[object], cuda_build: str | None, device: str, has_gpu: bool, is_wrong: bool) -> None:
    torch_facts = {"cuda_build": cuda_build, "gloo": True, "nccl": bool(devices), "devices": devices}
    judged = findings.check_accelerators(torch_facts, device, has_gpu)
    assert bool(wrong(judged)) == is_wrong
    assert [finding.subject for finding in judged if finding.subject.startswith("cuda:")] == [
        f"cuda:{index}" for index in range(len(devices))
    ]
    without_transport = findings.check_accelerators({**torch_facts, "gloo": False, "nccl": False}, device, has_gpu)
    assert "several ranks" in wrong(without_transport)


def test_where_linux_does_not_say_memory_is_0(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory_bytes(meminfo, tmp_path) == 0
    meminfo.write_text("")
    assert available_memory_bytes(meminfo, tmp_path) == 0
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2 * 2**20


def test_facts_about_the_machine_are_read_from_what_linux_tells() -> None:
    assert "avx512_bf16" in facts.processor_flags("processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\nbugs\t\t:\n")
    assert facts.processor_flags("Features\t: fp asimd bf16") == {"fp", "asimd", "bf16"}
    assert facts.processor_flags("") == set()
    assert facts.usable_cores() >= 1


@pytest.mark.parametrize("statuses", [["ok"], ["ok", "note"], ["ok", "wrong"], ["wrong", "wrong"], []])
@pytest.mark.parametrize("has_rich", [True, False])
def test_exit_code_and_remedies_follow_from_what_is_wrong(
    statuses: list[Status], has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding(f"[thing] {i}", status, "detail", f"mend --{i}") for i, status in enumerate(statuses)]
    monkeypatch.setattr(findings, "gather_facts", lambda: None)
    monkeypatch.setattr(findings, "judge", lambda *_: found)
    console = Console(width=200, record=True, file=io.StringIO())
    assert findings.run_doctor(console if has_rich else None) == int("wrong" in statuses)
    text = console.export_text() if has_rich else capsys.readouterr().out
    for finding in found:
        assert finding.subject in text
        assert (finding.remedy in text) == (finding.status == "wrong")


@pytest.mark.parametrize("dry_run", [True, False])
def test_each_command_of_pip_runs_once_in_order_until_one_fails(
    dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    first, second, failing, last = (
        f"{findings._pip('--version')} && echo {name} >> {log} && test {name} != failing"
        for name in ("first", "second", "failing", "last")
    )
    remedies = [first, "nvidia-smi", second, first, failing, last]
    found = [Finding(str(i), "wrong", "", remedy) for i, remedy in enumerate(remedies)]
    found.insert(0, Finding("worth a note", "note", "", last))
    monkeypatch.setattr(findings, "gather_facts", facts_of)
    monkeypatch.setattr(findings, "judge", lambda *_: found)
    assert findings.run_fix(None, dry_run=dry_run) == int(not dry_run)
    output = capfd.readouterr()
    printed = [line for line in output.out.splitlines() if line.endswith("failing")]
    assert printed == [first, second, failing, last][: 4 if dry_run else 3]
    assert (log.read_text().split() if log.exists() else []) == ([] if dry_run else ["first", "second", "failing"])
    told = f"This command failed:\n  {failing}\nThese commands have not run:\n  {last}\n"
    again = f"run:\n  {sys.executable} -m distembed.reports.doctor --fix\n"
    assert dry_run or (output.err.startswith(told) and output.err.endswith(again))


def test_a_fault_that_another_had_hidden_is_mended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (f"{findings._pip('--version')} && echo {name} >> {tmp_path / 'log'}" for name in "ab")
    states = iter([[first], [second], []])
    monkeypatch.setattr(findings, "gather_facts", facts_of)
    monkeypatch.setattr(findings, "judge", lambda *_: [Finding("", "wrong", "", each) for each in next(states)])
    assert findings.run_fix(None) == 0
    assert (tmp_path / "log").read_text().split() == ["a", "b"]


@pytest.mark.parametrize(
    ("known", "device", "words"),
    [
        ({}, None, None),
        ({"has_gpu": True, "driver": "580.65.06"}, None, None),
        ({"has_gpu": True, "driver": "535.10"}, "cpu", None),
        ({"has_gpu": True, "driver": "535.10", "installed": {"fbgemm-gpu-cpu": "1"}}, None, None),
        ({"has_gpu": True, "driver": "535.10", "cuda_build": "12.6"}, None, None),
        ({"has_gpu": True, "driver": "535.10"}, None, "driver 535.10 is too old for CUDA 13.0"),
        ({"driver": "535.10"}, "cuda", "--fix --device cpu"),
        (
            {"python_version": (3, 15, 1)},
            None,
            "This is Python 3.15.1; the trio 2.13 is tested on 3.11, 3.12, 3.13, 3.14",
        ),
        ({"installed": {"torch": "2.11.0"}}, None, "python3.12 -m venv"),
    ],
)
def test_no_command_runs_where_the_trio_would_not(
    known: dict[str, Any], device: str | None, words: str | None, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(cuda_driver, "_library_cuda", lambda: None)
    monkeypatch.setattr(findings, "gather_facts", lambda: facts_of(**known))
    monkeypatch.setattr(findings, "judge", lambda *_: [Finding("", "wrong", "", f"{findings._pip('--version')}")])
    assert findings.run_fix(None, device) == 1
    output = capfd.readouterr()
    assert (words is None) == ("--version" in output.out)
    assert words is None or (words in output.err and "Nothing was changed" in output.err)


@pytest.mark.parametrize("remedy", ["", "nvidia-smi"])
def test_a_dry_run_without_a_command_says_so(remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(findings, "gather_facts", facts_of)
    monkeypatch.setattr(findings, "judge", lambda *_: [Finding("gpu", "wrong", "", remedy)] if remedy else [])
    assert findings.run_fix(None, dry_run=True) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("No command of pip mends these faults:" if remedy else "Nothing is wrong.")
    assert remedy in output.err


def test_an_environment_without_pip_is_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(findings, "gather_facts", facts_of)
    monkeypatch.setattr(findings, "judge", lambda *_: [Finding("", "wrong", "", findings._pip("--version"))])
    findings.run_fix(None)
    assert f"pip {ensurepip.version()} from {tmp_path}" in capfd.readouterr().out


def test_two_doctors_mend_one_environment_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    holder = findings._lock_environment()
    waiting = threading.Thread(target=lambda: os.close(findings._lock_environment()))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    os.close(holder)
    waiting.join()


def test_here_each_finding_that_is_wrong_has_a_remedy_and_the_trio_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that load its members run in forks of a process that has loaded them, which takes seconds."""
    # Two threads may not start and join processes at once: each polls all children, and the exit code of a child is
    # read once. The thread that comes second gets 255.
    one_at_a_time = threading.Lock()

    def run_forked(program: str) -> LoadResult:
        with one_at_a_time:
            return LoadResult(json.loads(output_of(exec, program, {})))

    monkeypatch.setattr(facts, "run_load_program", run_forked)
    judged = findings.judge(facts.gather_facts())
    assert all(finding.remedy for finding in judged if finding.status == "wrong")
    by_subject = {finding.subject: finding for finding in judged}
    for member in ("torch", "fbgemm", "torchrec"):
        assert by_subject[f"{member} loads"].status == "ok", by_subject[f"{member} loads"].detail
    assert re.search(r"\d+ cores", by_subject["platform"].detail)
    (fused,) = (finding for finding in judged if finding.detail.startswith("yes, by numba "))
    assert fused.status == "ok"
