"""Compares the search for the fastest plan with mixed-integer solvers: HiGHS and OR-tools' CP-SAT.

::

    python tools/bench_solvers.py                     # with `pip install ortools` for CP-SAT; left out without it

All solve one problem (:mod:`distembed.planning.fastest.problem`) of one plan request. Memory counts the bytes of
weights and optimizer states, which add up. First the search solves the problem. Then each solver solves its program
(:mod:`distembed.planning.fastest.polish`) without a plan to start from, for the search's time and for ten times as
long; HiGHS also starts from the search's plan, for ten times as long. One function evaluates all plans, independent of
the solvers' claims. A bound is a lower bound of the time of all plans that fit.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.costs import PlacementCosts
from distembed.planning.devices import Cluster, find_device
from distembed.planning.fastest import polish
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment, Problem
from distembed.planning.fastest.solver import Solver
from distembed.planning.search import CountedMemory
from distembed.planning.table_problem import TableProblem
from distembed.reports.plan.plannable import ConfiguredModel
from distembed.sharding import default_sharders
from distembed.training.config import load_config

KAGGLE = Path(__file__).parents[1] / "configs" / "criteo_kaggle.yaml"
MOST_SECONDS = 60.0
TOLERANCE = PlanConfig().time_tolerance
"""The config's default: the search ends when its plan is proven to be this near to the fastest."""
ROUNDING = 1e-5
"""Share by which a solver may exceed a capacity, and by which its time may be wrong."""
PARTS = 10**8
"""CP-SAT's unit: whole parts of a millisecond and of a capacity."""
LONGEST_MS = 1000

try:
    from ortools.sat.python import cp_model
except ImportError:
    cp_model = None


@dataclass(frozen=True)
class Answer:
    """The result of a solver.

    Attributes:
        assignment: Placement of the tables; None if the solver found none.
        bound_ms: The solver's proven lower bound of the time of all plans that fit.
        claimed_ms: The slowest rank's milliseconds by the solver.
    """

    assignment: Assignment | None
    bound_ms: float
    claimed_ms: float = math.inf


def solve_with_highs(problem: Problem, capacity: float, seconds: float, start: Assignment | None = None) -> Answer:
    """Solves a problem by HiGHS on one thread, optionally from an assignment."""
    return Answer(*polish.solve(problem, Aim(capacity), start, seconds))


def solve_with_cp_sat(problem: Problem, capacity: float, seconds: float, workers: int) -> Answer:
    """Solves a problem by CP-SAT; coefficients are rounded down, so that its bound holds for the problem."""
    program, model = polish.Program(problem, Aim(capacity)), cp_model.CpModel()
    is_measured = np.isinf(program.uppers)
    variables = [model.new_int_var(0, LONGEST_MS * PARTS if own else 1, "") for own in is_measured]
    for row, lower, upper in program.rows:
        parts = PARTS if is_measured[list(row)].any() else 1
        whole = {own: math.floor(value * (1 if is_measured[own] else parts)) for own, value in row.items()}
        total = cp_model.LinearExpr.weighted_sum([variables[own] for own in whole], list(whole.values()))
        model.add(total == int(upper) if lower == upper else total <= int(upper))
    model.minimize(variables[0])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    bound = max(0.0, solver.best_objective_bound / PARTS)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound)
    found = program.assignment(np.array([solver.value(own) for own in variables]))
    return Answer(found, bound, solver.objective_value / PARTS)


def solve_by_search(problem: Problem, capacity: float) -> Answer:
    """Solves a problem by distembed's search."""
    solver = Solver(problem, 0.0, capacity, TOLERANCE)
    solution = solver.fastest(capacity)
    known = solution if solution.fits else None
    solution = solver.complete(known, lambda assignment: fits(problem, assignment, capacity)) or solution
    return Answer(solution.assignment, solution.lower_bound_ms, solution.milliseconds)


def fits(problem: Problem, assignment: Assignment, capacity: float) -> bool:
    """Returns whether no rank has more than its capacity."""
    return bool(Loads(problem, assignment.copy()).num_bytes.max() <= capacity * (1 + ROUNDING))


def milliseconds(problem: Problem, answer: Answer, capacity: float) -> float:
    """Returns the slowest rank's milliseconds of an answer, infinite without an assignment.

    Raises:
        RuntimeError: The answer does not fit, or is slower than the solver's claim: its program is not the problem.
    """
    if answer.assignment is None:
        return math.inf
    ms = float(Loads(problem, answer.assignment.copy()).milliseconds().max())
    if not fits(problem, answer.assignment, capacity) or ms > answer.claimed_ms * (1 + ROUNDING):
        raise RuntimeError(f"a plan of {answer.claimed_ms} ms takes {ms} ms, or does not fit")
    return ms


def kaggle(nodes: int) -> PlanRequest:
    """Returns DLRM over Criteo Kaggle with quotient-remainder tables, for nodes of 8."""
    config = load_config(KAGGLE, ["embedding.default.force=true", "train.batch_size=65536"])
    cluster = Cluster(find_device("h100-80gb"), nodes, 8)
    return ConfiguredModel(config).on_cluster(cluster).request


def drawn(num_tables: int, nodes: int, gpus: int, room: float) -> PlanRequest:
    """Returns random tables, for ranks whose memory is ``room`` times the tables' memory."""
    rng = np.random.default_rng(num_tables)
    tables = []
    for i in range(num_tables):
        num_ids, dim = int(10 ** rng.uniform(1, 7)), int(rng.choice([16, 32, 64, 128]))
        scheme: Any = QuotientRemainder(num_ids, collisions=4) if rng.random() < 0.5 else "naive"
        tables.append(CompositionalEmbeddingBagConfig(f"t{i}", num_ids, dim, [f"f{i}"], scheme))
    # Adagrad keeps a state for each number; without networks, 15% of a device stay free
    needed = 8 * sum(part.num_parameters for table in tables for part in table.partition_tables())
    device = replace(find_device("h100-80gb"), memory_bytes=round(room * needed / (nodes * gpus) / 0.85))
    return PlanRequest(
        nn.ModuleDict({"bags": CompositionalEmbeddingBagCollection(tables, device="meta")}),
        default_sharders(),
        Cluster(device, nodes, gpus),
        Workload(2048 * nodes * gpus),
        optimizers=TableOptimizers("adagrad"),
    )


CASES: dict[str, Callable[[], PlanRequest]] = {
    "Kaggle, 26 tables on 1x8": lambda: kaggle(1),
    "Kaggle, 26 tables on 4x8": lambda: kaggle(4),
    "8 tables on 1x4, tight memory": lambda: drawn(8, 1, 4, room=1.05),
    "16 tables on 1x4, tight memory": lambda: drawn(16, 1, 4, room=1.05),
    "60 tables on 1x8": lambda: drawn(60, 1, 8, room=1.3),
    "300 tables on 4x8": lambda: drawn(300, 4, 8, room=1.3),
}


def compare(request: PlanRequest, workers: int) -> Iterator[Sequence[str]]:
    """Yields a row for each solver and time limit: seconds, the slowest rank's milliseconds and the bound."""
    tables = TableProblem(request, PlacementCosts(request))
    problem, capacity = tables.problem.with_stored_bytes(), float(CountedMemory(request, tables).capacity.min())
    started = time.perf_counter()
    own = solve_by_search(problem, capacity)
    seconds = time.perf_counter() - started
    yield _row("search", "", seconds, milliseconds(problem, own, capacity), own)
    solvers: dict[str, Callable[[float], Answer]] = {"HiGHS": partial(solve_with_highs, problem, capacity)}
    if cp_model is not None:
        solvers["CP-SAT"] = partial(solve_with_cp_sat, problem, capacity, workers=workers)
    longer = min(10 * seconds, MOST_SECONDS)
    runs = [(allowed, name) for allowed in (seconds, longer) for name in solvers]
    if own.assignment is not None and fits(problem, own.assignment, capacity):
        solvers["HiGHS from the search"] = partial(solve_with_highs, problem, capacity, start=own.assignment)
        runs.append((longer, "HiGHS from the search"))
    for allowed, name in runs:
        started = time.perf_counter()
        answer = solvers[name](allowed)
        taken = time.perf_counter() - started
        yield _row(name, f"{allowed:.1f}", taken, milliseconds(problem, answer, capacity), answer)


def _row(name: str, allowed: str, seconds: float, ms: float, answer: Answer) -> Sequence[str]:
    found = "none" if math.isinf(ms) else f"{ms:.4f}"
    return name, allowed, f"{seconds:.1f}", found, f"{answer.bound_ms:.4f}"


def main() -> None:
    """Prints a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads of CP-SAT")
    options = parser.parse_args()
    print("| case | by | seconds allowed | taken | slowest rank, ms | proven bound, ms |\n|---|---|---|---|---|---|")
    for case, request in CASES.items():
        if options.only in case:
            for row in compare(request(), options.workers):
                print(f"| {' | '.join((case, *row))} |", flush=True)


if __name__ == "__main__":
    main()
