"""Datasets at URLs: the same files as in a local folder, however often the server fails."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import TemporaryFailure, UserError
from distembed.data import remote
from distembed.data.prepare import CriteoOptions, ResourceLimits, pipeline, prepare_criteo, write_parquet
from distembed.data.remote import read_remote, walk_remote
from tests.data import reference
from tests.data.flaky_files import Flaky, flaky_files, flaky_s3
from tests.data.reference import folder_bytes

OPTIONS = CriteoOptions(split="0.6,0.2,0.2", hash_size=50)
"""Without vocabularies, which take most of the time."""
URL = "flaky://bucket/criteo"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.tsv").write_bytes(reference.content(900, 3, malformed=0.004))
    return tmp_path / "in" / "rows.tsv"


@pytest.fixture
def flaky() -> Iterator[type[Flaky]]:
    with flaky_files(0.05) as files:
        yield files


def limits(tmp_path: Path, threads: int | None = None) -> ResourceLimits:
    return ResourceLimits(threads=threads, work=tmp_path / "work")


def remote_bytes(url: str) -> dict[str, bytes]:
    return {file.url.removeprefix(f"{url}/"): read_remote(file.url) for file in walk_remote(url)}


def test_a_dataset_at_a_url_is_the_local_one(rows: Path, tmp_path: Path, flaky: type[Flaky]) -> None:
    options = CriteoOptions(split="0.6,0.2,0.2")
    prepare_criteo([rows], tmp_path / "local", options)
    prepare_criteo([rows], URL, options, limits(tmp_path))
    assert remote_bytes(URL) == folder_bytes(tmp_path / "local")
    assert flaky.failures and not list((tmp_path / "work").iterdir())


def test_a_file_may_be_written_twice_at_once(
    rows: Path, tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster begins a task again whose worker is lost for it, and at work."""
    flaky.share, both, write_file = 0.0, threading.Barrier(2, timeout=60), pipeline._write_file

    def twice(*given: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda _: write_file(*given), range(2))
        assert one == other
        return one

    def upload(path: Path, url: str) -> None:
        if url.endswith(".parquet") and "/vocabulary/" not in url:
            both.wait()
        original(path, url)

    original = remote.upload
    prepare_criteo([rows], tmp_path / "local", OPTIONS)
    monkeypatch.setattr("distembed.data.prepare.staging.upload", upload)
    monkeypatch.setattr(pipeline, "_write_file", twice)
    prepare_criteo([rows], URL, OPTIONS, limits(tmp_path, threads=1))
    assert remote_bytes(URL) == folder_bytes(tmp_path / "local")


def test_files_leave_the_disk_when_they_are_uploaded_and_the_manifest_comes_last(
    rows: Path, tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def upload(path: Path, url: str) -> None:
        (dataset,) = (tmp_path / "work").glob(".*/*/staged")
        lying = list(dataset.rglob("*part-*.parquet*"))
        assert lying == [path] * path.name.startswith(".part-")
        order.append(url)
        original(path, url)

    original = remote.upload
    monkeypatch.setattr("distembed.data.prepare.staging.upload", upload)
    prepare_criteo([rows], URL, OPTIONS, ResourceLimits(threads=1, work=tmp_path / "work"))
    assert order[-1] == f"{URL}/manifest.json" and len(order) == len(set(order)) == len(walk_remote(URL))


def test_a_server_that_is_gone_for_long_interrupts(
    rows: Path, tmp_path: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is not written again."""
    written: list[str] = []
    original = write_parquet.FileWriter.write

    def write(writer: write_parquet.FileWriter, plan: write_parquet.FilePlan) -> write_parquet.WrittenFile:
        written.append(plan.path)
        flaky.share = 1.0 if len(written) == 2 else 0.0
        return original(writer, plan)

    monkeypatch.setattr(write_parquet.FileWriter, "write", write)
    chosen, notes = ResourceLimits(threads=1, work=tmp_path / "work"), []
    with pytest.raises(TemporaryFailure, match="flaky://bucket/criteo/.* cannot be written: 5 tries failed"):
        prepare_criteo([rows], URL, OPTIONS, chosen)
    flaky.share = 0.0
    prepare_criteo([rows], URL, OPTIONS, chosen, note=notes.append)
    assert written.count(written[0]) == 1 and written.count(written[1]) == 2 and "this resumes" in notes[0]
    prepare_criteo([rows], tmp_path / "local", OPTIONS)
    assert remote_bytes(URL) == folder_bytes(tmp_path / "local")


def test_what_is_there_is_replaced_only_when_asked_for(rows: Path, tmp_path: Path, flaky: type[Flaky]) -> None:
    prepare_criteo([rows], URL, CriteoOptions(split="days", hash_size=50), limits(tmp_path))
    before = remote_bytes(URL)
    with pytest.raises(UserError, match=f"{URL} exists already"):
        prepare_criteo([rows], URL, OPTIONS, limits(tmp_path))
    (tmp_path / "nothing.tsv").write_bytes(b"no row\n")
    with pytest.raises(UserError, match="malformed"):
        prepare_criteo([tmp_path / "nothing.tsv"], URL, OPTIONS, limits(tmp_path), overwrite=True)
    assert remote_bytes(URL) == before and not list((tmp_path / "work").iterdir())
    (tmp_path / "more").write_bytes(b"more")
    remote.upload(tmp_path / "more", f"{URL}/train/part-99999.parquet")
    hashed = CriteoOptions(split="0.6,0.2,0.2", hash_size=1000)
    prepare_criteo([rows], URL, hashed, limits(tmp_path), overwrite=True)
    prepare_criteo([rows], tmp_path / "local", hashed)
    assert remote_bytes(URL) == folder_bytes(tmp_path / "local")
    remote.remove_remote(f"{URL}/manifest.json")
    with pytest.raises(UserError, match="has files and is no dataset"):
        prepare_criteo([rows], URL, OPTIONS, limits(tmp_path))


def test_files_that_are_of_no_dataset_stay(rows: Path, tmp_path: Path, flaky: type[Flaky]) -> None:
    remote.upload(rows, f"{URL}/days/rows.tsv")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="of no dataset, such as days/rows.tsv"):
            prepare_criteo([rows], URL, OPTIONS, limits(tmp_path), overwrite=overwrite)
    assert list(remote_bytes(URL)) == ["days/rows.tsv"]


def test_a_url_may_be_written_in_other_ways(rows: Path, tmp_path: Path) -> None:
    prepare_criteo([rows], tmp_path / "local", OPTIONS)
    for url in (f"local://{tmp_path}/made", f"file://{tmp_path}//twice/"):
        prepare_criteo([rows], url, OPTIONS, limits(tmp_path))
        with pytest.raises(UserError, match="exists already"):
            prepare_criteo([rows], url, OPTIONS, limits(tmp_path))
        prepare_criteo([rows], url, OPTIONS, limits(tmp_path), overwrite=True)
    assert folder_bytes(tmp_path / "made") == folder_bytes(tmp_path / "local") == folder_bytes(tmp_path / "twice")


def test_the_work_is_done_in_a_local_folder(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the output s3://bucket/criteo is a URL: name a local folder"):
        prepare_criteo([rows], "s3://bucket/criteo", OPTIONS)
    with pytest.raises(UserError, match="work .* is no URL"):
        prepare_criteo([rows], tmp_path / "out", OPTIONS, limits(tmp_path))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_threads_write_to_an_s3_that_fails_often(rows: Path, tmp_path: Path) -> None:
    with flaky_s3(tmp_path, 0.03) as bucket:
        prepare_criteo([rows], f"{bucket}/criteo", OPTIONS, limits(tmp_path, threads=2))
        prepare_criteo([rows], tmp_path / "local", OPTIONS)
        assert remote_bytes(f"{bucket}/criteo") == folder_bytes(tmp_path / "local")
