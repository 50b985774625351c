"""Estimated times: TorchRec's for plain tables, and what several partitions and slower devices add to them."""

import dataclasses

import pytest
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.composition import PathMLP
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.cluster import Cluster
from distembed.planning.devices import Device, find_device
from distembed.planning.networks import NetworkEstimate
from distembed.planning.plan import find_plan
from distembed.planning.times import UTILISATION, StepTime
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder

NUM_IDS, DIM, ROWS = 100_000, 64, 4096


def times(
    scheme: object = "naive",
    composition: object = "product",
    *,
    device: Device | None = None,
    nodes: int = 1,
    gpus: int = 2,
    network: NetworkEstimate | None = None,
    bf16: bool = False,
    ids_per_row: float = 1.0,
) -> list[StepTime]:
    """Of each rank, with one table, on the first rank."""
    table = CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"], scheme, composition)  # type: ignore[arg-type]
    cluster = Cluster(device or find_device("a100-80gb"), nodes, gpus)
    workload = Workload(ROWS * cluster.world_size, {"f": ids_per_row}, network=network, bf16=bf16)
    model = nn.ModuleDict({"e": CompositionalEmbeddingBagCollection([table], device="meta")})
    sharders = [CompositionalEmbeddingBagCollectionSharder()]
    return find_plan(PlanRequest(model, sharders, cluster, workload, PlanConfig(["table_wise"]))).times


def test_a_plain_table_takes_what_torchrec_says() -> None:
    cluster = Cluster(find_device("a100-80gb"), 1, 2)
    planner = EmbeddingShardingPlanner(
        topology=cluster.topology(),
        batch_size=ROWS,
        constraints={"t": ParameterConstraints(["table_wise"], ["fused"])},
    )
    config = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=NUM_IDS, feature_names=["f"])
    planner.plan(
        nn.ModuleDict({"e": EmbeddingBagCollection([config], device="meta")}),  # type: ignore[arg-type]
        [EmbeddingBagCollectionSharder()],  # type: ignore[list-item]
    )
    assert planner._best_plan is not None
    (option,) = planner._best_plan
    (shard,) = option.shards
    assert shard.perf is not None
    own = times()[0]
    assert own.lookup == pytest.approx(shard.perf.fwd_compute + shard.perf.bwd_compute)
    of_ids = shard.perf.input_dist_comms
    assert own.exchange == pytest.approx(of_ids + shard.perf.fwd_comms + shard.perf.bwd_comms)


def test_more_partitions_take_longer_to_look_up_and_no_longer_to_exchange() -> None:
    plain = times()[0]
    two = times(QuotientRemainder(NUM_IDS, collisions=4))[0]
    three = times(MixedRadix(NUM_IDS, num_partitions=3))[0]
    halves = times(QuotientRemainder(NUM_IDS, collisions=4), "concat")[0]
    path = times(QuotientRemainder(NUM_IDS, collisions=4), PathMLP(hidden=[64]))[0]
    # k vectors are read and k + 1 moved to compose them; halves are as long as one vector, and are moved as well
    assert 2 * plain.lookup < two.lookup < 4 * plain.lookup
    assert 1.2 * two.lookup < three.lookup < 2 * two.lookup
    assert plain.lookup < halves.lookup < two.lookup
    assert plain.lookup < path.lookup
    assert plain.exchange == two.exchange == three.exchange == halves.exchange == path.exchange


def test_half_of_a_bandwidth_doubles_what_it_carries() -> None:
    device, scheme = find_device("a100-80gb"), QuotientRemainder(NUM_IDS, collisions=4)
    own = times(scheme)[0]

    def slower(field: str, nodes: int = 1) -> StepTime:
        return times(scheme, device=dataclasses.replace(device, **{field: getattr(device, field) / 2}), nodes=nodes)[0]

    assert slower("memory_bandwidth").lookup == pytest.approx(2 * own.lookup)
    assert slower("local_bandwidth").exchange == pytest.approx(2 * own.exchange)
    assert slower("node_bandwidth").exchange == own.exchange
    across = times(scheme, nodes=2)[0]
    assert slower("node_bandwidth", nodes=2).exchange > 1.5 * across.exchange
    # the exchange within one node is the faster one, and one rank has none
    assert across.exchange > own.exchange > times(scheme, gpus=1)[0].exchange == 0.0


def test_longer_bags_take_longer() -> None:
    one, ten = times()[0], times(ids_per_row=10.0)[0]
    # rows are read for every id, and written once a bag
    assert 3 * one.lookup < ten.lookup < 10 * one.lookup


def test_networks_take_their_operations_or_their_activations() -> None:
    device = find_device("a100-80gb")
    computes = NetworkEstimate(gradients=10**9, flops=10**12, peak=1)
    for bf16, flops in ((True, device.bf16_flops), (False, device.fp32_flops)):
        own = times(network=computes, bf16=bf16)[0]
        assert own.networks == pytest.approx(1e3 * 10**12 / (UTILISATION * flops))
    # in a ring each of two ranks sends every gradient once
    assert own.all_reduce == pytest.approx(1e3 * 10**9 / device.local_bandwidth)
    assert own.total == pytest.approx(own.lookup + own.exchange + own.networks + own.all_reduce)
    moves = times(network=NetworkEstimate(flops=1, peak=10**9))[0]
    assert moves.networks == pytest.approx(1e3 * 4 * 10**9 / device.memory_bandwidth)
    assert times()[0].networks == 0.0


def test_gradients_of_data_parallel_tables_are_counted_once() -> None:
    table = CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"])
    model = nn.ModuleDict({"e": CompositionalEmbeddingBagCollection([table], device="meta")})
    cluster, sharders = Cluster(find_device("a100-80gb"), 1, 8), [CompositionalEmbeddingBagCollectionSharder()]
    planned = find_plan(PlanRequest(model, sharders, cluster, Workload(ROWS), PlanConfig(["data_parallel"])))
    for own in planned.times:
        # in a ring of n ranks each sends 2 (n - 1) / n of them
        sent = 2 * 7 / 8 * NUM_IDS * DIM * 4
        assert own.exchange == 0.0
        assert own.all_reduce == pytest.approx(1e3 * sent / find_device("a100-80gb").local_bandwidth, rel=1e-6)
