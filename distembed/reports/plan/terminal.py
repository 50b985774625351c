"""A plan in a terminal: the tables and their places, the memory and time of each rank, and whether it fits."""

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from distembed.reports.plan import tables
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.report import CapacityReport
from distembed.reports.plan.tables import LineT, PlanColumn, RankQuantity

_MAX_LINES = 16
_MAX_TABLES = 200
_MAX_WORD = 12
_WIDE = 140  # characters from which on there is room for gaps
_LEAST_COLUMN = 7  # characters of a folded number, such as 1001.34, or of a shorter one and a space


def print_capacity_report(report: CapacityReport, console: Console) -> None:
    """Prints a report for a reader; in a narrow terminal cells are folded."""
    assessment = report.assessment
    if assessment.ranks:
        _print_tables(assessment, console)
        memory, time = tables.memory_by_rank(assessment), tables.time_by_rank(assessment)
        _print_ranks(memory, console)
        _print_ranks(time, console)
        _print_lines(console, tables.step_lines(assessment, memory, time))
    _print_lines(console, tables.host_lines(assessment), "bold yellow")
    _print_lines(console, [tables.verdict(assessment)], "bold green" if assessment.fits else "bold red")
    _print_lines(console, [f"  {line}" for line in tables.shortage_lines(assessment)])
    _print_lines(console, report.lines)
    _print_lines(console, [f"note: {line}" for line in report.notes])
    _print_lines(console, [f"  fits with {argument}" for argument in report.remedies.arguments])


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _print_tables(assessment: Assessment, console: Console) -> None:
    """Prints a line for each table, in the model's order, and below it the reasons of their places."""
    by_size = sorted(assessment.tables, key=lambda table: -table.storage.total)
    largest = {table.name for table in by_size[:_MAX_TABLES]}
    shown = [table for table in assessment.tables if table.name in largest]
    columns = tables.table_columns(assessment)
    console.print(_grid("tables", columns, shown, tables.is_in_host_memory, "bold yellow"))
    _print_lines(console, tables.reason_lines(assessment))
    if any(table.alternatives for table in assessment.tables):
        _print_lines(console, [tables.ALTERNATIVES_LEGEND], "dim")
    if len(by_size) > _MAX_TABLES:
        text = f"the {_MAX_TABLES} tables with most bytes of {len(by_size):,}; --json and --report have all"
        _print_lines(console, [text], "dim")
    console.print()


def _print_ranks(quantity: RankQuantity, console: Console) -> None:
    """Prints a line for each group of ranks with equal numbers; a narrow terminal leaves the items out."""
    groups, left_out = quantity.shown_groups(_MAX_LINES)
    columns = quantity.columns[: len(quantity.columns) - len(quantity.remarks)]
    if console.width < _LEAST_COLUMN * len(columns):
        columns = [columns[0], *columns[1 + len(quantity.items) :]]
        left_out = [*left_out, "the terminal is too narrow for all columns; --json and --report have them"]
    gap = int(console.width >= _WIDE)
    title = quantity.heading.lower()
    console.print(_grid(title, columns, groups, lambda group: not quantity.has_room(group[0]), "bold red", gap))
    _print_lines(console, left_out, "dim")
    console.print()


def _grid(
    title: str,
    columns: Sequence[PlanColumn[LineT]],
    lines: Sequence[LineT],
    is_marked: Callable[[LineT], bool],
    style: str,
    gap: int = 1,
) -> Table:
    """Returns a table whose marked lines have a style; cells fold between words, and within words longer than 12."""
    grid = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0)
    )
    for column in columns:
        justify: JustifyMethod = "right" if column.is_number else "left"
        longest = max((len(word) for line in lines for word in column.text(line).split()), default=0)
        grid.add_column(column.heading, justify=justify, overflow="fold", min_width=min(longest, _MAX_WORD))
    for line in lines:
        grid.add_row(*(Text(column.text(line)) for column in columns), style=style if is_marked(line) else None)
    return grid
