"""Memory of ranks after single tables are placed anew against that of a plan that was made so at once."""

import random

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement as rank_placement
from torchrec.distributed.types import ParameterSharding, ShardMetadata

from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning.buffers import Step
from distembed.planning.request import Workload
from distembed.sharding.placement import Placement, place_table
from distembed.sharding.table_slice import unit_size

WORLD_SIZE = 4
OPTIMIZERS = TableOptimizers("adagrad", "adam")
TABLES = [
    CompositionalEmbeddingBagConfig(
        f"t{i}", 300 + 90 * i, 32, [f"f{i}"], QuotientRemainder(300 + 90 * i, collisions=4), composition
    )
    for i, composition in enumerate(["product", "concat", "sum", "product", "path_linear", "product"])
]
WORKLOAD = Workload(64, {"f0": 3.0, "f3": 2.5}, num_dense=3)


def placements(table: CompositionalEmbeddingBagConfig) -> list[Placement]:
    """Some of each sharding type, of both kernels."""
    rows, columns = unit_size(table)
    block = -(-rows // WORLD_SIZE)
    ways = [("table_wise", [([0, 0], [rows, columns], rank)]) for rank in range(WORLD_SIZE)]
    if table.combine.columns(table.embedding_dim, 2) is not None:
        half = columns // 2
        ways.append(("column_wise", [([0, 0], [rows, half], 1), ([0, half], [rows, half], 3)]))
    by_rows = [([start * block, 0], [block, columns], start) for start in range(WORLD_SIZE)]
    ways += [("row_wise", by_rows), ("data_parallel", [])]
    return [
        place_table(table, _unit(sharding_type, kernel, shards), WORLD_SIZE)
        for sharding_type, shards in ways
        for kernel in ("fused", "dense")
    ]


def _unit(sharding_type: str, kernel: str, shards: list[tuple[list[int], list[int], int]]) -> ParameterSharding:
    metadata = [ShardMetadata(start, size, rank_placement("cpu", rank, WORLD_SIZE)) for start, size, rank in shards]
    spec = EnumerableShardingSpec(metadata) if metadata else None
    return ParameterSharding(sharding_type, kernel, [rank for *_, rank in shards], spec)


def test_placing_tables_anew_is_a_plan_that_was_made_so() -> None:
    chosen = random.Random(0)
    ways = [placements(table) for table in TABLES]
    plan = [chosen.choice(of_table) for of_table in ways]
    step = Step(plan, WORLD_SIZE, WORKLOAD, OPTIMIZERS, "cpu")
    for _ in range(100):
        number = chosen.randrange(len(TABLES))
        plan[number] = chosen.choice(ways[number])
        step.place(plan[number])
        rank = chosen.randrange(WORLD_SIZE)
        assert step.rank(rank) == Step(plan, WORLD_SIZE, WORKLOAD, OPTIMIZERS, "cpu").rank(rank)
