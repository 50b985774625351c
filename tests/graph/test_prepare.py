"""Preparing graphs from files, against dictionaries."""

import errno
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distembed import cli
from distembed.commands.shared import console
from distembed.data.dataset import manifest
from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare import CriteoOptions, ProgressUpdate, prepare_criteo
from distembed.errors import RunError, UserError
from distembed.graph import Graph
from distembed.graph.folder import GraphWriter
from distembed.graph.prepare import (
    GraphOptions,
    NodeIds,
    describe_graph,
    edge_reader,
    preparation,
    prepare_graph,
    shared_attributes,
    sorted_runs,
)
from distembed.graph.prepare.sorted_runs import SortedRuns
from tests.data import reference
from tests.data.test_prepare import bytes_of
from tests.graph.test_graph import check_graph, random_edges, reference_rows

NUM_NODES = 300
NODES = NodeIds(num_embeddings=NUM_NODES)
EDGES = random_edges(NUM_NODES, 2500, 0, 6.0)
TEN = NodeIds(num_embeddings=10)
WEIGHTED = GraphOptions(weight="weight")
DROP = GraphOptions(unknown="drop")


def table_of(sources: Any, targets: Any, weights: Any = None) -> pa.Table:
    columns = {"source": sources, "target": targets}
    return pa.table(columns if weights is None else columns | {"weight": weights})


def write(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=997)
        return path
    delimiter = "\t" if ".tsv" in path.name else ","
    content = pa.BufferOutputStream()
    pcsv.write_csv(table, content, pcsv.WriteOptions(delimiter=delimiter))
    raw = content.getvalue().to_pybytes()
    # two members, as some tools leave them
    path.write_bytes(gzip.compress(raw[:100]) + gzip.compress(raw[100:]) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Options with which everything is spooled, cut and merged in small pieces."""
    monkeypatch.setattr(preparation, "LEAST_MEMORY_BYTES", 1)
    monkeypatch.setattr(sorted_runs, "_MERGED_RECORDS", 64)
    monkeypatch.setattr(shared_attributes, "_EDGES_AT_A_TIME", 100)
    return {"memory_limit_bytes": 4000}


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["edges.parquet", "edges.csv", "edges.tsv", "edges.csv.gz", "edges.TSV.gz"])
def test_every_kind_of_file_gives_the_graph_of_its_edges(
    tmp_path: Path, name: str, weighted: bool, directed: bool
) -> None:
    file = write(tmp_path / name.lower(), table_of(*EDGES))
    file = file.rename(tmp_path / name)
    options = GraphOptions(weight="weight" if weighted else None, directed=directed)
    graph = prepare_graph([file], tmp_path / "out", NODES, options)
    rows = reference_rows(zip(*(column.tolist() for column in EDGES), strict=True), directed)
    check_graph(graph, NUM_NODES, rows)
    in_memory = Graph.from_edges(NUM_NODES, *(EDGES if weighted else EDGES[:2]), directed=directed)
    assert graph.fingerprint == in_memory.fingerprint
    stored = {(a, b) for a, row in rows.items() for b in row}
    distinct = stored if directed else {(min(a, b), max(a, b)) for a, b in stored}
    loops = int((EDGES[0] == EDGES[1]).sum())
    assert graph.details["dropped"] == {
        "duplicates": 2500 - loops - len(distinct),
        "self_loops": loops,
        "unknown": 0,
    }
    assert graph.details["num_rows"] == 2500
    assert graph.details["num_connected"] == len(rows)
    assert graph.details["largest_degree"] == max(map(len, rows.values()))


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.string(), pa.large_string(), pa.string_view()]
)
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_ids_are_read_from_columns_of_any_integer_and_text(
    tmp_path: Path, kind: pa.DataType, as_dictionary: bool
) -> None:
    if kind == pa.string_view() and as_dictionary:
        pytest.skip("pyarrow writes no Parquet file of these")
    columns = [pa.array(ids).cast(kind) for ids in ([0, 5, 100, 7], [1, 100, 7, 5])]
    columns = [column.dictionary_encode() for column in columns] if as_dictionary else columns
    file = write(tmp_path / "edges.parquet", pa.table(dict(zip(("b", "a"), columns, strict=True))))
    graph = prepare_graph([file], tmp_path / "out", NodeIds(num_embeddings=101), GraphOptions("a", "b"))
    check_graph(graph, 101, reference_rows([(1, 0, 1), (100, 5, 1), (7, 100, 1), (5, 7, 1)], False))


def test_a_folder_is_its_files_of_all_kinds(tmp_path: Path) -> None:
    for part, name in enumerate(["a.parquet", "b.csv", "c.tsv.gz"]):
        write(tmp_path / "in" / name, table_of(*(column[part::3] for column in EDGES)))
    (tmp_path / "in" / "_SUCCESS").touch()
    (tmp_path / "in" / ".hidden.csv").touch()
    one = prepare_graph([tmp_path / "in"], tmp_path / "one", NODES)
    assert one.fingerprint == Graph.from_edges(NUM_NODES, *EDGES[:2]).fingerprint
    assert [(s["name"], s["num_rows"]) for s in one.details["sources"]] == [
        ("a.parquet", 834),
        ("b.csv", 833),
        ("c.tsv.gz", 833),
    ]


@pytest.mark.parametrize(
    "options", [GraphOptions(), GraphOptions(weight="weight"), GraphOptions(weight="weight", directed=True)]
)
def test_bytes_do_not_depend_on_the_memory(tmp_path: Path, small_memory: dict[str, int], options: GraphOptions) -> None:
    """Nor on how the rows are cut: few pairs and many repetitions, whose weights could add up in another order."""
    rng = np.random.default_rng(1)
    ends = rng.integers(0, 12, (2, 1000))
    file = write(tmp_path / "edges.parquet", table_of(*ends, rng.exponential(size=1000)))
    nodes = NodeIds(num_embeddings=20)
    prepare_graph([file], tmp_path / "large", nodes, options)
    prepare_graph([file], tmp_path / "again", nodes, options)
    spooled = prepare_graph([file], tmp_path / "small", nodes, options, **small_memory)
    assert bytes_of(tmp_path / "small") == bytes_of(tmp_path / "large") == bytes_of(tmp_path / "again")
    assert not list((tmp_path / "small").glob(".*"))
    spooled.verify()


@given(
    st.lists(st.tuples(st.sampled_from([-(2**63), -5, 0, 1, 2, 7, 2**63 - 1]), st.integers(0, 9)), max_size=60),
    st.integers(1, 30),
    st.booleans(),
)
def test_records_come_sorted_in_the_order_they_were_given(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, int]], limit: int, with_payload: bool
) -> None:
    dtypes = (np.int64, np.int32) if with_payload else (np.int64,)
    size = sorted_runs.record_bytes(dtypes) * limit
    runs = SortedRuns(tmp_path_factory.mktemp("runs"), dtypes, size)
    for start in range(0, len(records), 7):
        columns = zip(*records[start : start + 7], strict=True)
        runs.add(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=False)))
    parts = list(runs.merged())
    keys = [part[0].tolist() for part in parts]
    assert sum(keys, []) == sorted(key for key, _ in records)
    assert all(before[-1] < after[0] for before, after in zip(keys[:-1], keys[1:], strict=True))
    assert all(len(part) <= limit or len(set(part)) == 1 for part in keys)
    if with_payload:
        given_order = [payload for _, payload in sorted(records, key=lambda record: record[0])]
        assert sum((part[1].tolist() for part in parts), []) == given_order


def shared_rows(pairs: list[tuple[int, Any]], max_shared: int) -> tuple[dict[int, dict[int, float]], list[int]]:
    """node -> neighbour -> values shared, and the sizes of the groups left out."""
    groups: dict[Any, set[int]] = {}
    for id_, value in pairs:
        if value is not None:
            groups.setdefault(str(value), set()).add(id_)
    taken = [group for group in groups.values() if len(group) <= max_shared]
    edges = [(a, b, 1.0) for group in taken for a, b in combinations(sorted(group), 2)]
    return reference_rows(edges, False), [len(group) for group in groups.values() if len(group) > max_shared]


@pytest.mark.parametrize("count_shared", [False, True])
@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.csv"])
@pytest.mark.parametrize("as_text", [False, True])
def test_ids_that_share_an_attribute_are_neighbours(
    tmp_path: Path, small_memory: dict[str, int], name: str, as_text: bool, count_shared: bool
) -> None:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 60, 500).tolist()
    values = (200 * rng.random(500) ** 3).astype(np.int64).tolist()
    column = [f'{v}°,"{v}' if v % 3 else str(v) for v in values] if as_text else [v - 100 for v in values]
    column[5] = column[77] = None
    file = write(tmp_path / name, pa.table({"film": ids, "person": column}))
    nodes = NodeIds(num_embeddings=60)
    options = GraphOptions("film", attribute="person", max_shared=15, count_shared=count_shared)
    graph = prepare_graph([file], tmp_path / "out", nodes, options)
    rows, hubs = shared_rows(list(zip(ids, column, strict=True)), 15)
    assert len(hubs) > 1
    check_graph(graph, 60, rows)
    distinct = {(i, v) for i, v in zip(ids, column, strict=True) if v is not None}
    assert graph.details["dropped"] == {
        "duplicates": 498 - len(distinct),
        "unknown": 0,
        "missing": 2,
        "hubs": len(hubs),
        "largest_hub": max(hubs),
    }
    prepare_graph([file], tmp_path / "small", nodes, options, **small_memory)
    assert bytes_of(tmp_path / "small") == bytes_of(tmp_path / "out")


def test_an_integer_and_its_text_are_one_attribute(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"source": [1, 2, 3], "kind": [7, -7, 10**18]}))
    (tmp_path / "b.csv").write_text(f"source,kind\n4,7\n5,-7\n6,{10**18}\n7,07\n8,\n9,\n")
    graph = prepare_graph([tmp_path], tmp_path / "out", TEN, GraphOptions(attribute="kind"))
    # 10^18 as a text has more digits than are read as a number
    check_graph(graph, 10, reference_rows([(1, 4, 1), (2, 5, 1)], False))
    assert graph.details["dropped"]["missing"] == 2


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
    """A dataset made elsewhere: a table with a vocabulary of texts, and one whose values are ids."""
    columns = {"label": [0, 1], "I": [0.0, 1.0], "film": [2, 3], "user": [0, 9]}
    write(folder / "part.parquet", pa.table(columns))
    features = (CategoricalFeature("film", 5), CategoricalFeature("user", 10))
    made = create_manifest(folder, Schema("label", ("I",), features), {"train": ["part.parquet"]})
    write(
        folder / "film.parquet",
        pa.table({"id": [2, 3, 4], "key": ["Alien", "Brazil", "Casablanca"], "count": [3, 2, 1]}),
    )
    vocabularies = {"film": manifest.Vocabulary("film.parquet", 3, 0, 0, 0)}
    manifest.dataclasses.replace(made, vocabularies=vocabularies).save(folder)
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
    with pytest.raises(UserError, match="vocabulary .*film.parquet cannot be read"):
        prepare_graph([file], tmp_path / "x", NodeIds(dataset, "film"))


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "1e3", " 2", "0x1", "99999999999999999999"])
@pytest.mark.parametrize("column", ["source", "target"])
def test_what_is_no_id_is_an_error_with_its_place(tmp_path: Path, column: str, value: str) -> None:
    columns = {"source": ["1"] * 9, "target": ["2"] * 9}
    columns[column][6] = value
    file = write(tmp_path / "edges.csv", table_of(**{f"{name}s": values for name, values in columns.items()}))
    shown = repr(value) if value else "nothing"
    with pytest.raises(UserError, match=f"edges.csv, row 7: {column} is {shown}; it must be an integer of 0 or more"):
        prepare_graph([file], tmp_path / "out", TEN, DROP)


@pytest.mark.parametrize("value", ["", "g", "123456789", "0x12", "-1"])
def test_what_is_no_key_is_an_error_with_its_place(criteo: Path, tmp_path: Path, value: str) -> None:
    file = write(tmp_path / "edges.csv", table_of(["1", value], ["2", "3"]))
    with pytest.raises(UserError, match="row 2: source is .*1 to 8 hexadecimal digits"):
        prepare_graph([file], tmp_path / "out", NodeIds(criteo / "hashed", "C1"))


@pytest.mark.parametrize("value", ["", "heavy", "-1", "0", "nan", "inf", "1e999"])
def test_what_is_no_weight_is_an_error_with_its_place(tmp_path: Path, value: str) -> None:
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
        ({"sources": [1], "target": [2]}, "has no column 'source'. Did you mean 'sources'"),
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
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"source,target\n", "no edge left: 0 rows"),
        ("a.csv", b"1,2\n3,4\n", "has no column 'source'. It has '1', '2'"),
        ("a.csv", b"source,target,source\n1,2,3\n", "several columns named 'source'"),
        ("a.csv", b"source,target\n1,2,3\n", "a.csv cannot be read"),
        ("a.csv", b"source,target\n1,\xff\n", "a.csv cannot be read"),
        ("a.tsv", b"source,target\n1,2\n", "has no column 'source'"),
        ("a.csv.gz", b"source,target\n1,2\n", "a.csv.gz cannot be read"),
        ("a.csv.gz", gzip.compress(b"source,target\n" + b"1,2\n" * 99, mtime=0)[:-12], "a.csv.gz cannot be read"),
        ("a.parquet", b"", "a.parquet cannot be read"),
        ("a.parquet", b"PAR1" * 9, "a.parquet cannot be read"),
        ("a.txt", b"source,target\n1,2\n", "a.txt ends in none of .parquet, .csv"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare_graph([tmp_path / name], tmp_path / "out", TEN)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_inputs_that_cannot_be(tmp_path: Path) -> None:
    file = write(tmp_path / "edges.csv", table_of([1], [2]))
    (tmp_path / "empty").mkdir()
    for inputs, output, message in (
        ([], "out", "no input"),
        ([tmp_path / "none.csv"], "out", "does not exist"),
        ([tmp_path / "empty"], "out", "has no file that ends in"),
        ([file, tmp_path / "empty" / ".." / "edges.csv"], "out", "named twice"),
        ([file], "", "lies inside the output"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_graph(inputs, tmp_path / output, TEN)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (NodeIds, {}, "neither"),
        (NodeIds, {"data": "x"}, "data=x"),
        (NodeIds, {"table": "C3"}, "table=C3"),
        (NodeIds, {"data": "x", "table": "C3", "num_embeddings": 3}, "num_embeddings=3"),
        (GraphOptions, {"unknown": "ignore"}, "unknown is 'ignore'"),
        (GraphOptions, {"max_shared": 1}, "max_shared is 1"),
        (GraphOptions, {"count_shared": True}, "count_shared"),
        (GraphOptions, {"attribute": "a", "weight": "w"}, "leave out weight"),
        (GraphOptions, {"attribute": "a", "directed": True}, "leave out weight and directed"),
        (GraphOptions, {"target": "source"}, "each has one role"),
    ],
)
def test_options_that_cannot_be(kind: type, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**options)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    file = write(tmp_path / "edges.csv", table_of([1], [2]))
    for nodes, memory_limit_bytes, message in (
        (NodeIds("nowhere", "C3"), 2 << 30, "nowhere"),
        (NodeIds(num_embeddings=0), 2 << 30, "num_embeddings is 0"),
        (TEN, 5, "memory_limit_bytes is 5"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_graph([file], tmp_path / "out", nodes, memory_limit_bytes=memory_limit_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["edges.csv"]


def test_only_a_graph_is_overwritten(criteo: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "edges.csv", table_of([1, 2], [2, 3]))
    first = prepare_graph([file], tmp_path / "out", TEN)
    eleven = NodeIds(num_embeddings=11)
    with pytest.raises(UserError, match="exists already"):
        prepare_graph([file], tmp_path / "out", eleven)
    second = prepare_graph([file], tmp_path / "out", eleven, overwrite=True)
    assert (first.num_nodes, second.num_nodes) == (10, 11)
    assert first.neighbors_of(2).tolist() == [1, 3]  # whoever has the old one open keeps it
    with pytest.raises(UserError, match="is no graph"):
        prepare_graph([file], criteo / "dataset", eleven, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "out"]


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "edges.csv", table_of([1], [2]))

    def fail(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GraphWriter, "append", fail)
    with pytest.raises(RunError, match="could not be written .No space left"):
        prepare_graph([file], tmp_path / "out", TEN)
    assert [path.name for path in tmp_path.iterdir()] == ["edges.csv"]


@pytest.mark.parametrize("limit_bytes", [100, 6000, 60_000])
def test_the_systems_own_refusal_to_write_is_explained(
    tmp_path: Path, small_memory: dict[str, int], limit_bytes: int
) -> None:
    """A limit on the size of files makes every writer meet it: of starts, of neighbours and of alias tables."""
    file = write(tmp_path / "edges.parquet", table_of(*random_edges(2000, 5000, 0)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(RunError, match="could not be written"):
            prepare_graph([file], tmp_path / "out", NodeIds(num_embeddings=2000), WEIGHTED, memory_limit_bytes=10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["edges.parquet"]


def test_progress_goes_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_reader, "_MOST_READ_BYTES", 1 << 15)
    for part in range(2):
        write(tmp_path / "in" / f"{part}.parquet", table_of(*EDGES))
    updates: list[ProgressUpdate] = []
    prepare_graph([tmp_path / "in"], tmp_path / "out", NODES, progress=updates.append)
    for stage in ("read", "write"):
        of_stage = [update for update in updates if update.stage == stage]
        assert [u.bytes_done for u in of_stage] == sorted(u.bytes_done for u in of_stage)
        assert of_stage[-1].bytes_done == of_stage[-1].bytes_total
    assert len(updates) > 10 and updates[-1].rows_done > 9000


def call(*arguments: object) -> str:
    """What the command says, within this process."""
    with console.capture() as said:
        cli.app(["prepare", "graph", *map(str, arguments)], standalone_mode=False)
    return said.get()


def test_the_command(tmp_path: Path) -> None:
    file = write(tmp_path / "edges.csv", table_of([1, 2, 2, 5], [2, 1, 3, 5]))
    said = call(file, "--output", tmp_path / "out", "--num-embeddings", 8, "--memory-limit", "1GB")
    assert "8 ids, 4 edges stored, both ways" in said and "3 ids (37.5%) have neighbours, 2 at most" in said
    assert "4 rows; left out: 1 given before, 1 from an id to itself" in said
    assert describe_graph(Graph.open(tmp_path / "out"))[0] in said
    pairs = write(tmp_path / "pairs.csv", pa.table({"film": [1, 2, 3], "director": ["a", "a", "b"]}))
    overwritten = ("-o", tmp_path / "out", "--overwrite", "--num-embeddings", 8)
    options = ("--source", "film", "--attribute", "director", "--count-shared", "--max-shared", 9)
    said = call(pairs, *options, *overwritten)
    assert "8 ids, 2 edges stored" in said and "3 rows; left out: none" in said
    said = call(
        write(pairs, pa.table({"film": [1, 2, 3, 4, 5], "director": [*"aaabb"]})), *options[:-1], 2, *overwritten
    )
    assert "attribute values left out: 1 that more than 2 ids share, 3 at most" in said
    with pytest.raises(UserError, match="--memory-limit"):
        call(file, "-o", tmp_path / "x", "--num-embeddings", 8, "--memory-limit", "much")


HANG_AND_PREPARE = """
import sys, time
from distembed.graph.prepare import NodeIds, prepare_graph
def hang(update):
    if update.stage == sys.argv[3]:
        print("hanging", flush=True)
        time.sleep(600)
prepare_graph([sys.argv[1]], sys.argv[2], NodeIds(num_embeddings=10), progress=hang)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read", "write"])
def test_killed_at_any_time_there_is_no_output_and_the_next_run_cleans_up(tmp_path: Path, stage: str) -> None:
    file, output = write(tmp_path / "edges.csv", table_of([1], [2])), tmp_path / "out"
    command = [sys.executable, "-c", HANG_AND_PREPARE, str(file), str(output), stage]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "hanging\n"
        with pytest.raises(UserError, match="another process is preparing"):
            prepare_graph([file], output, TEN)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not output.exists() and len(list(tmp_path.iterdir())) == 2
    prepare_graph([file], output, TEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "out"]
    assert json.loads((output / "graph.json").read_text())["num_edges"] == 2
