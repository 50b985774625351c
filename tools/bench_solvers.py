"""Compares the search for the fastest plan with mixed-integer solvers: HiGHS, which scipy brings, and OR-tools' CP-SAT.

::

    python tools/bench_solvers.py                     # with `pip install ortools` for CP-SAT; left out without it

All get the same problem in numbers (:mod:`distembed.planning.fastest.problem`) of the same plan request, with the bytes
of weights and optimizer states, which add up. First the search solves it, then each solver from nothing: for as long as
the search took, and for ten times as long. Plans are evaluated by the same function, whatever the solver said of them;
a bound is what no plan that fits goes below. The time in which the program is written down for a solver is not counted.

The program has a binary for each option of a table; for each rank (or node) and each kind of shard of an option;
for each group of lookups on each rank; for each exchange. Milliseconds of a phase are no less than what a rank does for
its own shards and for those of others, and the objective no less than the milliseconds of any rank.
"""

import argparse
import itertools
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import nn

from distembed.capacity.configured_model import ConfiguredModel
from distembed.config import load_config
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.cluster import Cluster
from distembed.planning.costs import PlacementCosts
from distembed.planning.devices import find_device
from distembed.planning.estimated_plan import CountedMemory
from distembed.planning.fastest.loads import Loads
from distembed.planning.fastest.problem import Assignment, Problem
from distembed.planning.fastest.solver import Solver
from distembed.planning.table_problem import TableProblem
from distembed.sharding import default_sharders

KAGGLE = Path(__file__).parents[1] / "configs" / "criteo_kaggle.yaml"
MOST_SECONDS = 60.0
TOLERANCE = PlanConfig().time_tolerance
"""The config's default: the search ends where its plan is known to be this near the fastest."""
ROUNDING = 1e-5
"""Share of a capacity by which a solver may exceed it, and of a time by which it may be wrong."""
PARTS = 10**8
"""Parts of a millisecond, and of a capacity, that CP-SAT counts; its numbers are whole."""
LONGEST_MS = 1000

try:
    from ortools.sat.python import cp_model
except ImportError:
    cp_model = None

Variable = int


@dataclass(frozen=True)
class Row:
    """Numbers that the sum of coefficients times variables lies between.

    Attributes:
        coefficients: Coefficient of each variable.
        lower, upper: The numbers.
        is_measured: Whether it adds up milliseconds, or shares of a capacity; else it counts.
    """

    coefficients: Mapping[Variable, float]
    lower: float
    upper: float
    is_measured: bool = False


@dataclass(frozen=True)
class Answer:
    """What a solver found.

    Attributes:
        assignment: Where tables go; None where it found nothing.
        bound_ms: What no plan that fits goes below, as it has proven.
        claimed_ms: The slowest rank's milliseconds, as it has them.
    """

    assignment: Assignment | None
    bound_ms: float
    claimed_ms: float = math.inf


@dataclass
class Program:
    """A problem as a mixed-integer program, whose first variable is to be small: the slowest rank's milliseconds.

    Attributes:
        problem: The problem.
        capacity: Bytes of each rank.
        rows: All rows.
        is_measured: Whether a variable is a number of milliseconds, or a share of the capacity; else it is binary.
        chosen: Variable of each table's options, by table and option.
        placed: Variables of all places of a kind of shard, by table, option and block.
    """

    problem: Problem
    capacity: float
    rows: list[Row] = field(default_factory=list)
    is_measured: list[bool] = field(default_factory=list)
    chosen: dict[tuple[int, int], Variable] = field(default_factory=dict)
    placed: dict[tuple[int, int, int], list[Variable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        if problem.ranks_at_once < problem.ranks_per_node:
            raise ValueError("ranks that share cores are not in the program; take a device for each rank")
        self._slowest = self._variable(is_measured=True)
        self._exchanges = [self._variable() for _ in problem.exchange_start_ms]
        self._groups = [[self._variable() for _ in self._ranks] for _ in problem.group_start_ms]
        self._sums: dict[object, dict[Variable, float]] = defaultdict(dict)
        self._add_ranks()
        for table in range(problem.num_tables):
            self._add_table(table)
        self.rows += [Row(sums, -math.inf, 0.0, is_measured=True) for sums in self._sums.values()]

    @property
    def _ranks(self) -> range:
        return range(self.problem.world_size)

    def _variable(self, is_measured: bool = False) -> Variable:
        self.is_measured.append(is_measured)
        return len(self.is_measured) - 1

    def _at_most(self, sum_of: object, total: Variable) -> None:
        """Says that a sum of milliseconds, or of bytes, is at most a variable."""
        self._sums[sum_of][total] = -1.0

    def _add_ranks(self) -> None:
        """Adds what ranks take without any table; what every rank has of all tables is one variable for all of them."""
        problem = self.problem
        one = self._variable()
        self.rows.append(Row({one: 1}, 1, 1))
        phases = range(problem.num_phases)
        common = {name: self._variable(is_measured=True) for name in ["ms", "bytes"]}
        common_own = [self._variable(is_measured=True) for _ in phases]
        common_other = [self._variable(is_measured=True) for _ in phases]
        for name, total in common.items():
            self._at_most((name, "common"), total)
        for phase in phases:
            self._at_most(("own", phase, "common"), common_own[phase])
            self._at_most(("other", phase, "common"), common_other[phase])
        for rank in self._ranks:
            ms, num_bytes = self._sums["ms", rank], self._sums["bytes", rank]
            ms |= {self._slowest: -1.0, one: problem.base_ms, common["ms"]: 1.0}
            num_bytes |= {one: -1.0, common["bytes"]: 1.0}
            ms |= dict(zip(self._exchanges, problem.exchange_start_ms, strict=True))
            ms |= {own[rank]: start for own, start in zip(self._groups, problem.group_start_ms, strict=True)}
            for phase in phases:
                longer = self._variable(is_measured=True)
                ms[longer] = 1.0
                self._sums["own", phase, rank] |= {longer: -1.0, common_own[phase]: 1.0}
                self._sums["other", phase, rank] |= {longer: -1.0, common_other[phase]: 1.0}

    def _add_table(self, table: int) -> None:
        options = self.problem.options_of(table)
        self.chosen |= {(table, option): self._variable() for option in options}
        self.rows.append(Row({self.chosen[table, option]: 1 for option in options}, 1, 1))
        users: dict[Variable, dict[Variable, float]] = defaultdict(dict)
        for option in options:
            chosen = self.chosen[table, option]
            self._add_common(option, chosen, users)
            for exchange in self.problem.options[option].exchanges:
                users[self._exchanges[exchange]][chosen] = 1
            self._add_shards(table, option, users)
        # what any of a table's options starts is started, of which there is one alone
        self.rows += [Row({**own, started: -1}, -math.inf, 0) for started, own in users.items()]

    def _add_common(self, option: int, chosen: Variable, users: dict[Variable, dict[Variable, float]]) -> None:
        problem, blocks, block = self.problem, self.problem.blocks, self.problem.option_everywhere[option]
        self._sums["ms", "common"][chosen] = float(blocks.lookup_ms[block])
        self._sums["bytes", "common"][chosen] = float(blocks.num_bytes[block]) / self.capacity
        own = problem.option_blocks[option]
        other_ms = blocks.other_ms[block] + (problem.num_shards[own, None] * blocks.other_ms[own]).sum(0)
        for phase in range(problem.num_phases):
            self._sums["own", phase, "common"][chosen] = float(blocks.own_ms[block, phase])
            self._sums["other", phase, "common"][chosen] = float(other_ms[phase])
        for group in filter(lambda own: own >= 0, blocks.groups[block]):
            for started in self._groups[group]:
                users[started][chosen] = 1

    def _add_shards(self, table: int, option: int, users: dict[Variable, dict[Variable, float]]) -> None:
        problem, kinds = self.problem, Counter(self.problem.option_blocks[option].tolist())
        chosen = self.chosen[table, option]
        for block, count in kinds.items():
            size = problem.ranks_per_node if problem.blocks.fills_node[block] else 1
            places = [self._variable() for _ in range(problem.world_size // size)]
            self.placed[table, option, block] = places
            self.rows.append(Row({**dict.fromkeys(places, 1), chosen: -count}, 0, 0))
            for place, rank in itertools.product(range(len(places)), range(size)):
                self._add_shard(block, places[place], place * size + rank, users)
        if kinds.total() > 1:
            # shards of one table lie in different places
            for here in zip(*(self.placed[table, option, block] for block in kinds), strict=True):
                self.rows.append(Row({**dict.fromkeys(here, 1), chosen: -1}, -math.inf, 0))

    def _add_shard(self, block: int, placed: Variable, rank: int, users: dict[Variable, dict[Variable, float]]) -> None:
        blocks = self.problem.blocks
        self._sums["ms", rank][placed] = float(blocks.lookup_ms[block])
        self._sums["bytes", rank][placed] = float(blocks.num_bytes[block]) / self.capacity
        for phase in range(self.problem.num_phases):
            self._sums["own", phase, rank][placed] = float(blocks.own_ms[block, phase])
            self._sums["other", phase, rank][placed] = -float(blocks.other_ms[block, phase])
        for group in filter(lambda own: own >= 0, blocks.groups[block]):
            users[self._groups[group][rank]][placed] = 1

    def assignment(self, values: Callable[[Variable], float]) -> Assignment:
        """Returns the assignment of a solution's values."""
        found = Assignment.empty(self.problem.num_tables)
        for (table, option), chosen in self.chosen.items():
            if values(chosen) < 0.5:
                continue
            blocks = self.problem.option_blocks[option].tolist()
            places = {block: self._places(table, option, block, values) for block in set(blocks)}
            found.option[table] = option
            found.places[table] = np.array([next(places[block]) for block in blocks], np.int64)
        return found

    def _places(self, table: int, option: int, block: int, values: Callable[[Variable], float]) -> Iterator[int]:
        placed = self.placed[table, option, block]
        return (place for place, variable in enumerate(placed) if values(variable) > 0.5)


def solve_with_highs(program: Program, seconds: float) -> Answer:
    """Solves a program by HiGHS, on one thread as scipy has it."""
    is_measured = np.array(program.is_measured)
    numbers = [(i, *number) for i, row in enumerate(program.rows) for number in row.coefficients.items() if number[1]]
    rows, columns, values = (np.array(own) for own in zip(*numbers, strict=True))
    matrix = csr_array((values, (rows, columns)), shape=(len(program.rows), len(is_measured)))
    lower, upper = ([getattr(row, name) for row in program.rows] for name in ("lower", "upper"))
    result = milp(
        np.eye(1, len(is_measured))[0],
        integrality=~is_measured,
        bounds=Bounds(0, np.where(is_measured, np.inf, 1)),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"time_limit": seconds},
    )
    bound = result.mip_dual_bound
    bound = 0.0 if bound is None or not math.isfinite(bound) else float(bound)
    if result.x is None:
        return Answer(None, bound)
    return Answer(program.assignment(lambda own: float(result.x[own])), bound, float(result.fun))


def solve_with_cp_sat(program: Program, seconds: float, workers: int) -> Answer:
    """Solves a program by CP-SAT. Coefficients are rounded down, so that its bound is one of the problem too."""
    model = cp_model.CpModel()
    variables = [model.new_int_var(0, LONGEST_MS * PARTS if own else 1, "") for own in program.is_measured]
    for row in program.rows:
        whole = {
            own: math.floor(value * (PARTS if row.is_measured and not program.is_measured[own] else 1))
            for own, value in row.coefficients.items()
        }
        total = cp_model.LinearExpr.weighted_sum([variables[own] for own in whole], list(whole.values()))
        if row.lower == row.upper:
            model.add(total == int(row.upper))
        else:
            model.add(total <= int(row.upper))
    model.minimize(variables[0])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    bound = max(0.0, solver.best_objective_bound / PARTS)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound)
    found = program.assignment(lambda own: solver.value(variables[own]))
    return Answer(found, bound, solver.objective_value / PARTS)


def solve_by_search(problem: Problem, capacity: float) -> Answer:
    """Solves a problem by the search of the package, as a plan is looked for."""
    solver = Solver(problem, 0.0, capacity, TOLERANCE)
    solution = solver.fastest(capacity)
    known = solution if solution.fits else None
    solution = solver.complete(known, lambda assignment: fits(problem, assignment, capacity)) or solution
    return Answer(solution.assignment, solution.lower_bound_ms, solution.milliseconds)


def fits(problem: Problem, assignment: Assignment, capacity: float) -> bool:
    """Returns whether no rank has more than its capacity."""
    return bool(Loads(problem, assignment.copy()).num_bytes.max() <= capacity * (1 + ROUNDING))


def milliseconds(problem: Problem, answer: Answer, capacity: float) -> float:
    """Returns the slowest rank's milliseconds of an answer; infinite where there is none.

    Raises:
        RuntimeError: The answer does not fit, or takes longer than the solver said: the program is not the problem.
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
    """Returns tables drawn at random, for ranks that have so many times the memory that these take."""
    rng = np.random.default_rng(num_tables)
    tables = []
    for i in range(num_tables):
        num_ids, dim = int(10 ** rng.uniform(1, 7)), int(rng.choice([16, 32, 64, 128]))
        scheme: Any = QuotientRemainder(num_ids, collisions=4) if rng.random() < 0.5 else "naive"
        tables.append(CompositionalEmbeddingBagConfig(f"t{i}", num_ids, dim, [f"f{i}"], scheme))
    # Adagrad keeps a number for each; 15% of a device are kept free where networks are not known
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
    """Yields who solved the request's problem, in how many seconds of those allowed, with what plan and bound."""
    tables = TableProblem(request, PlacementCosts(request))
    problem, capacity = tables.problem.with_stored_bytes(), float(CountedMemory(request, tables).capacity.min())
    started = time.perf_counter()
    own = solve_by_search(problem, capacity)
    seconds = time.perf_counter() - started
    yield _row("search", "", seconds, milliseconds(problem, own, capacity), own)
    program = Program(problem, capacity)
    solvers: dict[str, Callable[[Program, float], Answer]] = {"HiGHS": solve_with_highs}
    if cp_model is not None:
        solvers["CP-SAT"] = partial(solve_with_cp_sat, workers=workers)
    for allowed, (name, solve) in itertools.product((seconds, min(10 * seconds, MOST_SECONDS)), solvers.items()):
        started = time.perf_counter()
        answer = solve(program, allowed)
        taken = time.perf_counter() - started
        yield _row(name, f"{allowed:.1f}", taken, milliseconds(problem, answer, capacity), answer)


def _row(name: str, allowed: str, seconds: float, ms: float, answer: Answer) -> Sequence[str]:
    found = "none" if math.isinf(ms) else f"{ms:.4f}"
    return name, allowed, f"{seconds:.1f}", found, f"{answer.bound_ms:.4f}"


def main() -> None:
    """Prints a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names have this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads of CP-SAT")
    options = parser.parse_args()
    print("| case | by | seconds allowed | taken | slowest rank, ms | proven bound, ms |\n|---|---|---|---|---|---|")
    for case, request in CASES.items():
        if options.only in case:
            for row in compare(request(), options.workers):
                print(f"| {' | '.join((case, *row))} |", flush=True)


if __name__ == "__main__":
    main()
