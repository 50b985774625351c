"""Graphs over the ids of tables of any columns: a value is what it was in the table."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.table import prepare_table
from distembed.graph.prepare import NodeIds, prepare_graph
from tests.graph.edge_files import table_of, write
from tests.graph.reference import check_graph, reference_rows

SCHEMA = """
label: {column: label}
categorical:
  text: {kind: string}
  number: {kind: integer}
  digits: {kind: hexadecimal}
  hashed: {column: text, kind: string, hash_size: 50, hash_seed: 7}
  bin: {column: number, kind: quantile_bins, num_bins: 4}
split: none
min_count: 1
"""
TEXTS = ["a", "b", "", "1", "long text, with a comma"]
NUMBERS = [-(2**63), 2**63 - 1, -1, 0, 2**32 + 5]
DIGITS = ["0a", "ffffffff", "7", "10", "b"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    rows = {"label": [0, 1, 0, 1, 0], "text": TEXTS, "number": NUMBERS, "digits": DIGITS}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    (folder / "schema.yaml").write_text(SCHEMA)
    prepare_table([folder / "rows.parquet"], folder / "dataset", folder / "schema.yaml")
    return folder / "dataset"


@pytest.mark.parametrize(
    ("table", "column", "values"),
    [
        ("text", "text", TEXTS[:2] + TEXTS[3:]),
        ("number", "number", NUMBERS),
        ("digits", "digits", DIGITS),
        ("hashed", "text", TEXTS[:2] + TEXTS[3:]),
    ],
)
def test_edges_of_raw_values(dataset: Path, tmp_path: Path, table: str, column: str, values: list[Any]) -> None:
    rows = {"text": TEXTS, "number": NUMBERS, "digits": DIGITS}[column]
    ids = dict(zip(rows, pq.read_table(dataset / "train")[table].to_pylist(), strict=True))
    edges = list(zip(values[:-1], values[1:], strict=True))
    file = write(tmp_path / "edges.parquet", table_of(*map(list, zip(*edges, strict=True))))
    graph = prepare_graph([file], tmp_path / "out", NodeIds(dataset, table))
    size = next(each.num_embeddings for each in Manifest.load(dataset).schema.categorical if each.name == table)
    check_graph(graph, size, reference_rows([(ids[one], ids[other], 1) for one, other in edges], False))
