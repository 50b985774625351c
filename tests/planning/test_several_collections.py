"""One plan for a model of several collections: two of bags, one of sequences, and TorchRec's own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import PathMLP
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.errors import UserError
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload, make_plan, plan_as_json
from distembed.planning.cluster import Cluster
from distembed.planning.config import TablePlanConfig
from distembed.planning.devices import find_device
from distembed.planning.estimated_plan import EstimatedPlan
from distembed.planning.plan import cluster_here, find_plan
from distembed.ranks import Ranks
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
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
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=SIZES[feature],
                feature_names=[feature],
                init_fn=fill_by_row,
            )
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
    """Memory counts each compositional table to the byte, on its rank, and the plain ones somewhere."""
    weights = model.state_dict()
    compositional = [value for name, value in weights.items() if not name.startswith("plain.")]
    counted = estimated.memory[rank].items()
    assert counted["table_weights"] == sum(map(local_bytes, compositional))
    plain = sum(local_bytes(value) for name, value in weights.items() if name.startswith("plain."))
    # what an optimizer keeps of them is counted with them
    assert counted["plain_tables"] >= plain
    assert (counted["plain_tables"] == 0) == (plain == 0)


def check_model(rank: int, world_size: int, sharding_types: list[str] | None) -> None:
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    config = PlanConfig(sharding_types, min_partition=4, tables={"c": TablePlanConfig(["table_wise"])})
    workload = Workload(ROWS * world_size, dict.fromkeys(SIZES, 1.5))
    model = Model("meta")
    plan = make_plan(model, sharders(), ranks, workload, config)
    assert {path: list(tables) for path, tables in plan_as_json(plan).items()} == {
        "clicks": ["a", "b", "h"],
        "users": ["c"],
        "history": ["history"],
        "plain": list(PLAIN_TABLES),
    }
    estimated = find_plan(PlanRequest(model, sharders(), cluster_here(ranks), workload, config))
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=ranks.device, plan=plan, sharders=sharders())
    reference = Model("cpu")
    for table in reference.plain.embedding_bags.values():
        fill_by_row(table.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(sharded(batch(rank)), reference(batch(rank)))
    check_weights(sharded.module, rank, estimated)
    assert list(estimated.why) == ["a", "b", "h", "c", "history", *PLAIN_TABLES]


def check_all(rank: int, world_size: int) -> None:
    for sharding_types in (None, ["column_wise"], ["row_wise", "table_wise"], ["data_parallel"]):
        check_model(rank, world_size, sharding_types)


@pytest.mark.distributed
def test_all_collections_of_a_model_are_planned_counted_and_sharded() -> None:
    run_on_ranks(2, check_all)


def request(model: nn.Module, own_sharders: list[Any], gpus: int = 8) -> PlanRequest:
    return PlanRequest(model, own_sharders, Cluster(find_device("a100-80gb"), 1, gpus), Workload(4096))


def test_plain_tables_are_counted_where_they_lie() -> None:
    plain: Any = EmbeddingBagConfig(name="plain", embedding_dim=64, num_embeddings=10**6, feature_names=["p"])
    model = nn.ModuleDict(
        {
            "ours": CompositionalEmbeddingBagCollection(
                [CompositionalEmbeddingBagConfig(name, 4000, 16, [name]) for name in ("a", "b", "c")], device="meta"
            ),
            "theirs": EmbeddingBagCollection([plain], device=torch.device("meta")),
        }
    )
    estimated = find_plan(request(model, sharders()))
    assert list(plan_as_json(estimated.plan)["theirs"]) == ["plain"]
    assert list(plan_as_json(estimated.plan)["ours"]) == ["a", "b", "c"]
    assert list(estimated.why) == ["a", "b", "c", "plain"]
    ranks = plan_as_json(estimated.plan)["theirs"]["plain"]["ranks"]
    plain_bytes = [memory.items()["plain_tables"] for memory in estimated.memory]
    assert sum(plain_bytes) >= 10**6 * 64 * 4
    assert {rank for rank, num_bytes in enumerate(plain_bytes) if num_bytes} == set(ranks)


def test_collections_side_by_side_take_what_they_take_alone() -> None:
    def table(name: str) -> CompositionalEmbeddingBagConfig:
        return CompositionalEmbeddingBagConfig(name, 4000, 16, [name], QuotientRemainder(4000, collisions=4))

    def collection(*names: str) -> nn.Module:
        return CompositionalEmbeddingBagCollection([table(name) for name in names], device="meta")

    def step_bytes(collections: dict[str, nn.Module]) -> Any:
        (memory,) = find_plan(request(nn.ModuleDict(collections), sharders(), gpus=1)).memory
        return memory

    one, two = step_bytes({"x": collection("a", "b")}), step_bytes({"x": collection("a"), "y": collection("b")})
    assert one.tables == two.tables
    assert one.step.inputs == two.step.inputs
    assert one.step.total <= two.step.total <= 1.5 * one.step.total


def test_two_tables_of_one_name_are_refused_with_both_places() -> None:
    with pytest.raises(UserError, match=r"two tables named 'c', in 'users' and in 'plain'"):
        request(Model("meta", ["plain_p", "c"]), sharders())
    with pytest.raises(UserError, match=r"two tables named 'history', in 'history' and in 'plain'"):
        request(Model("meta", ["history", "d"]), sharders())


def test_a_collection_that_no_sharder_takes_is_refused_by_its_path() -> None:
    with pytest.raises(UserError, match=r"no sharder takes the CompositionalEmbeddingCollection 'history'"):
        request(Model("meta"), [CompositionalEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()])
