"""What can be named as input of a preparation: files with headers and marks, pipes, folders, and what is none."""

import errno
import gzip
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import distembed
from distembed.base.errors import UserError
from distembed.data import remote
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.data.prepare.row_source import Part
from distembed.data.prepare.table.preparation import criteo_inputs
from distembed.data.prepare.table.source import TableSource
from tests.data import reference
from tests.data.reference import HEADER, folder_bytes

ROWS = reference.content(400, 1)
LINE = ROWS.split(b"\n")[0]
FIELDS = LINE.split(b"\t")
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, bytes]:
    """The files of the dataset that the rows give by themselves, but for the manifest, which names their source."""
    (tmp_path / "plain.tsv").write_bytes(ROWS)
    prepare_criteo([tmp_path / "plain.tsv"], tmp_path / "plain")
    return without_manifest(tmp_path / "plain")


def without_manifest(dataset: Path) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(dataset).items() if name != "manifest.json"}


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize("header", [b"", HEADER + b"\n"])
def test_a_mark_and_a_header_are_no_rows(
    tmp_path: Path, plain: dict[str, bytes], header: bytes, mark: bytes, packed: bool, newline: bytes
) -> None:
    content = mark + (header + ROWS).replace(b"\n", newline)
    (tmp_path / "rows.tsv").write_bytes(gzip.compress(content) if packed else content)
    notes: list[str] = []
    manifest = prepare_criteo(
        [tmp_path / "rows.tsv"], tmp_path / "out", CriteoOptions(max_rejected=0), note=notes.append
    )
    assert without_manifest(tmp_path / "out") == plain
    assert manifest.sources[0].num_rows == 400 and manifest.rejected.num_rows == 0
    said = f"{tmp_path / 'rows.tsv'}: its first line is a header (label, I1, ..., C26), which is no row"
    assert notes == ([said] if header else [])


def test_lines_are_numbered_with_the_header(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(BOM + HEADER + b"\n" + LINE + b"\n\n" + ROWS)
    (tmp_path / "x.tsv").write_bytes(b"\n" + ROWS)
    prepare_criteo([tmp_path / "rows.tsv", tmp_path / "x.tsv"], tmp_path / "out")
    assert (tmp_path / "out" / "rejected.tsv").read_bytes().splitlines()[1:] == [
        b"rows.tsv\t3\tcolumns\t",
        b"x.tsv\t1\tcolumns\t",
    ]


@pytest.mark.parametrize(
    ("line", "is_header"),
    [
        (HEADER, True),
        (HEADER.replace(b"label", b"click").upper(), True),
        (b"\t".join(b'"%s"' % name for name in HEADER.split(b"\t")), True),
        (b"\t".join(b"_c%d" % i for i in range(40)), True),
        (b"\t".join(b"%d" % i for i in range(40)), True),
        (b"\t".join(b"%d" % i for i in range(1, 41)), False),
        (HEADER.replace(b"\tC26", b""), False),
        (HEADER.replace(b"I2", b"I1"), False),
        (HEADER.replace(b"I2", b""), False),
        (b"\t".join([b"label", *FIELDS[1:]]), False),
        (LINE, False),
        (b"", False),
    ],
)
def test_what_counts_as_a_header(line: bytes, is_header: bool, tmp_path: Path) -> None:
    for end in (b"\n", b"\r\n"):
        (tmp_path / "rows.tsv").write_bytes(line + end + ROWS)
        source = TableSource(criteo_inputs([tmp_path / "rows.tsv"]), CriteoOptions().schema())
        opened = source.open(Part(0), 1 << 20)
        assert b"".join(block.text for block in opened.raw_blocks()) == (ROWS if is_header else line + end + ROWS)
        assert opened.header_lines == len(opened.notes()) == is_header


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("packed", [False, True])
def test_text_in_two_or_four_bytes_a_character_is_refused_by_name(tmp_path: Path, encoding: str, packed: bool) -> None:
    content = ROWS.decode().encode(encoding)
    (tmp_path / "rows.tsv").write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError, match="rows.tsv is text in UTF-16 or UTF-32.*iconv"):
        prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "out")


def test_other_kinds_of_files_are_named(tmp_path: Path) -> None:
    import bz2
    import lzma
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.txt", "w") as archive:
        archive.writestr("rows.tsv", ROWS)
    (tmp_path / "b.txt").write_bytes(bz2.compress(ROWS))
    (tmp_path / "c.txt").write_bytes(lzma.compress(ROWS))
    for name, kind in (("a.txt", "a zip archive"), ("b.txt", "a bzip2 file"), ("c.txt", "an xz file")):
        with pytest.raises(UserError, match=f"{name} is {kind}.*into a pipe"):
            prepare_criteo([tmp_path / name], tmp_path / "out")


PREPARE = "import sys; from distembed.data.prepare import prepare_criteo; prepare_criteo(sys.argv[2:], sys.argv[1])"


def prepare_from(
    stdin: int | None, output: Path, *inputs: object, code: str = PREPARE
) -> subprocess.CompletedProcess[str]:
    """Prepares in a process of its own, with this standard input."""
    environment = {**os.environ, "PYTHONPATH": str(Path(distembed.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(output), *map(str, inputs)]
    return subprocess.run(command, env=environment, stdin=stdin, capture_output=True, text=True, timeout=120)


@pytest.fixture(params=["pipe", "socket", "file", "gzip pipe"])
def standard_input(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The rows, in what a process may have as its standard input."""
    content = gzip.compress(ROWS) if request.param == "gzip pipe" else ROWS
    if request.param == "file":
        (tmp_path / "given").write_bytes(b"skipped\n" + content)
        with open(tmp_path / "given", "rb", buffering=0) as file:
            file.seek(len(b"skipped\n"))  # as `{ read line; distembed prepare criteo -; } < given` does
            yield file.fileno()
        return
    if request.param == "socket":
        ends = socket.socketpair()
        reader, writer = (end.detach() for end in ends)
    else:
        reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "wb") as file:
            file.write(content)

    thread = threading.Thread(target=write)
    thread.start()
    yield reader
    os.close(reader)
    thread.join()


def test_standard_input_is_read(tmp_path: Path, plain: dict[str, bytes], standard_input: int) -> None:
    done = prepare_from(standard_input, tmp_path / "out", "-")
    assert done.returncode == 0, done.stderr
    assert without_manifest(tmp_path / "out") == plain
    assert [(source.name, source.num_rows) for source in Manifest.load(tmp_path / "out").sources] == [("stdin", 400)]


def feed(pipe: Path, content: bytes) -> threading.Thread:
    """Writes into a named pipe, byte after byte at first, as slow writers do."""
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "wb", buffering=0) as file:
            for byte in content[:20]:
                file.write(bytes([byte]))
            file.write(content[20:])

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("packed", [False, True])
def test_named_pipes_are_read_beside_files(tmp_path: Path, packed: bool) -> None:
    (tmp_path / "one.tsv").write_bytes(ROWS)
    (tmp_path / "two.tsv").write_bytes(BOM + HEADER + b"\n" + ROWS)
    prepare_criteo([tmp_path / "one.tsv", tmp_path / "two.tsv"], tmp_path / "files")
    content = BOM + HEADER + b"\n" + ROWS
    thread = feed(tmp_path / "pipe", gzip.compress(content) if packed else content)
    manifest = prepare_criteo([tmp_path / "one.tsv", tmp_path / "pipe"], tmp_path / "out")
    thread.join()
    assert without_manifest(tmp_path / "out") == without_manifest(tmp_path / "files")
    assert [source.name for source in manifest.sources] == ["one.tsv", "pipe-2"]


def test_devices_that_hold_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no rows: /dev/null"):
        prepare_criteo(["/dev/null"], tmp_path / "out")
    with pytest.raises(UserError, match="/dev/zero has a line of more than"):
        prepare_criteo(["/dev/zero"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_standard_input_that_gives_nothing(tmp_path: Path) -> None:
    closed = f"import os; os.close(0); {PREPARE}"
    assert "standard input is closed" in prepare_from(None, tmp_path / "out", "-", code=closed).stderr
    main, terminal = os.openpty()
    try:
        assert "standard input is a terminal" in prepare_from(terminal, tmp_path / "out", "-").stderr
    finally:
        os.close(main)
        os.close(terminal)


def test_what_a_folder_holds_besides_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "in.tsv"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "b.csv", ".hidden", "notes.md"):
        (folder / name).write_bytes(ROWS)
    notes: list[str] = []
    manifest = prepare_criteo([folder], tmp_path / "out", note=notes.append)
    assert notes == [f"of the folder {folder} not read: b.csv, more, notes.md; name what else is to be read"]
    assert [source.name for source in manifest.sources] == ["a.txt"]
    # an output inside the folder is not read either
    prepare_criteo([folder], folder / "out")
    prepare_criteo([folder], tmp_path / "again")
    assert folder_bytes(tmp_path / "out") == folder_bytes(folder / "out") == folder_bytes(tmp_path / "again")


def test_a_file_without_rows_among_others_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(ROWS)
    (tmp_path / "b.tsv").write_bytes(HEADER)
    notes: list[str] = []
    prepare_criteo([tmp_path], tmp_path / "out", note=notes.append)
    assert notes[0].endswith("which is no row") and notes[1] == f"{tmp_path / 'b.tsv'} has no rows"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loop", "symbolic links"),
        ("dangling", "nowhere does not exist"),
        ("missing.tsv", "does not exist"),
        ("day_*.tsv", "no file matches"),
        ("rows.tsv/x", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
        ("photos", "has no files of rows"),
        ("hard.tsv", "is named twice"),
        ("link.tsv", "is named twice"),
    ],
)
def test_an_input_that_cannot_be_is_said_in_a_sentence(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "rows.tsv").write_bytes(ROWS)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    os.link(tmp_path / "rows.tsv", tmp_path / "hard.tsv")
    (tmp_path / "link.tsv").symlink_to("rows.tsv")
    with pytest.raises(UserError, match=said):
        prepare_criteo([tmp_path / "rows.tsv", tmp_path / name], tmp_path / "out")
    with pytest.raises(UserError, match="no input"):
        prepare_criteo([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the system, as it does not refuse the root user."""
    (tmp_path / "rows.tsv").write_bytes(ROWS)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refuse)
        with pytest.raises(UserError, match="the folder .* cannot be read: Permission denied"):
            prepare_criteo([tmp_path], tmp_path / "out")
    monkeypatch.setattr("distembed.data.prepare.input_bytes.open_input", refuse)
    with pytest.raises(UserError, match=r"rows.tsv cannot be read: Permission denied"):
        prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "out")


def test_a_name_of_any_bytes_is_written_down(tmp_path: Path) -> None:
    for name in ("tab\tand\nline.tsv", "no\udcffutf8.tsv"):
        (tmp_path / name).write_bytes(b"\n" + ROWS)
        manifest = prepare_criteo([tmp_path / name], tmp_path / "out", overwrite=True)
        assert manifest == Manifest.load(tmp_path / "out") and manifest.sources[0].name == name
        lines = (tmp_path / "out" / "rejected.tsv").read_bytes().split(b"\n")
        assert len(lines) == 3 and len(lines[1].split(b"\t")) == 4


def test_patterns_and_urls_are_read(tmp_path: Path, plain: dict[str, bytes]) -> None:
    lines = ROWS.splitlines(keepends=True)
    for day, own in ((2, lines[:150]), (10, lines[150:])):
        (tmp_path / f"day_{day}.tsv").write_bytes(HEADER + b"\n" + b"".join(own))
        remote.upload(tmp_path / f"day_{day}.tsv", f"memory://criteo/day_{day}.tsv")
    for name, inputs in (("pattern", str(tmp_path / "day_*.tsv")), ("url", "memory://criteo/day_*.tsv")):
        prepare_criteo([inputs], tmp_path / name)
        assert without_manifest(tmp_path / name) == plain


def test_files_are_text_whatever_their_names_end_in(tmp_path: Path, plain: dict[str, bytes]) -> None:
    (tmp_path / "rows.json").write_bytes(ROWS)
    prepare_criteo([tmp_path / "rows.json"], tmp_path / "json")
    assert without_manifest(tmp_path / "json") == plain
    pq.write_table(pa.table({"label": [1]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="rows.parquet is a Parquet file.*into a pipe"):
        prepare_criteo([tmp_path / "rows.parquet"], tmp_path / "out")
