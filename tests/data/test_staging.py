"""A dataset appears whole or not at all."""

import errno
import resource
from pathlib import Path

import pytest

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, ProgressUpdate, ingest, prepare_criteo, staging, write_parquet
from distembed.data.prepare.feature_ids import LookupTables
from distembed.data.prepare.staging import staged_folder
from tests.data import reference
from tests.data.killed import hanging, wait_for_ever
from tests.data.reference import folder_bytes

HASHED = CriteoOptions(hash_size=50)
"""Without vocabularies, which take most of the time."""


def prepare_and_hang(source: Path, output: Path, options: CriteoOptions, step: str, overwrite: bool) -> None:
    """Prepares, and waits for ever at a step so that it can be killed there."""

    def hang(*_: object) -> None:
        wait_for_ever(source)

    def progress(update: ProgressUpdate) -> None:
        if update.stage == step:
            hang()

    if step == "flush":
        staging._flush = hang
    if step == "swapped":
        rename = Path.rename
        Path.rename = lambda self, target: (rename(self, target), hang())
    prepare_criteo([source], output, options, progress=progress, overwrite=overwrite)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.tsv"
    path.write_bytes(reference.content(500, 1, malformed=0.005))
    return path


@pytest.mark.parametrize("step", ["vocabulary", "flush"])
def test_killed_at_any_moment_it_leaves_no_dataset(source: Path, tmp_path: Path, step: str) -> None:
    output, options = tmp_path / "deep" / "out", CriteoOptions() if step == "vocabulary" else HASHED
    with hanging(source, prepare_and_hang, source, output, options, step, False):
        pass
    assert not output.exists() and len(list(output.parent.iterdir())) == 1
    prepare_criteo([source], output, options)
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert not list(output.glob(".*"))
    Manifest.load(output)


@pytest.mark.parametrize("step", ["write", "swapped"])
def test_killed_while_overwriting_the_old_dataset_stays(source: Path, tmp_path: Path, step: str) -> None:
    """Also between the two renames: the next run puts the old one back before it does anything else."""
    output = tmp_path / "out"
    prepare_criteo([source], output, CriteoOptions(5, hash_size=40))
    before = folder_bytes(output)
    with hanging(source, prepare_and_hang, source, output, HASHED, step, True):
        pass
    assert output.exists() == (step == "write")
    with pytest.raises(UserError, match="exists already|has no rows"):
        # The second run is refused either way, and must not lose anything.
        if step == "swapped":
            (tmp_path / "empty").touch()
            prepare_criteo([tmp_path / "empty"], output)
        else:
            prepare_criteo([source], output)
    assert folder_bytes(output) == before
    prepare_criteo([source], output, HASHED, overwrite=True)
    assert Manifest.load(output).preparation["hash_size"] == HASHED.hash_size
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_second_run_at_the_same_time_gives_way(source: Path, tmp_path: Path) -> None:
    with hanging(source, prepare_and_hang, source, tmp_path / "out", HASHED, "write", False):
        with pytest.raises(UserError, match="another process is preparing"):
            prepare_criteo([source], tmp_path / "out")
        prepare_criteo([source], tmp_path / "out2", HASHED)
    prepare_criteo([source], tmp_path / "out", HASHED)


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another process may have made it"):
        with staged_folder(tmp_path / "out", overwrite=False) as folder:
            (folder / "a").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(errno.EIO, "broken disk")])
def test_a_failure_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*ignored: object) -> None:
        raise error

    monkeypatch.setattr(write_parquet.FileWriter, "write", fail)
    with pytest.raises(BaseException) as caught:
        prepare_criteo([source], tmp_path / "out")
    assert not isinstance(caught.value, UserError | RunError)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tsv"]


@pytest.mark.parametrize(("module", "name"), [(ingest, "write_block"), (LookupTables, "write")])
def test_a_full_disk_is_explained(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    def fail(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(
        RunError, match=r"out could not be written \(No space left.*\): .* MiB were free after .* MiB\."
    ):
        prepare_criteo([source], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tsv"]


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A limit on the size of files makes every writer of the product meet the system's own refusal."""
    (tmp_path / "rows.tsv").write_bytes(reference.content(3000, 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(RunError) as refused:
            prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(refused.value).startswith(
        f"{tmp_path / 'out'} could not be written: this process may not write files so large"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tsv"]


def test_remains_of_a_process_that_died_before_it_locked(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.preparing").mkdir()
    (tmp_path / ".out.preparing" / "train").mkdir()
    (tmp_path / ".outer.preparing").mkdir()
    prepare_criteo([source], tmp_path / "out", HASHED)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".outer.preparing", "out", "rows.tsv"]
