"""Files as blocks of whole lines."""

import codecs
import gzip
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distembed.data.prepare import CriteoOptions
from distembed.data.prepare.input_bytes import MAGIC, OTHER_KINDS, InputBytes
from distembed.data.prepare.row_source import Part
from distembed.data.prepare.table.inputs import input_names
from distembed.data.prepare.table.preparation import criteo_inputs
from distembed.data.prepare.table.source import TableSource


def read(path: Path, block_bytes: int, start: int = 0, stop: int | None = None) -> list[bytes]:
    """Returns the blocks of a file, or of a range of it."""
    opened = TableSource(criteo_inputs([path]), CriteoOptions().schema()).open(Part(0, start, stop), block_bytes)
    blocks = [block.text for block in opened.raw_blocks()]
    if (start, stop) == (0, None):
        stored = path.read_bytes()
        assert opened.bytes_read == len(stored) and opened.sha256 == hashlib.sha256(stored).hexdigest()
    return blocks


@settings(max_examples=80)
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
    (tmp_path / "rows").write_bytes(b"".join(map(pack, texts)))
    found = InputBytes(str(tmp_path / "rows"))
    assert b"".join(found.pieces()) == b"".join(texts)
    assert found.bytes_read == (tmp_path / "rows").stat().st_size
