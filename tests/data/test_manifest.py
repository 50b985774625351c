"""Schemas and manifests."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.checksums import KEY, with_checksum
from distembed.base.errors import UserError
from distembed.data import SCHEMAS, CategoricalFeature, Manifest, Schema, create_manifest
from distembed.data.reader.reader import Prefetcher


def test_criteo_kaggle() -> None:
    schema = SCHEMAS["criteo_kaggle"]
    assert len(schema.dense) == 13 and len(schema.categorical) == 26 and schema.label == "label"
    assert sum(feature.num_embeddings for feature in schema.categorical) == 33_762_577
    assert schema.columns[:2] == ("label", "I1") and schema.columns[-1] == "C26"


def test_a_schema_survives_json() -> None:
    schema = Schema("y", ("a",), (CategoricalFeature("b", 3), CategoricalFeature("c", 4, True, 2.5)))
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.parametrize(
    ("name", "size", "options", "message"),
    [
        ("a", 0, {}, "num_embeddings"),
        ("a", 3.5, {}, "num_embeddings .* must be an integer"),
        ("", 3, {}, "name"),
        ("a", 3, {"mean_ids_per_row": 2.0}, "multi_hot=True"),
        ("a", 3, {"multi_hot": True, "mean_ids_per_row": -1.0}, "mean_ids_per_row"),
    ],
)
def test_impossible_features(name: str, size: float, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CategoricalFeature(name, size, **options)


def test_a_column_has_one_role() -> None:
    with pytest.raises(UserError, match="more than once: a"):
        Schema("a", ("a",), ())


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"y": [0, 1, 1, 1], "a": [1, 2, 0, 1]}), tmp_path / "a.parquet")
    create_manifest(tmp_path, Schema("y", (), (CategoricalFeature("a", 3),)), {"train": ["a.parquet"], "test": []})
    return tmp_path


def test_a_manifest_for_files_of_ones_own(dataset: Path) -> None:
    manifest = Manifest.load(dataset)
    assert manifest.splits["train"].num_rows == 4 and manifest.splits["train"].label_rate == 0.75
    assert manifest.splits["train"].files[0].bytes == (dataset / "a.parquet").stat().st_size
    assert manifest.splits["test"].label_rate is None
    assert [path.name for path in dataset.iterdir() if path.name.startswith(".")] == []


MALFORMED: list[dict[str, object]] = [
    {"schema": {}},
    {"schema": []},
    {"splits": []},
    {"splits": {"train": {}}},
    {"preparation": "x"},
    {"vocabularies": {"a": {}}},
    {"sources": [1]},
    {"rejected": []},
    {"checksums": {"checksums.bin": 1}},
    {"checksums": {}},
]
"""Values of a manifest whose checksum fits, as someone who means it would write them."""


def test_what_is_no_dataset(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Manifest.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it has no manifest.json"):
        Manifest.load(tmp_path / "empty")
    value = json.loads((dataset / "manifest.json").read_text())
    valid = {name: own for name, own in value.items() if name != KEY}
    for content, message in (
        ("{", "not valid JSON"),
        ("[]", "not the manifest"),
        (json.dumps({**value, "format_version": 99}), "format_version 99"),
        (json.dumps({**value, "schema": {}}), "damaged"),
        (json.dumps({**value, "splits": {"train": {}}}), "damaged"),
        *((json.dumps(with_checksum({**valid, **change})), "damaged") for change in MALFORMED),
    ):
        (dataset / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=message):
            Manifest.load(dataset)


def test_files_outside_the_folder(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="outside"):
        create_manifest(dataset, Schema("y", (), ()), {"train": ["../a.parquet"]})
    with pytest.raises(UserError, match="does not exist"):
        create_manifest(dataset, Schema("y", (), ()), {"train": ["b.parquet"]})
    (dataset / "c.parquet").write_text("no")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        create_manifest(dataset, Schema("y", (), ()), {"train": ["c.parquet"]})


def test_prefetching_gives_the_items_and_then_the_error() -> None:
    def items():  # noqa: ANN202
        yield 1
        yield 2
        raise ValueError("boom")

    ahead = Prefetcher(items, 1)
    assert next(ahead) == 1 and next(ahead) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            next(ahead)
    ahead.close()
    ahead.close()
