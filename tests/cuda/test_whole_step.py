"""Whole training steps of every kind of model on pretended CUDA: from a reader's batch to a line of metrics.

The model is built, planned and sharded by the trainer's own functions, and stepped by TorchRec's pipeline; FBGEMM's
tables are stand-ins. After the first steps, in which constants are copied, only pinned batches are copied to the
device, and the host waits only for what :mod:`tests.cuda.must_wait` lists.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

from distembed.base.ranks import Ranks
from distembed.data.dataset.schema import ITEM_NEGATIVE, CategoricalFeature, Label
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sharding.collection import ShardedCompositionalEmbeddingCollection
from distembed.sse import SSE
from distembed.tasks.base import BatchPosition
from distembed.training.build import Blueprint, build_training_state
from distembed.training.config import load_config
from distembed.training.metrics_window import MetricsWindow
from distembed.training.pipeline import prepared_batch, split_reader
from tests.cuda.must_wait import WAITS, answered, copied_by_torchrec
from tests.cuda.pretend import CUDA, Refused, pretend_cuda
from tests.cuda.stand_ins import absent_ranks, stand_in_tables
from tests.interactions import prepare
from tests.small_runs import config_values, write_dataset
from tests.tasks.retrieval_rows import prepare_rows
from tests.training.test_click_models import with_history

BATCH_SIZE, NUM_NEGATIVES = 8, 2
FREE_STEPS, STRICT_STEPS = 4, 3
"""Steps in which constants are copied, by a pipeline that works ahead, and those under watch."""
MULTI = "task={name: multi, labels: {label: {positive_weight: 2.0}, buy: {after: label}}}"
TOWERS = "model={name: two_tower, item: film, item_features: [genres, price], user_tower: [12], item_tower: [8]}"


def sequences_by(loss: str) -> str:
    return f"task={{name: next_item, max_length: 8, num_negatives: {NUM_NEGATIVES}, loss: {loss}}}"


MODELS: dict[str, tuple[str, list[str]]] = {
    "dlrm": ("clicks", []),
    "dcn": ("clicks", ["model={name: dcn, deep: [16], num_cross_layers: 2}"]),
    "bf16": ("clicks", ["train.precision=bf16"]),
    "adam": ("clicks", ["train.dense_optimizer={name: adam, learning_rate: 0.01}"]),
    "paths": ("clicks", ["embedding.default.composition=path_mlp", "embedding.default.hidden=[4]"]),
    "adagrad": ("clicks", ["train.dense_optimizer={name: adagrad, learning_rate: 0.01}"]),
    "averages": ("clicks", ["train.ema={decay: 0.99}"]),
    "gradient limit": ("clicks", ["train.sparse_optimizer.max_gradient=0.01"]),
    "gradient limit of all rows": (
        "sequences",
        ["model={name: hstu}", sequences_by("softmax"), "train.sparse_optimizer.max_gradient=0.01"],
    ),
    "ple": ("labels", ["model={name: ple, deep: [16], tower: [8]}", MULTI]),
    "mmoe": ("labels", ["model={name: mmoe, deep: [16], tower: [8], num_experts: 2}", MULTI]),
    "esmm": ("labels", ["model={name: esmm, deep: [16], dropout: 0.1}", MULTI]),
    "din": ("histories", ["model={name: din, attention: [8], deep: [16]}"]),
    "din, last items": ("histories", ["model={name: din, attention: [8], deep: [16], history_length: 2}"]),
    "din, mean": ("histories", ["model={name: din, history: mean, history_length: 2, deep: [16]}"]),
    "din, transformer": ("histories", ["model={name: din, history: transformer, deep: [16]}"]),
    "hstu": ("sequences", ["model={name: hstu}", sequences_by("softmax")]),
    "hstu, times": ("sequences", ["model={name: hstu, times: time}", sequences_by("softmax")]),
    "sasrec, binary": ("sequences", ["model={name: sasrec, num_heads: 2}", sequences_by("binary")]),
    "gru, sampled": ("sequences", ["model={name: gru, hidden: 8}", sequences_by("sampled_softmax")]),
    "hstu, in batch": (
        "sequences",
        ["model={name: hstu}", sequences_by("sampled_softmax, negatives: in_batch")],
    ),
    "two towers": ("films", [TOWERS, "task={name: retrieval, cutoffs: [10]}"]),
    "two towers, sampled": (
        "films",
        [TOWERS, "task={name: retrieval, cutoffs: [10], loss: sampled, num_negatives: 6}"],
    ),
}
"""The dataset and the settings of each step."""


def with_buy(split: str, table: pa.Table) -> pa.Table:
    """Adds a second label, which rows without the first label lack."""
    buy = np.where(table["label"].to_numpy() == 1, table["I1"].to_numpy() > 0, np.nan)
    return table.append_column("buy", pa.array(buy, pa.float32(), from_pandas=True))


def write_labels(folder: Path) -> Path:
    return write_dataset(folder / "dataset", change=with_buy, label=None, labels=(Label("label"), Label("buy")))


def write_histories(folder: Path) -> Path:
    history = CategoricalFeature("H", 400, True, 2.0, table="C2")
    numbers = {"dense_sequences": ("G",), "beside": ("H",), "missing_dense": True}
    return write_dataset(folder / "dataset", change=with_history, more=[history], **numbers)


DATASETS: dict[str, Callable[[Path], Path]] = {
    "clicks": lambda folder: write_dataset(folder / "dataset"),
    "labels": write_labels,
    "histories": write_histories,
    "sequences": lambda folder: prepare("sequences", folder, "--time", "time", "--dense", "time"),
    "films": prepare_rows,
}


@pytest.fixture(scope="module")
def dataset_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function from the name of a dataset to its folder, which is written once."""
    return cache(lambda name: DATASETS[name](tmp_path_factory.mktemp(name)))


def take_steps(
    dataset: Path, folder: Path, overrides: list[str], num_ranks: int = 1, put_back: Any = None
) -> MetricsWindow:
    """Takes a rank's steps, the last of them under watch; ``put_back`` is called before those with a patch."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    config = load_config(folder / "config.yaml", [f"train.batch_size={BATCH_SIZE}", "train.precision=fp32", *overrides])
    ranks = Ranks(0, num_ranks, num_ranks, CUDA)
    is_strict, waited, window = False, [], MetricsWindow()
    num_steps = FREE_STEPS + STRICT_STEPS
    reader = split_reader(config, ranks, prefetch_batches=0)
    with ExitStack() as stack:
        stack.enter_context(absent_ranks(num_ranks))
        blueprint = Blueprint.for_ranks(config, reader.schema, ranks, {"C2": SSE(p0=0.5)})
        workload = blueprint.workload()  # estimated on fake tensors of its own
        stack.enter_context(stand_in_tables())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Blueprint, "workload", lambda blueprint: workload)
        # a collection without memory, on the meta device, says of itself too that it is on CUDA
        for sharded in (ShardedCompositionalEmbeddingBagCollection, ShardedCompositionalEmbeddingCollection):
            patch.setattr(sharded, "load_state_dict", lambda *given, **named: None)
        stack.enter_context(pretend_cuda(lambda origin: not is_strict or copied_by_torchrec(origin)))
        stack.enter_context(answered(lambda name: NUM_NEGATIVES if name == ITEM_NEGATIVE else 1, waited))
        state = build_training_state(blueprint, ranks, num_steps)
        state.task.start(blueprint.task_context(str(dataset), ranks))
        state.task.start_lines()
        batches = (
            prepared_batch(state.task, batch, BatchPosition(step, 0), CUDA)
            for step, batch in enumerate(islice(iter(reader), num_steps))
        )
        for step, (loss, outputs) in enumerate(state.pipeline.outputs(batches), start=1):
            assert loss.device == CUDA
            assert all(values.device == CUDA for values in outputs.values())
            window.add(loss, state.task.training_sums(outputs), BATCH_SIZE)
            state.averages.update(step)
            state.optimizers.set_learning_rates(step)
            if step == FREE_STEPS:
                is_strict = True
                waited.clear()
                if put_back is not None:
                    put_back(patch, state)
        assert set(waited) <= set(WAITS)
    return window


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "num_ranks"), [*((name, 2) for name in MODELS), ("dlrm", 1), ("hstu", 1), ("two towers, sampled", 1)]
)
def test_whole_steps_wait_for_nothing(
    name: str, num_ranks: int, dataset_of: Callable[[str], Path], tmp_path: Path
) -> None:
    dataset, settings = MODELS[name]
    window = take_steps(dataset_of(dataset), tmp_path, settings, num_ranks)
    assert window.rows == BATCH_SIZE * (FREE_STEPS + STRICT_STEPS)


def look_at_losses(patch: pytest.MonkeyPatch, state: Any) -> None:
    stock = MetricsWindow.add

    def add(window: MetricsWindow, loss: torch.Tensor, *others: Any) -> None:
        float(loss)
        stock(window, loss, *others)

    patch.setattr(MetricsWindow, "add", add)


def do_not_pin(patch: pytest.MonkeyPatch, state: Any) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor.clone())


def exchange_counts_in_the_step(patch: pytest.MonkeyPatch, state: Any) -> None:
    patch.setattr(state.task, "_on_hosts", None)


@pytest.mark.parametrize(
    ("put_back", "name", "num_ranks"),
    [
        (look_at_losses, "dlrm", 1),
        (do_not_pin, "dlrm", 1),
        pytest.param(exchange_counts_in_the_step, "hstu", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_wait_in_a_whole_step_is_refused(
    put_back: Any, name: str, num_ranks: int, dataset_of: Callable[[str], Path], tmp_path: Path
) -> None:
    dataset, settings = MODELS[name]
    with pytest.raises(Refused):
        take_steps(dataset_of(dataset), tmp_path, settings, num_ranks, put_back)
