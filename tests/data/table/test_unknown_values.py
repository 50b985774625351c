"""A warning of columns with far more unknown values than in training."""

from pathlib import Path

import pyarrow as pa
import pytest

from distembed.data.prepare.table.preparation import prepare_table
from distembed.data.table.encoder import RowEncoder
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema

SCHEMA = TableSchema.from_json(
    {
        "label": {"column": "label"},
        "categorical": {"site": {}, "rare": {}, "tags": {"separator": "|"}, "hashed": {"hash_size": 50}},
        "split": "none",
    },
    "the schema",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known")
    lines = [f"{place % 2},{'ab'[place % 2]},r{place},x|y,h{place}" for place in range(200)]
    (folder / "rows.csv").write_text("\n".join(["label,site,rare,tags,hashed", *lines, ""]))
    prepare_table([folder / "rows.csv"], folder / "out", SCHEMA)
    return folder / "out"


@pytest.mark.parametrize(
    ("values", "num_blocks", "warned"),
    [
        ({"site": "a", "tags": "x"}, 3, []),
        ({"site": "A", "tags": "x|y"}, 3, ["site: 100 of the first 100 values"]),
        ({"site": "A", "tags": "x"}, 1, []),  # too few to say
        ({"site": None, "tags": None}, 9, []),
        ({"site": "a", "tags": "x|X|Y"}, 3, ["tags: 100 of the first 150 values"]),
    ],
)
def test_it_is_told_once(
    dataset: Path, caplog: pytest.LogCaptureFixture, values: dict[str, str], num_blocks: int, warned: list[str]
) -> None:
    """Each value of ``rare`` is there once in training, so that all are unknown there too."""
    from distembed.data.dataset.manifest import Manifest

    parser = TableParser(SCHEMA, needs_label=False)
    encoder = RowEncoder(dataset, Manifest.load(dataset), parser.layout)
    rows = [{**values, "rare": f"new{place}", "hashed": f"new{place}"} for place in range(50)]
    for _ in range(num_blocks):
        encoder.encode(parser.parse(pa.Table.from_pylist(rows, parser_schema())))
    assert [record.getMessage()[: len(text)] for record, text in zip(caplog.records, warned, strict=True)] == warned


def parser_schema() -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in ("site", "rare", "tags", "hashed")])
