"""Which values of a file become which ids of a table, and what is refused with its place."""

import gzip
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest, Vocabulary, create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.graph.prepare import GraphOptions, NodeIds, prepare_graph
from tests.data import reference
from tests.graph.edge_files import DROP, TEN, WEIGHTED, table_of, write
from tests.graph.reference import check_graph, reference_rows


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    (folder / "rows.tsv").write_bytes(reference.content(600, 1))
    prepare_criteo([folder / "rows.tsv"], folder / "dataset", CriteoOptions(min_count=1))
    prepare_criteo([folder / "rows.tsv"], folder / "hashed", CriteoOptions(hash_size=50, hash_seed=3))
    return folder


@pytest.mark.parametrize("as_text", [False, True])
def test_raw_values_become_ids_by_the_vocabulary(criteo: Path, tmp_path: Path, as_text: bool) -> None:
    dataset = criteo / "dataset"
    loaded = Manifest.load(dataset)
    vocabulary = pq.read_table(dataset / loaded.vocabularies["C3"].file).to_pydict()
    id_of = dict(zip(vocabulary["key"], vocabulary["id"], strict=True))
    rng = np.random.default_rng(3)
    keys = rng.choice(np.array(vocabulary["key"], np.int64), (2, 400)).tolist()
    spelled = [[f"{key:08x}" if key % 2 else f"{key:X}" for key in column] for column in keys] if as_text else keys
    file = write(tmp_path / "edges.parquet", table_of(*spelled))
    graph = prepare_graph([file], tmp_path / "out", NodeIds(dataset, "C3"))
    size = next(f.num_embeddings for f in loaded.schema.categorical if f.name == "C3")
    check_graph(graph, size, reference_rows([(id_of[a], id_of[b], 1) for a, b in zip(*keys, strict=True)], False))
    assert graph.details["ids"]["table"] == "C3" and len(graph.details["ids"]["fingerprint"]) == 64


def test_values_that_the_vocabulary_lacks_are_an_error_or_dropped(criteo: Path, tmp_path: Path) -> None:
    vocabulary = pq.read_table(criteo / "dataset" / "vocabulary" / "C1.parquet")["key"].to_pylist()
    known = [f"{key:08x}" for key in vocabulary[:3]]
    lacking = next(f"{key:08x}" for key in range(2**32) if key not in vocabulary)
    sources, targets = [known[0], known[1], lacking, known[2]], [known[1], known[2], known[0], lacking]
    file = write(tmp_path / "edges.csv", table_of(sources, targets))
    nodes = NodeIds(criteo / "dataset", "C1")
    with pytest.raises(UserError, match=rf"edges.csv, row 3: source is '{lacking}', .*2 of 4 rows .*--unknown drop"):
        prepare_graph([file], tmp_path / "out", nodes)
    graph = prepare_graph([file], tmp_path / "out", nodes, DROP)
    assert graph.details["dropped"]["unknown"] == 2 and graph.num_edges == 4
    pairs = write(
        tmp_path / "pairs.csv", pa.table({"source": [known[0], lacking, known[2], lacking], "x": [1, 1, 1, None]})
    )
    with pytest.raises(UserError, match="row 2: source is .*1 of 4 rows"):
        prepare_graph([pairs], tmp_path / "shared", nodes, GraphOptions(attribute="x"))
    graph = prepare_graph([pairs], tmp_path / "shared", nodes, GraphOptions(attribute="x", unknown="drop"))
    assert graph.num_edges == 2 and graph.details["dropped"]["unknown"] == graph.details["dropped"]["missing"] == 1


def test_raw_values_become_ids_by_the_hash(criteo: Path, tmp_path: Path) -> None:
    """The ids are those that the same values have in the dataset's rows."""
    rows = [reference.parse(line) for line in reference.lines_of((criteo / "rows.tsv").read_bytes())[:480]]
    raw = [row.keys[2] for row in rows if isinstance(row, reference.Row)]
    loaded = Manifest.load(criteo / "hashed")
    ids = pq.read_table(criteo / "hashed" / loaded.splits["train"].files[0].path)["C3"].to_pylist()
    pairs = [(i, i + 1) for i in range(479) if raw[i] is not None and raw[i + 1] is not None]
    file = write(tmp_path / "edges.csv", table_of(*([f"{raw[pair[end]]:08x}" for pair in pairs] for end in (0, 1))))
    graph = prepare_graph([file], tmp_path / "out", NodeIds(criteo / "hashed", "C3"))
    check_graph(graph, 50, reference_rows([(ids[a], ids[b], 1) for a, b in pairs], False))


def dataset_of_texts(folder: Path) -> Path:
    """Makes a dataset with a table that has a vocabulary of texts, and one whose values are ids."""
    columns = {"label": [0, 1], "I": [0.0, 1.0], "film": [2, 3], "user": [0, 9]}
    write(folder / "part.parquet", pa.table(columns))
    features = (CategoricalFeature("film", 5), CategoricalFeature("user", 10))
    made = create_manifest(folder, Schema("label", ("I",), features), {"train": ["part.parquet"]})
    write(
        folder / "film.parquet",
        pa.table({"id": [2, 3, 4], "key": ["Alien", "Brazil", "Casablanca"], "count": [3, 2, 1]}),
    )
    vocabularies = {"film": Vocabulary("film.parquet", 3, 0, 0, 0)}
    replace(made, vocabularies=vocabularies).save(folder)
    return folder


def test_texts_become_ids_by_a_vocabulary_of_texts(tmp_path: Path) -> None:
    dataset = dataset_of_texts(tmp_path / "dataset")
    file = write(tmp_path / "edges.csv", table_of(["Alien", "Brazil", "Solaris"], ["Brazil", "Casablanca", "Alien"]))
    with pytest.raises(UserError, match="row 3: source is 'Solaris', which is not in the table's vocabulary"):
        prepare_graph([file], tmp_path / "out", NodeIds(dataset, "film"))
    graph = prepare_graph([file], tmp_path / "out", NodeIds(dataset, "film"), DROP)
    check_graph(graph, 5, reference_rows([(2, 3, 1), (3, 4, 1)], False))
    ids = write(tmp_path / "ids.csv", table_of([0, 4], [9, 5]))
    check_graph(
        prepare_graph([ids], tmp_path / "user", NodeIds(dataset, "user")),
        10,
        reference_rows([(0, 9, 1), (4, 5, 1)], False),
    )
    with pytest.raises(UserError, match="table is 'films'.*Did you mean 'film'"):
        prepare_graph([file], tmp_path / "x", NodeIds(dataset, "films"))
    (dataset / "film.parquet").unlink()
    with pytest.raises(UserError, match="film.parquet is missing; prepare the data again"):
        prepare_graph([file], tmp_path / "x", NodeIds(dataset, "film"))


@pytest.mark.parametrize(
    ("column", "value"),
    list(zip(["source", "target"] * 4, ["", "x", "-1", "1.5", "1e3", " 2", "0x1", "9" * 20], strict=True)),
)
def test_what_is_no_id_is_an_error_with_its_place(tmp_path: Path, column: str, value: str) -> None:
    columns = {"source": ["1"] * 9, "target": ["2"] * 9}
    columns[column][6] = value
    file = write(tmp_path / "edges.csv", table_of(**{f"{name}s": values for name, values in columns.items()}))
    shown = repr(value) if value else "nothing"
    with pytest.raises(UserError, match=f"edges.csv, row 7: {column} is {shown}; it must be an integer of 0 or more"):
        prepare_graph([file], tmp_path / "out", TEN, DROP)


def test_what_is_no_key_or_weight_is_an_error_with_its_place(criteo: Path, tmp_path: Path) -> None:
    for value in ("", "g", "123456789", "0x12", "-1"):
        file = write(tmp_path / "edges.csv", table_of(["1", value], ["2", "3"]))
        with pytest.raises(UserError, match="row 2: source is .*1 to 8 hexadecimal digits"):
            prepare_graph([file], tmp_path / "out", NodeIds(criteo / "hashed", "C1"))
    for value in ("", "heavy", "-1", "0", "nan", "inf", "1e999"):
        file = write(tmp_path / "edges.csv", table_of([1, 2, 3], [2, 3, 4], ["1", "1e-3", value]))
        with pytest.raises(UserError, match="edges.csv, row 3: weight is .*a finite number above 0"):
            prepare_graph([file], tmp_path / "out", TEN, WEIGHTED)


@pytest.mark.parametrize("kind", [pa.int32(), pa.float32(), pa.decimal128(21, 2), pa.string()])
def test_weights_are_numbers_of_any_kind(tmp_path: Path, kind: pa.DataType) -> None:
    file = write(tmp_path / "edges.parquet", table_of([1, 1], [2, 3], pa.array([1, 3]).cast(kind)))
    graph = prepare_graph([file], tmp_path / "out", TEN, WEIGHTED)
    check_graph(graph, 10, reference_rows([(1, 2, 1.0), (1, 3, 3.0)], False))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"source": [1, -2], "target": [2, 3]}, "row 2: source is -2"),
        ({"source": [1, None], "target": [2, 3]}, "row 2: source is nothing"),
        (
            {"source": [1, 2], "target": [2, 10]},
            "row 2: target is 10, which is beyond the table: its ids lie in 0 to 9",
        ),
        ({"source": [1.0, 2.0], "target": [2, 3]}, "column 'source': its type is double; it must be integer"),
        ({"source": [True], "target": [2]}, "its type is bool"),
        ({"source": [[1]], "target": [2]}, "its type is list"),
        ({"sources": [1], "target": [2]}, "has no column 'source', .*Did you mean 'sources'"),
        ({"source": [3], "target": [3]}, "no edge left: 1 rows were read; dropped: duplicates 0, self_loops 1"),
        ({"source": pa.array([], pa.int64()), "target": pa.array([], pa.int64())}, "no edge left: 0 rows"),
    ],
)
def test_columns_that_are_no_edges_are_refused(tmp_path: Path, table: Mapping[str, Any], message: str) -> None:
    file = write(tmp_path / "edges.parquet", pa.table(dict(table)))
    with pytest.raises(UserError, match=message):
        prepare_graph([file], tmp_path / "out", TEN)
    assert [path.name for path in tmp_path.iterdir()] == ["edges.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"1,2\n3,4\n", "has no column 'source', 'target', .* It has '1', '2'"),
        ("a.csv", b"source,target,source\n1,2,3\n", "several columns named 'source'"),
        ("a.tsv", b"source,target\n1,2\n", "has no column 'source'"),
        ("a.csv", "source,target\n1,2\n".encode("utf-16"), "is text in UTF-16"),
        ("a.csv", b"source,target\n1,2,3\n", "line 2 is no row of its columns: b'1,2,3'"),
        ("a.csv.gz", gzip.compress(b"source,target\n1,\x00\n", mtime=0), "row 1: target is"),
        ("a.csv", b"", "0 rows were read"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare_graph([tmp_path / name], tmp_path / "out", TEN)
    assert [path.name for path in tmp_path.iterdir()] == [name]
