"""Laws of the doctor: it starts on a broken install, blames what is broken, and every remedy is a command."""

import io
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from distembed.doctor import facts, findings, report, trio
from distembed.doctor.facts import LoadResult
from distembed.doctor.findings import Finding, Status
from distembed.host_memory import available_memory_bytes

ROOT = Path(__file__).parents[1]
WELL = LoadResult({"cuda_build": None, "gloo": True, "nccl": False, "devices": []})
GPU = {"name": "A100", "memory_bytes": 80 * 2**30, "capability": [8, 0]}


def wrong(found: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found if finding.status == "wrong"}


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("missing", ["torch", "torchrec", "fbgemm_gpu", "rich", "packaging", "numpy", "pydantic"])
def test_it_can_be_imported_without(missing: str) -> None:
    done = python(f"import sys; sys.modules[{missing!r}] = None; import distembed.doctor; print('imported')")
    assert done.stdout == "imported\n", done.stderr


def test_importing_it_does_not_import_torch() -> None:
    done = python("import sys, distembed.doctor; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pins_are_what_setup_installs_and_pyproject_asks_for(device: str) -> None:
    printed = subprocess.run(
        [sys.executable, "distembed/doctor/trio.py", device], capture_output=True, text=True, check=True, cwd=ROOT
    )
    pins = trio.pins(device)
    assert [Requirement(each).name for each in printed.stdout.split()] == list(pins)
    assert list(pins)[0] == "torch", "torch comes first: what follows would take the newest one"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {Requirement(line).name: str(Requirement(line).specifier) for line in project["dependencies"]}
    assert asked["torch"] == f"=={pins['torch']}"
    assert not {"torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"} & asked.keys()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pinned_versions_are_well(device: str) -> None:
    installed = trio.pins(device) | {"torch": f"{trio.TORCH}+local"}
    assert findings.chosen_device(installed, has_gpu=device == "cpu") == device
    assert {finding.status for finding in findings.check_trio_versions(installed, device)} == {"ok"}


@pytest.mark.parametrize(
    ("device", "member", "found"),
    [case for case in itertools.product(["cpu", "cuda"], range(3), [None, "1.7.0", "1.8.1", "2.13.0rc1", "1.8.00"])],
)
def test_a_missing_or_other_version_is_blamed_by_name_with_the_command_that_installs_the_pinned_one(
    device: str, member: int, found: str | None
) -> None:
    pins = trio.pins(device)
    name = list(pins)[member]
    installed = {other: version for other, version in pins.items() if other != name} | ({name: found} if found else {})
    blamed = wrong(findings.check_trio_versions(installed, device))
    assert list(blamed) == [name]
    assert f"{name}=={pins[name]}" in blamed[name].remedy
    # torchrec's metadata would bring the CUDA build, and torch needs what it brings
    assert ("--no-deps" in blamed[name].remedy) == (name != "torch")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_both_builds_of_fbgemm_are_wrong_and_the_machines_own_is_kept(has_gpu: bool) -> None:
    installed = trio.pins("cpu") | trio.pins("cuda")
    device = findings.chosen_device(installed, has_gpu)
    assert device == ("cuda" if has_gpu else "cpu")
    (blamed,) = wrong(findings.check_trio_versions(installed, device)).values()
    removed, reinstalled = blamed.remedy.split(" && ")
    assert "uninstall" in removed and removed.endswith("fbgemm-gpu-cpu fbgemm-gpu")
    assert reinstalled.endswith(f" {trio.FBGEMM_DISTRIBUTIONS[device]}=={trio.FBGEMM}")


@pytest.mark.parametrize("broken", ["torch", "fbgemm", "torchrec"])
def test_only_the_lowest_member_that_does_not_load_is_blamed(broken: str) -> None:
    order = ["torch", "fbgemm", "torchrec"]
    failing = order[order.index(broken) :]
    loads = {member: LoadResult({}, "undefined symbol") if member in failing else WELL for member in order}
    judged = findings.check_loads(loads, "cpu")
    assert list(wrong(judged)) == [f"{broken} loads"]
    assert [finding.status for finding in judged].count("ok") == order.index(broken)


def test_a_member_whose_version_has_a_remedy_gets_no_second_one() -> None:
    loads = {"torch": WELL, "fbgemm": LoadResult({}, "undefined symbol"), "torchrec": WELL}
    assert not wrong(findings.check_loads(loads, "cpu", already_wrong={"fbgemm-gpu-cpu"}))


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os.abort()", "signal 6"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
def test_a_member_that_fails_to_load_is_reported_and_not_fatal(program: str, error: str) -> None:
    assert error in facts.run_load_program(program).error


def test_what_a_program_prints_before_its_facts_is_passed_over() -> None:
    assert facts.run_load_program("print('hello'); print('{\"a\": 1}')") == LoadResult({"a": 1})


def test_dependencies_are_checked_against_the_metadata() -> None:
    required = ["numpy>=2", "Torchmetrics==1.0.3", "typing_extensions", "torch==0.1", "absent>=1; python_version < '3'"]
    well = findings.check_dependencies({"numpy": "2.1", "torchmetrics": "1.0.3", "typing-extensions": "4"}, required)
    assert not wrong(well)
    blamed = wrong(findings.check_dependencies({"numpy": "1.26", "typing-extensions": "4"}, required))
    assert blamed.keys() == {"numpy", "Torchmetrics"}
    for finding in blamed.values():
        assert f" torch=={trio.TORCH}" in finding.remedy, "a dependency must not bring another torch"


def test_without_its_own_metadata_nothing_is_known_about_dependencies() -> None:
    (finding,) = findings.check_dependencies({}, None)
    assert finding.status == "wrong" and finding.remedy == "tools/setup.sh"


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


def test_a_transport_that_is_needed_and_missing_is_wrong() -> None:
    torch_facts = {"cuda_build": None, "gloo": False, "nccl": False, "devices": []}
    assert wrong(findings.check_accelerators(torch_facts, "cpu", False)).keys() == {"several ranks"}


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
    monkeypatch.setattr(report, "gather_facts", lambda: None)
    monkeypatch.setattr(report, "judge", lambda _: found)
    console = Console(width=200, record=True, file=io.StringIO())
    assert report.run_doctor(console if has_rich else None) == int("wrong" in statuses)
    text = console.export_text() if has_rich else capsys.readouterr().out
    for finding in found:
        assert finding.subject in text
        assert (finding.remedy in text) == (finding.status == "wrong")


def test_here_each_finding_that_is_wrong_has_a_remedy_and_the_trio_loads() -> None:
    judged = findings.judge(facts.gather_facts())
    assert all(finding.remedy for finding in judged if finding.status == "wrong")
    by_subject = {finding.subject: finding for finding in judged}
    for member in ("torch", "fbgemm", "torchrec"):
        assert by_subject[f"{member} loads"].status == "ok", by_subject[f"{member} loads"].detail
    assert re.search(r"\d+ cores", by_subject["platform"].detail)
