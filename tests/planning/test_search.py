"""The search, alone and polished by HiGHS, against every plan of small problems: its time, its bound, what fits."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.types import ShardingPlan

from distembed.base.errors import InsufficientMemory
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.buffers import Step
from distembed.planning.costs import PlacementCosts, step_times
from distembed.planning.devices import Cluster, find_device
from distembed.planning.fastest.exact import ExactSearch
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.local_search import Budget
from distembed.planning.fastest.problem import Assignment
from distembed.planning.search import EstimatedPlan, find_plan, plan_placements, some_plan_fits
from distembed.planning.table_problem import TableProblem
from tests.planning.drawn_requests import draw, request_of
from tests.planning.every_plan import EveryPlan

MOST = 50_000
FEW = 1_500
EQUAL = 1 + 1e-9


def slowest(request: PlanRequest, plan: ShardingPlan) -> float:
    """Milliseconds of the slowest rank."""
    placements = plan_placements(request.model, plan, request.cluster.world_size)
    return max(time.total for time in step_times(placements, PlacementCosts(request), request.cluster))


def fullest(request: PlanRequest, plan: ShardingPlan) -> int:
    """Bytes of the fullest rank."""
    placements = plan_placements(request.model, plan, request.cluster.world_size)
    return max(rank.total_bytes for rank in Step.of(request, placements).ranks())


def found_plan(request: PlanRequest) -> EstimatedPlan | None:
    """The search's plan if it fits."""
    try:
        found = find_plan(request)
    except InsufficientMemory:
        return None
    return found if found.fits else None


def places(found: EstimatedPlan) -> dict[str, Any]:
    """Everything that a plan says of tables."""
    return {path: {name: str(unit) for name, unit in units.items()} for path, units in found.plan.plan.items()}


def check(seed: int, most: int) -> None:
    request, every = draw(seed, most)
    best, found = every.fastest_that_fits(request), found_plan(request)
    assert some_plan_fits(request) == (found is not None) == (best is not None)
    check_all_plans(request, every, best)
    if found is None or best is None:
        return
    best_ms, own_ms, bound_ms = every.slowest_ms[best], slowest(request, found.plan), found.lower_bound_ms
    assert own_ms == pytest.approx(max(rank.times.total for rank in found.ranks))
    assert best_ms / EQUAL <= own_ms <= 1.02 * best_ms
    assert bound_ms is not None and bound_ms <= min(best_ms, own_ms) * EQUAL
    if found.is_complete:
        assert own_ms <= best_ms * (1 + request.config.time_tolerance) * EQUAL
    if seed % 5 == 0:
        again = found_plan(dataclasses.replace(request))
        assert again is not None and places(again) == places(found)


def check_all_plans(request: PlanRequest, every: EveryPlan, best: int | None) -> None:
    """The times and bytes of all plans are those that are reported of a plan."""
    last = len(every.slowest_ms) - 1
    for number in {0, last // 2, last, best or 0}:
        plan = every.plan(number)
        assert slowest(request, plan) == pytest.approx(every.slowest_ms[number], rel=1e-9)
        assert fullest(request, plan) == every.needed_bytes(number)


@pytest.mark.parametrize("seed", [0, 4, 10, 17, 20, 25])
def test_the_plan_is_the_best_of_all(seed: int) -> None:
    check(seed, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(216))
def test_the_plan_is_the_best_of_all_in_drawn_cases(seed: int) -> None:
    check(seed, MOST)


def bags(num_ids: Sequence[int], ids_per_row: Sequence[float], config: PlanConfig, ranks: int = 2) -> PlanRequest:
    """Full tables of these numbers of ids, each with a feature of so many ids a row, on one node."""
    make = CompositionalEmbeddingBagConfig
    tables = [make(f"t{at}", number, 16, [f"f{at}"]) for at, number in enumerate(num_ids)]
    workload = Workload(2**15, {f"f{at}": number for at, number in enumerate(ids_per_row)})
    cluster = Cluster(find_device("h100-80gb"), 1, ranks)
    return request_of(tables, cluster, workload, config, TableOptimizers("adagrad"))


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_bytes_decide_between_times_that_are_nearly_equal_and_only_there(tolerance: float) -> None:
    # fastest are the first two and the last two together, emptiest a large one with a small one
    large, small, ids_per_row = 1_000_000, 500_000, [3.0, 3.05, 3.1, 3.1]
    request = bags([large, large, small, small], ids_per_row, PlanConfig(["table_wise"], time_tolerance=tolerance))
    every, found = EveryPlan(request, FEW), found_plan(request)
    assert found is not None and found.is_complete
    near = np.flatnonzero(every.slowest_ms <= every.slowest_ms[0] * (1 + tolerance) * EQUAL).tolist()
    least = min(every.needed_bytes(number) for number in near)
    assert (least < every.needed_bytes(0)) == (tolerance > 0)
    assert fullest(request, found.plan) == least


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "only", "num_tables"), [(1, None, 12), (2, "data_parallel", 3), (2, "row_wise", 12)])
def test_the_bound_of_the_only_plan_is_its_time(ranks: int, only: str | None, num_tables: int) -> None:
    config = PlanConfig([only] if only else None, time_tolerance=0.0)  # type: ignore[list-item]
    request = bags(range(100, 100 + num_tables), [1.0] * num_tables, config, ranks)
    found = found_plan(request)
    assert found is not None and found.is_complete
    assert found.lower_bound_ms == pytest.approx(slowest(request, found.plan))


@pytest.mark.parametrize("seed", [4, 8, 13])
def test_the_search_adds_up_the_times_that_are_reported(seed: int) -> None:
    request, _ = draw(seed, 200)
    tables, random = TableProblem(request, PlacementCosts(request)), np.random.default_rng(seed)
    problem = tables.problem
    for _ in range(20):
        assignment = Assignment.empty(problem.num_tables)
        for table in range(problem.num_tables):
            option = int(random.choice(problem.options_of(table)))
            blocks = problem.option_blocks[option]
            fills_node = len(blocks) and problem.blocks.fills_node[blocks[0]]
            ranks = problem.world_size // (problem.ranks_per_node if fills_node else 1)
            assignment.option[table] = option
            assignment.places[table] = random.permutation(ranks)[: len(blocks)]
        plan = tables.plan(assignment)
        placed = plan_placements(request.model, plan, request.cluster.world_size)
        times = [time.total for time in step_times(placed, PlacementCosts(request), request.cluster)]
        assert Loads(problem, assignment).milliseconds().tolist() == pytest.approx(times, rel=1e-12)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 2), (256, 8)])
def test_the_exact_search_spends_no_more_than_its_budget_on_one_table(nodes: int, gpus: int) -> None:
    cluster = Cluster(find_device("h100-80gb"), nodes, gpus)
    request = dataclasses.replace(bags([100], [1.0], PlanConfig()), cluster=cluster)
    problem, budget = TableProblem(request, PlacementCosts(request)).problem, Budget(200)
    _, is_complete = ExactSearch(problem, Aim(capacity=1e12, host_capacity=0), budget).better_than(float("inf"))
    assert is_complete == (nodes < 256)
    assert budget.units > -2


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [13, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 22))])
def test_a_polished_plan_fits_and_is_no_slower(seed: int) -> None:
    request, _ = draw(seed, 500)
    polished = replace(request, config=replace(request.config, polish_seconds=2.0))
    before, after = (find_plan(own) for own in (request, polished))
    slowest, own = (max(rank.times.total for rank in plan.ranks) for plan in (before, after))
    assert after.fits >= before.fits
    assert own <= slowest * (1 + request.config.time_tolerance)
    assert before.lower_bound_ms <= after.lower_bound_ms <= own * (1 + 1e-9)
    assert after.is_complete >= before.is_complete
