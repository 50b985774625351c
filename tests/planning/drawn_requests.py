"""Drawn requests, small enough to try every plan: ranks, nodes, devices, tables, ways to place these, and memory."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.declared import TableOptimizers
from distembed.partitions import MixedRadix, Partition, QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.config import TablePlanConfig
from distembed.planning.devices import Cluster, find_device
from distembed.planning.networks import NetworkEstimate
from distembed.sharding import default_sharders
from tests.planning.every_plan import EveryPlan, TooManyPlans

SHAPES = [(1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (1, 6), (2, 3), (1, 8), (2, 4)]
"""Nodes, and ranks of each."""
DEVICES = ["h100-80gb", "a100-40gb", "l4-24gb", "cpu-256gb", "cpu-256gb,ranks_at_once=1", "cpu-256gb,ranks_at_once=2.5"]
TYPES = ["table_wise", "column_wise", "row_wise", "data_parallel", "table_row_wise", "grid_shard"]
MEMORY = ["loose", "tight", "scarce"]
PLENTY = 10**14


def draw(seed: int, most: int) -> tuple[PlanRequest, EveryPlan]:
    """Returns a request and all of its plans.

    Nodes and memory go round with the seed, all else is drawn. Memory is loose, or what the plan with fewest bytes of
    weights takes and up to a quarter more, or up to a tenth less than that. Of the sharding types so many are allowed,
    and of the tables so many taken, that all plans can be tried.

    Args:
        seed: Seed of the draw.
        most: How often a table may be placed, all plans together.
    """
    random = np.random.default_rng(seed)
    nodes, gpus = SHAPES[seed % len(SHAPES)]
    cluster = Cluster(dataclasses.replace(find_device(str(random.choice(DEVICES))), memory_bytes=PLENTY), nodes, gpus)
    tables = draw_tables(random, int(random.integers(2, 9)))
    types = draw_types(random, cluster)
    min_partition = 8 if random.random() < 0.5 else None
    host_memory = cluster.device.kind == "cuda" and random.random() < 0.15
    workload = draw_workload(random, cluster, tables)
    optimizers = TableOptimizers(str(random.choice(["adagrad", "row_wise_adagrad", "sgd"])))
    if host_memory:
        cluster = dataclasses.replace(cluster, host_memory_bytes=10**9)
    memory = MEMORY[seed // len(SHAPES) % len(MEMORY)]
    if memory != "loose":
        most //= 5  # the memory of many plans is counted
    while True:
        config = plan_config(tables, types, min_partition, host_memory)
        request = request_of(tables, cluster, workload, config, optimizers)
        try:
            every = EveryPlan(request, most)
        except TooManyPlans:
            # types first, then tables that make many plans
            types, tables = (types[:-1], tables) if len(types) > 1 else (types, tables[:-1])
            continue
        return with_memory(random, request, every, memory), every


def draw_tables(random: np.random.Generator, number: int) -> list[CompositionalEmbeddingConfig]:
    """Returns bags and sequences of several schemes and compositions, some of them alike and side by side."""
    tables: list[CompositionalEmbeddingConfig] = []
    sequences_from = number - int(random.integers(1, 3)) if random.random() < 0.25 else number
    while len(tables) < number:
        num_ids, dim = int(10 ** random.uniform(1, 6)), int(random.choice([8, 16]))
        schemes: list[Partition | str] = ["naive", QuotientRemainder(num_ids, collisions=4)]
        scheme = [*schemes, MixedRadix(num_ids, num_partitions=3)][int(random.choice([0, 0, 1, 1, 2]))]
        composition = "product"
        if isinstance(scheme, QuotientRemainder):
            composition = str(random.choice(["product", "product", "concat", "path_linear"]))
        is_sequence = len(tables) >= sequences_from
        dim = 16 if is_sequence else dim  # one collection has sequences of one width
        pooling = "max" if random.random() < 0.1 else "sum"
        for _ in range(int(random.choice([1, 1, 2, 3]))):
            at = len(tables)
            if at < number and (at >= sequences_from) == is_sequence:
                common = f"t{at}", num_ids, dim, [f"f{at}"], scheme, composition
                if is_sequence:
                    tables.append(CompositionalEmbeddingConfig(*common))
                else:
                    tables.append(CompositionalEmbeddingBagConfig(*common, pooling=pooling))  # type: ignore[arg-type]
    return tables


def draw_types(random: np.random.Generator, cluster: Cluster) -> list[str]:
    """Returns sharding types in an order at random; all tables can have the first."""
    types = TYPES if min(cluster.nodes, cluster.ranks_per_node) > 1 else TYPES[:4]
    first = str(random.choice(["table_wise", "table_wise", "table_wise", "data_parallel"]))
    return [first, *(str(name) for name in random.permutation(types) if name != first)]


def draw_workload(
    random: np.random.Generator, cluster: Cluster, tables: list[CompositionalEmbeddingConfig]
) -> Workload:
    """Returns a step of few rows or many, with several ids a row in some features, with networks or without."""
    rows = int(random.choice([64, 1024, 8192]))
    network = NetworkEstimate(10**6, 0, 10**6, 10**6, 300 * rows, 10**5 * rows) if random.random() < 0.3 else None
    ids_per_row = {name: 3.0 for table in tables for name in table.feature_names if random.random() < 0.2}
    return Workload(rows * cluster.world_size, ids_per_row, network=network)


def request_of(
    tables: Sequence[CompositionalEmbeddingConfig],
    cluster: Cluster,
    workload: Workload,
    config: PlanConfig | None = None,
    optimizers: TableOptimizers | None = None,
) -> PlanRequest:
    """Returns the request for a model of these tables; the collection of bags is ``bags``."""
    return PlanRequest(model_of(tables), default_sharders(), cluster, workload, config or PlanConfig(), optimizers)


def model_of(tables: Sequence[CompositionalEmbeddingConfig]) -> nn.Module:
    """Returns a model of a collection of bags and one of sequences."""
    bags = [table for table in tables if isinstance(table, CompositionalEmbeddingBagConfig)]
    sequences = [table for table in tables if not isinstance(table, CompositionalEmbeddingBagConfig)]
    model = nn.ModuleDict()
    if bags:
        model["bags"] = CompositionalEmbeddingBagCollection(bags, device="meta")
    if sequences:
        model["sequences"] = CompositionalEmbeddingCollection(sequences, device="meta")
    return model


def plan_config(
    tables: list[CompositionalEmbeddingConfig], types: list[str], min_partition: int | None, host_memory: bool
) -> PlanConfig:
    """Returns the config that allows some sharding types; none are named where it is all, as in the default config."""
    if set(types) >= set(TYPES[:4]) and len(types) in (4, 6):
        return PlanConfig(None, min_partition, host_memory)
    # sequences would all have ranges of one width
    by_name = {
        table.name: TablePlanConfig([name for name in types if name != "column_wise"])  # type: ignore[misc]
        for table in tables
        if not isinstance(table, CompositionalEmbeddingBagConfig)
    }
    return PlanConfig(types, min_partition, host_memory, tables=by_name)  # type: ignore[arg-type]


def with_memory(random: np.random.Generator, request: PlanRequest, every: EveryPlan, kind: str) -> PlanRequest:
    """Returns a request whose devices have much memory or little."""
    if kind == "loose":
        return request
    factor = 1 + 0.25 * random.random() ** 2 if kind == "tight" else 1 - 0.1 * random.random()
    plannable = factor * every.needed_bytes(every.emptiest())
    cluster = request.cluster
    share = 1 if cluster.device.kind == "cuda" else cluster.ranks_per_node
    memory_bytes = share * math.ceil(plannable / (1 - request.reserved_share) + 1)
    device = dataclasses.replace(cluster.device, memory_bytes=memory_bytes)
    return dataclasses.replace(request, cluster=dataclasses.replace(cluster, device=device))
