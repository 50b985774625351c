"""The exact search does no more work than it is allowed, however many ways there are to place one table."""

import pytest
from torch import nn

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.planning import PlanRequest, Workload
from distembed.planning.costs import PlacementCosts
from distembed.planning.devices import Cluster, find_device
from distembed.planning.fastest.exact import ExactSearch
from distembed.planning.fastest.loads import Aim
from distembed.planning.fastest.local_search import Budget
from distembed.planning.table_problem import TableProblem
from distembed.sharding import default_sharders


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 2), (256, 8)])
def test_the_work_on_one_table_is_counted_too(nodes: int, gpus: int) -> None:
    table = CompositionalEmbeddingBagConfig("t", 100, 12, ["f"])
    model = nn.ModuleDict({"bags": CompositionalEmbeddingBagCollection([table], device="meta")})
    cluster = Cluster(find_device("h100-80gb"), nodes, gpus)
    request = PlanRequest(model, default_sharders(), cluster, Workload(4096))
    problem, budget = TableProblem(request, PlacementCosts(request)).problem, Budget(200)
    outcome = ExactSearch(problem, Aim(capacity=1e12, host_capacity=0), budget).better_than(float("inf"))
    assert outcome.is_complete == (nodes < 256)
    assert budget.units > -2
