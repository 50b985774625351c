"""Estimated times: sums of what placements cost, and what bandwidths, bags and numbers of ranks do to these."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.composition import PathMLP
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.buffers import Step
from distembed.planning.costs import Layout, PlacementCosts, layout, step_times
from distembed.planning.devices import Cluster, Device, find_device
from distembed.planning.networks import NetworkEstimate
from distembed.planning.search import find_plan
from distembed.planning.storage import StepTime
from distembed.sharding.placement import place_table
from distembed.sharding.table_slice import unit_size
from tests.planning.drawn_requests import request_of

NUM_IDS, DIM, ROWS = 100_000, 64, 4096
SLOWER = {16: 1.75, 64: 1.15, 128: 1.0}
"""Seconds of a row of so many numbers on a GPU, as multiples of its bytes' at full speed, by TorchRec's planner."""
COPIED_BYTES = 2 * 4 * DIM * ROWS * (3 + 3)
"""Vectors and gradients copied to the order of features, and around an exchange: read and written."""
A100 = find_device("a100-80gb")
QUOTIENT = QuotientRemainder(NUM_IDS, collisions=4)
TABLES = [
    CompositionalEmbeddingBagConfig("plain", NUM_IDS, DIM, ["a"]),
    CompositionalEmbeddingBagConfig("product", NUM_IDS, DIM, ["b"], QUOTIENT),
    CompositionalEmbeddingBagConfig("twin", NUM_IDS, DIM, ["c"], QUOTIENT),
    CompositionalEmbeddingBagConfig("concat", NUM_IDS, DIM, ["d", "e"], QUOTIENT, "concat"),
    CompositionalEmbeddingBagConfig("path", NUM_IDS, DIM, ["f"], QUOTIENT, PathMLP(hidden=[64])),
]


def request(
    tables: Sequence[CompositionalEmbeddingBagConfig],
    cluster: Cluster,
    workload: Workload,
    sharding_type: str = "table_wise",
) -> PlanRequest:
    return request_of(tables, cluster, workload, PlanConfig([sharding_type]))  # type: ignore[list-item]


def times(
    scheme: object = "naive",
    composition: object = "product",
    *,
    device: Device = A100,
    nodes: int = 1,
    gpus: int = 2,
    network: NetworkEstimate | None = None,
    bf16: bool = False,
    ids_per_row: float = 1.0,
) -> list[StepTime]:
    """Of each rank, with one table, on the first rank."""
    table = CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"], scheme, composition)  # type: ignore[arg-type]
    cluster = Cluster(device, nodes, gpus)
    workload = Workload(ROWS * cluster.world_size, {"f": ids_per_row}, network=network, bf16=bf16)
    placed = place_table(table, unit(table, "table_wise", [[0]]), cluster.world_size, "bags")
    return step_times([placed], PlacementCosts(request([table], cluster, workload)), cluster)


def unit(
    table: CompositionalEmbeddingBagConfig, sharding_type: str, blocks: Sequence[Sequence[int]]
) -> ParameterSharding:
    """A table on these ranks, for each range of columns those of its rows."""
    rows, columns = unit_size(table)
    width, shards = columns // len(blocks), []
    for i, ranks in enumerate(blocks):
        height = -(-rows // len(ranks))
        for j, rank in enumerate(ranks):
            size = [min(height, rows - j * height), width]
            shards.append(ShardMetadata([j * height, i * width], size, f"rank:{rank}/cuda:{rank}"))
    return ParameterSharding(sharding_type, "fused", [0], EnumerableShardingSpec(shards))


UNITS = {
    "table_wise": [[1]],
    "column_wise": [[3], [0]],
    "row_wise": [[0, 1, 2, 3]],
    "table_row_wise": [[2, 3]],
    "grid_shard": [[2, 3], [0, 1]],
    "data_parallel": [[0]],
}
CLUSTER = Cluster(A100, 2, 2)


@pytest.mark.parametrize("types", [*[[name] for name in UNITS], list(UNITS)])
def test_a_ranks_time_is_the_sum_of_what_placements_cost(types: list[str]) -> None:
    network = NetworkEstimate(gradients=10**6, flops=10**10, peak=10**7)
    costs = PlacementCosts(request(TABLES, CLUSTER, Workload(ROWS, {"c": 3.0}, network=network)))
    placed = [
        place_table(table, unit(table, name, UNITS[name] if table.name != "path" else UNITS[name][:1]), 4, "bags")
        for table, name in zip(TABLES, itertools.cycle(types), strict=False)
    ]
    for rank, own in enumerate(step_times(placed, costs, CLUSTER)):
        lookup, all_reduce, starts, groups, exchanges = 0.0, costs.networks_all_reduce_ms, 0.0, set(), set()
        owner: dict[object, float] = {}
        other: dict[object, float] = {}
        for table in placed:
            way, ranks = layout(table.unit, DIM)
            cost = costs.cost(table.table, way, "bags")
            all_reduce += cost.all_reduce_ms
            exchanges |= {cost.exchange} - {None}
            mine = [shard for shard, at in zip(cost.shards, ranks, strict=True) if at == rank]
            mine += [cost.everywhere] if cost.everywhere else []
            lookup += sum(shard.lookup_ms for shard in mine)
            groups |= {shard.group for shard in mine}
            for shard in mine:
                for phase, transfer in shard.transfers.items():
                    owner[phase] = owner.get(phase, 0.0) + transfer.owner_ms
            for shard, at in zip(cost.shards, ranks, strict=True):
                for phase, transfer in shard.transfers.items():
                    other[phase] = other.get(phase, 0.0) + (transfer.other_ms if at != rank else 0.0)
        starts = costs.all_reduce_start_ms + sum(map(costs.group_start_ms, groups))
        starts += sum(map(costs.exchange_start_ms, exchanges))
        exchange = sum(max(owner.get(phase, 0.0), other.get(phase, 0.0)) for phase in owner.keys() | other.keys())
        assert own.lookup == pytest.approx(lookup, rel=1e-12)
        assert own.exchange == pytest.approx(exchange, rel=1e-12)
        assert own.starts == pytest.approx(starts, rel=1e-12)
        assert (own.networks, own.all_reduce) == (costs.networks_ms, pytest.approx(all_reduce, rel=1e-12))
        assert own.total == pytest.approx(lookup + exchange + starts + all_reduce + costs.networks_ms)


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_all_ranks_together_send_what_each_is_said_to_send(sharding_type: str) -> None:
    workload = Workload(ROWS, {"c": 3.0})
    costs = PlacementCosts(request(TABLES, CLUSTER, workload))
    for table in TABLES[:4]:
        own = unit(table, sharding_type, UNITS[sharding_type])
        step = Step([place_table(table, own, 4, "bags")], 4, workload, TableOptimizers(), "cuda")
        sent = [step.sent_bytes(rank) for rank in range(4)]
        expected = sum(each.ids + each.vectors + each.gradients + each.all_reduce for each in sent)
        assert costs.cost(table, layout(own, DIM)[0], "bags").sent_bytes == pytest.approx(expected, rel=1e-3)


def test_two_levels_send_less_between_nodes_than_rows_over_all_ranks() -> None:
    """Sums of a node's rows are added up before they leave it."""
    slow = dataclasses.replace(A100, local_bandwidth=1e18, reduce_bandwidth=1e18)
    cluster = Cluster(slow, 4, 8)
    costs = PlacementCosts(request(TABLES, cluster, Workload(ROWS)))
    ranks = list(range(32))
    by_rows = costs.cost(TABLES[0], layout(unit(TABLES[0], "row_wise", [ranks]), DIM)[0], "bags")
    by_node = costs.cost(TABLES[0], layout(unit(TABLES[0], "table_row_wise", [ranks[:8]]), DIM)[0], "bags")
    assert by_rows.everywhere is not None
    over_all = by_rows.everywhere.transfers[("bags", "row_wise"), "vectors"].owner_ms
    over_nodes = by_node.shards[0].transfers[("bags", "table_row_wise"), "vectors"].owner_ms
    # to 24 ranks of other nodes in the place of one of each
    assert over_all == pytest.approx(8 * over_nodes)


def test_a_plain_table_takes_its_bytes_over_the_bandwidths() -> None:
    own, num_ids = times()[0], 2 * ROWS
    # forward: ids, rows, sums; backward: gradients, sorted ids, rows that occur, read and written
    distinct = NUM_IDS * (1 - (1 - 1 / NUM_IDS) ** num_ids)
    forward = num_ids * (8 + 2 * 4 * DIM)
    backward = num_ids * (64 + 4 * DIM) + 2 * distinct * 4 * DIM
    seconds = SLOWER[DIM] * (forward + backward) / A100.lookup_bandwidth + COPIED_BYTES / A100.memory_bandwidth
    assert own.lookup == pytest.approx(1e3 * seconds)
    # the other rank's ids with their numbers; vectors and gradients
    assert own.exchange == pytest.approx(1e3 * ROWS * (8 + 4 + 2 * 4 * DIM) / A100.local_bandwidth)


def test_narrow_rows_are_read_more_slowly_on_gpus() -> None:
    def lookup_ms(dim: int) -> float:
        table = CompositionalEmbeddingBagConfig("t", NUM_IDS, dim, ["f"])
        costs = PlacementCosts(request([table], Cluster(A100, 1, 2), Workload(2 * ROWS)))
        (shard,) = costs.cost(table, Layout("table_wise", "fused", ((0, dim),)), "bags").shards
        return shard.lookup_ms

    num_ids = 2 * ROWS
    distinct = NUM_IDS * (1 - (1 - 1 / NUM_IDS) ** num_ids)
    for dim, slower in SLOWER.items():
        num_bytes = num_ids * (8 + 64 + 3 * 4 * dim) + 2 * distinct * 4 * dim
        assert lookup_ms(dim) == pytest.approx(1e3 * slower * num_bytes / A100.lookup_bandwidth)


def test_only_partitions_of_many_rows_are_sorted_in_one_pass_on_a_gpu() -> None:
    def moved_bytes(num_rows: tuple[int, int]) -> float:
        scheme = QuotientRemainder(num_rows[0] * num_rows[1], collisions=num_rows[1])
        assert sorted(scheme.num_rows) == sorted(num_rows)
        table = CompositionalEmbeddingBagConfig("t", scheme.num_embeddings, 16, ["f"], scheme, kernel="fused")
        costs = PlacementCosts(request([table], Cluster(A100, 1, 1), Workload(ROWS)))
        (shard,) = costs.cost(table, Layout("table_wise", "fused", ((0, 16),)), "bags").shards
        return shard.lookup_ms / 1e3 * A100.lookup_bandwidth / SLOWER[16]

    both, one, none = (moved_bytes(rows) for rows in ((513, 513), (513, 512), (512, 512)))
    # a sort moves 64 bytes an id
    assert both - one == pytest.approx(64 * ROWS, rel=0.01) and one - none == pytest.approx(64 * ROWS, rel=0.01)


def test_ranks_on_cpus_take_half_of_an_exchange_to_send_and_half_to_receive() -> None:
    tables, cluster = TABLES[1:3], Cluster(find_device("cpu-256gb"), 1, 2)
    costs = PlacementCosts(request(tables, cluster, Workload(2 * ROWS)))

    def exchanges(*ranks: int) -> list[float]:
        placed = [
            place_table(table, unit(table, "table_wise", [[rank]]), 2, "bags")
            for table, rank in zip(tables, ranks, strict=True)
        ]
        return [own.exchange for own in step_times(placed, costs, cluster)]

    # as many bytes go from one rank to the other, however the tables lie
    one_table = 1e3 * ROWS * (8 + 4 + 2 * 4 * DIM) / cluster.device.local_bandwidth
    assert exchanges(0, 0) == pytest.approx([one_table, one_table])
    assert exchanges(0, 1) == pytest.approx([one_table, one_table])


@pytest.mark.parametrize("device", ["a100-80gb", "cpu-256gb"])
def test_a_shards_exchange_is_that_of_a_rank_which_has_its_share_of_all(device: str) -> None:
    cluster = Cluster(find_device(device), 1, 2)
    costs = PlacementCosts(request(TABLES[:1], cluster, Workload(2 * ROWS)))
    (shard,) = costs.cost(TABLES[0], Layout("table_wise", "fused", ((0, DIM),)), "bags").shards
    num_bytes = ROWS * (8 + 4 + 2 * 4 * DIM)
    assert shard.exchange_ms(1) == pytest.approx(1e3 * num_bytes / cluster.device.local_bandwidth)


def test_rows_that_few_ranks_have_are_looked_up_by_these_alone() -> None:
    table, cluster = CompositionalEmbeddingBagConfig("few", 3, DIM, ["f"]), Cluster(A100, 8, 8)
    costs = PlacementCosts(request([table], cluster, Workload(64 * ROWS)))
    by_rows, whole = (
        costs.cost(table, Layout(name, "fused", ((0, DIM),)), "bags") for name in ("row_wise", "table_wise")
    )
    common_ms = whole.everywhere.lookup_ms
    assert by_rows.everywhere.lookup_ms - common_ms > whole.shards[0].lookup_ms / 3
    # each of these gets a third of the ids of 63 ranks
    ids = by_rows.everywhere.transfers[("bags", "row_wise"), "ids"].owner_ms
    per_byte = 1e3 * (7 / A100.local_bandwidth + 56 / A100.node_bandwidth)
    assert ids == pytest.approx(ROWS * (8 / 3 + 4) * per_byte)


def test_each_range_of_columns_takes_its_time_on_cpus_to_be_put_in_order() -> None:
    table, cluster = TABLES[0], Cluster(find_device("cpu-256gb"), 1, 4)
    costs = PlacementCosts(request([table], cluster, Workload(4 * ROWS)))

    def common_ms(number: int) -> float:
        wide = DIM // number
        ranges = tuple((at, at + wide) for at in range(0, DIM, wide))
        own = costs.cost(table, Layout("column_wise", "fused", ranges), "bags").everywhere
        assert own is not None
        return own.lookup_ms

    one_range = common_ms(2) - common_ms(1)
    assert 0 < one_range < 1e3 * ROWS * cluster.device.row_seconds
    assert common_ms(4) - common_ms(1) == pytest.approx(3 * one_range)


def test_a_table_of_torchrec_costs_what_the_same_full_table_does() -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=NUM_IDS, feature_names=["f"])
    model = nn.ModuleDict({"e": EmbeddingBagCollection([config], device="meta")})  # type: ignore[arg-type]
    stock = PlanRequest(
        model,
        [EmbeddingBagCollectionSharder()],  # type: ignore[list-item]
        Cluster(A100, 1, 2),
        Workload(2 * ROWS),
        PlanConfig(["table_wise"]),
    )
    assert [rank.times for rank in find_plan(stock).ranks] == times()


def test_more_partitions_take_longer_to_look_up_and_no_longer_to_exchange() -> None:
    copied = 1e3 * COPIED_BYTES / A100.memory_bandwidth

    def without_copies(*table: object) -> StepTime:
        own = times(*table)[0]
        return dataclasses.replace(own, lookup=own.lookup - copied)

    plain, two, halves = without_copies(), without_copies(QUOTIENT), without_copies(QUOTIENT, "concat")
    three, path = without_copies(MixedRadix(NUM_IDS, num_partitions=3)), without_copies(QUOTIENT, PathMLP(hidden=[64]))
    # k vectors are read and k + 1 moved to compose them; halves are as long as one vector, and are moved as well
    assert 1.5 * plain.lookup < two.lookup < 4 * plain.lookup
    assert 1.2 * two.lookup < three.lookup < 2 * two.lookup
    assert plain.lookup < halves.lookup < two.lookup
    assert plain.lookup < path.lookup
    assert plain.exchange == two.exchange == three.exchange == halves.exchange == path.exchange
    assert plain.starts < two.starts < three.starts


def test_half_of_a_bandwidth_doubles_what_it_carries() -> None:
    own = times(QUOTIENT)[0]

    def slower(nodes: int, *fields: str) -> StepTime:
        half = {field: getattr(A100, field) / 2 for field in fields}
        return times(QUOTIENT, device=dataclasses.replace(A100, **half), nodes=nodes)[0]

    assert slower(1, "memory_bandwidth", "lookup_bandwidth").lookup == pytest.approx(2 * own.lookup)
    assert slower(1, "local_bandwidth").exchange == pytest.approx(2 * own.exchange)
    assert slower(1, "node_bandwidth").exchange == own.exchange
    across = times(QUOTIENT, nodes=2)[0]
    # what goes to other nodes and what stays within one are added
    assert slower(2, "node_bandwidth").exchange + slower(2, "local_bandwidth").exchange == pytest.approx(
        3 * across.exchange
    )
    assert slower(2, "node_bandwidth").exchange > 1.5 * across.exchange
    assert across.exchange > own.exchange > times(QUOTIENT, gpus=1)[0].exchange == 0.0


def test_longer_bags_take_longer() -> None:
    one, ten = times()[0], times(ids_per_row=10.0)[0]
    # rows are read for every id, and written once a bag
    assert 3 * one.lookup < ten.lookup < 10 * one.lookup


def test_networks_take_their_operations_or_their_activations() -> None:
    computes = NetworkEstimate(gradients=10**9, flops=10**12, peak=1)
    for bf16, flops in ((True, A100.bf16_flops), (False, A100.fp32_flops)):
        own = times(network=computes, bf16=bf16)[0]
        assert own.networks == pytest.approx(1e3 * 10**12 / (A100.utilisation * flops))
    # in a ring each of two ranks sends every gradient once
    assert own.all_reduce == pytest.approx(1e3 * 10**9 / A100.local_bandwidth)
    moves = times(network=NetworkEstimate(flops=1, peak=10**9))[0]
    assert moves.networks == pytest.approx(1e3 * 4 * 10**9 / A100.memory_bandwidth)
    assert times()[0].networks == 0.0


def test_gradients_of_data_parallel_tables_are_averaged_within_nodes_then_between_them() -> None:
    table = CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"])
    for nodes in (1, 4):
        planned = find_plan(request([table], Cluster(A100, nodes, 8), Workload(ROWS), "data_parallel"))
        within = 2 * 7 / 8 * NUM_IDS * DIM * 4 / A100.local_bandwidth
        between = 2 * (nodes - 1) / nodes * NUM_IDS * DIM * 4 / 8 / A100.node_bandwidth
        for own in (rank.times for rank in planned.ranks):
            assert own.exchange == 0.0
            assert own.all_reduce == pytest.approx(1e3 * (within + between), rel=1e-6)


def test_ranks_that_share_cores_wait_for_them() -> None:
    """A node takes no less than all of its ranks' times over the number of ranks that its cores run at once."""
    alone = times(gpus=4)
    shared = times(gpus=4, device=dataclasses.replace(A100, ranks_at_once=2.0))
    least = sum(own.total for own in alone) / 2
    assert [own.total for own in shared] == pytest.approx([max(least, own.total) for own in alone])
    assert [dataclasses.replace(own, waiting=0.0) for own in shared] == alone


def test_distinct_ids_are_bounded_by_those_of_the_feature() -> None:
    """Of two unified tables of equal size, the one with a feature of 10 ids takes less time and memory."""
    cpu, planned = Cluster(find_device("cpu-256gb"), 1, 2), []
    for second in (10, NUM_IDS // 2):
        table = CompositionalEmbeddingBagConfig(
            "t", NUM_IDS, DIM, ["a", "b"], QUOTIENT, PathMLP(hidden=[64]), first_ids={"a": 0, "b": second}
        )
        asked = request([table], cpu, Workload(ROWS, {"a": 9.0, "b": 9.0}))
        placed = [place_table(table, unit(table, "table_wise", [[0]]), 2, "bags")]
        time = step_times(placed, PlacementCosts(asked), cpu)[0]
        planned.append((time.lookup, Step.of(asked, placed).ranks()[0].total_bytes))
    (few_ms, few_bytes), (many_ms, many_bytes) = planned
    assert few_ms < many_ms and few_bytes < many_bytes
