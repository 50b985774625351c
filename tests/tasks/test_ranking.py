"""The ranking task: a step against one in float64, evaluations against loops, the same on two ranks, bad input."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import SPARSE_FEATURES, CategoricalFeature, Schema
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection,
    EmbeddingConfig,
    TableConfig,
)
from distembed.models import MF, MFConfig, ModelInputs
from distembed.tasks import RankingConfig, RankingTask
from distembed.tasks.base import BatchPosition, TaskContext
from distembed.training.config import load_config

NUM_USERS, NUM_ITEMS = 23, 31
SCHEMA = Schema(
    "rating",
    (),
    (CategoricalFeature("user", NUM_USERS), CategoricalFeature("item", NUM_ITEMS)),
    label_kind="number",
)
Pairs = dict[str, list[tuple[int, int]]]


def draw_pairs() -> Pairs:
    """Draws distinct pairs for three splits; user 0 is in no split, user 1 not in the test split."""
    rng = np.random.default_rng(0)
    pairs = [(int(user), int(item)) for user in range(1, NUM_USERS) for item in rng.choice(NUM_ITEMS, 12, False)]
    rng.shuffle(pairs)
    splits: Pairs = {"train": pairs[:180], "validation": pairs[180:215], "test": pairs[215:]}
    splits["train"] += [pair for pair in splits["test"] if pair[0] == 1]
    splits["test"] = [pair for pair in splits["test"] if pair[0] != 1]
    return {name: [(int(user), int(item)) for user, item in own] for name, own in splits.items()}


def write_pairs(folder: Path, splits: Pairs) -> Path:
    for name, pairs in splits.items():
        (folder / name).mkdir(parents=True)
        users, items = zip(*pairs, strict=True) if pairs else ((), ())
        ids = {"user": pa.array(users, pa.int32()), "item": pa.array(items, pa.int32())}
        columns = {"rating": pa.array([1.0] * len(pairs), pa.float32()), **ids}
        pq.write_table(pa.table(columns), folder / name / "part-0.parquet", row_group_size=50)
    create_manifest(folder, SCHEMA, {name: [f"{name}/part-0.parquet"] for name in splits})
    return folder


def make_task(dataset: Path, **settings: Any) -> tuple[RankingTask, MF]:
    """Returns a started task and a model of tables on the CPU."""
    config = RankingConfig(**settings)
    task = config.build()
    assert isinstance(task, RankingTask)
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    task.start(TaskContext(DataConfig(path=str(dataset)), str(dataset), SCHEMA, ranks, 5, {}))
    inputs = ModelInputs.from_config(config.batch_schema(SCHEMA), EmbeddingConfig(TableConfig(embedding_dim=4)))
    model = MFConfig().build(inputs)
    assert isinstance(model, MF)
    several = config.num_negatives > 1
    collection = CompositionalEmbeddingCollection if several else CompositionalEmbeddingBagCollection
    model.embeddings = collection(model.embeddings.tables(), device="cpu")
    return task, model


def weights(model: MF) -> dict[str, torch.Tensor]:
    return {name.split(".")[-2].removesuffix("__p0"): value for name, value in model.embeddings.named_parameters()}


@pytest.mark.parametrize("num_negatives", [1, 3])
def test_a_step_equals_one_in_float64(tmp_path: Path, num_negatives: int) -> None:
    lambda_, splits = 0.3, draw_pairs()
    task, model = make_task(write_pairs(tmp_path, splits), regularization=lambda_, num_negatives=num_negatives)
    reader = BatchReader(str(tmp_path), "train", BatchOrder(16), rank=0, world_size=1)
    batch = task.prepare_batch(next(iter(reader)), BatchPosition(3, 0))
    reader.close()
    features = batch[SPARSE_FEATURES]
    users, items, negatives = (features[name].values().view(16, -1).tolist() for name in features.keys())
    drawn = [(user, item) for (user,), own in zip(users, negatives, strict=True) for item in own]
    assert not set(drawn) & set(splits["train"])
    loss, rows = task.step(model(features), batch)
    loss.backward()

    values = {name: value.detach().numpy().astype(np.float64) for name, value in weights(model).items()}
    expected, expected_loss = {name: np.zeros_like(value) for name, value in values.items()}, 0.0
    for row, ((user,), (item,)) in enumerate(zip(users, items, strict=True)):
        u, v = values["user"][user], values["item"][item]
        expected_loss += lambda_ * (u @ u + v @ v)
        expected["user"][user] += 2 * lambda_ * u
        expected["item"][item] += 2 * lambda_ * v
        for negative in negatives[row]:
            w = values["item"][negative]
            margin = u[:-1] @ (v - w)[:-1] + v[-1] - w[-1]
            expected_loss += math.log1p(math.exp(-margin)) / num_negatives + lambda_ * w @ w
            slope = -1 / (1 + math.exp(margin)) / num_negatives
            expected["user"][user] += slope * np.r_[(v - w)[:-1], 0]
            expected["item"][item] += slope * np.r_[u[:-1], 1]
            expected["item"][negative] += -slope * np.r_[u[:-1], 1] + 2 * lambda_ * w
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert rows["ordered"].shape == (16,)
    for name, value in weights(model).items():
        np.testing.assert_allclose(value.grad.to_dense().numpy(), expected[name], atol=1e-5)


def expected_metrics(
    splits: Pairs, split: str, users: npt.NDArray[Any], items: npt.NDArray[Any], exclude_seen: bool
) -> dict[str, float]:
    """Returns metrics by loops over users and items."""
    order = list(splits)
    seen = {pair for name in order[: order.index(split)] for pair in splits[name] if exclude_seen}
    found: dict[str, list[float]] = {"hr@3": [], "precision@3": [], "ndcg@3": [], "mrr": []}
    excluded_targets = len(seen & set(splits[split]))
    for user in sorted({user for user, _ in splits[split]}):
        relevant = {item for own, item in splits[split] if own == user}
        candidates = [item for item in range(NUM_ITEMS) if (user, item) not in seen]
        scores = {item: users[user] @ items[item] for item in candidates}
        ranked = sorted(scores, key=lambda item: -scores[item])
        hits = [place for place, item in enumerate(ranked) if item in relevant]
        gain = sum(1 / math.log2(place + 2) for place in hits if place < 3)
        found["hr@3"].append(float(any(place < 3 for place in hits)))
        found["precision@3"].append(sum(place < 3 for place in hits) / 3)
        found["ndcg@3"].append(gain / sum(1 / math.log2(place + 2) for place in range(min(3, len(relevant)))))
        found["mrr"].append(1 / (hits[0] + 1) if hits else 0.0)
    counts = {"rows": len(found["mrr"]), "excluded_targets": excluded_targets, "exclude_seen": exclude_seen}
    return {**counts, **{name: float(np.mean(values)) for name, values in found.items()}}


@pytest.mark.parametrize("exclude_seen", [True, False])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_evaluations_equal_loops(tmp_path: Path, split: str, exclude_seen: bool) -> None:
    splits = draw_pairs()
    splits["test"] += splits["train"][:20] + splits["validation"][:10]  # which their users take again
    splits["validation"] += splits["train"][10:30]
    splits = {name: list(dict.fromkeys(pairs)) for name, pairs in splits.items()}
    task, model = make_task(write_pairs(tmp_path, splits), cutoffs=[1, 3], exclude_seen=exclude_seen)
    model.eval()
    parts = [task.evaluate(model(batch[SPARSE_FEATURES]), batch) for batch in task.evaluation_batches(split, 5)]
    rows = {name: torch.cat([part[name] for part in parts]).detach().numpy() for name in task.outputs}
    users, items = (weights(model)[name].detach().numpy().astype(np.float64) for name in ("user", "item"))
    biases, users = users[:, -1], np.c_[users[:, :-1], np.ones(NUM_USERS)]
    metrics = task.metrics(rows)
    for name, value in expected_metrics(splits, split, users, items, exclude_seen).items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert 3 / NUM_ITEMS <= metrics["coverage@3"] <= 1
    require_best_scores(task.predictions(rows), users, items, biases)
    assert "NDCG@3" in task.describe(metrics)
    assert ("seen items are excluded" if exclude_seen else "seen items are candidates") in task.describe(metrics)


def test_unknown_users_and_items_are_in_no_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.tasks.split_items.reserved_ids", lambda manifest, name: (2, 3))
    splits = draw_pairs()
    task, model = make_task(write_pairs(tmp_path, splits), cutoffs=[1, 3])
    model.eval()
    parts = [task.evaluate(model(batch[SPARSE_FEATURES]), batch) for batch in task.evaluation_batches("test", 5)]
    rows = {name: torch.cat([part[name] for part in parts]).detach().numpy() for name in task.outputs}
    metrics = task.metrics(rows)
    assert rows["users"].tolist() == sorted({user for user, item in splits["test"] if not {user, item} & {2, 3}})
    assert metrics["unknown_users"] == sum(user in (2, 3) for user, _ in splits["test"]) > 0
    assert metrics["unknown_targets"] == sum(item in (2, 3) for _, item in splits["test"]) > 0
    assert not {2, 3} & set(rows["best"].flatten().tolist())


def require_best_scores(
    predicted: dict[str, npt.NDArray[Any]],
    users: npt.NDArray[Any],
    items: npt.NDArray[Any],
    biases: npt.NDArray[Any],
) -> None:
    """Scores of predictions are the model's, biases of users included, the best first."""
    names = [f"{kind}_{place}" for kind in ("item", "score") for place in (1, 2, 3)]
    assert list(predicted) == ["user", *names]
    best = np.stack([predicted[name] for name in names[:3]], 1)
    scores = np.stack([predicted[name] for name in names[3:]], 1)
    own = predicted["user"]
    expected = np.einsum("ud,ukd->uk", users[own], items[best]) + biases[own][:, None]
    np.testing.assert_allclose(scores, np.where(best < 0, -np.inf, expected), rtol=1e-5, atol=1e-6)
    assert bool((scores[:, :-1] >= scores[:, 1:]).all())


def test_a_split_without_rows_has_no_metrics(tmp_path: Path) -> None:
    task, model = make_task(write_pairs(tmp_path, {**draw_pairs(), "test": []}))
    (batch,) = task.evaluation_batches("test", 8)
    rows = task.evaluate(model.eval()(batch[SPARSE_FEATURES]), batch)
    metrics = task.metrics({name: values.detach().numpy() for name, values in rows.items()})
    assert metrics["rows"] == 0 and math.isnan(metrics["ndcg@10"])


def test_bad_settings_and_datasets_are_named() -> None:
    with pytest.raises(UserError, match=r"cutoffs is \[5, 1\]; give each number once, in rising order"):
        load_config(None, ["model.name=mf", "task={name: ranking, cutoffs: [5, 1]}"])
    with pytest.raises(UserError, match=r"task.cutoffs has 32, above the 31 ids of this dataset's items; lower it"):
        RankingConfig(cutoffs=[32]).batch_schema(SCHEMA)
    with pytest.raises(UserError, match="takes one item of each row, and the rows of this dataset have none"):
        RankingConfig().batch_schema(dataclasses.replace(SCHEMA, categorical=SCHEMA.categorical[:1]))
    lists = dataclasses.replace(SCHEMA.categorical[1], multi_hot=True)
    with pytest.raises(UserError, match="have several; make a dataset with `distembed prepare ratings`"):
        RankingConfig().batch_schema(dataclasses.replace(SCHEMA, categorical=(SCHEMA.categorical[0], lists)))


@pytest.mark.parametrize("num_negatives", [1, 3])
def test_rows_of_a_user_who_has_all_items_have_no_pairwise_loss(tmp_path: Path, num_negatives: int) -> None:
    others = [(user, item) for user, item in draw_pairs()["train"] if user != 7]
    everything = [(7, item) for item in range(NUM_ITEMS)]
    task, model = make_task(write_pairs(tmp_path, {"train": everything + others}), num_negatives=num_negatives)
    (line,) = task.start_lines()
    assert "1 user(s) have every item" in line and line.endswith(": id 7")
    sums = []
    for rows in (slice(0, len(everything)), slice(len(everything), None)):
        users, items = (torch.tensor(ids) for ids in zip(*(everything + others)[rows], strict=True))
        features = KeyedJaggedTensor(
            ["user", "item"], torch.cat([users, items]), lengths=torch.ones(2 * len(users)).int()
        )
        batch = task.prepare_batch(Batch({SPARSE_FEATURES: features}, len(users)), BatchPosition(0, 0))
        loss, outputs = task.step(model(batch[SPARSE_FEATURES]), batch)
        sums.append((loss, task.training_sums(outputs)["ordered"].tolist()))
    (none, (no_share, no_rows)), (loss, (_, num_rows)) = sums
    assert (none.item(), no_share, no_rows) == (0, 0, 0) and loss.item() > 0 and num_rows == len(others)
    none.backward()
    assert all(not value.grad.to_dense().any() for value in weights(model).values())
    assert math.isnan(task.training_metrics({"ordered": np.zeros(2)})["ordered"])
