"""Tables pinned to ranks, tables together, ranks of unequal memory: where they lie, and wishes that fail.

:mod:`tests.planning.test_fastest` compares assignments with every assignment that keeps the wishes.
"""

import dataclasses

import numpy as np
import pytest

from distembed.base.errors import InsufficientMemory, UserError
from distembed.commands.plan import ClusterOptions
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.config import TablePlanConfig
from distembed.planning.costs import PlacementCosts, step_times
from distembed.planning.devices import Cluster, find_device
from distembed.planning.search import find_plan, plan_placements
from distembed.planning.table_problem import TableProblem
from tests.planning.drawn_requests import request_of

MIB = 2**20


def request(config: PlanConfig, memory: tuple[int, ...] = (), ranks: int = 3, seed: int = 0) -> PlanRequest:
    """Full and compressed tables t0 to t4, of 1 to 100 MiB with their optimizer; ids of a row are drawn."""
    random = np.random.default_rng(seed)
    tables = []
    for number in range(5):
        num_ids, dim = int(10 ** random.uniform(4, 5.9)), int(random.choice([8, 16]))
        scheme = QuotientRemainder(num_ids, collisions=4) if random.random() < 0.5 else "naive"
        tables.append(CompositionalEmbeddingBagConfig(f"t{number}", num_ids, dim, [f"f{number}"], partition=scheme))
    workload = Workload(3 * 2**13, {f"f{number}": float(random.integers(1, 5)) for number in range(5)})
    cluster = Cluster(find_device("h100-80gb"), 1, ranks, memory_by_rank=memory)
    return request_of(tables, cluster, workload, config, TableOptimizers("adagrad"))


def ranks_of(request: PlanRequest) -> dict[str, set[int]]:
    """The ranks of each table in the plan that is found, which fits."""
    found = find_plan(dataclasses.replace(request, config=dataclasses.replace(request.config, time_tolerance=1.0)))
    assert found.fits
    return {name: set(own.ranks or []) for name, own in found.plan.plan["bags"].items()}  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_the_search_adds_up_the_times_of_tables_together_that_are_reported() -> None:
    own = request(PlanConfig(together=[["t0", "t3"], ["t1", "t2", "t4"]]))
    tables = TableProblem(own, PlacementCosts(own))
    assert tables.problem.num_tables == 2
    assert tables.unit_by_table == [0, 1, 1, 0, 1]
    found = find_plan(own)
    placed = step_times(plan_placements(own.model, found.plan, 3), PlacementCosts(own), own.cluster)
    assert max(time.total for time in placed) == pytest.approx(max(rank.times.total for rank in found.ranks))
    assert found.lower_bound_ms <= max(time.total for time in placed) * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["column_wise", "row_wise", "data_parallel"])
def test_tables_together_are_divided_alike(kind: str) -> None:
    config = PlanConfig([kind], together=[["t0", "t1", "t2"]])  # type: ignore[list-item]
    ranks = ranks_of(request(config, ranks=4))
    assert ranks["t0"] == ranks["t1"] == ranks["t2"]


def test_a_table_pinned_to_several_ranks_is_divided_among_these_at_most() -> None:
    config = PlanConfig(["data_parallel"], tables={"t0": TablePlanConfig(["column_wise"], ranks=[1, 3])})
    ranks = ranks_of(request(config, ranks=4))
    assert ranks["t0"] == {1, 3}


@pytest.mark.thorough
def test_a_reason_names_pins_and_tables_together() -> None:
    config = PlanConfig(["table_wise"], tables={"t0": TablePlanConfig(ranks=[2])}, together=[["t0", "t1"]])
    why = find_plan(request(config)).why
    assert why["t0"].endswith("; pinned to rank 2; together with t1")
    assert why["t1"].endswith("; pinned to rank 2; together with t0")
    assert "pinned" not in why["t2"]
    assert "together" not in why["t2"]


UNLIKE = {"t0": "row_wise", "t1": "table_wise"}
ALL_ON_ONE = PlanConfig(["table_wise"], tables={f"t{n}": TablePlanConfig(ranks=[0]) for n in range(5)})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "memory", "message"),
    [
        (PlanConfig(tables={"t0": TablePlanConfig(ranks=[3])}), 0, r"plan.tables.t0.ranks has rank 3.*from 0 to 2"),
        (PlanConfig(together=[["t0", "t9"]]), 0, "plan.together.*t9"),
        (PlanConfig(together=[["t0", "t1"], ["t1", "t2"]]), 0, "plan.together has table 't1' twice"),
        (
            PlanConfig(tables={n: TablePlanConfig(ranks=[int(n[1])]) for n in ("t0", "t1")}, together=[["t0", "t1"]]),
            0,
            "pinned to different ranks: 't0' to ranks 0, 't1' to ranks 1",
        ),
        (
            PlanConfig(tables={"t0": TablePlanConfig(["row_wise"], ranks=[0, 1])}),
            0,
            "'t0' is pinned to ranks 0-1 of 3, and row_wise needs more of them",
        ),
        (
            PlanConfig(tables={n: TablePlanConfig([kind]) for n, kind in UNLIKE.items()}, together=[[*UNLIKE]]),  # type: ignore[list-item]
            0,
            "cannot be divided alike: 't0' can be row_wise; 't1' can be table_wise",
        ),
        (PlanConfig(tables={"t0": TablePlanConfig(ranks=[0])}), 1, r"table 't0' needs .* to which it is pinned"),
        (ALL_ON_ONE, 0.99, "pinned to ranks 0 do not fit"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(config: PlanConfig, memory: float, message: str) -> None:
    own = request(config)
    if memory:
        of_tables = find_plan(request(ALL_ON_ONE)).ranks[0].storage.total
        of_first = of_tables if memory < 1 else MIB // 16
        memory_bytes = round(of_first * min(memory, 1) / (1 - own.reserved_share))
        cluster = dataclasses.replace(own.cluster, memory_by_rank=(memory_bytes, 2**36, 2**36))
        own = dataclasses.replace(own, cluster=cluster)
    with pytest.raises((UserError, InsufficientMemory), match=message):
        find_plan(own)


def test_the_command_takes_the_memory_of_each_rank() -> None:
    cluster = ClusterOptions(gpus=2, memory="1GiB,2GiB").cluster()
    assert cluster.bytes_by_rank == (2**30, 2**31)
    with pytest.raises(UserError, match="memory is given for 2 ranks; name all 3"):
        ClusterOptions(gpus=3, memory="1GiB,2GiB").cluster()
    with pytest.raises(UserError, match="--nodes is 0"):
        Cluster(find_device("l4-24gb"), 0, 1)
