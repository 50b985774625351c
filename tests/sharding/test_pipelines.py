"""The sharded collection in TorchRec's pipelines: the losses of plain steps, and of the unsharded model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks, process_group
from distembed.data.reader.batch import Batch
from distembed.embedding import CompositionalEmbeddingBagCollection
from distembed.models.layers import MLP
from distembed.planning import PlanConfig, Workload, make_plan
from distembed.planning.config import TablePlanConfig
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.table_slice import width
from distembed.tasks import ClickTask
from distembed.training.pipeline import StepOutput, TaskModel
from tests.ranks import check_cases, run_on_ranks
from tests.sharding.test_sharded_equals_unsharded import (
    SHARDING_TYPES,
    check_weights,
    draw,
    part,
    sharding_types_of,
    tables,
)

CPU = torch.device("cpu")
PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite)
ROWS, NUM_DENSE, RATE = 7, 3, 0.3
SPLITS = [2, 0, 7, 3, 4]
"""Rows of each of the five steps that are the first rank's; the second has the others."""


PLANS: dict[Any, ShardingPlan] = {}
"""Plans that this process has made: a plan takes longer than the steps of a model."""


class Clicks(nn.Module):
    """All compositions, and a network over their vectors and dense features."""

    batch_fields = ("dense_features", "sparse_features")

    def __init__(self, tables_on: str, weighted: bool) -> None:
        super().__init__()
        # maxima go with no weights
        used = [table for table in tables() if not (weighted and table.pooling == "max")]
        self.embeddings = CompositionalEmbeddingBagCollection(used, device=tables_on, is_weighted=weighted)
        torch.manual_seed(0)
        num_inputs = NUM_DENSE + sum(width(table) * len(table.feature_names) for table in used)
        self.network = MLP(num_inputs, [16, 1], last_is_linear=True)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        return self.network(torch.cat([dense, self.embeddings(features).values()], dim=1)).squeeze(1)


def task(tables_on: str, world_size: int, weighted: bool = False, device: torch.device = CPU) -> TaskModel:
    """The model with its loss, the network on the device."""
    model = Clicks(tables_on, weighted)
    model.network.to(device)
    return TaskModel(model, ClickTask(), world_size, device, bf16=False)


def shard(
    model: nn.Module,
    kind: str,
    device: torch.device = CPU,
    fused_params: dict[str, Any] | None = None,
    kernel: str | None = None,
) -> DistributedModelParallel:
    """The tables placed in one way, or ``mixed`` in all ways in turn; they are trained by a fused SGD."""
    collection = model.get_submodule("model.embeddings")
    vectors = collection.get_submodule("embedding_bags").parameters()
    apply_optimizer_in_backward(torch.optim.SGD, vectors, {"lr": RATE})
    kinds = SHARDING_TYPES if kind == "mixed" else [kind]
    own = {
        table.name: TablePlanConfig(sharding_types_of(table, kinds[i % len(kinds)]), min_partition=4)
        for i, table in enumerate(collection.tables())
    }
    sharders = [CompositionalEmbeddingBagCollectionSharder(fused_params, host_memory=kernel == "fused_uvm_caching")]
    world_size = dist.get_world_size()
    key = (kind, kernel, device, *own)
    if key not in PLANS:
        ranks = Ranks(dist.get_rank(), world_size, world_size, device)
        PLANS[key] = make_plan(model, sharders, ranks, Workload(ROWS * world_size), config=PlanConfig(tables=own))
    plan = PLANS[key]
    if kernel is not None:
        for placed in plan.plan["model.embeddings"].values():
            placed.compute_kernel = kernel
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=sharders)


def optimizer_of(model: DistributedModelParallel) -> KeyedOptimizer:
    others = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(others, lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    return CombinedOptimizer([model.fused_optimizer, dense])


def draw_batches(bags: str, count: int = len(SPLITS)) -> list[Batch]:
    """Global batches."""
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            {
                "dense_features": torch.randn(ROWS, NUM_DENSE, generator=generator),
                "sparse_features": draw(ROWS, bags, generator),
                "labels": torch.randint(0, 2, (ROWS,), generator=generator).float(),
            },
            global_batch_size=ROWS,
        )
        for _ in range(count)
    ]


def rows_of_rank(batch: Batch, rank: int, split: int) -> Batch:
    rows = (slice(0, split), slice(split, ROWS))[rank]
    own = {name: batch[name][rows] for name in ("dense_features", "labels")}
    return Batch({**own, "sparse_features": part(batch["sparse_features"], rows.start, rows.stop)}, ROWS)


def losses_of(outputs: Iterable[StepOutput]) -> list[float]:
    """Of the global batches, from each rank's share times the number of ranks; all ranks call it."""
    shares = torch.stack([loss for loss, _ in outputs])
    if dist.get_world_size() > 1:
        dist.all_reduce(shares)
    return (shares / dist.get_world_size()).tolist()


def run(pipeline: Any, batches: Sequence[Batch]) -> list[StepOutput]:
    """Steps through all batches, which leaves the pipeline empty."""
    remaining = iter(batches)
    outputs = [pipeline.progress(remaining) for _ in batches]
    if isinstance(pipeline, TrainPipelineBase):
        pipeline.reset()
    return outputs


def train_unsharded(batches: Sequence[Batch], weighted: bool) -> tuple[TaskModel, list[float]]:
    model = task("cpu", 1, weighted)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def check_pipelines(rank: int, world_size: int, kind: str, bags: str) -> None:
    weighted = bags == "weighted"
    batches = draw_batches(bags)
    own = [rows_of_rank(batch, rank, split) for batch, split in zip(batches, SPLITS, strict=True)]
    reference, expected = train_unsharded(batches, weighted)
    with torch.no_grad():
        _, (_, unsharded) = reference(batches[0])
    curves = []
    for make in PIPELINES:
        model = shard(task("meta", 2, weighted), kind)
        pipeline = make(model, optimizer_of(model), CPU)
        curves.append(losses_of(run(pipeline, own)))
        check_weights(model, reference)
        model.eval()
        with torch.no_grad():
            ((_, outputs),) = run(pipeline, own[:1])
        torch.testing.assert_close(outputs["logits"], unsharded["logits"][:2] if rank == 0 else unsharded["logits"][2:])
        check_weights(model, reference)
    assert curves[0] == pytest.approx(expected, rel=1e-5)
    # in the same order, to the last bit
    assert curves[1] == curves[0] and curves[2] == curves[0]


SOME = [("mixed", "ragged"), ("mixed", "weighted")]
ALL = [*((kind, "ragged") for kind in SHARDING_TYPES), ("mixed", "single"), ("mixed", "weighted")]


def check_all_pipelines(rank: int, world_size: int, cases: list[tuple[str, str]]) -> None:
    check_cases(rank, world_size, check_pipelines, cases)
    for bags in ("ragged",) if cases == SOME else ("ragged", "single", "weighted"):
        check_prefetched(rank, bags)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_pipeline_takes_the_steps_of_the_unsharded_model(cases: list[tuple[str, str]]) -> None:
    run_on_ranks(2, check_all_pipelines, cases)
    run_on_ranks(1, check_compiled)


def check_prefetched(rank: int, bags: str) -> None:
    """What is prefetched is what is looked up later, also where the next batch is prefetched before that.

    Of tables in host memory the large partitions are: small ones beside them stay on the device. A CPU has no cache,
    but all else of it.
    """
    model = shard(task("meta", 2, bags == "weighted"), "mixed", kernel="fused_uvm_caching")
    module = model.module.get_submodule("model.embeddings")
    inputs = []
    for batch in draw_batches(bags, 3):
        features = rows_of_rank(batch, rank, 3)["sparse_features"]
        inputs.append(module.input_dist(module.create_context(), features).wait().wait())
    for of_rank, *held in zip(module._lookups, *inputs, strict=True):
        cached = [require_small_on_device(kernel.config) for kernel in of_rank._emb_modules]
        looked_up, prefetched = record_requests(of_rank)
        with torch.no_grad():
            expected = [of_rank(features) for features in held]
        lookups_of_batch = len(looked_up) // len(held)
        assert not prefetched
        first, second, third = held
        with torch.no_grad():
            of_rank.prefetch(first)
            of_rank.prefetch(second)
            outputs = [of_rank(first)]
            of_rank.prefetch(third)
            # once more, as an evaluation between two steps might: it takes nothing of what waits for the others
            outputs += [of_rank(first), of_rank(second), of_rank(third)]
        for output, wanted in zip(outputs, [expected[0], *expected], strict=True):
            assert torch.equal(output, wanted)
        assert len(looked_up) == 7 * lookups_of_batch
        used_first = [request for request in looked_up[: 3 * lookups_of_batch] if cached[request[0]]]
        assert len(prefetched) == len(used_first) == 3 * sum(cached)
        for asked, used in zip(prefetched, used_first, strict=True):
            assert asked[0] == used[0]
            assert torch.equal(asked[1], used[1]) and torch.equal(asked[2], used[2])


SMALL = {"a__p1", "ab__p0", "hi__p1", "l__p1", "u__p1"}
"""Partitions with less than a fifth of the numbers that the largest of their table has."""


def require_small_on_device(config: GroupedEmbeddingConfig) -> bool:
    """Raises unless small partitions alone stay in device memory; returns whether those of a TBE are cached."""
    kernels = {table.name: table.compute_kernel.value for table in config.embedding_tables}
    assert kernels == {name: "fused" if name in SMALL else "fused_uvm_caching" for name in kernels}
    assert len(set(kernels.values())) == 1
    return not kernels.keys() & SMALL


Requests = list[tuple[int, Tensor, Tensor]]


def record_requests(of_rank: nn.Module) -> tuple[Requests, Requests]:
    """What is asked of each of the lookup's TBEs, now and in advance: its number, rows, offsets."""
    looked_up: Requests = []
    prefetched: Requests = []
    for i, kernel in enumerate(of_rank._emb_modules):
        tbe = kernel.emb_module
        tbe.register_forward_pre_hook(_recorder(i, looked_up), with_kwargs=True)
        tbe.prefetch = _prefetch_recorder(i, prefetched)
    return looked_up, prefetched


def _recorder(number: int, requests: Requests) -> Callable[..., None]:
    def record(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        requests.append((number, keywords["indices"], keywords["offsets"]))

    return record


def _prefetch_recorder(number: int, requests: Requests) -> Callable[..., None]:
    def prefetch(indices: Tensor, offsets: Tensor, forward_stream: Any) -> None:
        requests.append((number, indices, offsets))

    return prefetch


def check_compiled(rank: int, world_size: int) -> None:
    """Compiled networks between lookups and loss train as those that are not."""
    batches = draw_batches("ragged")
    _, expected = train_unsharded(batches, weighted=False)
    unsharded = task("meta", 1)
    # traced and differentiated as for any backend, without a C++ compiler
    unsharded.model.network = torch.compile(unsharded.model.network, backend="aot_eager")
    model = shard(unsharded, "mixed")
    pipeline = TrainPipelineSparseDist(model, optimizer_of(model), CPU)
    assert losses_of(run(pipeline, batches)) == pytest.approx(expected, rel=1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_rows_prefetched_from_host_memory_train_as_those_on_the_device(kind: str) -> None:
    # in fewer slots than there are rows, so that rows come and go
    cached = {"cache_load_factor": 0.2, "prefetch_pipeline": True}
    with process_group("cuda") as processes:
        batches = draw_batches("ragged", 12)
        curves, weights = [], []
        for make, kernel, fused_params in [
            (TrainPipelineBase, "fused", {}),
            (PrefetchTrainPipelineSparseDist, "fused_uvm_caching", cached),
        ]:
            model = shard(task("meta", 1, device=processes.device), kind, processes.device, dict(fused_params), kernel)
            pipeline = make(model, optimizer_of(model), processes.device)
            curves.append(losses_of(run(pipeline, batches)))
            weights.append([tensor for value in model.state_dict().values() for tensor in local_tensors(value)])
        # not to the last bit: atomic additions come in any order
        assert curves[1] == pytest.approx(curves[0], rel=1e-5)
        for from_host, on_device in zip(weights[1], weights[0], strict=True):
            torch.testing.assert_close(from_host, on_device)


def local_tensors(value: Any) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
