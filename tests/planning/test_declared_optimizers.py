"""Tables count and train alike whether ``apply_optimizer_in_backward`` or ``fused_params`` names their optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import ShardingEnv
from torchrec.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB
from torchrec.optim import Adam as TorchRecAdam
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.base.errors import UserError
from distembed.data.dataset.schema import SCHEMAS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.declared import TableOptimizers, declared_optimizer, declared_optimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.devices import Cluster, find_device
from distembed.planning.search import find_plan
from distembed.planning.storage import storage_by_rank
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from distembed.sharding.placement import place_table
from tests.layouts import Head, batch, tables
from tests.ranks import run_on_ranks

GIB, DIM = 2**30, 128
WAYS: dict[str, tuple[type[torch.optim.Optimizer], EmbOptimType]] = {
    "sgd": (torch.optim.SGD, EmbOptimType.EXACT_SGD),
    "adagrad": (torch.optim.Adagrad, EmbOptimType.EXACT_ADAGRAD),
    "row_wise_adagrad": (RowWiseAdagrad, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    "adam": (torch.optim.Adam, EmbOptimType.ADAM),
    "partial_row_wise_adam": (PartialRowWiseAdam, EmbOptimType.PARTIAL_ROWWISE_ADAM),
    "lamb": (LAMB, EmbOptimType.LAMB),
    "partial_row_wise_lamb": (PartialRowWiseLAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB),
}
"""The class for ``apply_optimizer_in_backward``, and the name for ``fused_params``."""

Declared = tuple[nn.Module, CompositionalEmbeddingBagCollectionSharder]


def by_class(model: nn.Module, name: str, **settings: float) -> Declared:
    vectors = [p for key, p in model.named_parameters() if ".embedding_bags." in key]
    apply_optimizer_in_backward(WAYS[name][0], vectors, settings)
    return model, CompositionalEmbeddingBagCollectionSharder()


def by_fused_params(model: nn.Module, name: str, **settings: float) -> Declared:
    return model, CompositionalEmbeddingBagCollectionSharder({"optimizer": WAYS[name][1], **settings})


def mlperf() -> nn.Module:
    """All 204,184,588 rows of MLPerf's DLRM-DCNv2."""
    made = [
        CompositionalEmbeddingBagConfig(feature.name, feature.num_embeddings, DIM, [feature.name])
        for feature in SCHEMAS["criteo_terabyte"].categorical
    ]
    return nn.ModuleDict({"embeddings": CompositionalEmbeddingBagCollection(made, device="meta")})


def stock_storage(declared: Declared, topology: Topology) -> list[Any]:
    """What TorchRec's planner counts for every way of placing every table."""
    model, sharder = declared
    sharders: list[Any] = [sharder]
    options = EmbeddingEnumerator(topology, batch_size=16).enumerate(model, sharders)
    return [(o.name, o.sharding_type, o.compute_kernel, [shard.storage for shard in o.shards]) for o in options]


def test_every_fused_optimizer_has_its_name_either_way() -> None:
    assert {name for name, kind in OPTIMIZERS.items() if kind.fused_class is not None} == WAYS.keys()
    for name in WAYS:
        for declare in (by_class, by_fused_params):
            model, sharder = declare(Head("meta"), name)
            assert declared_optimizers(model, [sharder]) == {table.name: name for table in tables()}
    undeclared = declared_optimizers(Head("meta"), [CompositionalEmbeddingBagCollectionSharder()])
    assert undeclared == {table.name: None for table in tables()}
    sequences = CompositionalEmbeddingCollection([CompositionalEmbeddingConfig("a", 9, 4, ["a"])], device="meta")
    sharder = CompositionalEmbeddingCollectionSharder({"optimizer": EmbOptimType.ADAM})
    assert declared_optimizers(sequences, [sharder]) == {"a": "adam"}


def test_a_tables_own_optimizer_comes_before_that_of_all() -> None:
    model, sharder = by_fused_params(Head("meta"), "adagrad")
    (own,) = [p for name, p in model.named_parameters() if name.endswith(".d__p0.weight")]
    apply_optimizer_in_backward(TorchRecAdam, [own], {"lr": 0.1})
    others = {table.name: "adagrad" for table in tables()}
    assert declared_optimizers(model, [sharder]) == {**others, "d": "adam"}


def test_optimizers_whose_state_is_not_known_are_refused_by_name() -> None:
    for optimizer in (LarsSGD, torch.optim.AdamW):
        unit = nn.Parameter(torch.zeros(1, 4))
        apply_optimizer_in_backward(optimizer, [unit], {"lr": 0.1})
        with pytest.raises(
            UserError, match=rf"'a' declares the optimizer torch\S+\.{optimizer.__name__}, .*known: sgd, .*lamb"
        ):
            declared_optimizer("a", unit)
    unit = nn.Parameter(torch.zeros(1, 4))
    for twice in (torch.optim.SGD, torch.optim.Adagrad):
        apply_optimizer_in_backward(twice, [unit], {"lr": 0.1})
    with pytest.raises(UserError, match=r"SGD and torch.*Adagrad"):
        declared_optimizer("a", unit)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchrecs_planner_counts_the_same_either_way(device: str) -> None:
    topology = Topology(world_size=4, local_world_size=2, compute_device=device)
    for name in WAYS:
        counted = [stock_storage(declare(Head("meta"), name), topology) for declare in (by_class, by_fused_params)]
        assert counted[0] == counted[1] and len(counted[0]) >= len(tables()) * 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("declare", "name", "states"),
    [
        (by_class, "sgd", 0.0),
        (by_fused_params, "adagrad", 1.0),
        (by_class, "adam", 2.0),
        (by_fused_params, "row_wise_adagrad", 1 / DIM),
    ],
)
def test_mlperfs_tables_take_their_weights_and_their_states(declare: Any, name: str, states: float) -> None:
    topology = Topology(world_size=8, local_world_size=8, compute_device="cuda", hbm_cap=80 * GIB, ddr_cap=1024 * GIB)
    rows = {feature.name: feature.num_embeddings for feature in SCHEMAS["criteo_terabyte"].categorical}
    undeclared = stock_storage((mlperf(), CompositionalEmbeddingBagCollectionSharder()), topology)
    declared = declare(mlperf(), name)
    for before, after in zip(undeclared, stock_storage(declared, topology), strict=True):
        (table, sharding_type, _, without_state), (*_, with_state) = before, after
        if sharding_type in ("table_wise", "row_wise"):
            added = sum(shard.hbm for shard in with_state) - sum(shard.hbm for shard in without_state)
            assert added == pytest.approx(states * rows[table] * DIM * 4, abs=len(with_state))  # each is rounded up
    # in a plan that TorchRec's planner makes, and by the name that is read off the tables
    model, sharder = declared
    sharders: list[Any] = [sharder]
    constraints = {table: ParameterConstraints(sharding_types=["table_wise"]) for table in rows}
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=16, constraints=constraints)
    plan: Any = planner.plan(model, sharders).plan["embeddings"]
    (sparse,) = set(declared_optimizers(model, sharders).values())
    assert sparse is not None
    collection: Any = model.get_submodule("embeddings")
    placements = [place_table(table, plan[table.name], world_size=8) for table in collection.tables()]
    optimizers = TableOptimizers(sparse)
    for_ranks = [stored for own in placements for stored in storage_by_rank(own, 8, optimizers).values()]
    assert sum(rank.weights for rank in for_ranks) == 204_184_588 * DIM * 4
    assert sum(rank.optimizer_state for rank in for_ranks) == states * 204_184_588 * DIM * 4


def local(value: Any) -> list[Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def train(declared: Declared, layouts: list[str]) -> list[Tensor]:
    """All weights and states after some steps in a plan of TorchRec's own planner; on one rank."""
    model, sharder = declared
    sharders: list[Any] = [sharder]
    names = [table.name for table in tables()]
    constraints = {
        # a function needs whole vectors
        name: ParameterConstraints(sharding_types=["table_wise" if name == "c" else layout], min_partition=4)
        for name, layout in zip(names, layouts, strict=True)
    }
    topology = Topology(world_size=1, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(model, sharders)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders, init_data_parallel=False
    )
    others = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense = KeyedOptimizerWrapper(others, lambda params: torch.optim.SGD(params, lr=0.1))
    for step in range(3):
        dense.zero_grad()
        (sharded(batch(step, 0, 8)) - 1).square().sum().backward()
        dense.step()
    states = sharded.fused_optimizer.state_dict()["state"]
    kept = [value for _, own in sorted(states.items()) for _, value in sorted(own.items())]
    weights = [value for _, value in sorted(sharded.state_dict().items())]
    return [tensor.clone() for value in (*weights, *kept) for tensor in local(value)]


def check_training(rank: int, world_size: int) -> None:
    mixed = ["row_wise", "data_parallel", "table_wise", "table_wise", "column_wise"]
    for layouts in (["column_wise"] * 5, mixed):
        found = []
        for name in ("sgd", "adagrad", "row_wise_adagrad"):
            eps = {} if name == "sgd" else {"eps": 1e-3}
            of_class = train(by_class(Head("meta"), name, lr=0.1, **eps), layouts)
            of_params = train(by_fused_params(Head("meta"), name, learning_rate=0.1, **eps), layouts)
            assert len(of_class) == len(of_params)
            for one, other in zip(of_class, of_params, strict=True):
                assert torch.equal(one, other), (layouts, name)
            found.append(of_class)
        # each is another optimizer than the one that FBGEMM takes when none is named
        assert not torch.equal(found[0][0], found[1][0]) and not torch.equal(found[1][0], found[2][0])


@pytest.mark.distributed
def test_training_is_the_same_either_way() -> None:
    run_on_ranks(1, check_training)


@pytest.mark.parametrize(("name", "factor"), [("adagrad", 1.0), ("adam", 2.0), ("row_wise_adagrad", 1 / DIM)])
def test_plans_count_what_tables_declare(name: str, factor: float) -> None:
    tables = [CompositionalEmbeddingBagConfig(f"t{i}", 10**6, DIM, [f"f{i}"]) for i in range(2)]
    cluster, (by_class, by_name) = Cluster(find_device("a100-80gb"), 1, 2), WAYS[name]

    def memory(fused_params: dict[str, Any] | None) -> list[dict[str, int]]:
        collection = CompositionalEmbeddingBagCollection(tables, device="meta")
        if fused_params is None:
            apply_optimizer_in_backward(by_class, collection.embedding_bags.parameters(), {"lr": 0.1})
        sharders: list[Any] = [CompositionalEmbeddingBagCollectionSharder(fused_params)]
        model, config = nn.ModuleDict({"e": collection}), PlanConfig(time_tolerance=1.0)
        planned = find_plan(PlanRequest(model, sharders, cluster, Workload(1024), config))
        return [dict(rank.memory) for rank in planned.ranks]

    declared = memory(None)
    assert declared == memory({"optimizer": by_name})
    weights, kept = (sum(rank[item] for rank in declared) for item in ("table_weights", "table_optimizer_state"))
    assert weights == 2 * 10**6 * DIM * 4 and kept == round(weights * factor)
