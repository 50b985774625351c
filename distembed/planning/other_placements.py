"""What each table would cost if it were placed in another way, with all others where they are."""

from collections.abc import Mapping, Sequence

from distembed.planning.alternatives import Alternative
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment
from distembed.planning.lookups import is_on_every_rank
from distembed.planning.table_problem import TableProblem

_PER_TABLE = 2
_TRIED = 4
"""Options of a table that are tried, those that take ranks least together."""


class OtherPlacements:
    """Other placements of the tables of a plan.

    Args:
        tables: The tables.
        assignment: The plan.
        capacity: Bytes of each rank for tables.
        host_capacity: Bytes of each rank's share of the machine's memory beside a device.
    """

    def __init__(
        self, tables: TableProblem, assignment: Assignment, capacity: float, host_capacity: float = 0.0
    ) -> None:
        self._tables, self._problem = tables, tables.problem
        self._aim = Aim(capacity, host_capacity)
        self._loads = Loads(self._problem, assignment.copy())
        self._ms = float(self._loads.milliseconds().max())
        self._num_bytes = float(self._loads.num_bytes.max())
        self._found = {own.table.name: self._of_table(table) for table, own in enumerate(tables.tables)}

    def best(self) -> Mapping[str, Sequence[Alternative]]:
        """Returns the best of each table, the best first, by table."""
        return self._found

    def why(self) -> dict[str, str]:
        """Returns the reason of each table's placement, by table."""
        return {own.table.name: self._why(table) for table, own in enumerate(self._tables.tables)}

    def _why(self, table: int) -> str:
        planned = self._tables.tables[table]
        only = self._tables.layouts.only_type_because(planned.table)
        others = self._found[planned.table.name]
        if len({layout.sharding_type for layout in planned.layouts}) == 1 and only:
            return only
        faster = [other for other in others if other.milliseconds < 0]
        if faster:
            return (
                "fits; others that are faster do not" if not any(it.fits for it in faster) else "fastest that was found"
            )
        return "fastest" if others else "nothing else is possible"

    def _of_table(self, table: int) -> list[Alternative]:
        loads, own = self._loads, int(self._loads.assignment.option[table])
        options = [option for option in self._problem.options_of(table) if option != own]
        options = sorted(options, key=self._in_all)[:_TRIED]
        places = loads.assignment.places[table]
        loads.take(table)
        found = [self._alternative(table, option, own) for option in options]
        loads.put(table, own, places)
        return sorted(found, key=lambda other: (not other.fits, other.milliseconds, other.memory_bytes))[:_PER_TABLE]

    def _in_all(self, option: int) -> float:
        """Returns the milliseconds that an option takes of all ranks together."""
        problem, blocks = self._problem, self._problem.blocks
        own, everywhere = problem.option_blocks[option], problem.option_everywhere[option]
        ms = problem.num_shards[own] * (blocks.lookup_ms[own] + blocks.own_ms[own].sum(1))
        on_all = blocks.lookup_ms[everywhere] + blocks.own_ms[everywhere].sum()
        return float(ms.sum() + on_all * problem.world_size)

    def _alternative(self, table: int, option: int, own: int) -> Alternative:
        loads, layout = self._loads, self._tables.layout(table, option)
        places, _ = loads.try_option(option, self._aim)
        loads.put(table, option, places)
        ms, num_bytes = float(loads.milliseconds().max()), float(loads.num_bytes.max())
        fits = num_bytes <= self._aim.capacity and float(loads.host_bytes.max()) <= self._aim.host_capacity
        loads.take(table)
        cost, before = self._tables.cost(table, option), self._tables.cost(table, own)
        return Alternative(
            sharding_type=layout.sharding_type,
            compute_kernel=layout.compute_kernel,
            num_shards=0 if layout.sharding_type == "data_parallel" else self._num_shards(table, option),
            milliseconds=ms - self._ms,
            memory_bytes=round(num_bytes - self._num_bytes),
            sent_bytes=round(cost.sent_bytes - before.sent_bytes),
            fits=fits,
        )

    def _num_shards(self, table: int, option: int) -> int:
        if is_on_every_rank(self._tables.layout(table, option).sharding_type):
            return self._problem.world_size
        return int(self._problem.num_shards[self._problem.option_blocks[option]].sum())
