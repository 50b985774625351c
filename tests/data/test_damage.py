"""Datasets that are damaged, old, or made to attack: files are held against checksums, and are inside the folder."""

import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from distembed.base.checksums import KEY, with_checksum
from distembed.base.errors import UserError
from distembed.data import CategoricalFeature, Manifest, Schema, create_manifest
from distembed.data.dataset.manifest import (
    CHECKSUMS_NAME,
    MANIFEST_VERSION,
    PIECE,
    file_pieces,
    id_fingerprint,
    read_checksums,
)
from distembed.data.dataset.row_groups import require_whole_splits, verify_dataset
from distembed.data.prepare import prepare_criteo
from distembed.data.reader import BatchOrder, BatchReader
from distembed.graph.prepare import GraphOptions, NodeIds, prepare_graph
from distembed.partitions import Explicit
from tests.canary import Canary
from tests.data import reference
from tests.data.small_dataset import SCHEMA, make_dataset, open_reader, rows_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, bytes]:
    """The files of a prepared dataset with a vocabulary and rejected rows, by their paths in it."""
    folder = tmp_path_factory.mktemp("damage")
    (folder / "rows.tsv").write_bytes(reference.content(600, 4, malformed=0.005))
    prepare_criteo([folder / "rows.tsv"], folder / "criteo")
    files = [path for path in (folder / "criteo").rglob("*") if path.is_file()]
    return {path.relative_to(folder / "criteo"): path.read_bytes() for path in files}


@pytest.fixture
def criteo(whole: dict[Path, bytes], tmp_path: Path) -> Path:
    """A copy of it."""
    for path, content in whole.items():
        (tmp_path / "criteo" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "criteo" / path).write_bytes(content)
    return tmp_path / "criteo"


def flip_a_bit(path: Path, position: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes values of the manifest and its checksum with them, as someone who means it would."""
    value = json.loads((folder / "manifest.json").read_text())
    del value[KEY]
    change(value)
    (folder / "manifest.json").write_text(json.dumps(with_checksum(value), indent=1))


@given(st.lists(st.integers(0, 40), max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_pieces_are_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, group_rows: list[int], indexed: bool, dictionary: bool, crc: bool
) -> None:
    """However a file was written: one piece a row group and one for the rest, which add up to all of its bytes."""
    path = tmp_path_factory.mktemp("pieces") / "a.parquet"
    columns = pa.schema([("x", pa.int32()), ("words", pa.list_(pa.string()))])
    options = {"write_page_index": indexed, "use_dictionary": dictionary, "write_page_checksum": crc}
    with pq.ParquetWriter(path, columns, **options) as writer:
        for rows in group_rows:
            words = [["a" * (row % 3), str(row)] for row in range(rows)]
            writer.write_table(
                pa.table([np.arange(rows, dtype=np.int32), pa.array(words, columns.types[1])], columns.names)
            )
    pieces, content = file_pieces(path), path.read_bytes()
    metadata = pq.read_metadata(path)
    assert len(pieces) == metadata.num_row_groups + 1
    bounds = [0, *np.cumsum(pieces["bytes"]).tolist()]
    assert bounds[-1] == len(content)
    for piece, start, stop in zip(pieces, bounds[:-1], bounds[1:], strict=True):
        assert piece["checksum"].tobytes() == xxhash.xxh3_128_digest(content[start:stop])
    for index in range(metadata.num_row_groups):
        for column in (metadata.row_group(index).column(number) for number in range(2)):
            if column.total_compressed_size:
                first = min(place for place in (column.data_page_offset, column.dictionary_page_offset) if place)
                assert bounds[index] <= first
                assert first + column.total_compressed_size <= bounds[index + 1]


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_damaged_row_group_is_refused_by_its_number(tmp_path: Path, prefetch_batches: int) -> None:
    folder = make_dataset(tmp_path / "d", 100)
    sizes = np.frombuffer((folder / CHECKSUMS_NAME).read_bytes(), PIECE)["bytes"]
    flip_a_bit(folder / "part0.parquet", int(sizes[0] + sizes[1] // 2))
    with pytest.raises(
        UserError, match=r"^[^,]*part0\.parquet, row group 1 is damaged: .*; prepare the data again, or fetch"
    ):
        list(open_reader(folder, 7, prefetch_batches=prefetch_batches))
    assert [problem for problem in verify_dataset(folder).problems if "row group 1 is damaged" not in problem] == []


def test_the_memory_of_a_check_does_not_grow_with_row_groups(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 1)
    numbers = pa.table({"x": np.random.default_rng(0).random(3_000_000)})
    pq.write_table(numbers, folder / "large.parquet", row_group_size=len(numbers), use_dictionary=False)
    create_manifest(folder, Schema(None, ("x",), ()), {"train": ["large.parquet"]})
    tracemalloc.start()
    assert verify_dataset(folder).problems == []
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


def test_all_problems_are_found_at_once(criteo: Path, whole: dict[Path, bytes]) -> None:
    found = verify_dataset(criteo)
    assert found.problems == []
    assert found.num_files == len(whole) and found.num_bytes == sum(map(len, whole.values()))
    damaged = [criteo / name for name in ("vocabulary/C3.parquet", "vocabulary/C9.parquet", "rejected.tsv")]
    damaged += [criteo / "train/part-00000.parquet", criteo / "test/part-00000.parquet"]
    for path in damaged:
        flip_a_bit(path)
    (criteo / "validation/part-00000.parquet").unlink()
    progress: list[int] = []
    problems = verify_dataset(criteo, progress.append).problems
    assert len(problems) == 6 and progress == sorted(progress)
    for path in (*damaged, criteo / "validation/part-00000.parquet"):
        assert sum(str(path) in problem for problem in problems) == 1, path


def test_files_cut_or_extended_are_refused_at_the_start(criteo: Path) -> None:
    """All splits of a run are looked at before its first step, those that are read last too."""
    for name in ("train", "validation", "test"):
        path = criteo / name / "part-00000.parquet"
        content = path.read_bytes()
        for changed in (b"", content[:1], content[: len(content) // 2], content[:-1], content + content[:99]):
            path.write_bytes(changed)
            with pytest.raises(UserError, match=rf"{name}/part-00000\.parquet has .* bytes, the manifest says"):
                require_whole_splits(criteo, ["train", "validation", "test"])
            assert any(str(path) in problem for problem in verify_dataset(criteo).problems)
        path.write_bytes(bytes(len(content)))
        with pytest.raises(UserError, match=rf"{name}/part-00000\.parquet, footer is damaged"):
            require_whole_splits(criteo, ["train", "validation", "test"])
        path.unlink()
        with pytest.raises(UserError, match=rf"{name}/part-00000\.parquet is missing"):
            require_whole_splits(criteo, ["train", "validation", "test"])
        path.write_bytes(content)
    require_whole_splits(criteo, ["train", "validation", "test"])
    with pytest.raises(UserError, match="no split 'holdout'"):
        require_whole_splits(criteo, ["train", "holdout"])


def test_other_rows_than_the_manifest_says_are_refused(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 100)
    manifest = Manifest.load(folder)
    split = manifest.splits["all"]
    first = replace(split.files[0], num_rows=split.files[0].num_rows + 1)
    for wrong, message in (
        (replace(split, num_rows=99), "has 99 rows, its files have 100"),
        (
            replace(split, num_rows=101, files=(first, split.files[1])),
            "part0.parquet has 50 rows, the manifest says 51",
        ),
    ):
        replace(manifest, splits={"all": wrong}).save(folder)
        for refuse in (lambda: require_whole_splits(folder, ["all"]), lambda: open_reader(folder)):
            with pytest.raises(UserError, match=message):
                refuse()
        assert len(verify_dataset(folder).problems) == 1


def test_a_vocabulary_is_held_against_its_checksum(criteo: Path) -> None:
    fingerprint = id_fingerprint(criteo, Manifest.load(criteo))
    flip_a_bit(criteo / "vocabulary" / "C7.parquet")
    with pytest.raises(UserError, match=r"vocabulary/C7\.parquet is damaged: its checksum"):
        id_fingerprint(criteo, Manifest.load(criteo))
    flip_a_bit(criteo / "vocabulary" / "C7.parquet")
    assert id_fingerprint(criteo, Manifest.load(criteo)) == fingerprint


def test_checksums_that_are_damaged_or_do_not_fit(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 100)
    path = folder / CHECKSUMS_NAME
    content = path.read_bytes()
    flip_a_bit(path)
    with pytest.raises(UserError, match=r"checksums\.bin is damaged"):
        open_reader(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"checksums\.bin is missing"):
        open_reader(folder)
    assert any(CHECKSUMS_NAME in problem for problem in verify_dataset(folder).problems)
    sizes = file_pieces(folder / "part0.parquet")["bytes"]
    sizes[:2] += [20, -20]  # so that row group 1 begins before its piece
    shifted = read_checksums(folder / "part0.parquet", sizes.tolist()).tobytes()
    shifted += content[len(shifted) :]
    for other in (content[: PIECE.itemsize], content + content, content[PIECE.itemsize :], b"", shifted):
        path.write_bytes(other)
        entry = {"bytes": len(other), "checksum": xxhash.xxh3_128_hexdigest(other)}
        change_manifest(folder, lambda value, entry=entry: value["checksums"].update({CHECKSUMS_NAME: entry}))
        with pytest.raises(
            UserError, match=r"checksums\.bin does not fit the manifest|row group 1 cannot be read: .*again"
        ):
            list(open_reader(folder))


def test_a_manifest_without_its_checksum_or_of_another_format_is_refused(criteo: Path) -> None:
    written = (criteo / "manifest.json").read_text()
    for damaged in (
        written.replace(f' "{KEY}"', ' "checksun"'),
        written.replace(f'\n "{KEY}": "', f'\n "{KEY}": "0'),
        written.replace('"min_count": 2', '"min_count": 3'),
    ):
        assert damaged != written
        (criteo / "manifest.json").write_text(damaged)
        with pytest.raises(UserError, match=r"manifest\.json is damaged: its checksum"):
            Manifest.load(criteo)
    (criteo / "manifest.json").write_text(written.replace(f'_version": {MANIFEST_VERSION}', '_version": 1'))
    with pytest.raises(UserError, match="has format_version 1, .* this distembed reads 2: prepare the data again"):
        Manifest.load(criteo)


OUTSIDE = ["../secret.parquet", "/secret.parquet", "train/../../secret.parquet", "..", "", ".", None, 5, "\0", "\ud800"]


def test_the_manifests_paths_stay_inside_the_folder(criteo: Path) -> None:
    (criteo.parent / "secret.parquet").write_bytes((criteo / "vocabulary" / "C1.parquet").read_bytes())
    content = (criteo / "manifest.json").read_bytes()
    parts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "splits.test.files[0].path": lambda value: value["splits"]["test"]["files"][0],
        "vocabularies.C4.file": lambda value: value["vocabularies"]["C4"],
        "rejected.file": lambda value: value["rejected"],
    }
    for outside in OUTSIDE:
        for field, part in parts.items():
            if outside is None and field == "rejected.file":  # there are none
                continue
            value = json.loads(content)
            del value[KEY]
            part(value)[field.rpartition(".")[2]] = outside
            (criteo / "manifest.json").write_text(json.dumps(with_checksum(value)))
            for read in (Manifest.load, verify_dataset, lambda folder: require_whole_splits(folder, ["train"])):
                with pytest.raises(UserError, match=rf"manifest\.json: {re.escape(field)} is .*must be a path inside"):
                    read(criteo)


@pytest.mark.parametrize("field", ["num_rows", "bytes"])
def test_sizes_that_are_none(criteo: Path, field: str) -> None:
    for size in ("9", -1, 1.5, None, True, [1]):
        change_manifest(criteo, lambda v, size=size: v["splits"]["train"]["files"][0].update({field: size}))
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            Manifest.load(criteo)


def test_links_that_the_user_made_are_followed(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "made", 40)
    (tmp_path / "linked").mkdir()
    for name in ("part0.parquet", "part1.parquet"):
        (tmp_path / "linked" / name).symlink_to(made / name)
    (tmp_path / "folder").symlink_to(tmp_path / "linked")
    names = ["part0.parquet", tmp_path / "linked" / "part1.parquet"]
    for folder in (tmp_path / "linked", tmp_path / "folder"):
        manifest = create_manifest(folder, SCHEMA, {"all": names})
        assert [file.path for file in manifest.splits["all"].files] == ["part0.parquet", "part1.parquet"]
        assert [rows_of(batch) for batch in open_reader(folder)] == [rows_of(batch) for batch in open_reader(made)]
        assert verify_dataset(folder).problems == []


def test_nothing_of_a_foreign_parquet_file_is_executed(tmp_path: Path) -> None:
    """PyArrow once unpickled the types of columns that a file declares to be of Python's making."""
    canary = tmp_path / "canary"
    declared = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Canary(canary)),
    }
    fields = [pa.field(name, pa.int64(), metadata=declared) for name in ("y", "x", "id")]
    schema = pa.schema(fields, metadata={b"pandas": pickle.dumps(Canary(canary))})
    pq.write_table(pa.table([[0, 1], [2, 3], [0, 1]], schema=schema), tmp_path / "a.parquet")
    assert b"ARROW:schema" in pq.read_metadata(tmp_path / "a.parquet").metadata
    create_manifest(tmp_path, Schema("y", ("x",), (CategoricalFeature("id", 2),)), {"train": ["a.parquet"]})
    (batch,) = BatchReader(tmp_path, "train", BatchOrder(2, shuffle=False))
    assert batch["dense_features"].tolist() == [[2.0], [3.0]]
    assert verify_dataset(tmp_path).problems == []
    assert Explicit.from_parquet(2, tmp_path / "a.parquet", ["id"]).num_rows == (2,)
    columns = GraphOptions(source="y", target="x")
    prepare_graph([tmp_path / "a.parquet"], tmp_path / "graph", NodeIds(num_embeddings=4), columns)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()  # it would have sung
