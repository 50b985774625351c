"""Tables that are divided over two levels, on four gloo ranks as two nodes of two, against the unsharded module."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv, ShardingPlan, ShardMetadata

from distembed.base.errors import UserError
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.checkpoints.test_checkpoint import require_equal
from tests.layouts import OPTIMIZER_NAMES, build, gather_numbers
from tests.planning import test_storage as storage
from tests.ranks import check_cases, run_on_ranks
from tests.sharding import test_pipelines as pipelines
from tests.sharding import test_sharded_equals_unsharded as bags
from tests.sharding import test_sse as sse
from tests.sharding import test_traffic as traffic

NODES = RANKS_PER_NODE = 2
SHARDING_TYPES = ("table_row_wise", "grid_shard")
ALL = list(itertools.product(SHARDING_TYPES, bags.OPTIMIZERS, ["single", "ragged", "weighted"]))
SOME = [("table_row_wise", "adagrad", "ragged"), ("grid_shard", "row_wise_adagrad", "weighted")]


def on_two_nodes(rank: int, world_size: int, check: Callable[..., None], *arguments: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    check(rank, world_size, *arguments)


def run_on_two_nodes(check: Callable[..., None], *arguments: Any) -> None:
    run_on_ranks(NODES * RANKS_PER_NODE, on_two_nodes, check, *arguments)


def by_distance(counted: traffic.CountBytes) -> Counter[str]:
    """Bytes for ranks of this rank's node, itself among them, and for the other node; and those that are averaged."""
    counts: Counter[str] = Counter()
    for (name, peer, _), num_bytes in counted.by_peer.items():
        is_near = peer // RANKS_PER_NODE == dist.get_rank() // RANKS_PER_NODE
        counts["average" if name == "allreduce_" else "within" if is_near else "between"] += num_bytes
    return counts


def nodes_of_table(kind: str, number: int) -> list[int]:
    """The node of each range of columns."""
    return [number % NODES] if kind == "table_row_wise" else [number % NODES, (number + 1) % NODES]


def planned(kind: str, number: int, unit: nn.Parameter) -> ParameterSharding:
    (num_rows, columns), nodes = unit.shape, nodes_of_table(kind, number)
    rows, own_columns = -(-num_rows // RANKS_PER_NODE), columns // len(nodes)
    shards = [
        ShardMetadata(
            [block * rows, i * own_columns],
            [min(rows, num_rows - block * rows), own_columns],
            f"rank:{RANKS_PER_NODE * node + block}/cpu",
        )
        for i, node in enumerate(nodes)
        for block in range(RANKS_PER_NODE)
    ]
    ranks = [shard.placement.rank() for shard in shards]
    return ParameterSharding(kind, traffic.FUSED, ranks, EnumerableShardingSpec(shards))


def shard(module: nn.Module, sharder: ModuleSharder[Any], kind: str) -> DistributedModelParallel:
    sharder.fused_params.update(learning_rate=0.1)
    units = sharder.shardable_parameters(module)
    plan = {name: planned(kind, i, units[name]) for i, name in enumerate(traffic.SIZES)}
    return DistributedModelParallel(
        traffic.Embedded(module),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings": plan}),  # type: ignore[dict-item]
        sharders=[sharder],
    )


def by_hand(kind: str, rank: int, features: Any) -> dict[str, dict[str, int]]:
    """What a plain table's dists carry within the node and to the other one, from the shapes alone."""
    rows, per_id = features.stride(), 8 + traffic.FLOAT * (features.weights_or_none() is not None)
    # to each rank the sizes of what comes: lengths, ids, weights, and the number of rows
    sizes = RANKS_PER_NODE * traffic.LENGTH * (3 + (features.weights_or_none() is not None))
    ids, columns = [0] * NODES, [0] * NODES
    for number, names in enumerate(traffic.FEATURES.values()):
        nodes = nodes_of_table(kind, number)
        for node in nodes:
            lengths = RANKS_PER_NODE * len(names) * rows * traffic.LENGTH
            ids[node] += lengths + sum(features[name].values().numel() for name in names) * per_id
            columns[node] += len(names) * traffic.DIM // len(nodes)
    own, other = rank // RANKS_PER_NODE, 1 - rank // RANKS_PER_NODE
    vectors = rows * columns[own] * traffic.FLOAT  # of one rank's batch
    return {
        "forward": {
            # partial sums of all rows, and of what comes of them the part of this node's rank
            "within": sizes + ids[own] + NODES * RANKS_PER_NODE * vectors + vectors,
            "between": sizes + ids[other] + (NODES - 1) * vectors,
        },
        "backward": {
            "within": vectors + RANKS_PER_NODE * NODES * vectors,
            "between": rows * columns[other] * traffic.FLOAT,
        },
    }


def count_step(model: nn.Module, features: Any) -> dict[str, Counter[str]]:
    """Bytes of the third step: what happens in the first few has happened then."""
    for _ in range(3):
        with traffic.CountBytes() as forward:
            output = model(traffic.with_dtype(features, torch.int64))
        with traffic.CountBytes() as backward:
            output.square().mean().backward()
    return {"forward": by_distance(forward), "backward": by_distance(backward)}


def check_traffic(rank: int, kind: str, is_weighted: bool, compositions: Sequence[str]) -> None:
    features = traffic.draw(4, rank, 10, is_weighted)
    stock = count_step(shard(traffic.plain(is_weighted), EmbeddingBagCollectionSharder({}), kind), features)
    stock["backward"].pop("average", 0)
    for composition in compositions:
        collection = traffic.ours(composition, is_weighted, torch.int64)
        model = shard(collection, CompositionalEmbeddingBagCollectionSharder({}), kind)
        counts = count_step(model, features)
        assert counts["backward"].pop("average") == sum(traffic.replicated_bytes(model).values())
        assert traffic.replicated_bytes(model) == traffic.replicated_by_hand("row_wise", composition)
        assert counts == stock == by_hand(kind, rank, features), (kind, composition, is_weighted)


def check_checkpoints(folder: Path, pairs: Sequence[tuple[str, str]], optimizers: Sequence[str]) -> None:
    """What was saved under the first layout of each pair is loaded under the second."""
    for (before, now), optimizer in itertools.product(pairs, optimizers):
        trained, other = build(before, optimizer), build(now, optimizer)
        for number in range(2):
            trained.step(number)
        path = folder / f"{before}-{now}-{optimizer}"
        save_checkpoint(path, trained.model, trained.optimizer, {"step": 2})
        load_checkpoint(path, other.model, other.optimizer)
        require_equal(gather_numbers(other), gather_numbers(trained), f"{before} to {now}, {optimizer}")


def check_other_nodes() -> None:
    """A plan for nodes of another size."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    with pytest.raises(UserError, match=r"'t0' is planned grid_shard with its rows on 2 rank.*a node has 4 here"):
        shard(traffic.ours("sum", False, torch.int64), CompositionalEmbeddingBagCollectionSharder({}), "grid_shard")
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)


def check_some(rank: int, world_size: int, folder: Path) -> None:
    check_cases(rank, world_size, bags.check_equal, SOME)
    for i, kind in enumerate(SHARDING_TYPES):
        check_traffic(rank, kind, bool(i), ["concat" if i else "product"])
        storage.check(rank, kind, OPTIMIZER_NAMES[1 + i], "adam")
    bags.check_empty_rank(rank, "grid_shard")
    check_checkpoints(folder, [("table_row_wise", "grid_shard")], ["row_wise_adagrad"])
    check_other_nodes()


def check_all(rank: int, world_size: int, folder: Path) -> None:
    check_cases(rank, world_size, bags.check_equal, ALL)
    for kind in SHARDING_TYPES:
        for is_weighted in (False, True):
            check_traffic(rank, kind, is_weighted, ["product", "sum", "concat"])
        for optimizer in OPTIMIZER_NAMES:
            storage.check(rank, kind, optimizer, "adam")
        bags.check_empty_bags(bags.check_empty_rank(rank, kind))
        bags.check_half_precision(kind)
    pairs = [("grid_shard", "column_wise"), ("row_wise", "grid_shard"), ("table_row_wise", "grid_shard")]
    check_checkpoints(folder, [*pairs, ("data_parallel", "table_row_wise")], OPTIMIZER_NAMES)


def check_one_node(rank: int, world_size: int) -> None:
    for kind in SHARDING_TYPES:
        pipelines.check_pipelines(rank, world_size, kind, "ragged")
        sse.check_bags(rank, world_size, kind)


@pytest.mark.slow
@pytest.mark.distributed
def test_pipelines_and_replaced_ids_are_those_of_other_tables() -> None:
    run_on_ranks(RANKS_PER_NODE, check_one_node)


# everything in one start of the ranks: starting them takes longer than most of what they do
@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("check", [check_some, pytest.param(check_all, marks=pytest.mark.slow)])
def test_two_nodes_together_equal_one_module(check: Callable[..., None], tmp_path: Path) -> None:
    run_on_two_nodes(check, tmp_path)
