"""A faster assignment and a tighter bound by HiGHS: a mixed-integer program that begins with a known assignment.

The program has a binary for each option of a table, for each place and distinct block of an option, for each group of
lookups on each rank, and for each exchange. The longer of two sums is linear: a variable that is at least each of them.
So a phase is at least a rank's work for its own shards, and at least its work for other ranks' shards. The objective
is at least the milliseconds of each rank.

Trade-off: HiGHS proves optima of tens of tables on a node, while a program of many ranks outgrows any time. Where the
time ends first, the result depends on the machine's speed.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from distembed.base.errors import UserError
from distembed.planning.fastest.loads import Aim
from distembed.planning.fastest.problem import NO_GROUP, Assignment, Floats, Ints, Problem

_MOST_PLACES = 200_000
"""Most binaries for places of shards, estimated from the mean over classes, for which a program is built."""


class Program:
    """A problem as a mixed-integer program: minimise variable 0, the slowest rank's milliseconds, subject to ``rows``.

    All variables are at least 0. A variable with upper limit 1 is binary; one without limit is continuous. A row is a
    constraint ``least <= sum of coefficient * variable <= most``::

        slowest rank's ms    continuous   0, the objective
        constant             1            its coefficients are the constant terms of sums
        exchange, group      binary       whether an exchange, or a group on a rank, is started
        option of a table    binary       one is chosen:           sum over the table's options = 1
        place of a block     binary       as many as the blocks:   sum over places = blocks * option
        sums of a rank       continuous   milliseconds and bytes, by column of ``Problem.block_sums``
    """

    def __init__(self, problem: Problem, aim: Aim) -> None:
        self._problem, self._ranks = problem, range(problem.world_size)
        self.uppers: list[float] = []  # by variable: 1 for a binary, 0 for a forbidden place, else infinite
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self._chosen: dict[tuple[int, int], int] = {}  # by table and option
        self._placed: dict[tuple[int, int, int], Ints] = {}  # variables of all places, by table, option and block
        self._slowest, self._constant = self._variable(np.inf), self._variable()
        self.rows.append(({self._constant: 1.0}, 1.0, 1.0))
        self._exchanges = [self._variable() for _ in problem.exchange_start_ms]
        self._groups = [[self._variable() for _ in self._ranks] for _ in problem.group_start_ms]
        # constraints `sum <= 0`, coefficients by variable. Keys: column of problem.block_sums, and rank; rank None has
        # the part that all ranks share. Names in place of a column are the slowest rank and a node's shared cores
        self._sums: dict[tuple[object, object], dict[int, float]] = defaultdict(dict)
        own_columns = range(3, 3 + problem.num_phases)
        self._phases = [(column, column + problem.num_phases) for column in own_columns]  # own and other shards
        self._bytes = [1, 2] if problem.blocks.host_bytes.any() else [1]
        self._columns = [0, *self._bytes, *range(3, 3 + 2 * problem.num_phases)]
        # bytes are shares of each rank's capacity; bytes on every rank, of the largest capacity (last column)
        self._scale = np.ones((3 + 2 * problem.num_phases, problem.world_size + 1))
        self._scale[1, :-1], self._scale[2, :-1] = np.maximum(aim.capacity, 1.0), np.maximum(aim.host_capacity, 1.0)
        self._scale[1:3, -1] = self._scale[1:3, :-1].max()
        self._add_ranks()
        for table in range(problem.num_tables):
            self._add_table(table)
        self.rows += [(sum_coefficients, -np.inf, 0.0) for sum_coefficients in self._sums.values()]

    def assignment(self, values: Floats) -> Assignment:
        """Returns the assignment that the values of all variables stand for."""
        assignment = Assignment.empty(self._problem.num_tables)
        for (table, option), chosen in self._chosen.items():
            if values[chosen] > 0.5:
                blocks = self._problem.option_blocks[option].tolist()
                # equal blocks share the variables of places: they take the chosen places in turn
                chosen_places = {
                    block: iter(np.flatnonzero(values[self._placed[table, option, block]] > 0.5)) for block in {*blocks}
                }
                assignment.option[table] = option
                assignment.places[table] = np.array([next(chosen_places[block]) for block in blocks], np.int64)
        return assignment

    def variables(self, assignment: Assignment) -> Ints:
        """Returns the variables of options and places that are 1 in an assignment; all other :attr:`choices` are 0."""
        chosen_variables = []
        for table, option in enumerate(assignment.option.tolist()):
            chosen_variables.append(self._chosen[table, option])
            for block, place in zip(self._problem.option_blocks[option], assignment.places[table], strict=True):
                chosen_variables.append(int(self._placed[table, option, block][place]))
        return np.array(chosen_variables, np.int64)

    @property
    def choices(self) -> Ints:
        """All variables of options and of places; they determine every other variable."""
        return np.concatenate([[*self._chosen.values()], *self._placed.values()]).astype(np.int64)

    def _variable(self, upper: float = 1.0) -> int:
        self.uppers.append(upper)
        return len(self.uppers) - 1

    def _add_ranks(self) -> None:
        """Adds the constraints on each rank's milliseconds and bytes.

        ``common`` has one variable by column for the cost of all tables to every rank, so that each rank's sum has a
        single coefficient in place of one for each option.
        """
        problem = self._problem
        common = {column: self._variable(np.inf) for column in self._columns}
        for column, total in common.items():
            self._sums[column, None][total] = -1.0
        by_rank = [self._variable(np.inf) for _ in self._ranks]
        for rank in self._ranks:
            ms = self._sums[0, rank]
            ms |= {by_rank[rank]: -1.0, self._constant: problem.base_ms, common[0]: 1.0}
            ms |= dict(zip(self._exchanges, problem.exchange_start_ms, strict=True))
            ms |= {
                rank_starts[rank]: start
                for rank_starts, start in zip(self._groups, problem.group_start_ms, strict=True)
            }
            for column in self._bytes:
                capacity_share = self._scale[column, -1] / self._scale[column, rank]
                self._sums[column, rank] |= {self._constant: -1.0, common[column]: capacity_share}
            for sides in self._phases:
                longer = self._variable(np.inf)
                ms[longer] = 1.0
                for column in sides:
                    self._sums[column, rank] |= {longer: -1.0, common[column]: 1.0}
            self._sums["slowest", rank] |= {by_rank[rank]: 1.0, self._slowest: -1.0}
        if problem.ranks_at_once < problem.ranks_per_node:
            for first in self._ranks[:: problem.ranks_per_node]:
                node_ms = dict.fromkeys(by_rank[first : first + problem.ranks_per_node], 1.0)
                self._sums["node", first] |= {**node_ms, self._slowest: -problem.ranks_at_once}

    def _add_table(self, table: int) -> None:
        """Adds a table's variables: one option is chosen, and starts the exchanges and groups that it uses."""
        problem, options = self._problem, self._problem.options_of(table)
        users: dict[int, dict[int, float]] = defaultdict(dict)
        for option in options:
            chosen = self._chosen[table, option] = self._variable()
            for column in self._columns:
                self._sums[column, None][chosen] = problem.option_sums[option, column] / self._scale[column, -1]
            started = [self._exchanges[exchange] for exchange in problem.options[option].exchanges]
            for group in problem.options[option].everywhere.groups:
                started += self._groups[group]
            for start in started:
                users[start][chosen] = 1.0
            self._add_shards(table, option, users)
        self.rows.append(({self._chosen[table, option]: 1.0 for option in options}, 1.0, 1.0))
        # the sum of the table's variables that use a start is at most the start's binary; the sum is at most 1, since
        # one option is chosen, with one shard on a rank at most
        self.rows += [({**coefficients, start: -1.0}, -np.inf, 0.0) for start, coefficients in users.items()]

    def _add_shards(self, table: int, option: int, users: dict[int, dict[int, float]]) -> None:
        """Adds the places of an option's blocks, and records in ``users`` the places that start a group on a rank."""
        problem, chosen = self._problem, self._chosen[table, option]
        block_counts = Counter(problem.option_blocks[option].tolist())
        for block, count in block_counts.items():
            size = int(problem.num_shards[block])
            places = np.array([self._variable() for _ in range(problem.world_size // size)], np.int64)
            self._placed[table, option, block] = places
            self.rows.append(({**dict.fromkeys(places.tolist(), 1.0), chosen: -float(count)}, 0.0, 0.0))
            for place in places[~problem.allowed[option].reshape(-1, size).all(1)].tolist():
                self.uppers[place] = 0.0
            for rank, placed in enumerate(np.repeat(places, size).tolist()):
                for column in self._columns:
                    self._sums[column, rank][placed] = problem.block_sums[block, column] / self._scale[column, rank]
                for group in problem.blocks.groups[block].tolist():
                    if group != NO_GROUP:
                        users[self._groups[group][rank]][placed] = 1.0
        if block_counts.total() > 1:
            # at most one block of a table at each place; all blocks of an option have the same kind of place
            for at_place in zip(*(self._placed[table, option, block].tolist() for block in block_counts), strict=True):
                self.rows.append(({**dict.fromkeys(at_place, 1.0), chosen: -1.0}, -np.inf, 0.0))


def solve(
    problem: Problem,
    aim: Aim,
    start: Assignment | None,
    seconds: float,
    accepts: Callable[[Assignment], bool] = lambda _: True,
    gap: float = 1e-4,
) -> tuple[Assignment | None, float]:
    """Returns the fastest accepted assignment that HiGHS finds from ``start``, and a lower bound of the milliseconds.

    HiGHS stops after ``seconds``, within a share ``gap`` of the optimum, or at the first assignment that ``accepts``
    refuses. Returns (None, 0.0) where the program would be too large.

    Raises:
        UserError: highspy is not installed.
    """
    try:
        import highspy
    except ImportError:
        raise UserError(
            "plan.polish_seconds (--polish) needs highspy, which is not installed: `pip install 'distembed[polish]'`"
        ) from None
    deadline, solutions = time.monotonic() + seconds, list[Assignment]()
    num_places = sum(problem.world_size * len(set(blocks.tolist())) for blocks in problem.option_blocks)
    if num_places * problem.num_tables > _MOST_PLACES * len(problem.classes):
        return None, 0.0
    program = Program(problem, aim)

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802 - HiGHS says its name here, before any option can be set
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    highs = Silent()  # type: ignore[no-untyped-call]
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.passModel(_model(highspy, program))
    if start is not None:
        choices, chosen = program.choices, program.variables(start)
        highs.setSolution(len(choices), choices.astype(np.int32), np.isin(choices, chosen).astype(np.float64))

    def take(event: "highspy.HighsCallbackEvent") -> None:
        assignment = program.assignment(np.asarray(event.data_out.mip_solution))
        if accepts(assignment):
            solutions.append(assignment)
        else:
            event.interrupt()

    highs.cbMipImprovingSolution.subscribe(take)
    highs.setOptionValue("time_limit", max(deadline - time.monotonic(), 0.0))
    highs.run()
    bound = highs.getInfo().mip_dual_bound
    return (solutions[-1] if solutions else None), float(bound) if np.isfinite(bound) else 0.0


def _model(highspy: Any, program: Program) -> Any:
    """Returns the program as a ``HighsLp``, whose rows are compressed: start of each row, then variable and value."""
    model = highspy.HighsLp()
    uppers, (rows, lower, upper) = np.array(program.uppers), zip(*program.rows, strict=True)
    model.num_col_, model.num_row_ = len(uppers), len(rows)
    model.col_cost_ = np.eye(1, len(uppers))[0]
    model.col_lower_, model.col_upper_ = np.zeros(len(uppers)), uppers
    model.row_lower_, model.row_upper_ = np.array(lower), np.array(upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    model.a_matrix_.index_ = np.fromiter((at for row in rows for at in row), np.int32)
    model.a_matrix_.value_ = np.fromiter((value for row in rows for value in row.values()), np.float64)
    kinds = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    model.integrality_ = [kinds[int(np.isinf(limit))] for limit in uppers]
    return model
