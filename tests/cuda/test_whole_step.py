"""Whole training steps on pretended CUDA, as the trainer takes them: from a reader's batch to a line of metrics.

The model is built, planned and sharded by the trainer's own functions, and stepped by TorchRec's pipeline; FBGEMM's
tables are stand-ins. After the first steps, in which constants are copied, only pinned batches are copied to the
device, and the host waits only for what :mod:`tests.cuda.must_wait` lists.
"""

from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

from distembed.base.ranks import Ranks
from distembed.data.dataset.schema import Label
from distembed.data.reader import BatchOrder, BatchReader, Decoding
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sse import SSE
from distembed.tasks.base import BatchPosition
from distembed.training.build import Blueprint, build_training_state
from distembed.training.config import load_config
from distembed.training.metrics_window import MetricsWindow
from distembed.training.pipeline import prepared_batch
from tests.cuda.must_wait import WAITS, answered, copied_by_torchrec
from tests.cuda.pretend import CUDA, Refused, pretend_cuda
from tests.cuda.stand_ins import absent_ranks, stand_in_tables
from tests.small_runs import config_values, write_dataset

FREE_STEPS, STRICT_STEPS = 4, 3
"""Steps in which constants are copied, by a pipeline that works ahead, and those under watch."""
MODELS: dict[str, list[str]] = {
    "dlrm": [],
    "dcn": ["model={name: dcn, deep: [16], num_cross_layers: 2}"],
    "ple": [
        "model={name: ple, deep: [16], tower: [8]}",
        "task={name: multi, labels: {label: {positive_weight: 2.0}, buy: {after: label}}}",
    ],
    "bf16": ["train.precision=bf16"],
    "adam": ["train.dense_optimizer={name: adam, learning_rate: 0.01}"],
    "paths": ["embedding.default.composition=path_mlp", "embedding.default.hidden=[4]"],
    "adagrad": ["train.dense_optimizer={name: adagrad, learning_rate: 0.01}"],
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("whole") / "dataset")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with two labels, of which rows without the first lack the second."""

    def with_buy(split: str, table: pa.Table) -> pa.Table:
        buy = np.where(table["label"].to_numpy() == 1, table["I1"].to_numpy() > 0, np.nan)
        return table.append_column("buy", pa.array(buy, pa.float32(), from_pandas=True))

    folder = tmp_path_factory.mktemp("labelled") / "dataset"
    return write_dataset(folder, change=with_buy, label=None, labels=(Label("label"), Label("buy")))


def take_steps(dataset: Path, folder: Path, overrides: list[str], put_back: Any = None) -> MetricsWindow:
    """Takes steps, the last of them under watch; ``put_back`` is called before those with a patch."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    config = load_config(folder / "config.yaml", ["train.batch_size=64", "train.precision=fp32", *overrides])
    ranks = Ranks(0, 1, 1, CUDA)
    is_strict, waited, window = False, [], MetricsWindow()
    num_steps = FREE_STEPS + STRICT_STEPS
    reader = BatchReader(dataset, "train", BatchOrder(64, seed=0), prefetch_batches=0, decoding=Decoding(pins=True))
    blueprint = Blueprint.for_ranks(config, reader.schema, ranks, {"C2": SSE(p0=0.5)})
    workload = blueprint.workload()  # estimated on fake tensors of its own
    with ExitStack() as stack:
        stack.enter_context(absent_ranks(1))
        stack.enter_context(stand_in_tables())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Blueprint, "workload", lambda blueprint: workload)
        # a collection without memory, on the meta device, says of itself too that it is on CUDA
        patch.setattr(ShardedCompositionalEmbeddingBagCollection, "load_state_dict", lambda *given, **named: None)
        stack.enter_context(pretend_cuda(lambda origin: not is_strict or copied_by_torchrec(origin)))
        stack.enter_context(answered(lambda name: 1, waited))
        state = build_training_state(blueprint, ranks, num_steps)
        state.task.start(blueprint.task_context(str(dataset), ranks))
        batches = (
            prepared_batch(state.task, batch, BatchPosition(step, 0), CUDA)
            for step, batch in enumerate(islice(iter(reader), num_steps))
        )
        for step, (loss, outputs) in enumerate(state.pipeline.outputs(batches), start=1):
            assert loss.device == CUDA
            assert all(values.device == CUDA for values in outputs.values())
            window.add(loss, state.task.training_sums(outputs), 64)
            state.optimizers.set_learning_rates(step)
            if step == FREE_STEPS:
                is_strict = True
                waited.clear()
                if put_back is not None:
                    put_back(patch, state)
        assert set(waited) <= set(WAITS)
    return window


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_whole_steps_wait_for_nothing(name: str, dataset: Path, labelled: Path, tmp_path: Path) -> None:
    window = take_steps(labelled if name == "ple" else dataset, tmp_path, MODELS[name])
    assert window.rows == 64 * (FREE_STEPS + STRICT_STEPS)


def look_at_losses(patch: pytest.MonkeyPatch, state: Any) -> None:
    stock = MetricsWindow.add

    def add(window: MetricsWindow, loss: torch.Tensor, *others: Any) -> None:
        float(loss)
        stock(window, loss, *others)

    patch.setattr(MetricsWindow, "add", add)


def do_not_pin(patch: pytest.MonkeyPatch, state: Any) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor.clone())


@pytest.mark.parametrize("put_back", [look_at_losses, do_not_pin], ids=lambda way: way.__name__)
def test_a_wait_in_a_whole_step_is_refused(put_back: Any, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        take_steps(dataset, tmp_path, [], put_back)
