"""What can be named as input of a preparation: files with headers and marks, pipes, folders, and what is none."""

import codecs
import errno
import gzip
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.data.prepare.ingest import InputPart
from distembed.data.prepare.table.inputs import MAGIC, OTHER_KINDS, InputBytes, input_names
from distembed.data.prepare.table.preparation import criteo_inputs
from distembed.data.prepare.table.source import TableSource
from tests.data import reference
from tests.data.reference import HEADER, folder_bytes

ROWS = reference.content(400, 1)
LINE = ROWS.split(b"\n")[0]
FIELDS = LINE.split(b"\t")
BOM = b"\xef\xbb\xbf"
HASHED = CriteoOptions(hash_size=50)
"""Without vocabularies, which take most of the time."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the dataset that the rows give by themselves, but for the manifest, which names their source."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.tsv").write_bytes(ROWS)
    prepare_criteo([folder / "plain.tsv"], folder / "plain", HASHED)
    return without_manifest(folder / "plain")


def without_manifest(dataset: Path) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(dataset).items() if name != "manifest.json"}


@pytest.mark.parametrize(
    ("header", "mark", "packed", "newline"),
    [
        (b"", BOM, False, b"\r\n"),
        (b"", b"", True, b"\n"),
        (HEADER + b"\n", BOM, True, b"\r\n"),
        (HEADER + b"\n", b"", False, b"\n"),
        (HEADER + b"\n", BOM, False, b"\n"),
    ],
)
def test_a_mark_and_a_header_are_no_rows(
    tmp_path: Path, plain: dict[str, bytes], header: bytes, mark: bytes, packed: bool, newline: bytes
) -> None:
    content = mark + (header + ROWS).replace(b"\n", newline)
    (tmp_path / "rows.tsv").write_bytes(gzip.compress(content) if packed else content)
    notes: list[str] = []
    options = replace(HASHED, max_rejected=0)
    manifest = prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "out", options, note=notes.append)
    assert without_manifest(tmp_path / "out") == plain
    assert manifest.sources[0].num_rows == 400 and manifest.rejected.num_rows == 0
    said = f"{tmp_path / 'rows.tsv'}: its first line is a header (label, I1, ..., C26), which is no row"
    assert notes == ([said] if header else [])


def test_lines_are_numbered_with_the_header(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(BOM + HEADER + b"\n" + LINE + b"\n\n" + ROWS)
    (tmp_path / "x.tsv").write_bytes(b"\n" + ROWS)
    prepare_criteo([tmp_path / "rows.tsv", tmp_path / "x.tsv"], tmp_path / "out", HASHED)
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
        opened = source.open(InputPart(0), 1 << 20)
        assert b"".join(block.text for block in opened.raw_blocks()) == (ROWS if is_header else line + end + ROWS)
        assert opened.header_lines == len(opened.notes()) == is_header


@contextmanager
def standard_input_is(descriptor: int | None) -> Iterator[None]:
    """Within the block, this is the standard input of this process; None closes it."""
    before = os.dup(0)
    try:
        os.close(0) if descriptor is None else os.dup2(descriptor, 0)
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


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
    with standard_input_is(standard_input):
        prepare_criteo(["-"], tmp_path / "out", HASHED)
    assert without_manifest(tmp_path / "out") == plain
    assert [(source.name, source.num_rows) for source in Manifest.load(tmp_path / "out").sources] == [("stdin", 400)]


def test_devices_that_hold_no_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no rows: /dev/null"):
        prepare_criteo(["/dev/null"], tmp_path / "out")
    with pytest.raises(UserError, match="/dev/zero has a line of more than"):
        prepare_criteo(["/dev/zero"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_standard_input_that_gives_nothing(tmp_path: Path) -> None:
    main, terminal = os.openpty()
    for descriptor, said in ((None, "standard input is closed"), (terminal, "standard input is a terminal")):
        with standard_input_is(descriptor), pytest.raises(UserError, match=said):
            prepare_criteo(["-"], tmp_path / "out", HASHED)
    os.close(main)
    os.close(terminal)


def test_what_a_folder_holds_besides_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "in.tsv"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "b.csv", ".hidden", "notes.md"):
        (folder / name).write_bytes(ROWS)
    notes: list[str] = []
    manifest = prepare_criteo([folder], tmp_path / "out", HASHED, note=notes.append)
    assert notes == [f"of the folder {folder} not read: b.csv, more, notes.md; name what else is to be read"]
    assert [source.name for source in manifest.sources] == ["a.txt"]
    # an output inside the folder is not read either
    prepare_criteo([folder], folder / "out", HASHED)
    prepare_criteo([folder], tmp_path / "again", HASHED)
    assert folder_bytes(tmp_path / "out") == folder_bytes(folder / "out") == folder_bytes(tmp_path / "again")


def test_a_file_without_rows_among_others_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(ROWS)
    (tmp_path / "b.tsv").write_bytes(HEADER)
    notes: list[str] = []
    prepare_criteo([tmp_path], tmp_path / "out", HASHED, note=notes.append)
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
    monkeypatch.setattr("distembed.data.prepare.table.inputs.open_input", refuse)
    with pytest.raises(UserError, match=r"rows.tsv cannot be read: Permission denied"):
        prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "out")


def test_a_name_of_any_bytes_is_written_down(tmp_path: Path) -> None:
    for name in ("tab\tand\nline.tsv", "no\udcffutf8.tsv"):
        (tmp_path / name).write_bytes(b"\n" + ROWS)
        manifest = prepare_criteo([tmp_path / name], tmp_path / "out", HASHED, overwrite=True)
        assert manifest == Manifest.load(tmp_path / "out") and manifest.sources[0].name == name
        lines = (tmp_path / "out" / "rejected.tsv").read_bytes().split(b"\n")
        assert len(lines) == 3 and len(lines[1].split(b"\t")) == 4


def test_files_are_text_whatever_their_names_end_in(tmp_path: Path, plain: dict[str, bytes]) -> None:
    (tmp_path / "rows.json").write_bytes(ROWS)
    prepare_criteo([tmp_path / "rows.json"], tmp_path / "json", HASHED)
    assert without_manifest(tmp_path / "json") == plain
    pq.write_table(pa.table({"label": [1]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="rows.parquet is a Parquet file.*into a pipe"):
        prepare_criteo([tmp_path / "rows.parquet"], tmp_path / "out")


def read(path: Path, block_bytes: int, start: int = 0, stop: int | None = None) -> list[bytes]:
    """Returns the blocks of a file, or of a range of it."""
    opened = TableSource(criteo_inputs([path]), CriteoOptions().schema()).open(InputPart(0, start, stop), block_bytes)
    blocks = [block.text for block in opened.raw_blocks()]
    if (start, stop) == (0, None):
        stored = path.read_bytes()
        assert opened.bytes_read == len(stored) and opened.sha256 == hashlib.sha256(stored).hexdigest()
    return blocks


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=30), max_size=40), st.integers(1, 100), st.booleans(), st.booleans())
def test_blocks_are_whole_lines_and_together_the_file(lines: list[bytes], size: int, ends: bool, packed: bool) -> None:
    content = b"\n".join(lines) + (b"\n" if ends else b"")
    stored = gzip.compress(content) if packed else content
    assume(not content.startswith((*OTHER_KINDS, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)))
    assume(packed or not content.startswith(tuple(MAGIC)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(stored)
        blocks = read(path, size)
    assert b"".join(blocks) == content.removeprefix(codecs.BOM_UTF8)
    assert all(block.endswith(b"\n") for block in blocks[:-1]) and all(blocks)


@settings(max_examples=40)
@given(
    lines=st.lists(st.sampled_from([b"", b"1", b"a\tb", b"c" * 30, b"\r"])),
    ends=st.booleans(),
    range_bytes=st.integers(1, 40),
    size=st.integers(1, 20),
)
def test_ranges_have_every_line_once(lines: list[bytes], ends: bool, range_bytes: int, size: int) -> None:
    content = b"0\t1\n" + b"\n".join(lines) + (b"\n" if ends else b"")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        starts = list(range(0, len(content), range_bytes))
        stops = [*starts[1:], None]
        ranges = [b"".join(read(path, size, start, stop)) for start, stop in zip(starts, stops, strict=True)]
    assert b"".join(ranges) == content
    begins = [0] + [place + 1 for place, byte in enumerate(content) if byte == 10]
    for start, stop, found in zip(starts, stops, ranges, strict=True):
        first = [place for place in begins if start <= place < (stop or len(content))]
        assert not found or content.startswith(found, first[0])
        assert bool(found) == bool(first)


def test_blocks_are_about_as_large_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"x" * 99 + b"\n")
    with open(tmp_path / "plain", "ab") as file:
        file.write((b"x" * 99 + b"\n") * 200_000)
    with gzip.open(tmp_path / "packed", "wb", 1) as file:
        file.write((b"x" * 99 + b"\n") * 200_000)
    for name in ("plain", "packed"):
        sizes = [len(block) for block in read(tmp_path / name, 4 << 20)]
        assert len(sizes) >= 3 and max(sizes) <= 9 << 20


def test_folders_are_read_in_natural_order(tmp_path: Path) -> None:
    for name in ["day_10", "day_2.gz", "day_1.tsv", "Day_3.TXT", ".hidden", "notes.md", "rows.csv"]:
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.csv").touch()
    names = [Path(each.place).name for each in criteo_inputs([tmp_path / "sub" / "x.csv", tmp_path])]
    assert names == ["x.csv", "Day_3.TXT", "day_1.tsv", "day_2.gz", "day_10"]


def test_names_do_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "x.tsv", tmp_path / "b" / "x.tsv"]
    assert input_names(paths) == ["a/x.tsv", "b/x.tsv"]
    assert input_names(paths[:1]) == ["x.tsv"]


@pytest.mark.parametrize("pack", [gzip.compress, lambda text: pa.compress(text, "zstd", asbytes=True)])
def test_several_compressed_members_are_read_one_after_the_other(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    texts = [b"x\n" * 3_000_000, b"", b"y\n", b"z\n" * 1_200_000]
    padding = b"\0" * 600 if pack is gzip.compress else b""  # as some tools leave it
    (tmp_path / "rows").write_bytes(b"".join([*map(pack, texts), padding]))
    found = InputBytes(str(tmp_path / "rows"))
    assert b"".join(found.pieces()) == b"".join(texts)
    assert found.bytes_read == (tmp_path / "rows").stat().st_size
