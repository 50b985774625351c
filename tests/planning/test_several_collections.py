"""One plan for a model of several collections: two of bags, one of sequences, and TorchRec's own."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType as TorchrecDataType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.ranks import Collectives, Ranks
from distembed.composition import PathMLP
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.table_storage import TableStorage
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload, plan_as_json
from distembed.planning.config import TablePlanConfig
from distembed.planning.devices import Cluster, find_device
from distembed.planning.networks import NetworkEstimate
from distembed.planning.search import EstimatedPlan, cluster_here, find_plan
from distembed.planning.storage import PlannedRank
from distembed.sharding import (
    CompositionalEmbeddingBagCollectionSharder,
    CompositionalEmbeddingCollectionSharder,
    default_sharders,
)
from tests.ranks import run_on_ranks

DIM, ROWS = 8, 6
SIZES = {"a": 400, "b": 60, "c": 90, "h": 300, "p": 50}
"""Number of ids by feature; ``c`` is looked up in two collections, and so is ``h``."""
PLAIN_TABLES = {"plain_c": "c", "plain_p": "p"}


def fill_by_row(weight: Tensor) -> None:
    """The same numbers in each column, so that ranges of columns are filled alike."""
    if weight.numel():
        weight.data.copy_(torch.linspace(0, 1, len(weight)).unsqueeze(1).expand_as(weight))


class Model(nn.Module):
    """All numbers that the collections give, summed over the ids of a sequence."""

    def __init__(self, device: str, plain_names: Sequence[str] = tuple(PLAIN_TABLES)) -> None:
        super().__init__()
        make = CompositionalEmbeddingBagConfig
        self.clicks = CompositionalEmbeddingBagCollection(
            [
                make("a", 400, DIM, ["a"], QuotientRemainder(400, collisions=4)),
                make("b", 60, DIM, ["b"], QuotientRemainder(60, collisions=5), "concat"),
                make("h", 300, DIM, ["h"], QuotientRemainder(300, collisions=4)),
            ],
            device=device,
        )
        path = make("c", 90, DIM, ["c"], QuotientRemainder(90, collisions=7), PathMLP(hidden=[5]), pooling="mean")
        self.users = CompositionalEmbeddingBagCollection([path], device=device)
        history = CompositionalEmbeddingConfig("history", 300, DIM, ["h"], QuotientRemainder(300, collisions=6))
        self.history = CompositionalEmbeddingCollection([history], device=device)
        plain: list[Any] = [
            EmbeddingBagConfig(SIZES[feature], DIM, name, feature_names=[feature], init_fn=fill_by_row)
            for name, feature in zip(plain_names, PLAIN_TABLES.values(), strict=True)
        ]
        self.plain = EmbeddingBagCollection(plain, device=torch.device(device))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.clicks(features).to_dict(), self.users(features).to_dict(), self.plain(features).to_dict()]
        history = self.history(features)["h"]
        rows = torch.arange(len(history.lengths())).repeat_interleave(history.lengths())
        summed = torch.zeros(len(history.lengths()), DIM).index_add(0, rows, history.values())
        return torch.cat([*[vectors[name] for vectors in pooled for name in sorted(vectors)], summed], dim=1)


def sharders() -> list[Any]:
    return [
        CompositionalEmbeddingBagCollectionSharder(),
        CompositionalEmbeddingCollectionSharder(),
        EmbeddingBagCollectionSharder(),
    ]


def batch(rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (len(SIZES), ROWS), generator=generator)
    ids = [
        torch.randint(0, size, (int(own.sum()),), generator=generator)
        for size, own in zip(SIZES.values(), lengths, strict=True)
    ]
    return KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=lengths.flatten())


def local_bytes(value: Any) -> int:
    if hasattr(value, "local_shards"):
        return sum(local_bytes(shard.tensor) for shard in value.local_shards())
    return int(value.numel() * value.itemsize)


def check_weights(model: nn.Module, rank: int, estimated: EstimatedPlan) -> None:
    """Memory counts each table to the byte, on its rank, TorchRec's own included."""
    weights = model.state_dict()
    memory = estimated.ranks[rank]
    assert memory.memory["table_weights"] == sum(map(local_bytes, weights.values()))
    for name in PLAIN_TABLES:
        counted = memory.tables[name].weights if name in memory.tables else 0
        assert counted == local_bytes(weights[f"plain.embedding_bags.{name}.weight"])


def check_model(rank: int, world_size: int, types: Mapping[str, str]) -> None:
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    config = PlanConfig(min_partition=4, tables={name: TablePlanConfig([kind]) for name, kind in types.items()})  # type: ignore[list-item]
    workload = Workload(ROWS * world_size, dict.fromkeys(SIZES, 1.5))
    model = Model("meta")
    request = PlanRequest(model, sharders(), cluster_here(ranks), workload, config)
    estimated = Collectives().on_first(lambda: find_plan(request))
    plan = estimated.plan
    assert {path: list(tables) for path, tables in plan_as_json(plan).items()} == {
        "clicks": ["a", "b", "h"],
        "users": ["c"],
        "history": ["history"],
        "plain": list(PLAIN_TABLES),
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=ranks.device, plan=plan, sharders=sharders())
    reference = Model("cpu")
    for table in reference.plain.embedding_bags.values():
        fill_by_row(table.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(sharded(batch(rank)), reference(batch(rank)))
    check_weights(sharded.module, rank, estimated)
    assert list(estimated.why) == ["a", "b", "h", "c", "history", *PLAIN_TABLES]


def check_all(rank: int, world_size: int) -> None:
    check_model(rank, world_size, {"c": "table_wise"})
    # TorchRec's tables are filled row by row of a shard, so that their rows are not divided
    ways = [("column_wise", "row_wise", "data_parallel"), ("row_wise", "data_parallel", "row_wise")]
    for first, second, third in ways:
        ours = {"a": first, "b": second, "c": "table_wise", "h": third, "history": first}
        plain = dict(zip(PLAIN_TABLES, ["column_wise", "data_parallel"], strict=True))
        check_model(rank, world_size, ours | plain)


@pytest.mark.thorough
@pytest.mark.distributed
def test_all_collections_of_a_model_are_planned_counted_and_sharded() -> None:
    run_on_ranks(2, check_all)


def request(model: nn.Module, own_sharders: list[Any], gpus: int = 8) -> PlanRequest:
    return PlanRequest(model, own_sharders, Cluster(find_device("a100-80gb"), 1, gpus), Workload(4096))


Shapes = Mapping[str, tuple[int, int]]


def stock_model(shapes: Shapes, data_type: str = "FP32") -> nn.Module:
    """One of our tables beside TorchRec's."""
    plain: list[Any] = [
        EmbeddingBagConfig(*shape, name, TorchrecDataType[data_type], [name]) for name, shape in shapes.items()
    ]
    ours = CompositionalEmbeddingBagCollection([CompositionalEmbeddingBagConfig("a", 4000, 16, ["a"])], device="meta")
    return nn.ModuleDict({"ours": ours, "theirs": EmbeddingBagCollection(plain, device=torch.device("meta"))})


STATES = {  # numbers for each weight, for each row of a shard, and for a parameter that torch updates
    "sgd": (0, 0, 0),
    "adagrad": (1, 0, 1),
    "row_wise_adagrad": (0, 1, 1),
    "adam": (2, 0, 1),
    "amsgrad": (3, 0, 1),
    "partial_row_wise_adam": (1, 1, 0),
}


def expected_storage(planned: dict[str, Any], rank: int, shape: tuple[int, int], itemsize: int, name: str) -> list[int]:
    """Bytes of weights, of states and of weights in host memory on a rank, from the shards of a plan alone."""
    shards = [own["size"] for own in planned["shards"] if own["rank"] == rank]
    is_replicated = planned["sharding_type"] == "data_parallel"
    if is_replicated:
        shards = [list(shape)]
    by_weight, by_row, by_parameter = STATES[name]
    numbers, rows = sum(rows * columns for rows, columns in shards), sum(rows for rows, columns in shards if columns)
    by_torch = is_replicated or planned["compute_kernel"] == "dense"
    states = [by_weight * numbers, by_row * rows, by_parameter * by_torch * bool(numbers)]
    if "uvm" not in planned["compute_kernel"]:
        return [numbers * itemsize, 4 * sum(states), 0]
    # states of rows stay on the device
    return [0, 4 * states[1], numbers * itemsize + 4 * states[0]]


def check_stock_storage(found: EstimatedPlan, name: str, shapes: Shapes, itemsize: int) -> set[str]:
    """Of each rank, weights and states of the stock tables; returns their compute kernels."""
    planned = plan_as_json(found.plan)["theirs"]
    for rank, memory in enumerate(found.ranks):
        for table, shape in shapes.items():
            own = memory.tables.get(table, TableStorage())
            counted = [own.weights, own.optimizer_state, own.host]
            assert counted == expected_storage(planned[table], rank, shape, itemsize, name), (rank, planned[table])
        items = memory.memory
        assert "plain_tables" not in items
        assert items["table_weights"] == sum(table.weights for table in memory.tables.values())
        assert items["table_optimizer_state"] == sum(table.optimizer_state for table in memory.tables.values())
        assert items["table_cache"] == sum(table.cache for table in memory.tables.values())
        assert memory.total_bytes == sum(items.values())
        assert memory.storage.host == sum(table.host for table in memory.tables.values())
    return {own["compute_kernel"] for own in planned.values()}


SHARDING_TYPES = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]


@pytest.mark.parametrize(("name", "data_type"), [*((name, "FP32") for name in STATES), ("adagrad", "FP16")])
def test_weights_and_states_of_stock_tables_are_counted_apart(name: str, data_type: str) -> None:
    """A table of each sharding type, of an odd number of rows, and with fewer rows than ranks."""
    optimizers = TableOptimizers(name, is_fused=OPTIMIZERS[name].fused_class is not None)
    # torch has none of some for what every rank has
    types = SHARDING_TYPES[: -1 if OPTIMIZERS[name].torch_class is None else None]
    shapes = {kind: (3 if kind in ("row_wise", "column_wise") else 1001, 64) for kind in types}
    tables = {kind: TablePlanConfig([kind], min_partition=16) for kind in types}  # type: ignore[list-item]
    config, model = PlanConfig(["table_wise"], time_tolerance=1.0, tables=tables), stock_model(shapes, data_type)
    cluster = Cluster(find_device("a100-80gb"), 2, 2)
    found = find_plan(PlanRequest(model, sharders(), cluster, Workload(64), config, optimizers))
    planned = plan_as_json(found.plan)["theirs"]
    assert {kind: own["sharding_type"] for kind, own in planned.items()} == {kind: kind for kind in types}
    check_stock_storage(found, name, shapes, {"FP32": 4, "FP16": 2}[data_type])


# the last keeps numbers of weights and numbers of rows, as the others do one of each
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(own, marks=pytest.mark.slow) for own in ("adagrad", "row_wise_adagrad")), "partial_row_wise_adam"],
)
def test_stock_tables_in_host_memory_count_as_host_memory(name: str) -> None:
    """The device has no room for them, and the host has; with less than they take there, the plan does not fit."""
    shape = (10**6, 64)
    whole = {"shards": [{"rank": 0, "size": shape}], "sharding_type": "table_wise", "compute_kernel": "uvm"}
    *_, taken = expected_storage(whole, 0, shape, 4, name)
    config = PlanConfig(["table_wise"], host_memory=True, reserve=0, time_tolerance=1.0)
    workload = Workload(64, network=NetworkEstimate())
    device = dataclasses.replace(find_device("a100-80gb"), memory_bytes=100 * 10**6)

    def planned(host_bytes: int) -> EstimatedPlan:
        cluster, own_sharders = Cluster(device, 1, 1, host_bytes), default_sharders(host_memory=True)
        model, optimizers = stock_model({"plain": shape}), TableOptimizers(name)
        return find_plan(PlanRequest(model, own_sharders, cluster, workload, config, optimizers))

    found = planned(taken)
    assert found.fits and found.ranks[0].excess_bytes[1] == 0
    assert check_stock_storage(found, name, {"plain": shape}, 4) <= {"fused_uvm", "fused_uvm_caching"}
    assert found.ranks[0].storage.host == taken
    with contextlib.suppress(InsufficientMemory):
        assert not planned(taken - 1).fits


def test_collections_side_by_side_take_what_they_take_alone() -> None:
    def table(name: str) -> CompositionalEmbeddingBagConfig:
        return CompositionalEmbeddingBagConfig(name, 4000, 16, [name], QuotientRemainder(4000, collisions=4))

    def collection(*names: str) -> nn.Module:
        return CompositionalEmbeddingBagCollection([table(name) for name in names], device="meta")

    def step_bytes(collections: dict[str, nn.Module]) -> PlannedRank:
        (rank,) = find_plan(request(nn.ModuleDict(collections), sharders(), gpus=1)).ranks
        return rank

    one, two = step_bytes({"x": collection("a", "b")}), step_bytes({"x": collection("a"), "y": collection("b")})
    assert one.tables == two.tables
    assert one.memory["inputs"] == two.memory["inputs"]
    items = ("gradients", "inputs", "outputs", "lookups", "activations")
    one_bytes, two_bytes = (sum(own.memory[item] for item in items) for own in (one, two))
    assert one_bytes <= two_bytes <= 1.5 * one_bytes


def test_two_tables_of_one_name_are_refused_with_both_places() -> None:
    with pytest.raises(UserError, match=r"two tables named 'c', in 'users' and in 'plain'"):
        request(Model("meta", ["plain_p", "c"]), sharders())
    with pytest.raises(UserError, match=r"two tables named 'history', in 'history' and in 'plain'"):
        request(Model("meta", ["history", "d"]), sharders())


def test_a_collection_that_no_sharder_takes_is_refused_by_its_path() -> None:
    with pytest.raises(UserError, match=r"no sharder takes the CompositionalEmbeddingCollection 'history'"):
        request(Model("meta"), [CompositionalEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()])
