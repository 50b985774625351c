"""Two towers: steps against float64, evaluations against loops, whole runs on ranks and resumed, wrong settings."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import LABELS, SPARSE_FEATURES, WEIGHTS
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.embedding import CompositionalEmbeddingBagCollection
from distembed.models import ModelInputs, TwoTower
from distembed.models.two_tower import TowerVectors, unit_vectors
from distembed.planning.request import Workload
from distembed.tasks import RetrievalTask
from distembed.tasks.base import BatchPosition, TaskContext
from distembed.tasks.catalogue.keyed_rows import KeyedRows, columns_of
from distembed.tasks.catalogue.rank_rows import RankRows, gather_with_gradients
from distembed.tasks.recommendations import EXCLUDED
from distembed.tasks.retrieval import ITEM_IDS
from distembed.training.build import Blueprint
from distembed.training.config import Config, load_config
from tests.ranks import run_on_ranks
from tests.small_runs import call, distembed, losses
from tests.tasks.retrieval_rows import prepare_rows, write_config


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_rows(tmp_path_factory.mktemp("films"))


@pytest.fixture(scope="module")
def datasets(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"plain": dataset, "hard": prepare_rows(tmp_path_factory.mktemp("hard"), hard=True)}


RESERVED = (0, 1)
"""Ids of missing and unknown values."""


def make(dataset: Path, path: Path, **sections: Any) -> tuple[RetrievalTask, TwoTower, Config]:
    """Returns a started task and a model of full tables on the CPU."""
    embedding = {"default": {"partition": "naive", "embedding_dim": 8}}
    config = load_config(write_config(path / "config.yaml", dataset, embedding=embedding, **sections))
    torch.manual_seed(0)
    schema = Manifest.load(dataset).schema
    task = config.task.build()
    assert isinstance(task, RetrievalTask)
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    task.start(TaskContext(DataConfig(path=str(dataset)), str(dataset), schema, ranks, 5, {}))
    model = config.model.build(ModelInputs.from_config(config.task.batch_schema(schema), config.embedding))
    assert isinstance(model, TwoTower)
    model.embeddings = CompositionalEmbeddingBagCollection(model.embeddings.tables(), device="cpu")
    return task, model, config


def rows_of(dataset: Path, split: str) -> list[dict[str, Any]]:
    """Returns the rows of a split; a list that is null is empty, and a number that is null NaN."""
    files = Manifest.load(dataset).splits[split].files
    rows = pa.concat_tables([pq.read_table(dataset / file.path) for file in files]).to_pylist()
    lists = ("history", "genres")
    return [
        {name: value if value is not None else [] if name in lists else math.nan for name, value in row.items()}
        for row in rows
    ]


class Equations:
    """The towers in float64, one row after another, from copies of a model's parameters."""

    def __init__(self, model: TwoTower, normalize: bool, temperature: float) -> None:
        self.values = {
            name: value.detach().double().requires_grad_() for name, value in model.named_parameters() if value.numel()
        }
        self._normalize, self._temperature = normalize, temperature

    def _vector(self, table: str, ids: list[int]) -> Tensor:
        (weight,) = (value for name, value in self.values.items() if f".{table}__p0." in name)
        return weight[ids].sum(0)

    def _number(self, side: str, number: float) -> Tensor:
        w, b, e, missing = (
            self.values[f"network.{side}.soft_one_hot.{name}"][0]
            for name in ("weights", "biases", "vectors", "missing")
        )
        return missing if math.isnan(number) else torch.softmax(number * w + b, 0) @ e

    def _tower(self, side: str, x: Tensor) -> Tensor:
        layers = [name for name in self.values if name.startswith(f"network.{side}.mlp") and name.endswith("weight")]
        for index, name in enumerate(layers):
            x = self.values[name] @ x + self.values[name.replace("weight", "bias")]
            x = x.relu() if index < len(layers) - 1 else x
        return x / x.norm() if self._normalize else x

    def user(self, row: dict[str, Any]) -> Tensor:
        ids = [self._vector("user", [row["user"]]), self._vector("country", [row["country"]])]
        return self._tower(
            "user", torch.cat([*ids, self._vector("film", row["history"]), self._number("user", row["age"])])
        )

    def item(self, row: dict[str, Any]) -> Tensor:
        ids = [self._vector("film", [row["film"]]), self._vector("genres", row["genres"])]
        return self._tower("item", torch.cat([*ids, self._number("item", row["price"])]))

    def score(self, user: dict[str, Any], item: dict[str, Any]) -> Tensor:
        return self.user(user) @ self.item(item) / self._temperature


def read_batch(dataset: Path, num_rows: int) -> Batch:
    reader = BatchReader(str(dataset), "train", BatchOrder(num_rows, shuffle=False), rank=0, world_size=1)
    batch = next(iter(reader))
    reader.close()
    return batch


def features_of_items(dataset: Path) -> dict[int, dict[str, Any]]:
    """Returns the last row of each known item in training, or else in an earlier of test and validation."""
    rows = [row for split in ("test", "validation", "train") for row in rows_of(dataset, split)]
    return {row["film"]: row for row in rows if row["film"] not in RESERVED}


@pytest.mark.parametrize(
    ("kind", "loss", "normalize", "most_scores"),
    [("plain", "in_batch", True, 2**25), ("hard", "sampled", False, 2**25), ("plain", "sampled", True, 40)],
)
def test_a_step_equals_one_in_float64(
    datasets: dict[str, Path],
    tmp_path: Path,
    kind: str,
    loss: str,
    normalize: bool,
    most_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = datasets[kind]
    monkeypatch.setattr("distembed.tasks.catalogue.softmax._MOST_SCORES", most_scores)
    num_rows, num_drawn = 16, 7 if loss == "sampled" else 0
    settings = {"loss": loss, **({"num_negatives": 7, "negative_exponent": 0.5} if num_drawn else {})}
    task, model, _ = make(dataset, tmp_path, task=settings, model={"normalize": normalize})
    rows = rows_of(dataset, "train")[:num_rows]
    batch = task.prepare_batch(read_batch(dataset, num_rows), BatchPosition(3, 0))
    total, _ = task.step(model(*[batch[name] for name in model.batch_fields]), batch)
    total.backward()

    def is_pair(row: dict[str, Any]) -> bool:
        return bool(row["label"]) and row["film"] not in RESERVED

    pairs = [row for row in rows_of(dataset, "train") if is_pair(row)]
    counts = {item: sum(row["film"] == item for row in pairs) for item in features_of_items(dataset)}
    drawn_weights = {item: max(count, 1) ** 0.5 for item, count in counts.items()}
    frequency = {item: count / len(pairs) for item, count in counts.items()}
    probability = {item: weight / sum(drawn_weights.values()) for item, weight in drawn_weights.items()}
    own = [row for row in rows if is_pair(row)]
    drawn = batch[ITEM_IDS][len(own) :].tolist()
    assert len(drawn) == num_drawn and set(drawn) <= counts.keys()
    candidates = own + [features_of_items(dataset)[item] for item in drawn]
    num_pairs = len(own)
    assert 1 < num_pairs < num_rows and len(batch[WEIGHTS]) == num_pairs
    assert batch[SPARSE_FEATURES].stride() == num_pairs + num_drawn  # neither looked up nor computed
    equations = Equations(model, normalize, 0.3)
    expected = torch.zeros((), dtype=torch.float64)
    for row in own:
        own_score, terms = equations.score(row, row), []
        for other in (other for other in candidates if other["film"] != row["film"]):
            item = other["film"]
            count = (num_pairs - 1) * frequency[item] + num_drawn * probability[item]
            terms.append(equations.score(row, other).exp() / count)
        expected = expected + (own_score.exp() + sum(terms)).log() - own_score
    expected = expected / (len(pairs) / len(rows_of(dataset, "train")))
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    found = dict(model.named_parameters())
    for name, value in equations.values.items():
        gradient = found[name].grad
        own_gradient = torch.zeros_like(value) if value.grad is None else value.grad
        assert gradient is not None, name
        tolerance = 1e-5 * max(1.0, own_gradient.abs().max().item())
        np.testing.assert_allclose(gradient.to_dense(), own_gradient, rtol=1e-5, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "in_batch"},
        {"loss": "sampled", "num_negatives": 12},
        {"loss": "sampled", "num_negatives": 12, "negative_exponent": 1.0},
    ],
)
def test_the_mean_over_draws_is_the_softmax_over_the_catalogue(
    dataset: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The mean of exp(loss) is unbiased: the sum over all items of the exponentials, over the target's exponential."""
    num_rows, num_draws = 12, 250
    task, _, _ = make(dataset, tmp_path, task=settings)
    films = np.array([row["film"] for row in rows_of(dataset, "train") if row["label"] and row["film"] not in RESERVED])
    rng = np.random.default_rng(0)
    size = 1 + max(features_of_items(dataset))
    # an item's score is a random number, and higher for an item of more pairs
    table = torch.from_numpy(np.stack([rng.normal(0, 0.5, size), np.log1p(np.bincount(films, minlength=size))], 1))
    table, query = table.float(), torch.ones(1, 2)
    target = int(films[0])
    batch = read_batch(dataset, num_rows)
    features = batch[SPARSE_FEATURES]
    found, uncorrected = [], []
    for step in range(num_draws):
        # the other pairs of the step are draws of the training split's pairs
        others = rng.choice(films, num_rows - 1)
        features["film"].values()[:] = torch.from_numpy(np.append(target, others))
        prepared = task.prepare_batch(
            Batch({**batch.fields, LABELS: torch.ones(num_rows)}, num_rows), BatchPosition(step, 0)
        )
        weights = torch.zeros(num_rows)
        weights[0] = 1.0
        ids = prepared[ITEM_IDS]
        vectors = TowerVectors(query.expand(num_rows, 2), table[ids])
        loss, _ = task.step(vectors, Batch({**prepared.fields, WEIGHTS: weights}, num_rows, prepared.counts_by_rank))
        found.append(loss.double().exp().item())
        scores = table[ids].sum(1).double()
        uncorrected.append(1 + (scores - scores[0]).exp()[ids != target].mean().item() * (len(set(films)) - 1))
    items = sorted(set(films) if settings["loss"] == "in_batch" else features_of_items(dataset))
    scores = table.sum(1).double()
    expected = (scores[items] - scores[target]).exp().sum().item()
    error = np.std(found, ddof=1) / math.sqrt(num_draws)
    assert error < 0.03 * expected and abs(np.mean(found) - expected) < 4 * error
    assert abs(np.mean(uncorrected) - expected) > 12 * error  # equal weights of all candidates are far off


def test_a_step_without_two_pairs_has_no_loss_against_other_rows(dataset: Path, tmp_path: Path) -> None:
    task, model, _ = make(dataset, tmp_path)
    batch = read_batch(dataset, 8)
    for labels in ([0] * 8, [0, 1, *[0] * 6]):
        prepared = task.prepare_batch(
            Batch({**batch.fields, LABELS: torch.tensor(labels).float()}, 8), BatchPosition(0, 0)
        )
        total, _ = task.step(model(*[prepared[name] for name in model.batch_fields]), prepared)
        total.backward()
        assert total.item() == 0
        assert len(prepared[WEIGHTS]) == prepared[SPARSE_FEATURES].stride() == sum(labels)


@pytest.mark.thorough
@pytest.mark.distributed
def test_ranks_without_a_pair_train_as_one(datasets: dict[str, Path], tmp_path: Path) -> None:
    train = {"batch_size": 6, "epochs": 1}
    config = write_config(tmp_path / "config.yaml", datasets["hard"], train=train)
    pairs = [row["label"] == 1 and row["film"] not in RESERVED for row in rows_of(datasets["hard"], "train")]
    assert np.mean(pairs) < 0.4  # of 2 rows a rank, one step in three has none on a rank
    call("train", config, "--run-dir", tmp_path / "one")
    distembed("train", config, "--run-dir", tmp_path / "three", ranks=3)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.thorough
def test_a_plan_grows_with_candidates_of_all_ranks_and_drawn_items(dataset: Path, tmp_path: Path) -> None:
    def workload(world_size: int, **task: Any) -> Workload:
        config = load_config(write_config(tmp_path / "config.yaml", dataset, task=task))
        schema = Manifest.load(dataset).schema
        return Blueprint(config, schema, world_size, 1, torch.device("cpu"), False, {}).workload()

    one, few, many = workload(1), workload(4), workload(4, loss="sampled", num_negatives=5200)
    dim, num_rows, num_candidates = 6, 17, 65 + 5200
    assert all(each.network.is_step_known for each in (one, few, many))
    # both passes of the inner products of a rank's queries and all ranks' candidates: 3 products of 2 operations
    assert few.network.flops > 6 * num_rows * 65 * dim
    assert many.network.flops - few.network.flops > 6 * num_rows * (num_candidates - 68) * dim
    assert many.network.peak > few.network.peak + 4 * num_rows * (num_candidates - 68)
    for name in ("film", "genres"):
        assert many.ids_per_row[name] == pytest.approx(few.ids_per_row[name] * (1 + 5200 / 65))
    assert many.ids_per_row["user"] == few.ids_per_row["user"] == one.ids_per_row["user"] == 1


def outputs_of(task: RetrievalTask, model: TwoTower, split: str) -> dict[str, Any]:
    found: dict[str, list[Any]] = {name: [] for name in task.outputs}
    with torch.no_grad():
        for batch in task.evaluation_batches(split, 7):
            rows = task.evaluate(model(*[batch[name] for name in model.batch_fields]), batch)
            for name, values in rows.items():
                found[name].append(values.numpy())
    return {name: np.concatenate(values) for name, values in found.items()}


@pytest.mark.parametrize("kind", ["plain", "hard"])
@pytest.mark.parametrize(("user", "exclude_seen"), [("user", True), ("user", False), (None, False)])
def test_evaluations_equal_loops(
    datasets: dict[str, Path], tmp_path: Path, user: str | None, exclude_seen: bool, kind: str
) -> None:
    dataset = datasets[kind]
    task, model, _ = make(dataset, tmp_path, task={"user": user, "exclude_seen": exclude_seen})
    found = task.metrics(outputs_of(task, model, "test"))
    equations, items = Equations(model, True, 0.3), features_of_items(dataset)
    earlier = [row for split in ("train", "validation") for row in rows_of(dataset, split) if row["label"]]
    queries: list[tuple[dict[str, Any], set[int]]] = []
    pairs = [row for row in rows_of(dataset, "test") if row["label"]]
    assert found["unknown_targets"] == sum(row["film"] in RESERVED for row in pairs)
    assert found["unknown_users"] == sum(user is not None and row["user"] in RESERVED for row in pairs)
    assert (found["unknown_targets"] > 0) == (kind == "hard")
    for row in pairs:
        if user and row["user"] in RESERVED:
            continue
        known = next((relevant for query, relevant in queries if user and query["user"] == row["user"]), None)
        if known is None:
            queries.append((row, known := set()))
        known.update({row["film"]} - {*RESERVED})
    expected: dict[str, list[float]] = {"recall@3": [], "ndcg@3": [], "mrr": [], "recall@10": []}
    for query, relevant in queries:
        if not relevant:
            continue
        seen = {row["film"] for row in earlier if exclude_seen and row["user"] == query["user"]}
        scores = {item: equations.score(query, row).item() for item, row in items.items() if item not in seen}
        ranked = sorted(scores, key=lambda item: -scores[item])
        places = [place for place, item in enumerate(ranked) if item in relevant]
        for k in (3, 10):
            expected[f"recall@{k}"].append(sum(place < k for place in places) / len(relevant))
        ideal = sum(1 / math.log2(place + 2) for place in range(min(3, len(relevant))))
        expected["ndcg@3"].append(sum(1 / math.log2(place + 2) for place in places if place < 3) / ideal)
        expected["mrr"].append(1 / (places[0] + 1) if places else 0.0)
    for name, values in expected.items():
        assert found[name] == pytest.approx(np.mean(values), abs=1e-6), name
    assert found["rows"] == (len(queries) if user else sum(bool(relevant) for _, relevant in queries))
    assert found["exclude_seen"] == exclude_seen


def test_only_known_users_have_seen_items(datasets: dict[str, Path], tmp_path: Path) -> None:
    task, _, _ = make(datasets["hard"], tmp_path, task={"exclude_seen": True})
    batch = read_batch(datasets["hard"], 60)
    users = batch[SPARSE_FEATURES]["user"].values().tolist()
    num_seen = task.prediction_batch(batch)[EXCLUDED]["item"].lengths().tolist()
    assert set(RESERVED) < set(users)
    assert all(count == 0 for user, count in zip(users, num_seen, strict=True) if user in RESERVED)
    assert sum(num_seen) > 0


def test_a_row_without_features_has_a_small_gradient_in_a_new_network(dataset: Path, tmp_path: Path) -> None:
    task, model, _ = make(dataset, tmp_path, task={"user": None})
    batch = task.prepare_batch(read_batch(dataset, 16), BatchPosition(0, 0))
    vectors = torch.zeros(2, 6, requires_grad=True)
    unit = unit_vectors(vectors + torch.tensor([[0.0] * 6, [3.0, 4.0, 0.0, 0.0, 0.0, 0.0]]))
    unit.sum().backward()
    assert unit[0].tolist() == [0.0] * 6 and unit[1].tolist() == pytest.approx([0.6, 0.8, 0, 0, 0, 0])
    assert vectors.grad is not None and vectors.grad[0].tolist() == [0.0] * 6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embeddings" in name or "soft_one_hot" in name:  # as if no row had a feature
                parameter.zero_()
    total, _ = task.step(model(*[batch[name] for name in model.batch_fields]), batch)
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert total.isfinite() and all(gradient.to_dense().abs().max() < 100 for gradient in gradients)


@pytest.mark.parametrize("keep", ["first", "last"])
def test_keyed_rows_are_the_first_or_last_of_each_id(dataset: Path, keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.tasks.catalogue.keyed_rows._LEAST_PENDING", 5)
    schema = columns_of(Manifest.load(dataset).schema, ["user", "history", "age"], label="label")
    rows = KeyedRows.of_splits(str(dataset), ["test", "train"], schema, "user", keep)
    expected: dict[int, dict[str, Any]] = {}
    for row in (row for split in ("test", "train") for row in rows_of(dataset, split) if row["label"]):
        if keep == "last" or row["user"] not in expected:
            expected[row["user"]] = row
    assert rows.ids.tolist() == sorted(expected)
    batch = rows.batch(rows.positions(rows.ids[::-1]))
    history = batch[SPARSE_FEATURES]["history"]
    lists = [part.tolist() for part in history.values().split(history.lengths().tolist())]
    assert lists == [expected[user]["history"] for user in reversed(rows.ids.tolist())]
    ages = [expected[user]["age"] for user in reversed(rows.ids.tolist())]
    np.testing.assert_array_equal(batch["dense_features"][:, 0], np.float32(ages))
    assert len(rows.without(rows.ids[:3].tolist())) == len(rows) - 3
    assert rows.batch(np.zeros(0, np.int64))[SPARSE_FEATURES].stride() == 0


def check_gathered_rows(rank: int, world_size: int) -> None:
    counts = [0, 5, 1]
    rows = torch.arange(6.0).view(6, 1).repeat(1, 2)
    own = rows.split(counts)[rank].clone().requires_grad_()
    factors = torch.arange(12.0).view(6, 2)
    gathered = gather_with_gradients(own, RankRows(counts, dist.group.WORLD))
    assert gathered.tolist() == rows.tolist()
    (gathered * factors * (rank + 1)).sum().backward()
    assert own.grad is not None and own.grad.tolist() == (6 * factors).split(counts)[rank].tolist()  # 1 + 2 + 3 = 6


@pytest.mark.distributed
def test_gathered_rows_get_the_gradients_of_all_ranks() -> None:
    run_on_ranks(3, check_gathered_rows)


def test_wrong_settings_are_explained(dataset: Path, tmp_path: Path) -> None:
    def refuses(message: str, *overrides: str, **sections: Any) -> None:
        config = write_config(tmp_path / "config.yaml", dataset, **sections)
        with pytest.raises(UserError, match=message):
            call("train", config, *overrides, "--run-dir", tmp_path / "run")
        assert not (tmp_path / "run").exists()

    refuses("film", model={"item": "movie"})
    refuses("'history', a list in each row", model={"item": "history"})
    refuses("genre", model={"item_features": ["genre"]})
    everything = ["genres", "price", "age", "user", "country", "history"]
    refuses("tower of users needs", model={"item_features": everything}, task={"user": None, "exclude_seen": False})
    refuses("which is a feature of the item", model={"item_features": ["user"]})
    refuses("task.item is 'user' and model.item is 'film'", task={"item": "user"})
    refuses("task.user", task={"user": "person"})
    refuses("num_negatives is 8 and loss is in_batch", task={"num_negatives": 8})
    refuses("negative_exponent is 0.5 and loss is in_batch", task={"negative_exponent": 0.5})
    refuses("data.skip_unreadable is 1", data={"skip_unreadable": 1})
    refuses("user is null", task={"user": None, "exclude_seen": True})
    refuses("lower it", task={"cutoffs": [1000]})
    refuses("do not go together", "task={name: click}")
    refuses("do not go together", "model={name: mf}")
