"""Graphs in memory and in folders, against dictionaries."""

import copy
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distembed.base.checksums import KEY, with_checksum
from distembed.base.errors import UserError
from distembed.graph import Graph, rows
from distembed.graph.csr import verify_graph
from distembed.graph.folder import array_types
from distembed.graph.rows import MAX_NODES, stored_edges
from tests.data.test_damage import flip_a_bit
from tests.graph.reference import check_graph, random_edges, reference_rows

weights = st.one_of(st.just(1.0), st.floats(1e-6, 1e6), st.sampled_from([1e-300, 1e300, 5e-324]))
edge_lists = st.integers(2, 12).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), weights), min_size=1, max_size=40)
    )
)


@given(edge_lists, st.booleans(), st.booleans())
def test_a_graph_has_the_edges_that_it_was_given(
    drawn: tuple[int, list[tuple[int, int, float]]], directed: bool, weighted: bool
) -> None:
    num_nodes, edges = drawn
    sources, targets, values = (list(column) for column in zip(*edges, strict=True))
    rows = reference_rows(edges, directed)
    if not rows:
        with pytest.raises(UserError, match="no edge"):
            Graph.from_edges(num_nodes, sources, targets, directed=directed)
        return
    graph = Graph.from_edges(num_nodes, sources, targets, values if weighted else None, directed)
    assert graph.weighted == weighted and graph.directed == directed
    check_graph(graph, num_nodes, rows)


@pytest.mark.parametrize("decades", [0.0, 1.0, 12.0])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(2, 1), (3, 7), (101, 150), (400, 9000)])
def test_neighbours_are_drawn_in_proportion_to_their_weights(num_nodes: int, num_edges: int, decades: float) -> None:
    sources, targets, values = random_edges(num_nodes, num_edges, 1, decades)
    targets = np.where(targets == sources, (sources + 1) % num_nodes, targets)
    graph = Graph.from_edges(num_nodes, sources, targets, values)
    rows = reference_rows(zip(sources.tolist(), targets.tolist(), values.tolist(), strict=True), False)
    check_graph(graph, num_nodes, rows)


@pytest.mark.parametrize("degree", [1, 2, 3, 49, 1000])
def test_equal_weights_never_need_an_alias(degree: int) -> None:
    graph = Graph.from_edges(degree + 1, [0] * degree, np.arange(1, degree + 1), [0.1] * degree, directed=True)
    assert graph.keep is not None and (graph.keep == 1).all()


def test_tables_of_a_row_do_not_depend_on_the_block_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = random_edges(60, 800, 3, 8.0)
    whole = Graph.from_edges(60, *edges)
    for size in (1, 7, 50):
        monkeypatch.setattr(rows, "BLOCK_EDGES", size)
        assert Graph.from_edges(60, *edges).fingerprint == whole.fingerprint


def test_a_node_that_is_everyones_neighbour() -> None:
    num_nodes = 200_001
    leaves = np.arange(1, num_nodes)
    values = np.random.default_rng(0).exponential(size=num_nodes - 1)
    graph = Graph.from_edges(num_nodes, leaves, np.zeros_like(leaves), values)
    assert graph.neighbors_of(0).tolist() == leaves.tolist() and graph.neighbors_of(7).tolist() == [0]
    assert graph.keep is not None and graph.alias is not None
    drawn = graph.keep[: num_nodes - 1] + np.bincount(
        graph.alias[: num_nodes - 1], 1 - graph.keep[: num_nodes - 1], num_nodes - 1
    )
    np.testing.assert_allclose(drawn / (num_nodes - 1), values / values.sum(), atol=1e-12)


@pytest.mark.parametrize(
    "convert",
    [list, torch.tensor, lambda ids: np.array(ids, np.uint8), lambda ids: torch.tensor(ids, dtype=torch.int32)],
)
def test_edges_come_as_lists_arrays_and_tensors(convert: Any) -> None:
    graph = Graph.from_edges(5, convert([0, 1, 1]), convert([1, 2, 4]), convert([1, 2, 3]))
    assert graph.fingerprint == Graph.from_edges(5, np.array([0, 1, 1]), np.array([1, 2, 4]), [1, 2, 3]).fingerprint
    assert graph.neighbors_of(1).tolist() == [0, 2, 4] and graph.neighbors_of(3).tolist() == []
    assert graph.neighbors.dtype == np.int32 and graph.starts.dtype == np.int64


def test_equal_graphs_have_equal_fingerprints_and_others_not() -> None:
    sources, targets, _ = random_edges(30, 90, 4)
    first = Graph.from_edges(30, sources, targets)
    again = np.random.default_rng(1).permutation(90)
    assert Graph.from_edges(30, targets[again], sources[again]).fingerprint == first.fingerprint
    others = [
        Graph.from_edges(31, sources, targets),
        Graph.from_edges(30, sources, targets, directed=True),
        Graph.from_edges(30, sources, targets, np.ones(90)),
        Graph.from_edges(30, sources, targets, np.arange(1, 91)),
        Graph.from_edges(30, sources[1:], targets[1:]),
    ]
    assert len({first.fingerprint, *(graph.fingerprint for graph in others)}) == 6


def test_ids_are_as_wide_as_the_graph_needs() -> None:
    assert array_types(2**31, False)["neighbors"] == np.int32
    assert array_types(2**31 + 1, True) == {"starts": "<i8", "neighbors": "<i8", "keep": "<f8", "alias": "<i4"}
    last = np.array([MAX_NODES - 1])
    keys = stored_edges(MAX_NODES, last, np.array([0]), None, directed=False).keys
    assert [(int(key) // MAX_NODES, int(key) % MAX_NODES) for key in keys] == [(MAX_NODES - 1, 0), (0, MAX_NODES - 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, [0], [0]), "num_nodes is 0"),
        ((2.0, [0], [1]), "num_nodes is 2.0"),
        ((MAX_NODES + 1, [0], [1]), "3,037,000,499"),
        ((3, [0, 1, 3], [1, 2, 0]), r"sources\[2\] is 3; ids lie in 0 to 2"),
        ((3, [0, 1], [1, -1]), r"targets\[1\] is -1"),
        ((3, [0.0, 1.5], [1, 2]), "sources are of type float64"),
        ((3, [True, False], [1, 2]), "sources are of type bool"),
        ((3, ["a"], [1]), "sources are of type"),
        ((3, [0, [1]], [1, 2]), "sources cannot be read"),
        ((3, [[0, 1]], [1, 2]), "shape"),
        ((3, 0, 1), "shape"),
        ((3, [0, 1], [1]), "2 sources, 1 targets"),
        ((3, [0, 1], [1, 2], [1.0]), "1 weights"),
        ((3, [0, 1], [1, 2], [1.0, 0.0]), r"weights\[1\] is 0.0"),
        ((3, [0, 1], [1, 2], [float("nan"), 1.0]), r"weights\[0\] is nan"),
        ((3, [0, 1], [1, 2], [1.0, float("inf")]), r"weights\[1\] is inf"),
        ((3, [0, 1], [1, 2], ["a", "b"]), "weights are of type"),
        ((3, [0, 0], [1, 1], [1.5e308, 1.5e308]), "add up to infinity"),
        ((3, [0, 1], [0, 1]), "no edge"),
        ((1, [0], [0]), "no edge"),
        ((3, [], []), "no edge"),
    ],
)
def test_what_is_no_graph_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Graph.from_edges(*arguments)


def test_there_are_no_neighbours_of_a_node_that_is_none() -> None:
    graph = Graph.from_edges(3, [0], [1])
    for node in (-1, 3):
        with pytest.raises(UserError, match="nodes 0 to 2"):
            graph.neighbors_of(node)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_comes_back_from_its_folder(tmp_path: Path, weighted: bool) -> None:
    sources, targets, values = random_edges(50, 300, 5)
    graph = Graph.from_edges(50, sources, targets, values if weighted else None, directed=weighted)
    graph.write(tmp_path / "new" / "graph")
    opened = Graph.open(tmp_path / "new" / "graph")
    opened.verify()
    assert (opened.num_nodes, opened.num_edges, opened.directed) == (50, graph.num_edges, weighted)
    assert opened.fingerprint == graph.fingerprint
    for name in array_types(50, weighted):
        mapped, array = getattr(opened, name), getattr(graph, name)
        assert isinstance(mapped, np.memmap)
        assert mapped.dtype == array.dtype and np.array_equal(mapped, array)
        mapped[:] = 0
    opened.verify()  # what is written to the arrays does not reach the files
    with pytest.raises(UserError, match="is not empty"):
        graph.write(tmp_path / "new" / "graph")


def truncate(folder: Path) -> None:
    with open(folder / "neighbors.bin", "r+b") as file:
        file.truncate(20)


def change_json(folder: Path, **changes: object) -> None:
    """Changes values and their checksum with them, as someone who means it would."""
    value = json.loads((folder / "graph.json").read_text()) | changes
    (folder / "graph.json").write_text(json.dumps(with_checksum({k: v for k, v in value.items() if k != KEY})))


def rename_checksum(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"{KEY}": "', '"checksun": "'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda folder: (folder / "graph.json").unlink(), "is no graph"),
        (lambda folder: (folder / "graph.json").write_bytes(b"\xff{"), "not valid JSON"),
        (lambda folder: (folder / "graph.json").write_text("[]"), "does not describe a graph"),
        (lambda folder: change_json(folder, format_version=9), "format_version 9"),
        (lambda folder: change_json(folder, format_version=1), "format_version 1"),
        (lambda folder: rename_checksum(folder / "graph.json"), r"graph\.json is damaged"),
        (lambda folder: change_json(folder, arrays={}), "damaged"),
        (lambda folder: change_json(folder, num_edges=7), "damaged"),
        (lambda folder: change_json(folder, num_nodes=None), "damaged"),
        (lambda folder: change_json(folder, fingerprint="0"), "its checksums do not give its fingerprint"),
        (lambda folder: (folder / "alias.bin").unlink(), "alias.bin is missing"),
        (truncate, "neighbors.bin has 20 bytes"),
        (lambda folder: (folder / "starts.bin").write_bytes(b"\1" * 88), "starts.bin is damaged"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    Graph.from_edges(10, *random_edges(10, 30, 6)).write(tmp_path / "graph")
    damage(tmp_path / "graph")
    with pytest.raises(UserError, match=message):
        Graph.open(tmp_path / "graph")


def write_anew(folder: Path, name: str, values: list[int]) -> None:
    """Writes other numbers and all checksums of them, as someone who means it would."""
    graph, other = Graph.open(folder), folder.parent / "other"
    array = np.array(values, getattr(graph, name).dtype)
    replace(graph, **{name: array}, folder=None, description=None).write(other)
    shutil.rmtree(folder)
    other.rename(folder)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("neighbors", [1, 2, 3, 4], "neighbours outside of its ids, 0 to 3"),
        ("neighbors", [1, -1, 3, 2], "neighbours outside of its ids"),
        ("starts", [0, 3, 1, 3, 4], "its rows overlap"),
        ("starts", [0, 1, 3, 3, 5], "rows do not cover its edges"),
    ],
)
def test_neighbors_are_ids_whatever_checksums_say(tmp_path: Path, name: str, values: list[int], message: str) -> None:
    Graph.from_edges(4, [0, 2], [1, 3]).write(tmp_path / "graph")
    write_anew(tmp_path / "graph", name, values)
    with pytest.raises(UserError, match=message):
        Graph.open(tmp_path / "graph")
    (problem,) = verify_graph(tmp_path / "graph").problems
    assert message in problem


def test_a_changed_byte_is_found_when_the_graph_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "graph"
    Graph.from_edges(10, *random_edges(10, 30, 6)).write(folder)
    opened = Graph.open(folder)
    flip_a_bit(folder / "neighbors.bin")
    for read in (opened.verify, lambda: Graph.open(folder)):
        with pytest.raises(UserError, match="neighbors.bin is damaged: its checksum"):
            read()
    flip_a_bit(folder / "alias.bin")
    found = verify_graph(folder)
    assert [name for name in ("starts", "neighbors", "keep", "alias") if any(name in p for p in found.problems)] == [
        "neighbors",
        "alias",
    ]
    assert found.num_files == 5 and found.num_bytes == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("outside", ["../starts.bin", "/starts.bin", "a/../../starts.bin", "", None, 5, "\0", "\ud800"])
def test_arrays_are_inside_the_folder(tmp_path: Path, outside: object) -> None:
    folder = tmp_path / "graph"
    Graph.from_edges(10, *random_edges(10, 30, 6)).write(folder)
    shutil.copy(folder / "starts.bin", tmp_path / "starts.bin")
    arrays = json.loads((folder / "graph.json").read_text())["arrays"]
    arrays["starts"]["file"] = outside
    change_json(folder, arrays=arrays)
    for read in (Graph.open, verify_graph):
        with pytest.raises(UserError, match=r"graph\.json: arrays\.starts\.file is .*must be a path inside"):
            read(folder)


def test_copies_of_a_graph_in_a_folder_are_the_same_graph(tmp_path: Path) -> None:
    graph = Graph.from_edges(5, [0, 1], [1, 2])
    assert copy.deepcopy(graph) is graph
    assert np.array_equal(pickle.loads(pickle.dumps(graph)).neighbors, graph.neighbors)
    graph.write(tmp_path / "graph")
    mapped = Graph.open(tmp_path / "graph")
    again = pickle.loads(pickle.dumps(mapped))
    assert again.folder == mapped.folder and np.array_equal(again.starts, graph.starts)
    assert len(pickle.dumps(mapped)) < 500
