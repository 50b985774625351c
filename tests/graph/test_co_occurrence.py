"""Graphs of what occurs together in a dataset's training split, and of JSON, against loops over the same rows."""

from collections import defaultdict
from itertools import combinations
from math import sqrt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.interactions import (
    InteractionColumns,
    InteractionFiles,
    Preparation,
    RatingOptions,
    SequenceOptions,
    prepare_ratings,
    prepare_sequences,
)
from distembed.graph.prepare import GraphOptions, NodeIds, counted_edges, describe_graph, prepare_graph
from tests.graph.reference import Rows, check_graph, reference_rows

TOGETHER = GraphOptions(co_occurrence=True, count_shared=True)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ratings")
    files = InteractionFiles([write_events(folder)])
    columns = InteractionColumns(rating="rating", time="time")
    prepare_ratings(files, Preparation(folder / "out"), columns, RatingOptions(split="time:0.8,0.1,0.1"))
    return folder / "out"


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    files = InteractionFiles([write_events(folder)])
    options = SequenceOptions(max_length=8, windows="all")
    prepare_sequences(files, Preparation(folder / "out"), InteractionColumns(time="time"), options)
    return folder / "out"


def write_events(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    table = pa.table(
        {
            "user": rng.integers(0, 25, 500),
            "item": rng.zipf(1.5, 500) % 60,
            "rating": rng.integers(1, 6, 500),
            "time": rng.integers(0, 90, 500),
        }
    )
    pcsv.write_csv(table, folder / "events.csv")
    return folder / "events.csv"


def train_rows(dataset: Path) -> list[dict]:
    files = Manifest.load(dataset).splits["train"].files
    return [row for file in files for row in pq.read_table(dataset / file.path).to_pylist()]


def groups(dataset: Path, table: str) -> list[set[int]]:
    """Returns the distinct items of each user, or the users of each item."""
    found: dict[int, set[int]] = defaultdict(set)
    for row in train_rows(dataset):
        for item in row["item"] if isinstance(row["item"], list) else [row["item"]]:
            node, group = (item, row["user"]) if table == "item" else (row["user"], item)
            found[group].add(node)
    return list(found.values())


def shared_rows(dataset: Path, table: str, max_shared: int) -> Rows:
    pairs = [pair for group in groups(dataset, table) if len(group) <= max_shared for pair in combinations(group, 2)]
    return reference_rows([(a, b, 1.0) for a, b in pairs], directed=False)


def num_nodes(dataset: Path, table: str) -> int:
    features = Manifest.load(dataset).schema.categorical
    return next(feature.num_embeddings for feature in features if feature.name == table)


@pytest.mark.parametrize(
    ("kind", "table", "max_shared"),
    [("ratings", "user", 1000), ("ratings", "item", 12), ("sequences", "user", 12), ("sequences", "item", 1000)],
)
def test_items_of_a_user_and_users_of_an_item_are_neighbours(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, table: str, max_shared: int
) -> None:
    dataset = request.getfixturevalue(kind)
    options = GraphOptions(co_occurrence=True, count_shared=True, max_shared=max_shared)
    graph = prepare_graph([], tmp_path / "out", NodeIds(dataset, table), options)
    check_graph(graph, num_nodes(dataset, table), shared_rows(dataset, table, max_shared))
    assert graph.details["num_rows"] == len(train_rows(dataset))


@pytest.mark.parametrize("within", [1, 3, 1000])
def test_items_are_neighbours_within_some_steps(tmp_path: Path, sequences: Path, within: int) -> None:
    edges = [
        (a, b, 1.0)
        for row in train_rows(sequences)
        for place, a in enumerate(row["item"])
        for b in row["item"][place + 1 : place + 1 + within]
    ]
    options = GraphOptions(co_occurrence=True, count_shared=True, within=within)
    graph = prepare_graph([], tmp_path / "out", NodeIds(sequences, "item"), options)
    check_graph(graph, num_nodes(sequences, "item"), reference_rows(edges, directed=False))


@pytest.mark.parametrize(
    ("measure", "min_shared", "max_neighbors", "count_shared", "batch_rows"),
    [
        *[("count", 2, None, True, 2**20), ("count", 1, 3, False, 50), ("count", 2, 1, True, 50)],
        *[("cosine", 2, None, False, 50), ("cosine", 1, 3, True, 2**20), ("cosine", 2, 1, False, 2**20)],
    ],
)
def test_only_the_strongest_edges_are_kept(
    tmp_path: Path,
    ratings: Path,
    monkeypatch: pytest.MonkeyPatch,
    measure: str,
    min_shared: int,
    max_neighbors: int | None,
    count_shared: bool,
    batch_rows: int,
) -> None:
    monkeypatch.setattr(counted_edges, "_BATCH_ROWS", batch_rows)
    sizes: dict[int, int] = defaultdict(int)
    for group in groups(ratings, "item"):
        for item in group:
            sizes[item] += 1
    wanted: Rows = {}
    every = shared_rows(ratings, "item", 1000)
    for node, row in every.items():
        heavy = {other: weight for other, weight in row.items() if weight >= min_shared}
        if measure == "cosine":
            heavy = {other: weight / sqrt(sizes[node] * sizes[other]) for other, weight in heavy.items()}
        nearest = sorted(heavy, key=lambda other: (-heavy[other], other))[:max_neighbors]
        if nearest:
            wanted[node] = {other: heavy[other] for other in nearest}
    options = GraphOptions(
        co_occurrence=True,
        count_shared=count_shared,
        min_shared=min_shared,
        max_neighbors=max_neighbors,
        measure=measure,
    )
    graph = prepare_graph([], tmp_path / "out", NodeIds(ratings, "item"), options)
    assert graph.weighted == count_shared and graph.directed == (max_neighbors is not None)
    check_graph(graph, num_nodes(ratings, "item"), wanted)
    left_out = sum(map(len, every.values())) - sum(map(len, wanted.values()))
    dropped = graph.details["dropped"]
    assert dropped.get("rare", 0) + dropped.get("beyond", 0) == left_out
    assert "left out" in describe_graph(graph)[-1]


def test_what_does_not_go_together_is_refused(tmp_path: Path, ratings: Path) -> None:
    nodes = NodeIds(ratings, "item")
    for refused, said in [
        (lambda: GraphOptions(min_shared=2), "count what ids share"),
        (lambda: GraphOptions(within=2), "co_occurrence too"),
        (lambda: GraphOptions(co_occurrence=True, within=0), "within is 0"),
        (lambda: GraphOptions(co_occurrence=True, directed=True), "without a weight"),
        (lambda: GraphOptions(co_occurrence=True, attribute="x"), "leave out one"),
        (lambda: prepare_graph([ratings], tmp_path / "out", nodes, TOGETHER), "and no files"),
        (lambda: prepare_graph([], tmp_path / "out", NodeIds(num_embeddings=3), TOGETHER), "and no files"),
        (lambda: prepare_graph([], tmp_path / "out", nodes), "no input was named"),
        (
            lambda: prepare_graph([], tmp_path / "out", nodes, GraphOptions(co_occurrence=True, within=2)),
            "prepare sequences",
        ),
    ]:
        with pytest.raises(UserError, match=said):
            refused()
    assert not (tmp_path / "out").exists()


def test_attributes_may_be_lists(tmp_path: Path) -> None:
    lists = [["fun", "war"], [], None, ["war", None], ["fun", "war", "war"], ["sad"]]
    texts = ["" if entries is None else " ".join(entry or "" for entry in entries) for entries in lists]
    rows = "".join(f"{item}\t{text}\n" for item, text in enumerate(texts))
    (tmp_path / "films.item").write_text("film:token\tgenre:token_seq\n" + rows)
    films = list(range(len(lists)))
    for kind in (pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.int64())):
        genres = (
            lists
            if kind.value_type != pa.int64()
            else [entries and [entry and sum(entry.encode()) for entry in entries] for entries in lists]
        )
        pq.write_table(
            pa.table({"film": films, "genre": pa.array(genres, kind)}), tmp_path / f"{kind.value_type}.parquet"
        )
    wanted = reference_rows([(0, 4, 2.0), (0, 3, 1.0), (3, 4, 1.0)], directed=False)
    options = GraphOptions("film", attribute="genre", count_shared=True)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    for number, file in enumerate(files):
        graph = prepare_graph([file], tmp_path / str(number), NodeIds(num_embeddings=6), options)
        check_graph(graph, 6, wanted)
        assert graph.details["dropped"]["missing"] == 2 and graph.details["dropped"]["duplicates"] == 1
    assert len(files) == 4
