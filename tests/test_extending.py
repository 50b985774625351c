"""A model and a task of one's own: registered in a few lines, trained on two ranks.

:mod:`tests.test_plugins` has partition schemes and compositions, :mod:`tests.optim.test_added_optimizers` optimizers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic.dataclasses
import pytest
import torch
import yaml
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.lazy import NameTable
from distembed.base.ranks import Ranks
from distembed.data.reader.batch import Batch
from distembed.models import MODELS, Model, ModelInputs
from distembed.planning.devices import Cluster, find_device
from distembed.reports.comparison import report_columns
from distembed.reports.plan.assessment import assess_capacity
from distembed.reports.report import write_run_report
from distembed.tasks import TASKS, Task
from distembed.tasks.base import Outputs, Rows, Sums
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.config import load_config
from distembed.training.describe import describe
from distembed.training.inference import evaluate_split, load_training_state
from distembed.training.resume import load_run_config
from distembed.training.run import train_run
from distembed.training.start import RunOptions
from tests.ranks import run_on_ranks
from tests.small_runs import SIZES, config_values

# ------------------------------------------------------------------------------------------------- what users write


class SquaredError(Task):
    """Predicts the label itself, by its squared error."""

    batch_fields = ("labels",)
    outputs = ("predicted", "labels")
    reported_metrics = (ReportedMetric("rmse", "RMSE", better="lower"),)
    prediction_columns = ("prediction",)

    def step(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        predicted, labels = outputs.float(), batch["labels"]
        return ((predicted - labels) ** 2).sum(), {"predicted": predicted, "labels": labels}

    def metrics(self, rows: Rows) -> dict[str, float]:
        return {"rows": len(rows["labels"]), "rmse": float(np.sqrt(np.mean((rows["predicted"] - rows["labels"]) ** 2)))}

    def training_sums(self, outputs: Outputs) -> Outputs:
        squared = (outputs["predicted"] - outputs["labels"]).double() ** 2
        return {"squared": torch.stack([squared.sum(), torch.ones_like(squared).sum()])}

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        squared, num_rows = sums["squared"]
        return {"rmse": float(np.sqrt(squared / num_rows))}

    def predictions(self, rows: Rows) -> dict[str, np.ndarray]:
        return {"prediction": rows["predicted"]}

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return f"RMSE {metrics['rmse']:.4f}"

    describe_training = describe


@pydantic.dataclasses.dataclass(frozen=True)
class SquaredErrorConfig:
    name: Literal["squared_error"] = "squared_error"

    def build(self) -> Task:
        return SquaredError()


def register_task() -> dict[str, Any]:
    TASKS["squared_error"] = SquaredErrorConfig
    return {"task": {"name": "squared_error"}}


class ThreeCollections(Model):
    """Bags and sequences of compositional tables, and a collection of TorchRec's own, each of some features."""

    batch_fields = ("dense_features", "sparse_features")

    def __init__(self, inputs: ModelInputs, hidden: int) -> None:
        super().__init__()
        dim = inputs.embedding_dim
        self.bags, self.bag_names = inputs.pooled_embeddings(["C2", "C3"])
        self.history, _ = inputs.sequence_embeddings(["M"], suffix="_history")
        plain = EmbeddingBagConfig(
            name="plain", num_embeddings=SIZES["C1"], embedding_dim=dim, feature_names=["C1"], init_fn=_fill
        )
        self.plain = EmbeddingBagCollection(tables=[plain], device=torch.device("meta"))
        self.network = nn.Sequential(nn.Linear(inputs.num_dense + 4 * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        bags, plain = self.bags(sparse_features), self.plain(sparse_features)
        history = self.history(sparse_features)["M"].to_padded_dense(3).sum(1)
        vectors = [dense_features, *(bags[name] for name in self.bag_names), plain["C1"], history]
        return self.network(torch.cat(vectors, dim=1)).squeeze(1)


@torch.no_grad()
def _fill(weight: Tensor) -> Tensor:
    return weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))


@pydantic.dataclasses.dataclass(frozen=True)
class ThreeCollectionsConfig:
    name: Literal["three"] = "three"
    hidden: int = 8

    def build(self, inputs: ModelInputs) -> Model:
        return ThreeCollections(inputs, self.hidden)


def register_model() -> dict[str, Any]:
    MODELS["three"] = ThreeCollectionsConfig
    # AMSGrad, which FBGEMM has not: all three collections train by it
    amsgrad = {"name": "amsgrad", "learning_rate": 0.01}
    return {"model": {"name": "three", "hidden": 12}, "train": {"sparse_optimizer": amsgrad}}


REGISTER = {"task": register_task, "model": register_model}

# ------------------------------------------------------------------------------------------------------- what they get


def write_config(path: Path, dataset: Path, changes: Mapping[str, Any]) -> Path:
    values = config_values(dataset)
    for section, own in changes.items():
        values[section] = {**({} if "name" in own else values.get(section, {})), **own}
    path.write_text(yaml.safe_dump(values))
    return path


def train(rank: int, world_size: int, folder: Path, dataset: Path) -> None:
    """Registers one of each; trains an epoch with each, and evaluates what it has saved."""
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    for kind, register in REGISTER.items():
        file = write_config(folder / f"{kind}-{rank}-of-{world_size}.yaml", dataset, register())
        run = folder / f"{kind}-{world_size}"
        finished = train_run(load_config(file), RunOptions(run), ranks, None, lambda text: None)
        if world_size == 1:
            continue
        state, _ = load_training_state(run, str(dataset), load_run_config(run), ranks)
        again = evaluate_split(state, str(dataset), "test", ranks)
        if rank == 0:
            assert finished.evaluation is not None, kind
            assert again.pop("split") == "test"
            assert {key: finished.evaluation[key] for key in again} == pytest.approx(again, rel=1e-5), kind


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.thorough
@pytest.mark.distributed
def test_what_is_registered_outside_of_the_package_trains_on_two_ranks(tmp_path: Path, dataset: Path) -> None:
    """As on one rank, with metrics and a report of its own task."""
    for world_size in (2, 1):
        run_on_ranks(world_size, train, tmp_path, dataset)
    for kind in REGISTER:
        one, two = losses(tmp_path / f"{kind}-1"), losses(tmp_path / f"{kind}-2")
        assert one == pytest.approx(two, rel=1e-4) and len(one) == 31, kind
        assert np.mean(one[-5:]) < np.mean(one[:5]), f"{kind}: it learns"
        summaries = write_run_report([tmp_path / f"{kind}-1", tmp_path / f"{kind}-2"], tmp_path / "report.html")
        headings = [column.heading for column in report_columns(summaries)]
        assert ("RMSE" in headings) == (kind == "task") and ("AUC" in headings) == (kind != "task")
        evaluation = json.loads((tmp_path / f"{kind}-2" / "evaluation.json").read_text())
        assert evaluation[SquaredError().headline.name if kind == "task" else "auc"] > 0


@pytest.fixture
def _names_as_before() -> Iterator[None]:
    yield
    tables: list[NameTable[Any]] = [TASKS, MODELS]
    for names in tables:
        for name in names.added.copy():
            del names[name]


@pytest.mark.thorough
@pytest.mark.usefixtures("_names_as_before")
@pytest.mark.parametrize("kind", REGISTER)
def test_it_can_be_described_and_planned(kind: str, tmp_path: Path, dataset: Path) -> None:
    config = load_config(write_config(tmp_path / "config.yaml", dataset, REGISTER[kind]()))
    described = describe(config)
    tables = ["C2", "C3", "M_history", "plain"] if kind == "model" else list(SIZES)
    assert [table.config.name for table in described.tables] == tables
    assessment = assess_capacity(config, Cluster(find_device("cpu-256gb"), 1, 2))
    assert assessment.fits
    assert [table.name for table in assessment.tables] == tables
    for table in assessment.tables:
        num_copies = 2 if table.sharding_type == "data_parallel" else 1
        assert table.storage.weights == num_copies * table.one_copy.weights > 0
