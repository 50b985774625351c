"""What the task of next items makes of batches, by hand, and its losses and metrics against loops."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data import create_manifest
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.models.queries import Items, Queries
from distembed.sse import SSE
from distembed.tasks import NextItemConfig, NextItemTask, batch_schema
from distembed.tasks.base import BatchPosition, TaskContext
from distembed.tasks.next_item import SEEN
from tests.catalogue.fake_catalogue import FakeCatalogue

NUM_ITEMS, NUM_USERS = 20, 6
ROWS = [[5, 6, 7, 8, 9], [10], [], [11, 12], [13, 14, 15, 16]]
HOURS = [[0.5, 0.6, 0.7, 0.8, 0.9], [1.0], [], [1.1, 1.2], [1.3, 1.4, 1.5, 1.6]]
SCHEMA = Schema(
    None,
    (),
    (
        CategoricalFeature("user", NUM_USERS),
        CategoricalFeature("item", NUM_ITEMS, True, 2.4),
        CategoricalFeature("genre", 4, True, 2.4),
    ),
    dense_sequences=("hour",),
)


def write_dataset(folder: Path) -> str:
    """Writes the rows as a training split; genres are items modulo 4."""
    columns = {
        "user": pa.array(range(1, 6), pa.int32()),
        "item": pa.array(ROWS, pa.list_(pa.int32())),
        "genre": pa.array([[item % 4 for item in row] for row in ROWS], pa.list_(pa.int32())),
        "hour": pa.array(HOURS, pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    create_manifest(folder, SCHEMA, {"train": ["rows.parquet"]})
    return str(folder)


def jagged(columns: dict[str, Sequence[Sequence[Any]]], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    values = [value for column in columns.values() for row in column for value in row]
    lengths = [len(row) for column in columns.values() for row in column]
    return KeyedJaggedTensor(list(columns), torch.tensor(values, dtype=dtype), lengths=torch.tensor(lengths))


def make_batch(rows: slice = slice(None)) -> Batch:
    """Returns these of the rows as the reader would give them."""
    items = ROWS[rows]
    ids = {
        "user": [[user] for user in range(1, 6)][rows],
        "item": items,
        "genre": [[item % 4 for item in row] for row in items],
    }
    numbers = jagged({"hour": HOURS[rows]}, torch.float32)
    return Batch({"sparse_features": jagged(ids), "dense_sequences": numbers}, len(ROWS))


def started(folder: str, sse: dict[str, SSE] | None = None, **settings: Any) -> NextItemTask:
    task = NextItemConfig(**settings).build()
    assert isinstance(task, NextItemTask)
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    task.start(TaskContext(DataConfig(path=folder), folder, SCHEMA, ranks, 3, sse or {}))
    return task


def lists(features: Any, name: str) -> list[list[float]]:
    """Returns a feature of a batch as lists."""
    own = features[name]
    return [row.tolist() for row in own.values().split(own.lengths().tolist())]


def test_a_row_of_training_is_its_items_and_the_next_ones(tmp_path: Path) -> None:
    task = started(write_dataset(tmp_path), loss="softmax", max_length=3)
    batch = task.prepare_batch(make_batch(), BatchPosition(0, 0))
    features = batch["sparse_features"]
    assert lists(features, "user") == [[1], [2], [3], [4], [5]]
    assert lists(features, "item") == [[6, 7, 8], [], [], [11], [13, 14, 15]]
    assert lists(features, "item_target") == [[7, 8, 9], [], [], [12], [14, 15, 16]]
    assert lists(features, "genre") == [[2, 3, 0], [], [], [3], [1, 2, 3]]
    assert lists(batch["dense_sequences"], "hour")[0] == pytest.approx([0.6, 0.7, 0.8])
    assert features.keys() == list(batch_schema(NextItemConfig(loss="softmax"), SCHEMA).categorical_names)
    assert batch.global_batch_size == len(ROWS) and SEEN not in batch.fields


def test_a_row_of_an_evaluation_is_its_history_and_the_last_item(tmp_path: Path) -> None:
    task = started(write_dataset(tmp_path), loss="binary", max_length=3)
    batch = task.prepare_batch(make_batch(), None)
    features = batch["sparse_features"]
    assert lists(features, "item") == [[6, 7, 8], [], [], [11], [13, 14, 15]]
    assert lists(features, "item_target") == [[9], [10], [], [12], [16]]
    assert lists(features, "item_negative") == [[]] * 5
    assert lists(batch[SEEN], "item") == [[5, 6, 7, 8], [], [], [11], [13, 14, 15]]


def test_negatives_are_none_of_the_users_items_and_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    task = started(write_dataset(tmp_path), loss="binary", max_length=3, num_negatives=40)
    whole = lists(task.prepare_batch(make_batch(), BatchPosition(7, 0))["sparse_features"], "item_negative")
    assert [len(row) for row in whole] == [120, 0, 0, 40, 120]
    for own, row in zip(whole, ROWS, strict=True):
        assert not set(own) & set(row) and set(own) <= set(range(NUM_ITEMS))
    halves = [
        lists(task.prepare_batch(make_batch(rows), BatchPosition(7, first))["sparse_features"], "item_negative")
        for rows, first in ((slice(0, 3), 0), (slice(3, 5), 3))
    ]
    assert halves[0] + halves[1] == whole
    other = lists(task.prepare_batch(make_batch(), BatchPosition(8, 0))["sparse_features"], "item_negative")
    assert other != whole


def test_targets_are_replaced_at_their_rate_and_in_training_alone(tmp_path: Path) -> None:
    rule = SSE(p0=0.25, reserved=[0, 1])
    task = started(write_dataset(tmp_path), {"item_target": rule}, loss="softmax")
    wanted = [[6, 7, 8, 9], [], [], [12], [14, 15, 16]]
    assert lists(task.prepare_batch(make_batch(), None)["sparse_features"], "item_target")[0] == [9]
    changed = 0
    for step in range(150):
        found = lists(task.prepare_batch(make_batch(), BatchPosition(step, 0))["sparse_features"], "item_target")
        again = lists(task.prepare_batch(make_batch(), BatchPosition(step, 0))["sparse_features"], "item_target")
        assert found == again and [len(row) for row in found] == [len(row) for row in wanted]
        changed += sum(a != b for old, new in zip(wanted, found, strict=True) for a, b in zip(old, new, strict=True))
    assert abs(changed / (150 * 8) - 0.25) < 0.06


def test_lists_that_are_not_as_long_as_the_items_are_refused(tmp_path: Path) -> None:
    task = started(write_dataset(tmp_path), loss="softmax")
    ids = {"user": [[1], [2]], "item": [[5, 6], [7]], "genre": [[1, 2], [3, 0]]}
    batch = Batch({"sparse_features": jagged(ids)}, 2)
    with pytest.raises(UserError, match=r"'genre': a row has 2 entries and 1 items"):
        task.prepare_batch(batch, BatchPosition(0, 0))


@pytest.mark.parametrize("position", [None, BatchPosition(0, 0)])
@pytest.mark.parametrize("loss", ["softmax", "binary"])
def test_batches_without_rows(tmp_path: Path, position: BatchPosition | None, loss: str) -> None:
    task = started(write_dataset(tmp_path), loss=loss)
    batch = task.prepare_batch(make_batch(slice(0, 0)), position)
    assert batch["sparse_features"].stride() == 0 and len(batch["sparse_features"].values()) == 0


def test_a_user_who_has_all_items_is_ranked_among_all_alone(tmp_path: Path) -> None:
    task = started(write_dataset(tmp_path), max_length=3, sampled_candidates=7, cutoffs=[1, 5])
    items = [list(range(NUM_ITEMS)), [5, 6]]
    ids = {"user": [[1], [2]], "item": items, "genre": [[0] * len(row) for row in items]}
    numbers = jagged({"hour": [[0.5] * len(row) for row in items]}, torch.float32)
    batch = task.prepare_batch(Batch({"sparse_features": jagged(ids), "dense_sequences": numbers}, 2), None)
    catalogue: Any = FakeCatalogue(torch.randn(NUM_ITEMS, 4), None, 8)
    found = task.evaluate(Queries(torch.randn(2, 4), catalogue), batch)
    assert found["sampled"].isnan().all(1).tolist() == [True, False]
    assert not found["metrics"].isnan().any()
    metrics = task.metrics({name: values.numpy() for name, values in found.items()})
    assert metrics["hr@1"] >= 0.5 and metrics["mrr_of_8"] == found["sampled"][1, -1]


@pytest.mark.parametrize("loss", ["binary", "sampled_softmax"])
def test_targets_of_a_user_who_has_all_items_have_no_loss_against_negatives(
    tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = [*ROWS[:3], list(range(NUM_ITEMS)), ROWS[4]]
    monkeypatch.setattr("tests.tasks.test_next_item.ROWS", everything)
    monkeypatch.setattr("tests.tasks.test_next_item.HOURS", [[0.5] * len(row) for row in everything])
    task = started(write_dataset(tmp_path), loss=loss, max_length=3, num_negatives=2)
    (line,) = task.start_lines()
    assert line.startswith("note: 1 user(s) have every item") and line.endswith(": id 4")
    batch = task.prepare_batch(make_batch(), BatchPosition(0, 0))
    features: Any = batch["sparse_features"]
    is_whole = torch.tensor([False] * 3 + [True] * 3 + [False] * 3)  # three targets each of rows 1, 4 and 5
    generator, found = torch.Generator().manual_seed(0), {}
    for feature in ("item_target", "item_negative"):
        ids = features[feature].values()
        vectors = torch.randn(len(ids), 4, generator=generator).requires_grad_()
        found[feature] = Items(ids, vectors)
    catalogue: Any = FakeCatalogue(torch.zeros(NUM_ITEMS, 4), None, 8)
    task.step(Queries(torch.randn(9, 4, generator=generator), catalogue, found), batch)[0].backward()
    target, negatives = (found[name].vectors.grad for name in ("item_target", "item_negative"))
    assert target is not None and negatives is not None
    assert (negatives.view(9, -1) != 0).all(1).tolist() == (~is_whole).tolist()
    assert not negatives.view(9, -1)[is_whole].any()
    assert bool(target[is_whole].any()) == (loss == "binary")


def test_a_negative_that_replaces_another_has_a_binary_loss_though_it_is_never_drawn(tmp_path: Path) -> None:
    """Item 0 stands for no item here, so that it is not drawn, but SSE may put it in the place of one that is."""
    folder = write_dataset(tmp_path)
    dataclasses.replace(Manifest.load(folder), preparation={"schema": {}}).write(tmp_path)
    task = started(folder, {"item_negative": SSE(p0=0.9)}, loss="binary", num_negatives=40, negative_exponent=1.0)
    batch = task.prepare_batch(make_batch(), BatchPosition(0, 0))
    features: Any = batch["sparse_features"]
    generator, found = torch.Generator().manual_seed(0), {}
    for feature in ("item_target", "item_negative"):
        ids = features[feature].values()
        found[feature] = Items(ids, torch.randn(len(ids), 4, generator=generator))
    assert (found["item_negative"].ids == 0).any()
    vectors, catalogue = torch.randn(8, 4, generator=generator), FakeCatalogue(torch.zeros(NUM_ITEMS, 4), None, 8)
    loss, _ = task.step(Queries(vectors, catalogue, found), batch)  # type: ignore[arg-type]
    negatives = found["item_negative"].vectors.view(8, 40, 4)
    expected = -(vectors * found["item_target"].vectors).sum(1).sigmoid().log().sum()
    expected -= (1 - (vectors.unsqueeze(1) * negatives).sum(2).sigmoid()).log().sum()
    assert float(loss) == pytest.approx(float(expected) / task._targets_per_row, rel=1e-5)


def test_other_datasets_and_settings_are_refused() -> None:
    with pytest.raises(UserError, match="cutoffs has 21, above the 20 ids of this dataset's items"):
        batch_schema(NextItemConfig(cutoffs=[21]), SCHEMA)
    single = Schema(None, (), (CategoricalFeature("item", 5),))
    with pytest.raises(UserError, match="no lists of the feature 'item'.*prepare sequences"):
        batch_schema(NextItemConfig(), single)
    with pytest.raises(ValueError, match="in_batch.*use sampled_softmax"):
        NextItemConfig(loss="binary", negatives="in_batch")
    with pytest.raises(ValueError, match="sampled_candidates is 9, among which no target could miss the first 10"):
        NextItemConfig(sampled_candidates=9)
