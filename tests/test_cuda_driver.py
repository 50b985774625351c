"""Laws of a driver that is too old: training, the doctor and the set-up refuse it by both versions, and say what helps.

A program of the name ``nvidia-smi`` stands in for NVIDIA's; what asks it runs in a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fbgemm_gpu
import pytest
import torch

from distembed.base import cuda_driver
from distembed.base.errors import UserError
from distembed.base.ranks import choose_device
from distembed.reports.doctor import findings
from distembed.reports.doctor.trio import TRIOS, Trio
from tests.processes import output_of

ROOT = Path(__file__).parents[1]
DEVICE = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"
OLD, NEW = "550.54.15", "580.65.06"


def fake_nvidia_smi(folder: Path, driver: str, lists: str = DEVICE) -> dict[str, str]:
    """Environment in which nvidia-smi lists these devices, of this driver; fails where it lists none."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"""#!/bin/sh
[ -n "{lists}" ] || exit 9
case "$1" in
-L) echo "{lists}" ;;
--query-gpu=driver_version) printf "{driver}\\n{driver}\\n" ;;
*) exit 2 ;;
esac
"""
    )
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return environment | {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def choose(*cases: tuple[str, str | None, str, dict[str, str]]) -> list[str]:
    """What is chosen for each name, torch's CUDA, variant of FBGEMM and environment."""
    return output_of(choose_here, cases).splitlines()


def choose_here(cases: tuple[tuple[str, str | None, str, dict[str, str]], ...]) -> None:
    """As a CUDA build without a device that it can use, whichever build is installed here."""
    torch.cuda.is_available = lambda: False
    for name, cuda, variant, environment in cases:
        os.environ.clear()
        os.environ.update(environment)
        torch.version.cuda, fbgemm_gpu.__variant__ = cuda, variant
        try:
            print(choose_device(name, 0))
        except UserError as error:
            print("refused:", error)


def test_training_refuses_a_device_that_it_cannot_use_and_says_what_helps(tmp_path: Path) -> None:
    old, new = fake_nvidia_smi(tmp_path / "old", OLD), fake_nvidia_smi(tmp_path / "new", NEW)
    names = ["auto", "cuda"]
    *said, with_new_driver = choose(*((name, "13.0", "cuda", old) for name in names), ("auto", "13.0", "cuda", new))
    for name, text in zip(names, said, strict=True):
        assert text.startswith(f"refused: train.device is {name!r}, this machine has an NVIDIA device")
        assert f"the NVIDIA driver {OLD} is too old for CUDA 13.0, which needs driver {NEW} or newer" in text
        for remedy in ("newer driver", "a torch built for an older CUDA", "train.device=cpu"):
            assert remedy in text
    assert with_new_driver.startswith("refused: ")
    assert "too old" not in with_new_driver and "does not say why" in with_new_driver


def test_whoever_wants_no_gpu_or_has_none_trains_on_the_processor(tmp_path: Path) -> None:
    old, without = fake_nvidia_smi(tmp_path / "old", OLD), fake_nvidia_smi(tmp_path / "none", OLD, lists="")
    cases = {
        "asked for": ("cpu", "13.0", "cuda", old),
        "torch is built for it": ("auto", None, "cuda", old),
        "its members were chosen": ("auto", "13.0", "cpu", old),
        "devices are hidden": ("auto", "13.0", "cuda", old | {"CUDA_VISIBLE_DEVICES": ""}),
        "nvidia-smi lists none": ("auto", "13.0", "cuda", without),
    }
    assert dict(zip(cases, choose(*cases.values()), strict=True)) == dict.fromkeys(cases, "cpu")


@pytest.mark.parametrize(
    ("cuda", "driver", "suffices"),
    [
        ("13.0", "580.65.06", True),
        ("13.0", "580.65.05", False),
        ("13.2", "590.1", True),  # a minor version needs no newer one
        ("12.6", "525.60.13", True),
        ("12.9", "525.60.12", False),
        ("12.9", "470.256.02", False),
        ("11.8", "470.256.02", True),
        ("99.0", "1.0", True),  # not known, so not blamed
        ("13.0", None, True),
    ],
)
def test_a_driver_suffices_from_the_oldest_of_its_major_version_on(
    cuda: str, driver: str | None, suffices: bool
) -> None:
    shortage = cuda_driver.driver_shortage(cuda, driver)
    assert (shortage is None) == suffices
    assert suffices or (f" {driver} " in str(shortage) and f"CUDA {cuda}" in str(shortage))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC 11\n",
            "535.183.01",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root)\n", "570.86.15"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_without_nvidia_smi_the_kernel_says_the_version(
    text: str | None, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_driver, "_KERNEL_MODULE", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert cuda_driver.driver_version() == version


@pytest.mark.parametrize("trio", TRIOS.values(), ids=TRIOS)
def test_the_doctor_names_both_versions(trio: Trio) -> None:
    torch_facts = {"cuda_build": trio.cuda, "gloo": True, "nccl": True, "devices": []}
    finding, *_ = findings.check_accelerators(torch_facts, "cuda", has_gpu=True, driver=OLD)
    assert finding.status == "wrong" and OLD in finding.detail and NEW in finding.detail
    assert "distembed.reports.doctor --fix --device cpu" in finding.remedy and "newer driver" in finding.remedy
    # with the members for processors it is no more than worth knowing
    finding, *_ = findings.check_accelerators(torch_facts, "cpu", has_gpu=True, driver=OLD)
    assert finding.status == "note" and OLD in finding.detail


def test_the_doctors_facts_have_the_driver_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, OLD)["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (cuda_driver.nvidia_smi_works(), cuda_driver.driver_version()) == (True, OLD)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the set-up reads, and without a .venv; its Pythons make none."""
    root = tmp_path / "checkout"
    for name in (
        "tools/setup.sh",
        "pyproject.toml",
        "distembed/reports/doctor/trio.py",
        "distembed/base/cuda_driver.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


def set_up(
    checkout: Path, environment: dict[str, str], *arguments: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the set-up with a Python that tells the version of any trio and refuses to make an environment."""
    python = checkout / "python3"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *" suits"|*"import venv"*) exit 0;; *_base_executable*) echo "$0";; '
        '"-m venv"*) echo "would make it" >&2; exit 7;; *) exec "$REAL_PYTHON" "$@";; esac\n'
    )
    python.chmod(0o755)
    own = {"DISTEMBED_PYTHON": str(python), "REAL_PYTHON": sys.executable, **(variables or {})}
    return subprocess.run(
        ["bash", "tools/setup.sh", *arguments],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={name: value for name, value in environment.items() if not name.startswith("DISTEMBED_")} | own,
    )


@pytest.mark.parametrize("arguments", [[], ["--trio", "2.11"], ["test", "--trio=2.11"]])
def test_the_set_up_ends_before_it_downloads_what_would_not_run(
    arguments: list[str], checkout: Path, tmp_path: Path
) -> None:
    done = set_up(checkout, fake_nvidia_smi(tmp_path, OLD), *arguments)
    assert done.returncode == 1 and "would make it" not in done.stderr
    assert OLD in done.stderr and NEW in done.stderr
    assert "DISTEMBED_DEVICE=cpu tools/setup.sh" in done.stderr and "newer driver" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("driver", "devices", "variables"), [(NEW, DEVICE, {}), (OLD, "", {}), (OLD, DEVICE, {"DISTEMBED_DEVICE": "cpu"})]
)
@pytest.mark.parametrize("trio", TRIOS)
def test_the_set_up_goes_on_where_the_driver_suffices_or_is_not_needed(
    driver: str, devices: str, variables: dict[str, str], trio: str, checkout: Path, tmp_path: Path
) -> None:
    variables = variables | {"DISTEMBED_TRIO": trio}
    done = set_up(checkout, fake_nvidia_smi(tmp_path, driver, devices), variables=variables)
    assert done.returncode == 7 and "would make it" in done.stderr, done.stderr


def test_an_unknown_trio_is_refused_with_the_known_ones(checkout: Path, tmp_path: Path) -> None:
    done = set_up(checkout, fake_nvidia_smi(tmp_path, NEW), "--trio", "1.0")
    assert done.returncode == 1 and done.stderr.strip().endswith(f"allowed are: {', '.join(TRIOS)}")
