"""Laws of the wheel: its files, packages and entry points, and that it works in an environment with nothing else.

pip builds it without a network, and fills the environment from the index that it is configured for.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.version import Version

from distembed.base.version import __version__
from distembed.reports.doctor.trio import FBGEMM_DISTRIBUTIONS, TORCHX, TRIOS

ROOT = Path(__file__).parents[2]
FOLDERS = {"distembed": "distembed", "distembed/configs": "configs", "distembed/launch": "launch"}
"""Folder of the wheel -> its folder in the repository."""


def copied(folder: Path) -> Path:
    """Copies the files that the build of the image is sent, which suffice for a wheel; a build writes next to them."""
    allowed = (ROOT / "tools" / "Dockerfile.dockerignore").read_text().splitlines()
    for name in [line.removeprefix("!") for line in allowed if line.startswith("!")]:
        if (ROOT / name).is_dir() and not (ROOT / name).is_symlink():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build_wheel(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    return subprocess.run([*build, "--wheel-dir", folder, source], capture_output=True, text=True)


def files_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built beside a module of an earlier version's build."""
    folder = tmp_path_factory.mktemp("wheel")
    (source := folder / "source").mkdir()
    (source / "build" / "lib" / "launch").mkdir(parents=True)
    (source / "build" / "lib" / "launch" / "removed.py").touch()
    done = build_wheel(copied(source), folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("distembed-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The unpacked wheel."""
    shutil.unpack_archive(wheel, wheel.parent / "site-packages", "zip")
    return wheel.parent / "site-packages"


def test_the_wheel_has_the_modules_and_data_of_its_package_and_nothing_else(installed: Path) -> None:
    expected = {
        Path(installed_folder) / file.relative_to(ROOT / folder)
        for installed_folder, folder in FOLDERS.items()
        for pattern in ("*.py", "*.yaml", "py.typed", "CHANGELOG.md")
        for file in (ROOT / folder).rglob(pattern)
    }
    files = {file.relative_to(installed) for file in installed.rglob("*") if file.is_file()}
    assert {file for file in files if not file.parts[0].endswith(".dist-info")} == expected


def test_an_sdist_gives_a_wheel_of_the_same_files(wheel: Path, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    program = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=copied(source), check=True, capture_output=True)
    (sdist,) = tmp_path.glob("distembed-*.tar.gz")
    done = build_wheel(sdist, tmp_path / "wheels")
    assert done.returncode == 0, done.stderr
    (again,) = (tmp_path / "wheels").glob("*.whl")
    assert files_in(again) == files_in(wheel)


@pytest.mark.parametrize("folder", ["configs", "launch"])
def test_sources_that_lost_a_link_are_refused_with_the_command_that_mends_them(folder: str, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    link = copied(source) / "distembed" / folder
    link.unlink()
    link.write_text(f"../{folder}")
    done = build_wheel(source, tmp_path)
    assert done.returncode != 0
    assert f"distembed/{folder} is no folder" in done.stderr
    assert f"run: ln -sfn ../{folder} distembed/{folder}" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_each_entry_point_is_in_the_wheel_or_torchxs_own(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    points = Distribution.at(metadata).entry_points
    assert {point.group for point in points} == {
        "console_scripts",
        "torchx.components",
        "torchx.schedulers",
        "torchx.named_resources",
    }
    for point in points:
        package = point.module.partition(".")[0]
        assert package in {*FOLDERS, "torchx"}, point
        assert package == "torchx" or (installed / point.module.replace(".", "/")).with_suffix(".py").is_file(), point


def test_the_metadata_name_the_newest_version_of_the_changes_and_all_tested_pythons(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    told = Distribution.at(metadata).metadata
    versions = re.findall(r"^## (\d+\.\d+\.\d+)$", (installed / "distembed" / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions == sorted(versions, key=Version, reverse=True)
    assert told["Version"] == versions[0] == __version__
    minors = {name.rpartition(".")[2] for name in told.get_all("Classifier") if "Python :: 3." in name}
    assert minors == {str(minor) for trio in TRIOS.values() for minor in trio.pythons}
    assert not {"Home-page", "Project-URL", "Author", "Author-email"} & set(told)


def test_the_image_is_built_by_instructions_that_a_linter_accepts_from_extras_that_exist() -> None:
    dockerfile = (ROOT / "tools" / "Dockerfile").read_text()
    subprocess.run([Path(sys.executable).with_name("hadolint"), "-"], input=dockerfile, text=True, check=True)
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(defaults["EXTRAS"].split(",")) <= extras.keys()
    assert all(int(defaults["PYTHON"].removeprefix("3.")) in trio.pythons for trio in TRIOS.values())
    assert defaults["DEVICE"] in FBGEMM_DISTRIBUTIONS
    (install,) = re.findall(r'pip install --editable ("[^"]+")', dockerfile)
    for given, asked in (("", "."), ("serve,sweep", ".[serve,sweep]")):
        asked_of_pip = subprocess.run(["sh", "-c", f"printf %s {install}"], env={"EXTRAS": given}, capture_output=True)
        assert asked_of_pip.stdout.decode() == asked


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extras", ["", "serve"])
def test_the_image_is_built_and_all_is_well_in_it(extras: str) -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("no docker here: the image cannot be built")
    build = ["docker", "build", "--quiet", "-f", ROOT / "tools" / "Dockerfile", "--build-arg", "DEVICE=cpu"]
    built = subprocess.run(
        [*build, "--build-arg", f"EXTRAS={extras}", ROOT], check=True, capture_output=True, text=True
    )
    subprocess.run(["docker", "run", "--rm", built.stdout.strip(), "distembed", "doctor"], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_an_empty_environment_doctor_fix_completes_it_and_all_of_the_quickstart_runs(
    wheel: Path, tmp_path: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    programs = tmp_path / "environment" / "bin"
    (work := tmp_path / "work").mkdir()

    def run(program: str | Path, *arguments: object, code: int = 0) -> str:
        done = subprocess.run(
            [program, *map(str, arguments)], cwd=work, env=own, capture_output=True, text=True, errors="replace"
        )
        assert done.returncode == code, f"{program} {arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def distembed(*arguments: object, code: int = 0) -> str:
        return run(programs / "distembed", *arguments, code=code)

    run(sys.executable, "-m", "venv", tmp_path / "environment")
    reachable = [programs / "pip", "download", "--no-deps", "--dest", tmp_path / "downloads", f"torchx=={TORCHX}"]
    if subprocess.run(reachable, env=own, capture_output=True).returncode:
        pytest.skip(f"pip reaches no package index: torchx=={TORCHX} cannot be downloaded")
    run(programs / "pip", "install", wheel)

    distembed("synthesize", "raw.tsv", "--rows", 4000)
    distembed("prepare", "criteo", "raw.tsv", "--output", "dataset", "--split", "0.8,0.1,0.1")
    assert "shi2020/figure4-operations" in distembed("reproduce", "--list")
    training = ("train", ROOT / "configs" / "quickstart.yaml", "data.path=dataset", "--run-dir")
    assert "torchrec is not installed: `distembed doctor --fix`" in distembed(*training, "runs/full", code=1)
    distembed("doctor", code=1)
    commands = distembed("doctor", "--fix", "--dry-run").splitlines()
    _, block = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[:2]
    of_pip, *of_distembed = (shlex.split(line, comments=True) for line in block.splitlines())
    assert of_pip == ["pip", "install", "."]  # the wheel, above
    for program, *arguments in of_distembed:
        run(programs / program, *arguments)
    assert len(commands) == 3 and all("--no-deps" in command for command in commands)
    assert distembed("doctor", "--dry-run") == "Nothing is wrong.\n"

    training = ("train", "configs/quickstart.yaml", "data.path=dataset", "--run-dir")
    distembed(*training, "runs/full")
    distembed(*training, "runs/qr", "embedding.default.partition=quotient_remainder")
    distembed("report", "runs/full", "runs/qr", "--output", "report.html")
    assert (work / "report.html").is_file()
    distembed("launch", *training[1:], "runs/two", "-j", "1x2")
    assert "distembed.train" in run(programs / "torchx", "builtins")
