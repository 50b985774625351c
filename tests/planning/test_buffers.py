"""Estimated bytes of buffers and activations against those of the tensors that are alive at a step's fullest moment.

Measured by following every storage from the operator that returns it to its end, on real tensors and real ranks; the
bytes are the same in every run.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.base.ranks import Ranks
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.embedding.settings import QuantizedCommsConfig, VectorExchange
from distembed.models import DCNConfig, DLRMConfig, ModelInputs, SoftOneHotConfig
from distembed.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.optimizers import Optimizers, fuse_sparse_optimizer
from distembed.planning.buffers import Step, StepBuffers
from distembed.planning.networks import NetworkEstimate, estimate_network
from distembed.planning.request import Workload
from distembed.sharding import default_sharders, limit_gradients
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.tasks import ClickTask
from distembed.training.pipeline import StepPipeline, TaskModel
from tests.ranks import run_on_ranks

NUM_DENSE, NUM_FEATURES, NUM_IDS = 13, 8, 20_000
MODELS = {
    "dlrm": DLRMConfig(bottom=[128, 64], top=[128, 64]),
    "dcn": DCNConfig(deep=[128, 64], num_cross_layers=3),
    "dlrm, soft one-hot": DLRMConfig(top=[128, 64], dense="soft_one_hot", soft_one_hot=SoftOneHotConfig(bins=32)),
    "dcn, soft one-hot": DCNConfig(deep=[128, 64], num_cross_layers=3, dense="both"),
}
LEAST, MOST, MOST_OF_KNOWN_MISS = 0.9, 1.2, 1.25
"""Of the measured bytes. One case is estimated 1.22 times too large: a path beside long bags, of 64 columns."""


class Alive(TorchDispatchMode):
    """Bytes of all storages that operators have returned and that still exist.

    No operator returns the copy of its input in which gloo sums for a reduce-scatter: it is added while that runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if "reduce_scatter" in func.name():
            tensors = [own for own in tree_leaves(args) if isinstance(own, Tensor)]
            self.peak = max(self.peak, self.bytes + max(own.numel() * own.itemsize for own in tensors))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.follow(tensor.untyped_storage())
        return returned

    def follow(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self.sizes:
            self.sizes[address] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, address, None)
            self.peak = max(self.peak, self.bytes)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Case:
    layouts: tuple[str, ...]
    composition: str = "product"
    is_multi_hot: bool = False
    model: str = "dlrm"
    dim: int = 32
    partition: str = "quotient_remainder"
    pooling: str = "sum"
    sparse: str = "row_wise_adagrad"
    dense: str = "adagrad"
    bf16: bool = False
    batch_size: int = 640
    """Rows on all ranks."""
    multi_hot: tuple[int, ...] = tuple(range(NUM_FEATURES))
    """Which features have bags, where there are any."""
    mean: float = 5.0
    """Ids of a bag: from 1, or from 0 where they are 1 on average."""
    data_type: str = "fp32"
    exchange: VectorExchange = VectorExchange()
    max_gradient: float | None = None

    def has_bags(self, feature: int) -> bool:
        return self.is_multi_hot and feature in self.multi_hot

    @property
    def schema(self) -> Schema:
        means = [self.mean if self.has_bags(i) else 1.0 for i in range(NUM_FEATURES)]
        features = [CategoricalFeature(f"C{i}", NUM_IDS, self.has_bags(i), mean) for i, mean in enumerate(means)]
        return Schema("label", tuple(f"I{i}" for i in range(NUM_DENSE)), tuple(features))

    @property
    def embedding(self) -> EmbeddingConfig:
        settings = {"partition": self.partition, "composition": self.composition, "pooling": self.pooling}
        settings |= {"data_type": self.data_type}
        return EmbeddingConfig(default=TableConfig(**settings, embedding_dim=self.dim, threshold=0, force=True))  # type: ignore[arg-type]


def batches(case: Case, rank: int, num_rows: int, count: int) -> Iterator[Batch]:
    rng = np.random.default_rng(rank)
    for _ in range(count):
        least = 0 if case.mean == 1.0 else 1
        of_features = [
            rng.integers(least, 2 * case.mean - least + 1, num_rows) if case.has_bags(i) else np.ones(num_rows)
            for i in range(NUM_FEATURES)
        ]
        lengths = np.concatenate(of_features)
        ids = rng.integers(0, NUM_IDS, int(lengths.sum()))
        features = KeyedJaggedTensor(
            list(case.schema.categorical_names),
            torch.from_numpy(ids).clone(),
            lengths=torch.from_numpy(lengths).int(),
            stride=num_rows,
        )
        fields = {"dense_features": torch.zeros(num_rows, NUM_DENSE), "labels": torch.zeros(num_rows)}
        yield Batch({**fields, "sparse_features": features}, case.batch_size)


def sharded(case: Case, world_size: int) -> tuple[DistributedModelParallel, Optimizers]:
    cpu = torch.device("cpu")
    model = MODELS[case.model].build(ModelInputs.from_config(case.schema, case.embedding))
    sparse = SparseOptimizerConfig(name=case.sparse)  # type: ignore[arg-type]
    fuse_sparse_optimizer(model.get_submodule("embeddings.embedding_bags").parameters(), sparse, cpu)
    task, sharders = (
        TaskModel(model, ClickTask(), world_size, cpu, case.bf16),
        default_sharders(exchange=case.exchange),
    )
    constraints = {
        name: ParameterConstraints(sharding_types=[layout], min_partition=8)
        for name, layout in zip(case.schema.categorical_names, itertools.cycle(case.layouts), strict=False)
    }
    local_world_size = get_local_size(world_size)
    topology = Topology(world_size=world_size, local_world_size=local_world_size, compute_device="cpu", ddr_cap=2**40)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(task, sharders, dist.group.WORLD)  # type: ignore[arg-type]
    if not sparse.is_fused:
        for placed in plan.plan["model.embeddings"].values():  # type: ignore[attr-defined]
            placed.compute_kernel = "dense"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dmp = DistributedModelParallel(
        task, env=env, device=cpu, plan=plan, sharders=sharders, init_data_parallel=world_size > 1
    )
    if case.max_gradient is not None:
        limit_gradients(dmp, case.max_gradient)
    return dmp, Optimizers(dmp, DenseOptimizerConfig(name=case.dense), sparse, num_steps=10)  # type: ignore[arg-type]


def local_bytes(value: object) -> int:
    if hasattr(value, "local_shards"):
        return sum(local_bytes(shard.tensor) for shard in value.local_shards())
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def measured(case: Case, rank: int, world_size: int) -> tuple[int, DistributedModelParallel]:
    """Bytes at the fullest moment of a step, without weights, buffers and states; and the model.

    The most of several steps, whatever their timing.
    """
    num_rows = case.batch_size // world_size
    with Alive() as alive:
        model, optimizers = sharded(case, world_size)
        processes = Ranks(rank, world_size, world_size, torch.device("cpu"))
        pipeline = StepPipeline(model, optimizers.combined, processes)
        outputs = pipeline.outputs(batches(case, rank, num_rows, 7))
        peaks = []
        for _ in outputs:
            peaks.append(alive.peak)
            alive.peak = alive.bytes
    states = optimizers.combined.state_dict()["state"].values()
    kept = sum(local_bytes(value) for of_parameter in states for value in of_parameter.values())
    networks = [buffer for name, buffer in model.named_buffers() if ".embeddings." not in name]
    # the first steps make states, and gradients' buckets in their final order; at the end the pipeline runs empty
    return max(peaks[2:-2]) - kept - sum(map(local_bytes, [*model.state_dict().values(), *networks])), model


def estimated(case: Case, rank: int, world_size: int, model: nn.Module) -> StepBuffers:
    (module,) = [m for m in model.modules() if isinstance(m, ShardedCompositionalEmbeddingBagCollection)]
    network = network_of(case, case.batch_size // world_size, world_size > 1)
    placements, workload = list(module._placements.values()), workload_of(case, network)
    return Step(placements, world_size, workload, TableOptimizers(), "cpu", {"": case.exchange}).buffers(rank)


def workload_of(case: Case, network: NetworkEstimate) -> Workload:
    ids_per_row = {feature.name: feature.mean_ids_per_row for feature in case.schema.categorical}
    multi_hot = {feature.name for feature in case.schema.categorical if feature.multi_hot}
    return Workload(case.batch_size, ids_per_row, multi_hot, NUM_DENSE, network)


def network_of(case: Case, num_rows: int, averages: bool) -> NetworkEstimate:
    inputs, model = ModelInputs.from_config(case.schema, case.embedding), MODELS[case.model]
    network = estimate_network(model, inputs, ClickTask(), num_rows, case.dense, case.bf16, 2 if averages else 1)
    assert network is not None
    return network


def check(rank: int, world_size: int, cases: list[Case]) -> None:
    torch.manual_seed(0)
    wrong = []
    for case in cases:
        found, model = measured(case, rank, world_size)
        expected = estimated(case, rank, world_size, model)
        most = MOST_OF_KNOWN_MISS if case == KNOWN_MISS else MOST
        if not LEAST <= expected.total / found <= most:
            wrong.append(f"{expected.total / found:.3f}: estimated {expected}, measured {found}, {case}")
    assert not wrong, "\n".join([f"rank {rank} of {world_size}", *wrong])


LAYOUTS = ("table_wise", "column_wise", "row_wise", "data_parallel")
COMPOSITIONS = ("product", "concat", "path_mlp")
CASES = [
    Case((layout,), composition, is_multi_hot, model)
    for (layout, composition, is_multi_hot), model in zip(
        itertools.product(LAYOUTS, COMPOSITIONS, (False, True)), itertools.cycle(("dlrm", "dcn", "dcn")), strict=False
    )
    # a function needs whole vectors
    if (layout, composition) != ("column_wise", "path_mlp")
]
MIXED_CASES = [
    Case(("table_wise", "data_parallel"), max_gradient=1e-3),
    # of some features and not of others, in either order, and bags that are short or empty
    Case(("table_wise",), is_multi_hot=True, multi_hot=(7,), mean=20.0),
    Case(("table_wise",), is_multi_hot=True, multi_hot=(0, 1, 2, 3), mean=3.0),
    Case(("table_wise",), is_multi_hot=True, multi_hot=(4, 5, 6, 7), mean=3.0),
    Case(("row_wise",), is_multi_hot=True, multi_hot=(4, 5, 6, 7), mean=3.0),
    Case(("table_wise", "data_parallel"), is_multi_hot=True, mean=1.0),
    Case(("table_wise",), "path_mlp", is_multi_hot=True, multi_hot=(7,), mean=20.0),
]
KNOWN_MISS = replace(MIXED_CASES[-1], batch_size=2048, dim=64)
OTHER_CASES = [
    Case(("table_wise", "row_wise", "data_parallel"), is_multi_hot=True),
    Case(("table_wise", "column_wise"), "concat", True, "dcn", bf16=True),
    Case(("table_wise",), is_multi_hot=True, partition="chinese_remainder"),
    Case(("row_wise",), is_multi_hot=True, partition="chinese_remainder", dim=64),
    Case(("data_parallel",), is_multi_hot=True, partition="chinese_remainder"),
    Case(("table_wise",), is_multi_hot=True, pooling="max"),
    Case(("table_wise",), "concat", True, pooling="mean", sparse="adagrad", dense="adam"),
    Case(("table_wise",), "feature", True),
    Case(("table_wise",), "path_linear", True),
    Case(("table_wise", "data_parallel"), "weighted_sum", True),
    Case(("row_wise",), "weighted_sum", True, partition="multi_hash"),
    Case(("table_wise", "data_parallel"), "tensor_train", True),
    Case(("row_wise",), "tensor_train"),
    Case(("table_wise",), is_multi_hot=True, partition="multi_hash"),
    Case(("table_wise", "row_wise"), "concat", True, partition="truncated"),
    Case(("table_wise",), sparse="amsgrad", dense="adam", bf16=True),
    Case(("data_parallel",), sparse="amsgrad", dense="sgd"),
    Case(("table_wise",), model="dlrm, soft one-hot"),
]
HALF_CASES = [
    Case((layout,), dim=64, data_type=data_type, exchange=exchange, sparse=sparse)
    for layout, sparse in (
        ("table_wise", "adagrad"),
        ("column_wise", "adagrad"),
        ("row_wise", "row_wise_adagrad"),
        ("data_parallel", "row_wise_adagrad"),
    )
    for data_type, exchange in (
        ("fp16", VectorExchange()),
        ("fp16", VectorExchange("fp16")),
        ("fp16", VectorExchange("bf16")),
        ("fp16", VectorExchange(comms=QuantizedCommsConfig("fp16", "bf16"))),
        ("fp16", VectorExchange(comms=QuantizedCommsConfig(forward_precision="fp16"))),
    )
    if layout != "data_parallel" or exchange == VectorExchange()
]
HALF_CASES += [Case(("table_wise",), dim=64, exchange=VectorExchange(comms=QuantizedCommsConfig("int8", "int8")))]
HALF_CASES += [Case(("data_parallel",), "path_mlp", dim=64, data_type="bf16", sparse="adagrad")]
HALF_CASES += [Case(("table_wise", "row_wise", "data_parallel"), is_multi_hot=True, data_type="fp16")]
HALF_CASES += [Case((layout,), sparse="amsgrad", data_type="fp16") for layout in ("table_wise", "data_parallel")]


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        # without other ranks layouts differ little
        pytest.param(1, MIXED_CASES[1::3] + CASES[1::11], id="1"),
        pytest.param(2, MIXED_CASES[::2] + CASES[::3], id="2"),
        *(pytest.param(ranks, MIXED_CASES + CASES, id=f"{ranks}, all", marks=pytest.mark.slow) for ranks in (1, 2, 4)),
    ],
)
def test_steps_are_estimated_closely(world_size: int, cases: list[Case]) -> None:
    run_on_ranks(world_size, check, cases)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_in_half_precision_are_estimated_closely(world_size: int) -> None:
    run_on_ranks(world_size, check, [*HALF_CASES, *(replace(case, batch_size=2048) for case in HALF_CASES)])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_of_other_kinds_and_sizes_are_estimated_closely(world_size: int) -> None:
    larger = [replace(case, batch_size=2048, dim=64) for case in CASES + MIXED_CASES]
    run_on_ranks(world_size, check, OTHER_CASES + larger)


def check_on_two_nodes(rank: int, world_size: int, cases: list[Case]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    check(rank, world_size, cases)


@pytest.mark.slow
@pytest.mark.distributed
def test_steps_of_two_nodes_are_estimated_closely() -> None:
    layouts = (("table_row_wise",), ("grid_shard",), ("grid_shard", "table_row_wise", "column_wise"))
    cases = [Case(layout, is_multi_hot=is_multi_hot) for layout in layouts for is_multi_hot in (False, True)]
    cases += [Case(("table_row_wise",), "path_mlp"), Case(("grid_shard",), partition="mixed_radix", dim=64)]
    run_on_ranks(4, check_on_two_nodes, [*cases, Case(layouts[-1], "concat")])


class Pooled(nn.Module):
    """Vectors as of a lookup: autograd keeps none of them, and nobody takes their gradient."""

    def __init__(self, names: list[str], dim: int) -> None:
        super().__init__()
        self.names, self.dim = names, dim

    def forward(self, num_rows: int) -> KeyedTensor:
        origin = torch.zeros(num_rows, 1, requires_grad=True)
        origin.register_hook(torch.zeros_like)
        values = origin + torch.zeros(1, self.dim * len(self.names))
        return KeyedTensor(self.names, [self.dim] * len(self.names), values)


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_rows", "bf16"), [(1, False), (7, True), (300, False)])
def test_networks_are_estimated_to_a_hundredth(model: str, bf16: bool, num_rows: int) -> None:
    case = Case(("table_wise",), model=model, bf16=bf16)
    names = list(case.schema.categorical_names)
    with Alive() as alive:
        net = MODELS[model].build(ModelInputs.from_config(case.schema, case.embedding))
        net.embeddings = Pooled(names, case.dim)
        dense_features, labels = torch.zeros(num_rows, NUM_DENSE), torch.zeros(num_rows)
        before = alive.peak = alive.bytes
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = net(dense_features, num_rows)
        nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum").backward()
        found = alive.peak - before
    expected = network_of(case, num_rows, averages=False)
    assert math.isclose(expected.peak, found, rel_tol=0.01, abs_tol=1024)
    assert expected.parameters == expected.gradients == sum(p.numel() * 4 for p in net.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "adamw", "amsgrad"])
def test_states_of_networks_follow_the_optimizer(optimizer: str) -> None:
    network = network_of(Case(("table_wise",), dense=optimizer), 8, 2)
    states = len(OPTIMIZERS[optimizer].states)
    steps = 4 * 12 if states else 0  # of six layers' weights and biases
    assert network.optimizer_state == states * network.parameters + steps


@pytest.mark.parametrize("num_dense", [0, 1])
def test_a_rank_without_tables_and_features_takes_what_the_networks_take(num_dense: int) -> None:
    schema = Schema("label", tuple(f"I{i}" for i in range(num_dense)), (CategoricalFeature("a", 10),))
    inputs = ModelInputs.from_config(schema, EmbeddingConfig(default=TableConfig(embedding_dim=4)))
    network = estimate_network(MODELS["dcn"], inputs, ClickTask(), 8, "sgd", False, 2)
    assert network is not None
    buffers = Step([], 2, Workload(16, num_dense=num_dense, network=network), TableOptimizers(), "cpu").buffers(0)
    assert buffers.lookups == buffers.outputs == 0
    assert buffers.gradients == network.gradients
    assert buffers.activations == network.peak


BENCH = Path(__file__).parents[2] / "tools" / "bench_memory.py"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_estimates_are_close_to_the_highest_of_ten_runs(tmp_path: Path) -> None:
    rows = []
    for name in ("product, ", "path_mlp, "):  # the models of clicks
        output = tmp_path / f"{name.strip(', ')}.json"
        subprocess.run([sys.executable, BENCH, "--only", name, "--output", output], check=True)
        rows += json.loads(output.read_text())["rows"]
    assert len(rows) == 9
    for row in rows:
        assert 0.9 * row["highest"] <= row["estimate"] <= 4 / 3 * row["highest"], row
