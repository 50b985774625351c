"""A plan in a terminal: the tables and where they lie, what each rank holds, and whether it fits.

Where a terminal is narrow, the columns that matter least are left out, or added up into one; what is left out is said.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from distembed.capacity.assessment import Assessment
from distembed.capacity.by_rank import RankGroup, RankItem, RankQuantity, memory_by_rank, time_by_rank
from distembed.capacity.report import CapacityReport
from distembed.capacity.texts import (
    ALTERNATIVES_LEGEND,
    alternative_lines,
    host_lines,
    is_in_host_memory,
    reason_lines,
    shortage_lines,
    step_lines,
    table_columns,
    verdict,
)
from distembed.planning.planned_rank import PlannedRank

_MAX_LINES = 16
_MAX_TABLES = 200
_GAP = 2
_BAR_WIDTHS = 8, 24
_MAX_WIDTHS = {"table": 32, "why": 40}
_TOLD_BELOW = {"why": reason_lines, "instead": alternative_lines}
"""Columns whose texts stand below the table where a terminal has no room for them."""


@dataclass(frozen=True)
class _PrintedColumn:
    """A column as it is printed."""

    heading: str
    cells: Sequence[str]
    is_number: bool = True  # whether the cells stand to the right
    max_width: int = 10_000  # characters beyond which a cell is folded
    least_width: int | None = None  # to which a narrow terminal folds it

    @cached_property
    def width(self) -> int:
        """Width in characters; headings are broken between words."""
        widest = max(map(cell_len, [*self.heading.split(), *"\n".join(self.cells).split("\n")]))
        return min(self.max_width, widest)


def print_capacity_report(report: CapacityReport, console: Console) -> None:
    """Prints for a reader what ``distembed plan --json`` prints for a program.

    Args:
        report: Report to print.
        console: Console to print to; its width decides which columns there are.
    """
    assessment = report.assessment
    if assessment.ranks:
        _print_tables(_with_largest_tables(assessment), console)
        if (num_tables := len(assessment.tables)) > _MAX_TABLES:
            left_out = f"the {_MAX_TABLES} tables with most bytes of {num_tables:,}; --json and --report have all"
            _print_lines(console, [left_out, ""], "dim")
        memory, time = memory_by_rank(assessment), time_by_rank(assessment)
        _print_ranks(memory, console)
        _print_ranks(time, console)
        _print_lines(console, step_lines(assessment, memory, time))
    _print_lines(console, host_lines(assessment), "bold yellow")
    _print_lines(console, [verdict(assessment)], "bold green" if assessment.fits else "bold red")
    _print_lines(console, [f"  {line}" for line in shortage_lines(assessment)])
    _print_lines(console, report.cost.lines if report.cost is not None else [])
    _print_lines(console, report.smallest.lines if report.smallest is not None else [])
    _print_lines(console, [f"note: {line}" for line in report.notes])
    _print_lines(console, [f"  fits with {argument}" for argument in report.remedies.arguments])


def _with_largest_tables(assessment: Assessment) -> Assessment:
    """Returns the assessment with the tables that are shown, in the model's order."""
    by_size = sorted(range(len(assessment.tables)), key=lambda index: -assessment.tables[index].storage.total)
    return replace(assessment, tables=tuple(assessment.tables[index] for index in sorted(by_size[:_MAX_TABLES])))


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _print_tables(assessment: Assessment, console: Console) -> None:
    """Prints a line for each table, and below why it lies there where the column has no room."""
    columns, printed = table_columns(assessment), {}
    for column in columns:
        cells, max_width = list(map(column.text, assessment.tables)), _MAX_WIDTHS.get(column.heading, console.width)
        printed[column.heading] = _PrintedColumn(column.heading, cells, column.is_number, max_width, column.least_width)
    left_out = []
    dispensable = sorted((own.dispensable, own.heading) for own in columns if own.dispensable is not None)
    for _, heading in dispensable:
        if _total_width(list(printed.values())) <= console.width:
            break
        left_out.append(heading)
        del printed[heading]
    shown = _folded(list(printed.values()), console.width)
    room = console.width - _total_width(shown)  # which reasons may have
    shown = [replace(own, max_width=own.width + room) if own.heading == "why" else own for own in shown]
    grid = _grid("tables", shown)
    for index, table in enumerate(assessment.tables):
        texts = [Text(column.cells[index]) for column in shown]
        grid.add_row(*texts, style="bold yellow" if is_in_host_memory(table) else None)
    console.print(grid)
    for heading, lines in _TOLD_BELOW.items():
        _print_lines(console, lines(assessment) if heading in left_out else [])
    if any(column.heading == "instead" for column in columns):
        _print_lines(console, [ALTERNATIVES_LEGEND], "dim")
    _print_omitted_columns(console, [heading for heading in left_out if heading not in _TOLD_BELOW])
    console.print()


def _print_ranks(quantity: RankQuantity, console: Console) -> None:
    """Prints a line for ranks that are alike, of those that are shown, with a bar."""
    groups, left_out_groups = quantity.shown_groups(_MAX_LINES)
    left_out: list[str] = []
    columns = _rank_columns(quantity, groups, left_out)
    for name in _dispensable_by_rank(quantity):
        if _total_width(columns) + _GAP + _BAR_WIDTHS[0] <= console.width:
            break
        left_out.append(name)
        columns = _rank_columns(quantity, groups, left_out)
    columns = _folded(columns, console.width - _GAP - _BAR_WIDTHS[0])
    width = min(_BAR_WIDTHS[1], max(_BAR_WIDTHS[0], console.width - _total_width(columns) - _GAP))
    grid = _grid(quantity.heading.lower(), columns)
    grid.add_column(_broken(quantity.bar_heading, width), width=width)
    for index, group in enumerate(groups):
        texts = [Text(column.cells[index]) for column in columns]
        style = "bold red" if quantity.is_too_much(group.first) else None
        grid.add_row(*texts, _bar(quantity, group.first, width), style=style)
    console.print(grid)
    items = [item.name for item in quantity.items]
    added = [name for name in items if name in left_out] if set(items) - set(left_out) else []
    _print_lines(console, [f"others: {', '.join(added)}"] if added else [], "dim")
    _print_omitted_columns(console, [name for name in left_out if name not in added])
    _print_lines(console, [left_out_groups] if left_out_groups else [], "dim")
    console.print()


def _bar(quantity: RankQuantity, rank: PlannedRank, width: int) -> Bar:
    """Returns the bar of a rank, which is full where it has more than it may."""
    full, colour = quantity.full_bar or 1.0, "red" if quantity.is_too_much(rank) else "default"
    return Bar(full, 0, min(quantity.bar(rank), full), width=width, color=colour)


def _dispensable_by_rank(quantity: RankQuantity) -> list[str]:
    """Returns what a narrow terminal leaves out of the table by rank: first what is zero on every rank."""
    empty = [item.name for item in quantity.items if not any(map(item.amount, quantity.ranks))]
    shown = [(item.dispensable, item.name) for item in quantity.items if item.name not in empty]
    shown += [(own.dispensable, own.heading) for own in quantity.columns_beside if own.dispensable is not None]
    return [*empty, *(name for _, name in sorted(shown))]


def _rank_columns(quantity: RankQuantity, groups: Sequence[RankGroup], left_out: Sequence[str]) -> list[_PrintedColumn]:
    """Returns the columns but for the bar; items that are left out are added up, unless all are."""
    ranks = [group.first for group in groups]

    def amounts(items: Sequence[RankItem]) -> list[str]:
        return [quantity.text(sum(item.amount(rank) for item in items)) for rank in ranks]

    columns = [_PrintedColumn("rank", [group.text for group in groups], least_width=10)]
    columns += [_PrintedColumn(item.name, amounts([item])) for item in quantity.items if item.name not in left_out]
    others = [item for item in quantity.items if item.name in left_out]
    if len(others) < len(quantity.items) and any(item.amount(rank) for item in others for rank in ranks):
        columns.append(_PrintedColumn("others", amounts(others)))
    columns.append(_PrintedColumn(quantity.total_heading, [quantity.text(quantity.total(rank)) for rank in ranks]))
    beside = [column for column in quantity.columns_beside if column.heading not in left_out]
    return columns + [_PrintedColumn(column.heading, list(map(column.text, ranks))) for column in beside]


def _folded(columns: Sequence[_PrintedColumn], width: int) -> list[_PrintedColumn]:
    """Returns the columns with those made narrower, as far as is needed, that can go on in a next line."""
    folded, excess = list(columns), _total_width(columns) - width
    foldable = [index for index, column in enumerate(columns) if column.least_width is not None]
    for index in sorted(foldable, key=lambda index: -(columns[index].least_width or 0)):
        if excess > 0:
            column = columns[index]
            folded[index] = replace(column, max_width=max(column.least_width or 0, column.width - excess))
            excess -= column.width - folded[index].width
    return folded


def _print_omitted_columns(console: Console, headings: Sequence[str]) -> None:
    """Prints which columns the terminal has no room for."""
    if headings:
        _print_lines(console, [f"left out in this width: {', '.join(headings)}"], "dim")


def _total_width(columns: Sequence[_PrintedColumn]) -> int:
    """Returns the width of the columns and of the gaps between them, in characters."""
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _grid(title: str, columns: Sequence[_PrintedColumn]) -> Table:
    """Returns rich's table with these columns and no lines yet."""
    grid = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0)
    )
    for column in columns:
        justify: JustifyMethod = "right" if column.is_number else "left"
        grid.add_column(_broken(column.heading, column.width), width=column.width, justify=justify, overflow="fold")
    return grid


def _broken(heading: str, width: int) -> str:
    """Returns a heading that is broken between words."""
    return "\n".join(textwrap.wrap(heading, width, break_long_words=False))
