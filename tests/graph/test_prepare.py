"""Preparing graphs from files, against dictionaries."""

import json
import resource
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distembed.base.errors import RunError, UserError
from distembed.commands import cli
from distembed.commands.shared import console
from distembed.data.prepare import ProgressUpdate
from distembed.graph import Graph
from distembed.graph.prepare import (
    GraphOptions,
    NodeIds,
    counted_edges,
    describe_graph,
    preparation,
    prepare_graph,
    readers,
)
from tests.data.killed import hanging, wait_for_ever
from tests.data.reference import folder_bytes
from tests.graph.edge_files import TEN, WEIGHTED, table_of, write
from tests.graph.reference import check_graph, random_edges, reference_rows

NUM_NODES = 300
NODES = NodeIds(num_embeddings=NUM_NODES)
EDGES = random_edges(NUM_NODES, 2500, 0, 6.0)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Gives a limit of memory with which everything is read and merged in small pieces."""
    monkeypatch.setattr(preparation, "LEAST_MEMORY_BYTES", 1)
    monkeypatch.setattr(counted_edges, "_BATCH_ROWS", 64)
    return {"memory_limit_bytes": 4000}


@pytest.mark.parametrize(
    ("name", "weighted", "directed"),
    [
        *[("edges.parquet", True, True), ("edges.parquet", False, False), ("edges.csv", True, False)],
        *[("edges.tsv", False, True), ("edges.csv.gz", False, False), ("edges.TSV.gz", True, True)],
    ],
)
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
    assert graph.details["dropped"] == {"duplicates": 2500 - loops - len(distinct), "self_loops": loops, "unknown": 0}
    assert graph.details["num_rows"] == 2500
    assert graph.details["num_connected"] == len(rows)
    assert graph.details["largest_degree"] == max(map(len, rows.values()))


KINDS = [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.string(), pa.large_string(), pa.string_view()]


@pytest.mark.parametrize(
    ("kind", "as_dictionary"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS[1:-1:2])]
)
def test_ids_are_read_from_columns_of_any_integer_and_text(
    tmp_path: Path, kind: pa.DataType, as_dictionary: bool
) -> None:
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
    assert folder_bytes(tmp_path / "small") == folder_bytes(tmp_path / "large") == folder_bytes(tmp_path / "again")
    assert not list((tmp_path / "small").glob(".*"))
    spooled.verify()


def shared_rows(pairs: list[tuple[int, Any]], max_shared: int) -> tuple[dict[int, dict[int, float]], list[int]]:
    """Returns the number of values shared by node and neighbour, and the sizes of the groups left out."""
    groups: dict[Any, set[int]] = {}
    for id_, value in pairs:
        if value is not None:
            groups.setdefault(str(value), set()).add(id_)
    taken = [group for group in groups.values() if len(group) <= max_shared]
    edges = [(a, b, 1.0) for group in taken for a, b in combinations(sorted(group), 2)]
    return reference_rows(edges, False), [len(group) for group in groups.values() if len(group) > max_shared]


@pytest.mark.parametrize(
    ("name", "as_text", "count_shared"),
    [
        ("pairs.parquet", False, False),
        ("pairs.parquet", True, True),
        ("pairs.csv", False, True),
        ("pairs.csv", True, False),
    ],
)
def test_ids_that_share_an_attribute_are_neighbours(
    tmp_path: Path, small_memory: dict[str, int], name: str, as_text: bool, count_shared: bool
) -> None:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 30, 200).tolist()
    values = (80 * rng.random(200) ** 3).astype(np.int64).tolist()
    column = [f'{v}°,"{v}' if v % 3 else str(v) for v in values] if as_text else [v - 100 for v in values]
    column[5] = column[77] = None
    file = write(tmp_path / name, pa.table({"film": ids, "person": column}))
    nodes = NodeIds(num_embeddings=30)
    options = GraphOptions("film", attribute="person", max_shared=8, count_shared=count_shared)
    graph = prepare_graph([file], tmp_path / "out", nodes, options)
    rows, hubs = shared_rows(list(zip(ids, column, strict=True)), 8)
    assert len(hubs) > 1
    check_graph(graph, 30, rows)
    distinct = {(i, v) for i, v in zip(ids, column, strict=True) if v is not None}
    assert graph.details["dropped"] == {
        "duplicates": 198 - len(distinct),
        "unknown": 0,
        "missing": 2,
        "hubs": len(hubs),
        "largest_hub": max(hubs),
    }
    prepare_graph([file], tmp_path / "small", nodes, options, **small_memory)
    assert folder_bytes(tmp_path / "small") == folder_bytes(tmp_path / "out")


def test_an_integer_and_its_text_are_one_attribute(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"source": [1, 2, 3], "kind": [7, -7, 10**18]}))
    (tmp_path / "b.csv").write_text(f"source,kind\n4,7\n5,-7\n6,{10**18}\n7,07\n8,\n9,\n")
    graph = prepare_graph([tmp_path], tmp_path / "out", TEN, GraphOptions(attribute="kind"))
    check_graph(graph, 10, reference_rows([(1, 4, 1), (2, 5, 1), (3, 6, 1)], False))
    assert graph.details["dropped"]["missing"] == 2


def test_inputs_and_settings_that_cannot_be(tmp_path: Path) -> None:
    file, empty = write(tmp_path / "edges.csv", table_of([1], [2])), tmp_path / "empty"
    empty.mkdir()
    for inputs, output, nodes, limit, message in (
        ([empty], "out", TEN, 2 << 30, "has no files of rows"),
        ([file], "", TEN, 2 << 30, "lies inside the output"),
        ([file], "out", NodeIds("nowhere", "C3"), 2 << 30, "nowhere"),
        ([file], "out", NodeIds(num_embeddings=0), 2 << 30, "num_embeddings is 0"),
        ([file], "out", TEN, 5, "memory_limit_bytes is 5"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_graph(inputs, tmp_path / output, nodes, memory_limit_bytes=limit)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "empty"]


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


def test_only_a_graph_is_overwritten(tmp_path: Path) -> None:
    file = write(tmp_path / "edges.csv", table_of([1, 2], [2, 3]))
    first = prepare_graph([file], tmp_path / "out", TEN)
    eleven = NodeIds(num_embeddings=11)
    with pytest.raises(UserError, match="exists already"):
        prepare_graph([file], tmp_path / "out", eleven)
    second = prepare_graph([file], tmp_path / "out", eleven, overwrite=True)
    assert (first.num_nodes, second.num_nodes) == (10, 11)
    assert first.neighbors_of(2).tolist() == [1, 3]  # whoever has the old one open keeps it
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "manifest.json").touch()
    with pytest.raises(UserError, match="is no graph"):
        prepare_graph([file], tmp_path / "dataset", eleven, overwrite=True)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("[!o]*/*")) == [
        "dataset/manifest.json"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "edges.csv", "out"]


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
    monkeypatch.setattr(readers, "_MOST_READ_BYTES", 1 << 13)
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
    """Runs the command within this process, and returns what it prints."""
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


def prepare_and_hang(file: Path, output: Path, stage: str) -> None:
    def hang(update: ProgressUpdate) -> None:
        if update.stage == stage:
            wait_for_ever(file)

    prepare_graph([file], output, TEN, progress=hang)


@pytest.mark.parametrize("stage", ["read", "write"])
def test_killed_at_any_time_there_is_no_output_and_the_next_run_cleans_up(tmp_path: Path, stage: str) -> None:
    file, output = write(tmp_path / "edges.csv", table_of([1], [2])), tmp_path / "out"
    with hanging(file, prepare_and_hang, file, output, stage), pytest.raises(UserError, match="another process is"):
        prepare_graph([file], output, TEN)
    assert not output.exists() and len(list(tmp_path.iterdir())) == 2
    prepare_graph([file], output, TEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "out"]
    assert json.loads((output / "graph.json").read_text())["num_edges"] == 2
