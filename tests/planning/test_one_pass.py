"""Tables that are to be looked up in one pass are planned where training can do that, and refused where it cannot."""

from typing import Any

import pytest

from distembed.base.errors import UserError
from distembed.composition import PathLinear
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.settings import LookupKernel
from distembed.optim.declared import TableOptimizers
from distembed.partitions import Partition, QuotientRemainder, Remainder
from distembed.planning import PlanConfig, Workload
from distembed.planning.devices import Cluster, find_device
from distembed.planning.layouts import Layouts
from distembed.planning.search import find_plan
from tests.planning.drawn_requests import request_of

NUM_IDS = 1000


def kernels(optimizer: str, device: str = "h100-80gb", **settings: Any) -> set[tuple[str, str]]:
    """Returns the sharding types and compute kernels that a table of these settings may be planned with."""
    settings = {"embedding_dim": 16, "partition": QuotientRemainder(NUM_IDS, collisions=4), **settings}
    table = CompositionalEmbeddingBagConfig("clicks", NUM_IDS, feature_names=["f"], **settings)
    cluster, config = Cluster(find_device(device), 1, 2, 10**12), PlanConfig(host_memory=device != "cpu-256gb")
    request = request_of([table], cluster, Workload(64), config, TableOptimizers(optimizer))
    return {(layout.sharding_type, layout.compute_kernel) for layout in Layouts(request).of_unit([(table, "bags")])[0]}


def test_no_table_is_planned_where_rows_are_read_through_a_cache() -> None:
    auto, fused = kernels("adagrad"), kernels("adagrad", kernel="fused")
    assert fused == {own for own in auto if own[1] != "fused_uvm_caching"} < auto


def test_an_optimizer_that_the_pass_lacks_leaves_what_torch_updates() -> None:
    assert {kernel for _, kernel in kernels("adam")} > {"dense"}
    assert kernels("adam", kernel="fused") == {("data_parallel", "dense")}
    assert kernels("adam", "cpu-256gb", kernel="fused") == {("data_parallel", "dense")}


@pytest.mark.parametrize("device", ["h100-80gb", "cpu-256gb"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"composition": PathLinear()}, "path_linear does not compose column by column"),
        ({"pooling": "max"}, "pooling is max"),
        ({"embedding_dim": 6}, "a number of columns is no multiple of 4"),
    ],
)
def test_what_training_would_refuse_is_not_planned(settings: dict[str, Any], reason: str, device: str) -> None:
    assert kernels("adagrad", device, **settings)
    with pytest.raises(UserError, match=f"'clicks' has kernel='fused'.*because {reason}; give it kernel='auto'"):
        kernels("adagrad", device, **settings, kernel="fused")


@pytest.mark.parametrize("bag", [1.0, 10.0])
def test_one_pass_is_estimated_to_take_less_than_lookups_by_partition_and_less_than_a_hashed_table(bag: float) -> None:
    """As it was measured (``tools/bench_embedding.py``): 0.15x to 0.7x of a hashed table, and these above 1x."""

    def lookup_ms(partition: Partition, kernel: LookupKernel) -> float:
        table = CompositionalEmbeddingBagConfig("clicks", 400_000, 16, ["f"], partition, kernel=kernel)
        cluster, workload = Cluster(find_device("cpu-256gb"), 1, 1, 10**12), Workload(8192, {"f": bag})
        request = request_of([table], cluster, workload, optimizers=TableOptimizers("adagrad"))
        return find_plan(request).ranks[0].times.lookup

    hashed = lookup_ms(Remainder(400_000, collisions=4), "fbgemm")
    scheme = QuotientRemainder(400_000, collisions=4)
    assert 0.15 * hashed < lookup_ms(scheme, "auto") < 0.8 * hashed < hashed < lookup_ms(scheme, "fbgemm")
