"""A plan in a terminal: the tables and where they lie, what each rank holds, and whether it fits.

Where a terminal is narrow, the columns that matter least are left out, or added up into one; what is left out is said.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from distembed.capacity.texts import (
    MemoryItem,
    host_lines,
    in_host_memory,
    items_of,
    rank_bytes,
    shortage_lines,
    shown_ranks,
    step_columns,
    step_lines,
    table_columns,
    verdict,
    why_lines,
)
from distembed.units import format_bytes

_MOST_RANKS_SHOWN = 16
_GAP = 2
_BAR_WIDTHS = 8, 24
_LEAST_WHY, _MOST_NAME = 40, 32

# what a narrow terminal leaves out, the first first; memory is added up as "others"
_DISPENSABLE_BY_RANK = (
    "allocator",
    "gradients",
    "lookups",
    "step buffers",
    "sent a step",
    "activations",
    "SSE graphs",
    "networks",
    "optimizer",
)
_DISPENSABLE_BY_TABLE = ("why", "scheme", "rows", "cache")
_FOLDABLE_BY_TABLE = {"placed": 20, "table": 8}  # to so many columns of the terminal


@dataclass(frozen=True)
class _Shown:
    """A column as it is printed.

    Attributes:
        heading: above it.
        cells: of its lines.
        is_number: whether it stands to the right.
        most: columns of the terminal beyond which it is folded.
    """

    heading: str
    cells: Sequence[str]
    is_number: bool = True
    most: int = 10_000

    @property
    def width(self) -> int:
        """Columns of the terminal; headings are broken between words."""
        widest = max(map(cell_len, [*self.heading.split(), *self.cells]))
        return min(self.most, widest)


def print_plan(values: Mapping[str, Any], console: Console) -> None:
    """Prints what ``distembed plan --json`` would, for a reader.

    Args:
        values: of ``--json``.
        console: to print to; its width decides which columns there are.
    """
    if values["ranks"]:
        _print_tables(values, console)
        _print_ranks(values, console)
        _say(console, step_lines(values))
    _say(console, host_lines(values), "bold yellow")
    _say(console, [verdict(values)], "bold green" if values["fits"] else "bold red")
    _say(console, [f"  {line}" for line in shortage_lines(values)])
    _say(console, [f"note: {line}" for line in values["notes"]])
    _say(console, [f"  fits with {remedy}" for remedy in values["remedies"]])


def _say(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def _print_tables(values: Mapping[str, Any], console: Console) -> None:
    columns = []
    for column in table_columns(values):
        cells = [column.text(table) for table in values["tables"]]
        most = {"table": _MOST_NAME, "why": _LEAST_WHY}.get(column.heading, console.width)
        columns.append(_Shown(column.heading, cells, column.is_number, most))
    left_out = []
    for heading in _DISPENSABLE_BY_TABLE:
        if _width_of(columns) <= console.width:
            break
        left_out += [column.heading for column in columns if column.heading == heading]
        columns = [column for column in columns if column.heading != heading]
    columns = _folded(columns, console.width)
    if columns[-1].heading == "why":
        width = console.width - _width_of(columns[:-1]) - _GAP
        columns[-1] = _Shown("why", columns[-1].cells, False, width)
    table = _table("tables", columns)
    for index, row in enumerate(values["tables"]):
        texts = [Text(column.cells[index]) for column in columns]
        table.add_row(*texts, style="bold yellow" if in_host_memory(row) else None)
    console.print(table)
    if "why" in left_out:
        left_out.remove("why")
        _say(console, why_lines(values))
    _say_left_out(console, left_out)
    console.print()


def _print_ranks(values: Mapping[str, Any], console: Console) -> None:
    ranks, said = shown_ranks(values, _MOST_RANKS_SHOWN)
    items = {item.name: item for item in items_of(values)}
    left_out: list[str] = []
    columns = _rank_columns(values, ranks, left_out)
    for name in _dispensable(values):
        if _width_of(columns) + _GAP + _BAR_WIDTHS[0] <= console.width:
            break
        left_out.append(name)
        columns = _rank_columns(values, ranks, left_out)
    bar = min(_BAR_WIDTHS[1], max(_BAR_WIDTHS[0], console.width - _width_of(columns) - _GAP))
    table = _table("memory by rank", columns)
    table.add_column(_broken(f"of {format_bytes(rank_bytes(values))}", bar), width=bar)
    for index, rank in enumerate(ranks):
        used, capacity = rank["total"], rank["capacity"]
        filled = Bar(capacity, 0, min(used, capacity), width=bar, color="red" if used > capacity else "default")
        texts = [Text(column.cells[index]) for column in columns]
        table.add_row(*texts, filled, style="bold red" if used > capacity else None)
    console.print(table)
    added = [name for name in items if name in left_out]
    if added:
        _say(console, [f"others: {', '.join(added)}"], "dim")
    _say_left_out(console, [name for name in left_out if name not in items])
    _say(console, [said] if said else [], "dim")
    console.print()


def _dispensable(values: Mapping[str, Any]) -> list[str]:
    """Headings of the table by rank that a narrow terminal leaves out: first what is zero on every rank."""
    items = items_of(values)
    empty = [item.name for item in items if not any(map(item.bytes_on, values["ranks"]))]
    headings = [*(item.name for item in items), *(column.heading for column in step_columns(values))]
    return [*empty, *(name for name in _DISPENSABLE_BY_RANK if name in headings and name not in empty)]


def _rank_columns(
    values: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], left_out: Sequence[str]
) -> list[_Shown]:
    """Without the bar; memory that is left out is added up."""

    def sizes(items: Sequence[MemoryItem]) -> list[int]:
        return [sum(item.bytes_on(rank) for item in items) for rank in ranks]

    items = items_of(values)
    columns = [_Shown("rank", [str(rank["rank"]) for rank in ranks])]
    columns += [
        _Shown(item.name, list(map(format_bytes, sizes([item])))) for item in items if item.name not in left_out
    ]
    others = sizes([item for item in items if item.name in left_out])
    if any(others):
        columns.append(_Shown("others", list(map(format_bytes, others))))
    columns.append(_Shown("total", [format_bytes(rank["total"]) for rank in ranks]))
    beside = [column for column in step_columns(values) if column.heading not in left_out]
    return columns + [_Shown(column.heading, list(map(column.text, ranks))) for column in beside]


def _folded(columns: Sequence[_Shown], width: int) -> list[_Shown]:
    """With the columns made narrower that can go on in a next line, as far as is needed."""
    folded = list(columns)
    for heading, least in _FOLDABLE_BY_TABLE.items():
        excess = _width_of(folded) - width
        for index, column in enumerate(folded):
            if excess > 0 and column.heading == heading:
                folded[index] = replace(column, most=max(least, column.width - excess))
    return folded


def _say_left_out(console: Console, headings: Sequence[str]) -> None:
    if headings:
        _say(console, [f"left out in this width: {', '.join(headings)}"], "dim")


def _width_of(columns: Sequence[_Shown]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _table(title: str, columns: Sequence[_Shown]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0)
    )
    for column in columns:
        justify: JustifyMethod = "right" if column.is_number else "left"
        table.add_column(_broken(column.heading, column.width), width=column.width, justify=justify, overflow="fold")
    return table


def _broken(heading: str, width: int) -> str:
    return "\n".join(textwrap.wrap(heading, width, break_long_words=False))
