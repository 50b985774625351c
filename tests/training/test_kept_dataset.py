"""A run keeps what the ids of its dataset mean, and is of use without the dataset."""

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset import kept
from distembed.data.dataset.kept import keep_dataset, kept_dataset
from distembed.data.dataset.manifest import Manifest, id_fingerprint
from distembed.launch.jobs.preflight import check_dataset
from distembed.training.config import load_config
from distembed.training.trained_run import find_trained_run
from tests.criteo_runs import criteo_run
from tests.data.test_damage import flip_a_bit
from tests.small_runs import call, distembed, losses, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    criteo_run(folder)
    return folder


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose files are its own."""
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_keeps_the_manifest_without_rows_and_the_vocabularies(folder: Path) -> None:
    copy, dataset = folder / "run" / "dataset", folder / "dataset"
    found, whole = Manifest.load(copy), Manifest.load(dataset)
    assert id_fingerprint(copy, found) == id_fingerprint(dataset, whole)
    for name, split in found.splits.items():
        assert split.files == ()
        assert (split.num_rows, split.label_rate) == (whole.splits[name].num_rows, whole.splits[name].label_rate)
    for vocabulary in whole.vocabularies.values():
        assert (copy / vocabulary.file).read_bytes() == (dataset / vocabulary.file).read_bytes()
        assert os.path.samefile(copy / vocabulary.file, dataset / vocabulary.file)  # takes no room of its own
    assert sorted(path.name for path in copy.iterdir()) == ["manifest.json", "vocabulary"]


def test_what_needs_no_rows_works_without_the_dataset(folder: Path, own: Path, tmp_path: Path) -> None:
    (folder / "dataset").rename(folder / "away")
    try:
        assert find_trained_run(own, None).dataset == str(own / "dataset")
        call("materialise", own, "--output", tmp_path / "vectors", "--table", "C9")
        assert pq.read_table(tmp_path / "vectors" / "C9.parquet").num_rows > 2
        with pytest.raises(UserError, match="say where it is with --data"):
            find_trained_run(own, None, "test")
    finally:
        (folder / "away").rename(folder / "dataset")
    with pytest.raises(UserError, match="has no rows; name the dataset itself"):
        find_trained_run(own, str(own / "dataset"), "test")


def test_check_reads_what_is_kept(own: Path) -> None:
    said = call("check", own).splitlines()
    assert said[1].startswith(f"dataset {own / 'dataset'}: whole, 27 files")
    flip_a_bit(own / "dataset" / "vocabulary" / "C3.parquet", 50)
    done = distembed("check", own, code=2)
    assert "C3.parquet is damaged" in done.stderr and done.stderr.count("is damaged: its") == 1


def test_a_resumed_run_keeps_what_it_has_or_lacks(folder: Path, own: Path) -> None:
    train = ("train", folder / "config.yaml", "--run-dir", own, "--resume")
    before = (own / "dataset" / "manifest.json").stat().st_mtime_ns
    call(*train, "train.max_steps=4")
    assert (own / "dataset" / "manifest.json").stat().st_mtime_ns == before
    shutil.rmtree(own / "dataset")
    call(*train, "train.max_steps=5")
    assert kept_dataset(own) == own / "dataset"


def test_large_vocabularies_are_linked_and_others_copied_where_no_link_can_be(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, manifest = str(folder / "dataset"), Manifest.load(folder / "dataset")

    def refused(*_: object) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", refused)
    keep_dataset(tmp_path, dataset, manifest)
    file = tmp_path / "dataset" / "vocabulary" / "C1.parquet"
    assert not file.is_symlink() and not os.path.samefile(file, Path(dataset) / "vocabulary" / "C1.parquet")
    shutil.rmtree(tmp_path / "dataset")
    monkeypatch.setattr(kept, "MOST_COPIED_BYTES", 0)
    keep_dataset(tmp_path, dataset, manifest)
    assert file.is_symlink() and os.path.samefile(file, Path(dataset) / "vocabulary" / "C1.parquet")
    assert Manifest.load(tmp_path / "dataset").checksums == {
        file: manifest.checksums[file] for file in manifest.other_files if file.startswith("vocabulary/")
    }


def test_a_dataset_that_lies_in_the_run_is_left_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "dataset", tmp_path / "dataset")
    manifest = Manifest.load(tmp_path / "dataset")
    keep_dataset(tmp_path, str(tmp_path / "dataset"), manifest)
    assert Manifest.load(tmp_path / "dataset") == manifest


@pytest.mark.thorough
@pytest.mark.distributed
def test_ranks_train_and_evaluate_on_a_url_as_on_the_folder(
    config: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{dataset}"
    local, there = tmp_path / "local", tmp_path / "there"
    for run, path in ((local, dataset), (there, url)):
        distembed("train", config, f"data.path={path}", "train.max_steps=10", "--run-dir", run, ranks=2)
    assert losses(there) == losses(local) and len(losses(there)) == 10
    found, expected = ([{**line, "seconds": 0, "time": 0} for line in metrics(run, "eval")] for run in (there, local))
    assert found == expected and len(found) == 2
    fetched = list((tmp_path / "cache").rglob("pieces/??/*"))
    # one or two row groups and the footer of validation and test, and all eight of training
    assert len(fetched) == 8 + 1 + 2 + 1 + 1 + 1
    evaluated = json.loads(call("evaluate", local, "--data", url, "--json"))
    assert evaluated["rows"] == found[-1]["rows"] and evaluated["auc"] == pytest.approx(found[-1]["auc"], abs=1e-6)
    finding = check_dataset(load_config(config, [f"data.path={url}"]))
    assert (finding.status, finding.detail) == ("ok", f"{url}: 3 file(s)")
