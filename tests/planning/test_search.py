"""The search against every plan of small problems: its time, its bound, and that it misses no plan that fits."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.errors import InsufficientMemory
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.cluster import Cluster
from distembed.planning.costs import Layout, PlacementCosts
from distembed.planning.devices import find_device
from distembed.planning.estimated_plan import placed_tables, plan_placements
from distembed.planning.memory import rank_memories
from distembed.planning.plan import find_plan
from distembed.planning.sharding_plan import unit_sharding
from distembed.planning.times import step_times
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder

TYPES = ["table_wise", "column_wise", "row_wise", "data_parallel"]
MOST_PLANS = 40_000


def request(seed: int) -> PlanRequest:
    """Two to four tables, some large, on two ranks to eight of one node or two, with much memory or little."""
    rng = np.random.default_rng(seed)
    nodes, gpus = [(1, 2), (2, 1), (1, 4), (2, 2), (1, 8)][seed % 5]
    num_tables = 2 + int(rng.integers(3 if nodes * gpus <= 4 else 2))
    tables = []
    for i in range(num_tables):
        num_ids, dim = int(10 ** rng.uniform(1, 6)), int(rng.choice([8, 16]))
        scheme = QuotientRemainder(num_ids, collisions=4) if rng.random() < 0.5 else "naive"
        composition = "path_linear" if rng.random() < 0.2 and scheme != "naive" else "product"
        make = CompositionalEmbeddingBagConfig
        tables.append(make(f"t{i}", num_ids, dim, [f"f{i}"], scheme, composition))  # type: ignore[arg-type]
    # from too little for any plan to enough for all
    needed = 8 * sum(table.num_embeddings * table.embedding_dim for table in tables) / (nodes * gpus)
    memory = int(2**20 + needed * rng.uniform(0.3, 3))
    device = dataclasses.replace(find_device("h100-80gb"), memory_bytes=memory)
    return PlanRequest(
        nn.ModuleDict({"e": CompositionalEmbeddingBagCollection(tables, device="meta")}),
        [CompositionalEmbeddingBagCollectionSharder()],  # type: ignore[list-item]
        Cluster(device, nodes, gpus),
        Workload(int(rng.choice([64, 2048])) * nodes * gpus),
        PlanConfig(TYPES, min_partition=8),  # type: ignore[arg-type]
        TableOptimizers("adagrad"),
    )


def placements_of_table(made: PlanRequest, table: CompositionalEmbeddingBagConfig) -> Iterator[ParameterSharding]:
    """Every way to place one table."""
    cluster, whole = made.cluster, ((0, table.embedding_dim),)
    ranks = range(cluster.world_size)
    for rank in ranks:
        yield unit_sharding(table, Layout("table_wise", "fused", whole), [rank], cluster)
    if table.combine.columns(table.embedding_dim, len(table.scheme.num_rows)) is not None and table.embedding_dim == 16:
        for pair in itertools.permutations(ranks, 2):
            yield unit_sharding(table, Layout("column_wise", "fused", ((0, 8), (8, 16))), pair, cluster)
    yield unit_sharding(table, Layout("row_wise", "fused", whole), ranks, cluster)
    yield unit_sharding(table, Layout("data_parallel", "dense", whole), ranks, cluster)


def fastest_that_fits(made: PlanRequest) -> float | None:
    """Milliseconds of the slowest rank under the best of all plans, or None where none fits."""
    cluster, costs, best = made.cluster, PlacementCosts(made), None
    own = [list(placements_of_table(made, table)) for table in made.tables]  # type: ignore[arg-type]
    if np.prod([len(units) for units in own]) > MOST_PLANS:
        pytest.skip("too many plans")
    for units in itertools.product(*own):
        module = EmbeddingModuleShardingPlan()
        module.update(zip([table.name for table in made.tables], units, strict=True))
        plan = ShardingPlan({"e": module})
        placements = plan_placements(made.model, plan, cluster.world_size)
        ms = max(time.total for time in step_times(placed_tables(made, plan, placements), costs, cluster))
        if best is not None and ms >= best:
            continue
        memory = rank_memories(
            placements, cluster.world_size, made.workload, made.table_optimizers, cluster.device.kind
        )
        if max(rank.total for rank in memory) <= made.plannable_bytes:
            best = ms
    return best


def check(seed: int) -> None:
    made = request(seed)
    best = fastest_that_fits(made)
    try:
        found = find_plan(made)
    except InsufficientMemory:
        assert best is None
        return
    assert found.fits == (best is not None)
    if best is not None:
        slowest = max(time.total for time in found.times)
        assert slowest <= 1.02 * best
        assert found.lower_bound_ms is not None and found.lower_bound_ms <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 6])
def test_the_plan_is_the_best_of_all(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(200))
def test_the_plan_is_the_best_of_all_in_drawn_cases(seed: int) -> None:
    check(seed)
