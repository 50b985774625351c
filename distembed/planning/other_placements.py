"""What each table would cost if it were placed in another way, with all others where they are."""

from collections.abc import Mapping, Sequence

from distembed.planning.alternatives import Alternative
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment
from distembed.planning.lookups import is_on_every_rank
from distembed.planning.placement_reasons import ChosenPlacement, TriedPlacement, is_whole
from distembed.planning.table_problem import TableProblem
from distembed.sharding.groups.load import FLOAT_BYTES

_PER_TABLE = 2
_TRIED = 4
"""Options of a table that are tried, those that take ranks least together; beside the whole table."""


class OtherPlacements:
    """Other placements of the tables of a plan.

    Args:
        tables: The tables.
        assignment: The plan.
        limits: Bytes of each rank for tables.
        tolerance: Share of a step's time by which the plan may be slower, to have fewer bytes on the fullest rank.
    """

    def __init__(self, tables: TableProblem, assignment: Assignment, limits: Aim, tolerance: float) -> None:
        self._tables, self._problem, self._tolerance = tables, tables.problem, tolerance
        self._aim = limits
        self._loads = Loads(self._problem, assignment.copy())
        self._ms = float(self._loads.milliseconds().max())
        self._num_bytes = float(self._loads.num_bytes.max())
        self._tried = [self._of_table(table) for table in range(len(tables.tables))]

    def best(self) -> Mapping[str, Sequence[Alternative]]:
        """Returns the best of each table, the best first, by table."""
        names = [own.table.name for own in self._tables.tables]
        return {
            name: [own.alternative for own in tried[:_PER_TABLE]]
            for name, tried in zip(names, self._tried, strict=True)
        }

    def why(self) -> dict[str, str]:
        """Returns the reason of each table's placement, by table."""
        return {own.table.name: self._why(table) for table, own in enumerate(self._tables.tables)}

    def _why(self, table: int) -> str:
        planned, option = self._tables.tables[table], int(self._loads.assignment.option[table])
        only = self._tables.layouts.only_type_because(planned.table)
        if len({layout.sharding_type for layout in planned.layouts}) == 1 and only:
            return only
        num_parameters = sum(part.num_parameters for part in planned.table.partition_tables())
        chosen = ChosenPlacement(
            self._tables.layout(table, option),
            self._tables.cost(table, option),
            FLOAT_BYTES * num_parameters,
            self._tolerance * self._ms,
        )
        return chosen.reason(self._tried[table])

    def _of_table(self, table: int) -> list[TriedPlacement]:
        """Returns other placements, the best first."""
        loads, own = self._loads, int(self._loads.assignment.option[table])
        options, places = self._options_to_try(table, own), loads.assignment.places[table]
        loads.take(table)
        found = [self._try(table, option, own) for option in options]
        loads.put(table, own, places)
        return sorted(
            found,
            key=lambda it: (not it.alternative.fits, it.alternative.milliseconds, it.alternative.memory_bytes),
        )

    def _options_to_try(self, table: int, own: int) -> list[int]:
        """Returns options that take ranks least together, and those that leave the table whole."""
        options = sorted((option for option in self._problem.options_of(table) if option != own), key=self._in_all)
        return options[:_TRIED] + [it for it in options[_TRIED:] if is_whole(self._tables.layout(table, it))]

    def _in_all(self, option: int) -> float:
        """Returns the milliseconds that an option takes of all ranks together."""
        problem, blocks = self._problem, self._problem.blocks
        own, everywhere = problem.option_blocks[option], problem.option_everywhere[option]
        ms = problem.num_shards[own] * (blocks.lookup_ms[own] + blocks.own_ms[own].sum(1))
        on_all = blocks.lookup_ms[everywhere] + blocks.own_ms[everywhere].sum()
        return float(ms.sum() + on_all * problem.world_size)

    def _try(self, table: int, option: int, own: int) -> TriedPlacement:
        loads, layout = self._loads, self._tables.layout(table, option)
        places, _ = loads.try_option(option, self._aim)
        loads.put(table, option, places)
        by_rank, num_bytes = loads.milliseconds(), float(loads.num_bytes.max())
        fits = num_bytes <= self._aim.capacity and float(loads.host_bytes.max()) <= self._aim.host_capacity
        is_slowest = table in loads.tables_of[int(by_rank.argmax())]
        loads.take(table)
        cost, before = self._tables.cost(table, option), self._tables.cost(table, own)
        alternative = Alternative(
            sharding_type=layout.sharding_type,
            compute_kernel=layout.compute_kernel,
            num_shards=0 if layout.sharding_type == "data_parallel" else self._num_shards(table, option),
            milliseconds=float(by_rank.max()) - self._ms,
            memory_bytes=round(num_bytes - self._num_bytes),
            sent_bytes=round(cost.sent_bytes - before.sent_bytes),
            fits=fits,
        )
        return TriedPlacement(layout, cost, alternative, is_slowest)

    def _num_shards(self, table: int, option: int) -> int:
        if is_on_every_rank(self._tables.layout(table, option).sharding_type):
            return self._problem.world_size
        return int(self._problem.num_shards[self._problem.option_blocks[option]].sum())
