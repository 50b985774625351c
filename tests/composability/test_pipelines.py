"""TorchRec's pipelines and ``torch.compile`` of a sharded model: with TorchRec's collection, and with ours."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import experimental_pipelines as experimental
from torchrec.distributed.train_pipeline import train_pipelines as pipelines
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.reader.batch import Batch
from tests.composability.stock import take_weights
from tests.composability.test_sharding import CPU, Head, both, make_plan
from tests.composability.test_variable_batches import draw
from tests.ranks import run_on_ranks
from tests.sharding.test_sharded_equals_unsharded import SIZES
from tests.versions import PREFETCH_ON_THE_CPU

RATE, NUM_STEPS = 0.1, 4
# traced and differentiated as for any backend, without a C++ compiler
COMPILED = pipelines.TorchCompileConfig(backend="aot_eager", compile_on_iter=0)
TRAINING: dict[str, Callable[..., Any]] = {
    "TrainPipelineBase": pipelines.TrainPipelineBase,
    "TrainPipelineSparseDist": pipelines.TrainPipelineSparseDist,
    "TrainPipelineSparseDistLite": pipelines.TrainPipelineSparseDistLite,
    "TrainPipelineSparseDistT": experimental.TrainPipelineSparseDistT,
    "TrainEvalHybridPipelineBase": experimental.TrainEvalHybridPipelineBase,
}
EVALUATING: dict[str, Callable[..., Any]] = {"EvalPipelineSparseDist": pipelines.EvalPipelineSparseDist}
FAILING: dict[str, tuple[Callable[..., Any], str]] = {
    "TrainPipelineFusedSparseDist": (pipelines.TrainPipelineFusedSparseDist, "unknown parameter type"),
    "TrainPipelineSemiSync": (pipelines.TrainPipelineSemiSync, "unknown parameter type"),
    "PrefetchTrainPipelineSparseDist": (pipelines.PrefetchTrainPipelineSparseDist, PREFETCH_ON_THE_CPU),
    "EvalPipelineFusedSparseDist": (pipelines.EvalPipelineFusedSparseDist, "unknown parameter type"),
    "EvalPipelineCPUSparse": (experimental.EvalPipelineCPUSparse, "pin_memory|Found no NVIDIA driver"),
}
"""What each says on the CPU, whose tensors have neither streams nor pinned memory; the last by torch's build."""


class Task(nn.Module):
    """The squared error of a head's outputs."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs = self.head(batch["sparse_features"])[0].squeeze(1)
        loss = nn.functional.mse_loss(outputs, batch["labels"])
        return loss, (loss.detach(), outputs.detach())


Trained = tuple[nn.Module, KeyedOptimizer]


def shard(make: Callable[[str], Head], sharder: ModuleSharder[Any]) -> Trained:
    """The sharded model with the unsharded one's weights, and its optimizer; all ranks call it."""
    task = Task(make("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, task.head.embeddings.parameters(), {"lr": RATE})
    plan = ShardingPlan({"head.embeddings": make_plan(task.head, sharder).plan["embeddings"]})
    model = DistributedModelParallel(task, device=CPU, plan=plan, sharders=[sharder])
    take_weights(model.module.module if hasattr(model.module, "module") else model.module, Task(make("cpu")))
    others = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(others, lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def make_batches(features: KeyedJaggedTensor) -> list[Batch]:
    """The same rows in each step, new as a reader's, with other labels."""
    keys, num_rows = list(range(len(features.keys()))), features.stride()
    labels = torch.arange(num_rows).float()
    return [
        Batch({"sparse_features": features.permute(keys), "labels": labels + i}, num_rows) for i in range(NUM_STEPS)
    ]


def train(model: nn.Module, optimizer: KeyedOptimizer, batches: Sequence[Batch]) -> list[Tensor]:
    """The loss of each step."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, (detached, _) = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(detached)
    return losses


def run(pipeline: Any, batches: Sequence[Batch]) -> list[Tensor]:
    """The loss of each step of a pipeline."""
    remaining = iter(batches)
    return [pipeline.progress(remaining)[0] for _ in batches]


def check_training(rank: int, world_size: int) -> None:
    for make, sharder, features in both():
        batches = make_batches(features)
        expected = train(*shard(make, sharder), batches)
        assert expected[0] != expected[1]
        for name, pipeline in TRAINING.items():
            losses = run(pipeline(*shard(make, sharder), CPU), batches)
            torch.testing.assert_close(losses, expected, msg=f"{make.__name__}, {name}: {losses}, not {expected}")
        model, optimizer = shard(make, sharder)
        model.eval()
        with torch.no_grad():
            outputs = [model(batch)[1][0] for batch in batches]
            for pipeline in EVALUATING.values():
                assert torch.equal(torch.stack(run(pipeline(model, optimizer, CPU), batches)), torch.stack(outputs))


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_pipelines_that_stock_runs_on_the_cpu_take_the_steps_of_a_plain_loop(world_size: int) -> None:
    run_on_ranks(world_size, check_training)


def check_failures(rank: int, world_size: int) -> None:
    said: dict[str, set[str]] = {name: set() for name in FAILING}
    for make, sharder, features in both():
        batches = make_batches(features)
        for name, (pipeline, message) in FAILING.items():
            model, optimizer = shard(make, sharder)
            is_evaluating = name.startswith("Eval")
            model.train(not is_evaluating)
            with torch.no_grad() if is_evaluating else contextlib.nullcontext():
                with pytest.raises((RuntimeError, AssertionError), match=message) as failed:
                    pytest.fail(f"{name} works: {run(pipeline(model, optimizer, CPU), batches)}")
            said[name].add(f"{failed.type.__name__}: {failed.value}")
    assert all(len(texts) == 1 for texts in said.values()), said


@pytest.mark.distributed
def test_pipelines_that_stock_cannot_run_on_the_cpu_fail_in_the_same_way() -> None:
    run_on_ranks(1, check_failures)


def check_compiled(rank: int, world_size: int) -> None:
    for make, sharder, features in both():
        batches = make_batches(features)[:2]  # the second in the graphs of the first
        expected = train(*shard(make, sharder), batches)
        torch._dynamo.utils.counters.clear()
        pipeline = pipelines.TrainPipelinePT2(*shard(make, sharder), CPU, compile_configs=COMPILED)
        torch.testing.assert_close(run(pipeline, batches), expected)
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0
        model, _ = shard(make, sharder)
        torch._dynamo.reset()
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Dynamo does not know how to trace method"):
            whole(batches[0])
        torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiled_sharded_model_trains_as_an_uncompiled_one(world_size: int) -> None:
    """By the pipeline that calls ``model.compile``, in several graphs: TorchRec's own logging cannot be traced."""
    run_on_ranks(world_size, check_compiled)


def check_variable_batches(rank: int, world_size: int) -> None:
    (make, sharder, _) = both()[1]
    batches = []
    for step in range(NUM_STEPS):
        features = draw(SIZES, 4 + rank, torch.Generator().manual_seed(2 * step + rank), weighted=False)
        batches.append(Batch({"sparse_features": features, "labels": torch.ones(4 + rank)}, 4 + rank))
    expected = train(*shard(make, sharder), batches)
    losses = run(pipelines.TrainPipelineSparseDist(*shard(make, sharder), CPU), batches)
    torch.testing.assert_close(losses, expected)


@pytest.mark.distributed
def test_a_pipeline_takes_a_batch_size_for_each_feature() -> None:
    run_on_ranks(2, check_variable_batches)
