"""Reasons for each table's place: the cost of the table's other placements while all other tables stay in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distembed.base.units import format_bytes, format_ranges
from distembed.planning.costs import Layout, PlacementCost
from distembed.planning.fastest.loads import Aim, Loads
from distembed.planning.fastest.problem import Assignment
from distembed.planning.request import PlanRequest
from distembed.planning.table_problem import TableProblem
from distembed.planning.times import is_on_every_rank
from distembed.sharding.groups.load import FLOAT_BYTES
from distembed.sharding.placement import IN_HOST_MEMORY, WITHIN_NODES

_PER_TABLE = 2
_TRIED = 4
"""Other options tried for each table, with the least work of all ranks; options that leave it whole are added."""
_ROUNDING_MS = 1e-9
"""Milliseconds up to which two times count as equal."""


@dataclass(frozen=True)
class Alternative:
    """Another placement of one table, and the cost that it adds to the plan's; negative numbers are savings."""

    sharding_type: str
    compute_kernel: str
    num_shards: int  # 0 where every rank would hold the whole table
    added_milliseconds: float  # of the slowest rank's step
    added_memory_bytes: int  # of the fullest rank
    added_sent_bytes: int  # by all ranks together in a step
    fits: bool  # whether every rank would have room

    @property
    def sort_key(self) -> tuple[bool, float, int]:
        return not self.fits, self.added_milliseconds, self.added_memory_bytes


@dataclass(frozen=True)
class _Tried:
    layout: Layout
    cost: PlacementCost
    alternative: Alternative
    is_slowest: bool  # whether the slowest rank would then hold one of the table's shards


def explain(
    request: PlanRequest, tables: TableProblem, assignment: Assignment, aim: Aim
) -> tuple[dict[str, str], Mapping[str, Sequence[Alternative]]]:
    """Returns, by table name, the reason for the table's place, and its two best other placements, the best first."""
    others = _OtherPlacements(request, tables, assignment, aim)
    why, alternatives = {}, {}
    for number, planned in enumerate(tables.tables):
        tried, name = others.tried(number), planned.table.name
        why[name] = others.why(number, tried) + others.note(number)
        alternatives[name] = [other.alternative for other in tried[:_PER_TABLE]]
    return why, alternatives


class _OtherPlacements:
    """Moves one unit of tables of a plan at a time, and puts it back; a unit's tables move together."""

    def __init__(self, request: PlanRequest, tables: TableProblem, assignment: Assignment, aim: Aim) -> None:
        self._request, self._tables, self._problem, self._aim = request, tables, tables.problem, aim
        self._loads = Loads(self._problem, assignment.copy())
        self._ms = float(self._loads.milliseconds().max())
        self._num_bytes = float(self._loads.num_bytes.max())

    def why(self, table: int, tried: Sequence[_Tried]) -> str:
        """Returns a reason like ``in 4 ranges of columns: whole it would not fit``."""
        planned = self._tables.tables[table]
        only = self._tables.layouts.only_type_because(planned.table)
        if len({layout.sharding_type for layout in planned.layouts}) == 1 and only:
            return only
        return f"{_in_words(self._tables.layout(table, self._option(table)))}: {self._because(table, tried)}"

    def _exchange_ms(self, cost: PlacementCost) -> float:
        """Returns the milliseconds of exchanges that the table costs the rank with its most expensive shard."""
        return max(shard.exchange_ms(self._problem.world_size - 1) for shard in (*cost.shards, cost.everywhere))

    def _because(self, table: int, tried: Sequence[_Tried]) -> str:
        """Returns the first reason that the tried placements support, from the most to the least telling.

        A faster alternative that fits may exist: the plan gives up time within its tolerance for fewer bytes.
        """
        layout, cost = self._tables.layout(table, self._option(table)), self._tables.cost(table, self._option(table))
        if not tried:
            return "nothing else is possible"
        alternatives, is_replicated = [other.alternative for other in tried], layout.sharding_type == "data_parallel"
        faster = [alternative for alternative in alternatives if alternative.added_milliseconds < -_ROUNDING_MS]
        if fitting := [alternative for alternative in faster if alternative.fits]:
            allowed_ms = self._request.config.time_tolerance * self._ms
            if all(-other.added_milliseconds <= allowed_ms and other.added_memory_bytes > 0 for other in fitting):
                return "hardly slower than others, with fewer bytes on the fullest rank"
            return "fastest that was found"
        kernel = layout.compute_kernel
        alike = (other for other in tried if _is_whole(other.layout) and other.layout.compute_kernel == kernel)
        undivided = None if _is_whole(layout) or is_replicated else next(alike, None)
        if undivided is not None and not undivided.alternative.fits:
            return "whole it would not fit"
        if faster:
            return "others that are faster do not fit"
        if undivided is not None and undivided.alternative.added_milliseconds > _ROUNDING_MS:
            return "whole its rank would be the slowest" if undivided.is_slowest else "whole the step would take longer"
        if is_replicated and cost.all_reduce_ms < min(self._exchange_ms(other.cost) for other in tried):
            num_parameters = sum(part.num_parameters for part in self._tables.tables[table].table.partition_tables())
            return f"{format_bytes(FLOAT_BYTES * num_parameters)} of gradients cost less than its exchange"
        fitting = [alternative for alternative in alternatives if alternative.fits]
        equally_fast = [alternative for alternative in fitting if alternative.added_milliseconds <= _ROUNDING_MS]
        if not equally_fast:
            return "fastest" if fitting else "others do not fit"
        if all(alternative.added_memory_bytes > 0 for alternative in equally_fast):
            return "as fast as others, with fewer bytes on the fullest rank"
        return "no other is faster"

    def note(self, table: int) -> str:
        """Returns remarks, each after ``; ``: a dense kernel, host memory, pinned ranks, and tables kept together."""
        optimizers, config = self._request.table_optimizers, self._tables.tables[table].table
        layout = self._tables.layout(table, self._option(table))
        members = [
            self._tables.tables[number].table
            for number in self._tables.tables_by_unit[self._tables.unit_by_table[table]]
        ]
        names = ", ".join(member.name for member in members if member.name != config.name)
        ranks = self._tables.layouts.ranks(members)
        note = "" if optimizers.is_fused else f"; dense kernel: FBGEMM has no {optimizers.sparse}"
        note = "; dense kernel: all rows have gradients" if config.dense_gradient else note
        note += "; host memory: no device has room" if layout.compute_kernel in IN_HOST_MEMORY else ""
        note += f"; pinned to rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}" if ranks else ""
        return note + (f"; together with {names}" if names else "")

    def tried(self, table: int) -> list[_Tried]:
        """Returns other placements of a table (with its unit), the best first; some leave it whole."""
        loads, planned, unit = self._loads, self._option(table), self._tables.unit_by_table[table]
        other_options = (option for option in self._problem.options_of(unit) if option != planned)
        options = sorted(other_options, key=lambda option: self._problem.mean_ms[option])
        # the options with the least work, and the options that leave the table whole
        whole = [option for option in options[_TRIED:] if _is_whole(self._tables.layout(table, option))]
        options = options[:_TRIED] + whole
        places = loads.assignment.places[unit]
        loads.take(unit)
        tried = [self._try(table, option, planned) for option in options]
        loads.put(unit, planned, places)
        return sorted(tried, key=lambda other: other.alternative.sort_key)

    def _option(self, table: int) -> int:
        return int(self._loads.assignment.option[self._tables.unit_by_table[table]])

    def _try(self, table: int, option: int, planned: int) -> _Tried:
        loads, layout, unit = self._loads, self._tables.layout(table, option), self._tables.unit_by_table[table]
        places, _ = loads.try_option(option, self._aim)
        loads.put(unit, option, places)
        by_rank, num_bytes = loads.milliseconds(), float(loads.num_bytes.max())
        fits = self._aim.fits(loads.num_bytes, loads.host_bytes)
        is_slowest = unit in loads.tables_by_rank[int(by_rank.argmax())]
        loads.take(unit)
        sent_bytes, sent_before = (
            sum(self._tables.cost(member, tried_option).sent_bytes for member in self._tables.tables_by_unit[unit])
            for tried_option in (option, planned)
        )
        num_shards = int(self._problem.num_shards[self._problem.option_blocks[option]].sum())
        if is_on_every_rank(layout.sharding_type):
            num_shards = 0 if layout.sharding_type == "data_parallel" else self._problem.world_size
        alternative = Alternative(
            sharding_type=layout.sharding_type,
            compute_kernel=layout.compute_kernel,
            num_shards=num_shards,
            added_milliseconds=float(by_rank.max()) - self._ms,
            added_memory_bytes=round(num_bytes - self._num_bytes),
            added_sent_bytes=round(sent_bytes - sent_before),
            fits=fits,
        )
        return _Tried(layout, self._tables.cost(table, option), alternative, is_slowest)


def _is_whole(layout: Layout) -> bool:
    """Returns whether one rank has all rows and columns, and no other rank has a copy."""
    is_in_rows = is_on_every_rank(layout.sharding_type) or layout.sharding_type in WITHIN_NODES
    return len(layout.columns) == 1 and not is_in_rows


def _in_words(layout: Layout) -> str:
    if layout.sharding_type == "data_parallel":
        return "replicated"
    if is_on_every_rank(layout.sharding_type):
        return "by rows"
    if _is_whole(layout):
        return "whole"
    ranges = [f"in {len(layout.columns)} ranges of columns"] if len(layout.columns) > 1 else []
    return ", ".join([*ranges, *(["by rows within a node"] if layout.sharding_type in WITHIN_NODES else [])])
