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

from distembed.capacity.assessment import AssessedRank, Assessment
from distembed.capacity.rank_quantity import RankGroup, RankItem, RankQuantity
from distembed.capacity.reasons import ALTERNATIVES_LEGEND, alternative_lines, bound_lines, reason_lines
from distembed.capacity.report import CapacityReport
from distembed.capacity.texts import (
    host_lines,
    is_in_host_memory,
    quantities_by_rank,
    shortage_lines,
    step_lines,
    table_columns,
    verdict,
)

_MAX_LINES = 16
_MAX_TABLES = 200
_GAP = 2
_BAR_WIDTHS = 8, 24
_MIN_REASON_WIDTH, _MAX_NAME_WIDTH = 40, 32

# what a narrow terminal leaves out, in this order; items that are left out are added up as "others"
_DISPENSABLE_BY_RANK = (
    *("allocator", "gradients", "lookups", "step buffers", "activations", "SSE graphs", "networks", "optimizer"),
    *("waiting for cores", "starts", "all-reduce", "sent a step", "host memory"),
    *("cache", "lookup", "tables", "exchange"),
)
_DISPENSABLE_BY_TABLE = ("instead", "why", "scheme", "rows", "cache")
_FOLDABLE = {"rank": 10, "placed": 20, "ranks": 12, "table": 8}  # to so many characters


@dataclass(frozen=True)
class _PrintedColumn:
    """A column as it is printed.

    Attributes:
        heading: Text above the column.
        cells: Text of each line.
        is_number: Whether the cells stand to the right.
        max_width: Characters beyond which a cell is folded.
    """

    heading: str
    cells: Sequence[str]
    is_number: bool = True
    max_width: int = 10_000

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
        _print_lines(console, _tables_left_out(assessment), "dim")
        quantities = quantities_by_rank(assessment)
        for quantity in quantities:
            _print_ranks(quantity, console)
        _print_lines(console, [*step_lines(*quantities), *bound_lines(assessment)])
    _print_lines(console, host_lines(assessment), "bold yellow")
    _print_lines(console, [verdict(assessment)], "bold green" if assessment.fits else "bold red")
    _print_lines(console, [f"  {line}" for line in shortage_lines(assessment)])
    _print_lines(console, report.smallest.lines if report.smallest is not None else [])
    _print_lines(console, [f"note: {line}" for line in report.notes])
    _print_lines(console, [f"  fits with {argument}" for argument in report.remedies.arguments])


def _with_largest_tables(assessment: Assessment) -> Assessment:
    """Returns the assessment with the tables that are shown, in the model's order."""
    by_size = sorted(range(len(assessment.tables)), key=lambda index: -assessment.tables[index].storage.total)
    return replace(assessment, tables=tuple(assessment.tables[index] for index in sorted(by_size[:_MAX_TABLES])))


def _tables_left_out(assessment: Assessment) -> list[str]:
    """Returns the line that says which tables are not shown, if there are any."""
    num_tables = len(assessment.tables)
    if num_tables <= _MAX_TABLES:
        return []
    return [f"the {_MAX_TABLES} tables with most bytes of {num_tables:,}; --json and --report have all", ""]


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _print_tables(assessment: Assessment, console: Console) -> None:
    """Prints a line for each table, and below why it lies there where the column has no room."""
    columns = []
    for column in table_columns(assessment):
        cells = [column.text(table) for table in assessment.tables]
        max_width = {"table": _MAX_NAME_WIDTH, "why": _MIN_REASON_WIDTH}.get(column.heading, console.width)
        columns.append(_PrintedColumn(column.heading, cells, column.is_number, max_width))
    left_out = []
    for heading in _DISPENSABLE_BY_TABLE:
        if _total_width(columns) <= console.width:
            break
        left_out += [column.heading for column in columns if column.heading == heading]
        columns = [column for column in columns if column.heading != heading]
    columns = _with_wide_reasons(_folded(columns, console.width), console.width)
    grid = _grid("tables", columns)
    for index, table in enumerate(assessment.tables):
        texts = [Text(column.cells[index]) for column in columns]
        grid.add_row(*texts, style="bold yellow" if is_in_host_memory(table) else None)
    console.print(grid)
    _print_lines(console, reason_lines(assessment) if "why" in left_out else [])
    if alternatives := alternative_lines(assessment):
        _print_lines(console, alternatives if "instead" in left_out else [])
        _print_lines(console, [ALTERNATIVES_LEGEND], "dim")
    _print_omitted_columns(console, [heading for heading in left_out if heading not in ("why", "instead")])
    console.print()


def _with_wide_reasons(columns: Sequence[_PrintedColumn], width: int) -> list[_PrintedColumn]:
    """Returns the columns with the reasons as wide as there is room."""
    room = width - _total_width(columns)
    return [replace(column, max_width=column.width + room) if column.heading == "why" else column for column in columns]


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


def _bar(quantity: RankQuantity, rank: AssessedRank, width: int) -> Bar:
    """Returns the bar of a rank, which is full where it has more than it may."""
    full, colour = quantity.full_bar or 1.0, "red" if quantity.is_too_much(rank) else "default"
    return Bar(full, 0, min(quantity.bar(rank), full), width=width, color=colour)


def _dispensable_by_rank(quantity: RankQuantity) -> list[str]:
    """Returns what a narrow terminal leaves out of the table by rank: first what is zero on every rank."""
    empty = [item.name for item in quantity.items if not any(map(item.amount, quantity.ranks))]
    shown = {*(item.name for item in quantity.items), *(column.heading for column in quantity.columns_beside)}
    return [*empty, *(name for name in _DISPENSABLE_BY_RANK if name in shown and name not in empty)]


def _rank_columns(quantity: RankQuantity, groups: Sequence[RankGroup], left_out: Sequence[str]) -> list[_PrintedColumn]:
    """Returns the columns but for the bar; items that are left out are added up, unless all are."""
    ranks = [group.first for group in groups]

    def amounts(items: Sequence[RankItem]) -> list[str]:
        return [quantity.text(sum(item.amount(rank) for item in items)) for rank in ranks]

    columns = [_PrintedColumn("rank", [group.text for group in groups])]
    columns += [_PrintedColumn(item.name, amounts([item])) for item in quantity.items if item.name not in left_out]
    others = [item for item in quantity.items if item.name in left_out]
    if len(others) < len(quantity.items) and any(item.amount(rank) for item in others for rank in ranks):
        columns.append(_PrintedColumn("others", amounts(others)))
    columns.append(_PrintedColumn(quantity.total_heading, [quantity.text(quantity.total(rank)) for rank in ranks]))
    beside = [column for column in quantity.columns_beside if column.heading not in left_out]
    return columns + [_PrintedColumn(column.heading, list(map(column.text, ranks))) for column in beside]


def _folded(columns: Sequence[_PrintedColumn], width: int) -> list[_PrintedColumn]:
    """Returns the columns with those made narrower, as far as is needed, that can go on in a next line."""
    folded = list(columns)
    for heading, least in _FOLDABLE.items():
        excess = _total_width(folded) - width
        for index, column in enumerate(folded):
            if excess > 0 and column.heading == heading:
                folded[index] = replace(column, max_width=max(least, column.width - excess))
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
