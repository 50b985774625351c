"""Reasons why tables are placed as they are, of plans of which the reason is known."""

from dataclasses import replace

from torch import nn

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.devices import Cluster, find_device
from distembed.planning.search import find_plan
from distembed.sharding import default_sharders

LARGE, SMALL = 1_000_000, 8
"""Ids of tables of 16 numbers, which take 128 MB with Adagrad's states, and 1 KB."""


def why(num_ids: int, *, megabytes: int = 80_000, rows_of_rank: int = 256, config: PlanConfig | None = None) -> str:
    """The reason of one table's placement on two devices."""
    device = replace(find_device("h100-80gb"), memory_bytes=megabytes * 10**6)
    table = CompositionalEmbeddingBagConfig("t", num_ids, 16, ["f"])
    request = PlanRequest(
        nn.ModuleDict({"bags": CompositionalEmbeddingBagCollection([table], device="meta")}),
        default_sharders(),
        Cluster(device, 1, 2),
        Workload(2 * rows_of_rank),
        config or PlanConfig(),
        TableOptimizers("adagrad"),
    )
    found = find_plan(request)
    assert found.fits
    return found.why["t"]


def test_a_table_that_no_rank_has_room_for_is_divided_for_that() -> None:
    assert why(LARGE, megabytes=120).endswith(": whole it would not fit")


def test_a_table_that_one_rank_is_slow_with_is_divided_for_that() -> None:
    assert why(LARGE, rows_of_rank=200_000).endswith(": whole its rank would be the slowest")


def test_a_table_whose_gradients_are_less_than_its_vectors_is_replicated() -> None:
    # 8 rows of 16 floats
    assert why(SMALL) == "replicated: 512 B of gradients cost less than its exchange"


def test_what_the_config_says_is_the_reason() -> None:
    reason = why(SMALL, config=PlanConfig(["row_wise"]))  # type: ignore[arg-type]
    assert reason == "of row_wise, as plan.sharding_types has it"
