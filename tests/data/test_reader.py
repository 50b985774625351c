"""What the reader makes of columns of all types, which values it refuses, and how its thread ends."""

import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from distembed.base.checksums import KEY, with_checksum
from distembed.base.errors import UserError
from distembed.data import SCHEMAS, CategoricalFeature, Manifest, Schema, create_manifest
from distembed.data.reader.reader import Prefetcher
from tests.data.small_dataset import SINGLE, make_dataset, open_reader, rows_of


@pytest.mark.parametrize("kind", [pa.large_list(pa.int32()), pa.list_(pa.uint16()), pa.list_(pa.int8(), 2)])
def test_any_kind_of_list(tmp_path: Path, kind: pa.DataType) -> None:
    values = [[1, 2], [3, 4], [5, 6]]
    pq.write_table(pa.table({"y": [0.0, 1.0, 1.0], "t": pa.array(values, kind)}), tmp_path / "a.parquet")
    create_manifest(tmp_path, Schema("y", (), (CategoricalFeature("t", 7, multi_hot=True),)), {"all": ["a.parquet"]})
    (batch,) = open_reader(tmp_path, shuffle=False)
    assert batch["sparse_features"].values().tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["labels"].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("num_dense", [0, 1, 2])
def test_ids_beyond_32_bits(tmp_path: Path, num_dense: int) -> None:
    ids = [2**40, 2**31, 5]
    columns = {f"d{i}": [0.25 + i, 1.0, 2.0] for i in range(num_dense)}
    pq.write_table(pa.table({"y": [0, 1, 0], "a": ids, "b": [1, 2, 3], **columns}), tmp_path / "a.parquet")
    features = (CategoricalFeature("a", 2**41), CategoricalFeature("b", 4))
    create_manifest(tmp_path, Schema("y", tuple(columns), features), {"all": ["a.parquet"]})
    (batch,) = open_reader(tmp_path, shuffle=False)
    assert batch["sparse_features"]["a"].values().tolist() == ids
    assert batch["sparse_features"]["b"].values().tolist() == [1, 2, 3]
    assert batch["labels"].tolist() == [0.0, 1.0, 0.0]
    assert batch["dense_features"].tolist() == [
        [0.25 + i for i in range(num_dense)],
        [1.0] * num_dense,
        [2.0] * num_dense,
    ]


def test_columns_of_another_type(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 10)
    right = Manifest.load(folder)
    for wrong, message in (
        (Schema("unused", (), ()), "its type is string"),
        (Schema("clicked", ("tags",), ()), "a label, weight or dense column is numeric"),
        (Schema("clicked", (), (CategoricalFeature("tags", 50),)), "multi_hot=False needs integer"),
        (Schema("clicked", (), (CategoricalFeature("row", 50, multi_hot=True),)), "needs a list of integers"),
        (Schema("clicked", (), (CategoricalFeature("x", 50),)), "its type is double"),
        (Schema("nowhere", (), ()), "lacks the columns nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            create_manifest(folder, wrong, {"all": ["part0.parquet"]})
        replace(right, schema=wrong).save(folder)
        with pytest.raises(UserError, match=message):
            open_reader(folder)


def prefetching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("distembed-prefetch")}


@pytest.mark.thorough
def test_the_thread_ends_with_its_reader(tmp_path: Path) -> None:
    before = prefetching()

    def gone() -> bool:
        """Says whether the threads started since then have ended; waits as long as needed."""
        deadline = time.monotonic() + 30
        while prefetching() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        return not prefetching() - before

    folder = make_dataset(tmp_path / "d", 300)
    each = open_reader(folder, 5, prefetch_batches=2)
    batches = iter(each)
    next(batches)
    assert prefetching()
    each.close()
    assert gone()
    batches = iter(each)
    next(batches)
    del batches
    gc.collect()
    assert gone()
    with pytest.raises(KeyboardInterrupt):
        for _ in each:
            raise KeyboardInterrupt
    gc.collect()
    assert gone()
    batches = iter(each)
    next(batches)
    del each, batches
    gc.collect()
    assert gone()


def test_batches_can_be_moved_and_single_valued_bags_know_their_sums(tmp_path: Path) -> None:
    """What TorchRec would compute from the lengths is what the batch brings along."""
    (batch,) = open_reader(make_dataset(tmp_path / "d", 9, schema=SINGLE), shuffle=False)
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert rows_of(moved) == rows_of(batch) == list(range(9)) and moved.global_batch_size == 9
    features = batch["sparse_features"]
    assert features.lengths().tolist() == [1] * 18 and features.offsets().tolist() == list(range(19))
    assert features.length_per_key() == [9, 9] and features.offset_per_key() == [0, 9, 18]


def test_criteo_kaggle() -> None:
    schema = SCHEMAS["criteo_kaggle"]
    assert len(schema.dense) == 13 and len(schema.categorical) == 26 and schema.label == "label"
    assert sum(feature.num_embeddings for feature in schema.categorical) == 33_762_577
    assert schema.columns[:2] == ("label", "I1") and schema.columns[-1] == "C26"


def test_a_schema_survives_json_and_its_columns_have_one_role() -> None:
    schema = Schema("y", ("a",), (CategoricalFeature("b", 3), CategoricalFeature("c", 4, True, 2.5)))
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    with pytest.raises(UserError, match="more than once: a"):
        Schema("a", ("a",), ())


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
