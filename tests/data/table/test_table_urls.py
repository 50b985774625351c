"""Tables at URLs: what is read from object stores and web servers is what is read from files."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import distembed.data.prepare.pipeline as pipeline
from distembed.base.errors import TemporaryFailure, UserError
from distembed.data import remote
from distembed.data.prepare.table import TableOptions, prepare_table
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.preparation import criteo_inputs
from tests.data.flaky_files import flaky_files, flaky_s3
from tests.data.table.test_prepare_table import FORMS, ONE_THREAD, SCHEMA, data_files, drawn_rows

ROWS = drawn_rows(80, seed=7)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Within the block a web server of this machine has the files of a folder; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def write_forms(folder: Path) -> None:
    folder.mkdir()
    for form, write in FORMS.items():
        (folder / form).write_bytes(write(ROWS))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the dataset of a file, which all forms give."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "rows.csv").write_bytes(FORMS["rows.csv"](ROWS))
    prepare_table([folder / "rows.csv"], folder / "made", SCHEMA, limits=ONE_THREAD)
    return data_files(folder / "made")


@pytest.mark.parametrize("form", ["rows.csv", "rows.CSV.gz", "rows.tsv.zst", "rows.jsonl", "rows.parquet"])
def test_urls_give_what_files_give(
    form: str, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / form).write_bytes(FORMS[form](ROWS))
    monkeypatch.setattr(pipeline, "PART_BYTES", 2000)
    with flaky_files(0.05):
        remote.upload(tmp_path / "raw" / form, f"flaky://rows/{form}")
        manifest = prepare_table([f"flaky://rows/{form}"], tmp_path / "flaky", SCHEMA, limits=ONE_THREAD)
    assert data_files(tmp_path / "flaky") == local
    assert manifest.sources[0].bytes == (tmp_path / "raw" / form).stat().st_size


def test_a_web_server_has_rows(tmp_path: Path) -> None:
    write_forms(tmp_path / "raw")
    names = ["rows.csv", "rows.parquet", "rows.ndjson.gz"]
    inputs = [tmp_path / "raw" / name for name in names]
    prepare_table(inputs, tmp_path / "local", SCHEMA, limits=ONE_THREAD)
    with web_server(tmp_path / "raw") as url:
        prepare_table([f"{url}/{name}" for name in names], tmp_path / "web", SCHEMA, limits=ONE_THREAD)
        with pytest.raises(UserError, match="nothing.csv"):
            prepare_table([f"{url}/nothing.csv"], tmp_path / "none", SCHEMA)
        with pytest.raises(UserError, match="named twice"):
            prepare_table([f"{url}/rows.csv"] * 2, tmp_path / "none", SCHEMA)
    assert data_files(tmp_path / "web") == data_files(tmp_path / "local")


@pytest.mark.parametrize("form", ["rows.csv", "rows.ndjson.gz"])
def test_a_signature_is_in_no_file(form: str, local: dict[str, bytes], tmp_path: Path) -> None:
    write_forms(tmp_path / "raw")
    with web_server(tmp_path / "raw") as url:
        signed = f"{url}/{form}?X-Amz-Signature=5ec2e7&X-Amz-Expires=60"
        manifest = prepare_table([signed], tmp_path / "web", SCHEMA, limits=ONE_THREAD)
        assert [source.name for source in manifest.sources] == [f"{url}/{form}"]
    assert data_files(tmp_path / "web") == local
    assert not any(b"5ec2e7" in path.read_bytes() for path in (tmp_path / "web").rglob("*") if path.is_file())


def test_a_web_server_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    with web_server(tmp_path) as url:
        pass
    with pytest.raises(TemporaryFailure, match="5 tries failed"):
        find_inputs([f"{url}/rows.csv"])


@pytest.mark.slow
def test_a_folder_of_an_object_store_is_its_files(tmp_path: Path) -> None:
    write_forms(tmp_path / "raw")
    names = ["rows.CSV.gz", "rows.csv", "rows.parquet"]
    options = TableOptions(min_count=1)
    prepare_table([tmp_path / "raw" / name for name in names], tmp_path / "local", SCHEMA, options, ONE_THREAD)
    with flaky_s3(tmp_path, 0.02) as bucket:
        for name in names:
            remote.upload(tmp_path / "raw" / name, f"{bucket}/day/{name}")
        prepare_table([f"{bucket}/day"], tmp_path / "s3", SCHEMA, options, ONE_THREAD)
        prepare_table([f"{bucket}/day/rows.*"], tmp_path / "pattern", SCHEMA, options, ONE_THREAD)
    assert data_files(tmp_path / "s3") == data_files(tmp_path / "local") == data_files(tmp_path / "pattern")


def test_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"day_{day}/hour_{hour}.csv" for day in (1, 2, 10) for hour in (9, 11)]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("y,c\n1,a\n")
        remote.upload(tmp_path / name, f"memory://hours/{name}")
        remote.upload(tmp_path / name, f"memory://flat/{name.replace('/', '-')}")
    patterns = [str(tmp_path / "day_*/*.csv"), "memory://hours/day_*/*.csv", "memory://flat"]
    for pattern in patterns:
        found = [each.place.replace("-", "/") for each in find_inputs([pattern])]
        assert ["/".join(place.rsplit("/", 2)[1:]) for place in found] == names, pattern


def test_files_in_the_order_of_letters_are_noted(tmp_path: Path) -> None:
    paths = [tmp_path / f"day_{day}.tsv" for day in (1, 2, 10)]
    for path in paths:
        path.write_text("1\n")
    for find in (find_inputs, criteo_inputs):
        for listed, num_notes in ((paths, 0), (sorted(paths), 1), (paths[::-1], 0), (paths[:2], 0), ([tmp_path], 0)):
            notes: list[str] = []
            find(listed, notes.append)
            assert len(notes) == num_notes
            assert all("day_10.tsv is read before" in note and "day_2.tsv" in note for note in notes)
