"""A plan in a terminal: the tables and where they lie, what each rank holds, and whether it fits.

Where a terminal is narrow, the columns that matter least are left out, or added up into one; what is left out is said.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from distembed.reports.plan import texts
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.by_rank import LineT, PlanColumn, RankQuantity, memory_by_rank, time_by_rank
from distembed.reports.plan.report import CapacityReport

_MAX_LINES = 16
_MAX_TABLES = 200
_GAP = 2
_BAR_WIDTHS = 8, 24
_MAX_WIDTHS = {"table": 32, "why": 40}
_TOLD_BELOW = ("why", "instead")  # columns whose texts stand below the table where there is no room for them


@dataclass(frozen=True)
class _PrintedColumn:
    """A column as it is printed."""

    column: PlanColumn[Any]
    cells: Sequence[str]
    max_width: int  # characters beyond which a cell is folded

    @cached_property
    def width(self) -> int:
        """Width in characters; headings are broken between words."""
        words = self.column.heading.split()
        return min(self.max_width, max(map(cell_len, [*words, *"\n".join(self.cells).split("\n")])))


def print_capacity_report(report: CapacityReport, console: Console) -> None:
    """Prints for a reader what ``distembed plan --json`` prints for a program; the width decides about columns."""
    assessment = report.assessment
    if assessment.ranks:
        _print_tables(assessment, console)
        memory, time = memory_by_rank(assessment), time_by_rank(assessment)
        _print_ranks(memory, console)
        _print_ranks(time, console)
        _print_lines(console, texts.step_lines(assessment, memory, time))
    _print_lines(console, texts.host_lines(assessment), "bold yellow")
    _print_lines(console, [texts.verdict(assessment)], "bold green" if assessment.fits else "bold red")
    _print_lines(console, [f"  {line}" for line in texts.shortage_lines(assessment)])
    _print_lines(console, report.lines)
    _print_lines(console, [f"note: {line}" for line in report.notes])
    _print_lines(console, [f"  fits with {argument}" for argument in report.remedies.arguments])


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _print_names(console: Console, title: str, names: Sequence[str]) -> None:
    _print_lines(console, [f"{title}: {', '.join(names)}"] if names else [], "dim")


def _print_tables(assessment: Assessment, console: Console) -> None:
    """Prints a line for each table, in the model's order, and below why it lies there where the column has no room."""
    num_tables = len(assessment.tables)
    largest = sorted(range(num_tables), key=lambda index: -assessment.tables[index].storage.total)[:_MAX_TABLES]
    assessment = replace(assessment, tables=tuple(assessment.tables[index] for index in sorted(largest)))
    columns = texts.table_columns(assessment)
    shown, left_out = _fitted(
        lambda left_out: [own for own in columns if own.heading not in left_out], assessment.tables, console.width
    )
    room = console.width - _total_width(shown)  # which reasons may have
    shown = [replace(own, max_width=own.width + room) if own.column.heading == "why" else own for own in shown]
    grid = _grid("tables", shown)
    for index, table in enumerate(assessment.tables):
        style = "bold yellow" if texts.is_in_host_memory(table) else None
        grid.add_row(*(Text(own.cells[index]) for own in shown), style=style)
    console.print(grid)
    for column in columns:
        if column.heading in _TOLD_BELOW and column.heading in left_out:
            _print_lines(console, texts.lines_by_text(assessment, column))
    if any(column.heading == "instead" for column in columns):
        _print_lines(console, [texts.ALTERNATIVES_LEGEND], "dim")
    _print_names(console, "left out in this width", [name for name in left_out if name not in _TOLD_BELOW])
    console.print()
    if num_tables > _MAX_TABLES:
        text = f"the {_MAX_TABLES} tables with most bytes of {num_tables:,}; --json and --report have all"
        _print_lines(console, [text, ""], "dim")


def _print_ranks(quantity: RankQuantity, console: Console) -> None:
    """Prints a line for ranks that are alike, of those that are shown, with a bar."""
    groups, left_out_groups = quantity.shown_groups(_MAX_LINES)
    room = console.width - _GAP - _BAR_WIDTHS[0]
    columns, left_out = _fitted(quantity.columns, groups, room)
    width = min(_BAR_WIDTHS[1], max(_BAR_WIDTHS[0], console.width - _total_width(columns) - _GAP))
    full = quantity.limit or max(map(quantity.bar, quantity.ranks))
    grid = _grid(quantity.heading.lower(), columns)
    grid.columns[0].justify = "right"
    used = " used" if quantity.undrawn else ""
    grid.add_column(f"of {quantity.text(full)}{quantity.unit}{used}", width=width)
    for index, group in enumerate(groups):
        has_room = quantity.has_room(group[0])
        amount, colour = min(quantity.bar(group[0]), full), "default" if has_room else "red"
        bar = Bar(full or 1.0, 0, amount, width=width, color=colour)
        style = None if has_room else "bold red"
        grid.add_row(*(Text(own.cells[index]) for own in columns), bar, style=style)
    console.print(grid)
    items = [item.name for item in quantity.items]
    added = [name for name in items if name in left_out] if set(items) - set(left_out) else []
    _print_names(console, "others", added)
    _print_names(console, "left out in this width", [name for name in left_out if name not in added])
    _print_lines(console, [left_out_groups] if left_out_groups else [], "dim")
    console.print()


def _fitted(
    columns: Callable[[Sequence[str]], Sequence[PlanColumn[LineT]]], lines: Sequence[LineT], width: int
) -> tuple[list[_PrintedColumn], list[str]]:
    """Returns the columns that a width has room for, folded where needed, and the headings left out.

    ``columns`` returns the columns where some headings are left out.
    """
    candidates = sorted(
        (own for own in columns([]) if own.dispensable is not None), key=lambda own: own.dispensable or 0
    )
    for number in range(len(candidates) + 1):
        left_out = [own.heading for own in candidates[:number]]
        shown = [
            _PrintedColumn(own, list(map(own.text, lines)), _MAX_WIDTHS.get(own.heading, width))
            for own in columns(left_out)
        ]
        if _total_width(shown) <= width:
            break
    excess = _total_width(shown) - width
    foldable = [index for index, own in enumerate(shown) if own.column.least_width is not None]
    for index in sorted(foldable, key=lambda index: -(shown[index].column.least_width or 0)):
        if excess > 0:
            before = shown[index]
            shown[index] = replace(before, max_width=max(before.column.least_width or 0, before.width - excess))
            excess -= before.width - shown[index].width
    return shown, left_out


def _total_width(columns: Sequence[_PrintedColumn]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _grid(title: str, columns: Sequence[_PrintedColumn]) -> Table:
    grid = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0)
    )
    for own in columns:
        justify: JustifyMethod = "right" if own.column.is_number else "left"
        grid.add_column(own.column.heading, width=own.width, justify=justify, overflow="fold")
    return grid
