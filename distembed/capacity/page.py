"""A plan as a page, or its chart alone: the memory of each rank, by what takes it, below the device's capacity.

Where there is no plan, the chart is of what tables need beside what is left for them.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distembed.capacity.texts import (
    Column,
    MemoryItem,
    devices,
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
)
from distembed.errors import UserError
from distembed.files import whole_file
from distembed.runs.pages import COLOURS, FIGURE_SETTINGS, PAGE_COLOUR, figure, page, section, svg_of, swatch
from distembed.units import format_bytes

MOST_BARS = 64
"""Ranks that have a bar, and a line in the page's table; of more, the chart is an area, and the table an excerpt."""

_CLOSE_UP = 0.4  # share of the capacity below which what is used is drawn once more, larger
_ITEM_COLOURS = {
    "tables": COLOURS[0],
    "optimizer": COLOURS[1],
    "cache": COLOURS[3],
    "SSE graphs": "#7f9a3a",
    "networks": COLOURS[2],
    "gradients": COLOURS[4],
    "step buffers": COLOURS[6],
    "lookups": COLOURS[7],
    "activations": COLOURS[5],
    "allocator": "#9a9a9a",
}
_NEEDED_COLOURS = {"weights": "tables", "optimizer_state": "optimizer", "gradients": "gradients"}
_RED, _GREEN = "#d1495b", "#2a9d78"


def write_report(values: Mapping[str, Any], file: Path) -> None:
    """Writes a plan for a reader, whole or not at all.

    Args:
        values: of ``distembed plan --json``.
        file: ``.html`` for a page that fetches nothing, ``.png`` or ``.svg`` for its chart.

    Raises:
        UserError: for another suffix, or a folder.
        RunError: where the file cannot be written.
    """
    require_suffix(file)
    content = _WRITERS[file.suffix.lower()](values)
    with whole_file(file) as temporary:
        Path(temporary).write_bytes(content)


def require_suffix(file: Path) -> None:
    """Refuses a file that :func:`write_report` would not write, before there is a plan.

    Raises:
        UserError: for a suffix that is none of those there are, or a folder.
    """
    if file.suffix.lower() not in _WRITERS:
        found = f"ends in {file.suffix!r}" if file.suffix else "has no suffix"
        raise UserError(f"{file} {found}; a plan can be written as one of: {', '.join(_WRITERS)}.")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file.")


def render_page(values: Mapping[str, Any]) -> str:
    """The page's HTML."""
    kind = "fits" if values["fits"] else "short"
    lines = [*shortage_lines(values), *host_lines(values), *step_lines(values)]
    remedies = [f"fits with {remedy}" for remedy in values["remedies"]]
    sections = [
        f'<p class="{kind}">{escape(verdict(values))}</p>\n{_lines([*lines, *remedies])}',
        section("Memory by rank" if values["ranks"] else "Memory", _legend(values) + _figures(values)),
        section("Tables", _table(table_columns(values), values["tables"], in_host_memory)),
    ]
    if values["ranks"]:
        sections.append(section("Ranks", _ranks(values)))
    if values["notes"]:
        sections.append(section("Notes", _lines(values["notes"])))
    return page(f"distembed: plan for {devices(values)}", "".join(sections), _STYLE)


# ------------------------------------------------------------------------------------------------------------ the page


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>\n" for line in lines)


def _legend(values: Mapping[str, Any]) -> str:
    shown = "".join(f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in _colours(values).items())
    return f'<p class="legend">{shown}</p>\n'


def _figures(values: Mapping[str, Any]) -> str:
    if not values["ranks"]:
        drawn = svg_of(lambda figure: draw_needed(values, figure.add_subplot()), (9, 2))
        return figure("Needed and left", f"On all ranks of {devices(values)} together.", drawn)
    whole = svg_of(lambda figure: draw_ranks(values, figure.add_subplot()), (9, 4))
    figures = figure("All of it", "The dashed line is the device's capacity.", _with_tooltips(whole, values))
    if _needs_close_up(values):
        close = svg_of(lambda figure: draw_ranks(values, figure.add_subplot(), close_up=True), (9, 4))
        figures += figure("Close-up", "What is used, without the allocator's reserve.", _with_tooltips(close, values))
    return figures


def _with_tooltips(svg: str, values: Mapping[str, Any]) -> str:
    """Each bar tells its bytes to who points at it."""
    items = {item.name: item for item in items_of(values)}

    def tell(match: re.Match[str]) -> str:
        rank = values["ranks"][int(match[2])]
        item = items[match[3].replace("-", " ")]
        told = f"rank {rank['rank']}: {item.name} {format_bytes(item.bytes_on(rank))}"
        return f"{match[0]}<title>{escape(told)}</title>"

    return re.sub(r'<g id="(all|close-up)-rank-(\d+)-([^"]+)">', tell, svg)


def _ranks(values: Mapping[str, Any]) -> str:
    ranks, said = shown_ranks(values, MOST_BARS)
    columns = [Column("rank", lambda rank: str(rank["rank"]))]
    columns += [Column(item.name, _bytes_of(item)) for item in items_of(values)]
    columns.append(Column(f"total, of {format_bytes(rank_bytes(values))}", lambda rank: format_bytes(rank["total"])))
    columns.append(Column("fullest moment", lambda rank: str(rank["fullest_moment"]), is_number=False))
    table = _table([*columns, *step_columns(values)], ranks, lambda rank: rank["total"] > rank["capacity"])
    return table + _lines([said] if said else [])


def _bytes_of(item: MemoryItem) -> Callable[[Mapping[str, Any]], str]:
    return lambda rank: format_bytes(item.bytes_on(rank))


def _table(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], is_marked: Callable[[Mapping[str, Any]], bool]
) -> str:
    def line(tag: str, texts: Iterable[str], kind: str = "") -> str:
        cells = zip(columns, texts, strict=True)
        shown = "".join(f"<{tag}{_class('' if c.is_number else 'text')}>{escape(text)}</{tag}>" for c, text in cells)
        return f"<tr{_class(kind)}>{shown}</tr>\n"

    headings = line("th", (column.heading for column in columns))
    body = "".join(line("td", (c.text(row) for c in columns), "marked" if is_marked(row) else "") for row in rows)
    return f'<div class="wide"><table class="plan">\n{headings}{body}</table></div>\n'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


# ------------------------------------------------------------------------------------------------------------ the chart


def draw_ranks(values: Mapping[str, Any], axes: Axes, close_up: bool = False) -> None:
    """Memory of each rank, stacked by item: a bar each, or an area where there are many.

    Args:
        values: with a plan.
        axes: to draw into.
        close_up: whether to draw what is used, without the allocator's reserve and the capacity.
    """
    ranks = values["ranks"]
    items = [item for item in items_of(values) if not (close_up and item.name == "allocator")]
    sizes = [np.array([item.bytes_on(rank) for rank in ranks], dtype=np.float64) for item in items]
    capacity, bottom = rank_bytes(values), np.zeros(len(ranks))
    highest = max(float(sum(sizes, np.zeros(1)).max()), 1.0 if close_up else capacity)
    unit = _label_bytes(axes, highest)
    for item, size in zip(items, sizes, strict=True):
        name = f"{'close-up' if close_up else 'all'}-rank-{{}}-{item.name.replace(' ', '-')}"
        _draw_item(axes, size / unit, bottom / unit, _ITEM_COLOURS[item.name], name)
        bottom += size
    if not close_up:
        _draw_capacity(axes, capacity / unit, f"capacity {format_bytes(capacity)}")
    margin = max(0.0, (6 - len(ranks)) / 2)  # a bar of one rank does not fill the width
    axes.set_xlim(-0.5 - margin, len(ranks) - 0.5 + margin)
    axes.set_ylim(0, highest / unit * (1.05 if close_up else 1.12))
    if len(ranks) < 6:
        axes.set_xticks(range(len(ranks)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel("rank")


def _draw_item(axes: Axes, heights: np.ndarray, bottom: np.ndarray, colour: str, name: str) -> None:
    """One layer of the stack; ``name.format(rank)`` becomes the id of a rank's bar in an SVG."""
    if len(heights) > MOST_BARS:
        edges = np.arange(len(heights) + 1) - 0.5
        axes.stairs(bottom + heights, edges, baseline=bottom, fill=True, color=colour)
        return
    for rank, bar in enumerate(axes.bar(range(len(heights)), heights, bottom=bottom, color=colour)):
        bar.set_gid(name.format(rank))


def _draw_capacity(axes: Axes, height: float, text: str) -> None:
    axes.axhline(height, color=matplotlib.rcParams["text.color"], linestyle=(0, (4, 3)), linewidth=1.4)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(text, (1, height), (0, 3), ha="right", va="bottom", **place)


def draw_needed(values: Mapping[str, Any], axes: Axes) -> None:
    """What all tables need, stacked by item, beside what is left for them on all ranks."""
    needed, left = values["needed_by_tables"], values["left_for_tables"]
    highest = max(sum(needed.values()), left, 1)
    unit = _label_bytes(axes, highest, axis="x")
    start = 0.0
    for name, of_item in _NEEDED_COLOURS.items():
        (bar,) = axes.barh([0], [needed[name] / unit], left=[start], color=_ITEM_COLOURS[of_item])
        bar.set_gid(f"needed-{name}")
        start += needed[name] / unit
    (bar,) = axes.barh([1], [left / unit], color=_GREEN)
    bar.set_gid("left")
    axes.set_yticks([0, 1], [f"needed: {format_bytes(sum(needed.values()))}", f"left: {format_bytes(left)}"])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)


def _label_bytes(axes: Axes, highest: float, axis: str = "y") -> int:
    """Labels an axis by the unit of :func:`format_bytes` for the highest value, and gives its bytes."""
    name = format_bytes(int(highest)).split()[1]
    if axis == "y":
        axes.set_ylabel(f"{name} a rank")
    else:
        axes.set_xlabel(name)
    return int(1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(name))


def _needs_close_up(values: Mapping[str, Any]) -> bool:
    used = max(rank["total"] - rank["memory"]["allocator"] for rank in values["ranks"])
    return bool(0 < used < _CLOSE_UP * rank_bytes(values))


def _colours(values: Mapping[str, Any]) -> dict[str, str]:
    """By name of what is drawn."""
    if not values["ranks"]:
        needed = {name.replace("_", " "): _ITEM_COLOURS[item] for name, item in _NEEDED_COLOURS.items()}
        return {**needed, "left for tables": _GREEN}
    return {item.name: _ITEM_COLOURS[item.name] for item in items_of(values)}


def draw_chart(values: Mapping[str, Any], drawn: Figure) -> None:
    """The chart that stands alone: with the verdict above and its legend below."""
    drawn.suptitle(verdict(values), x=0.01, ha="left", parse_math=False, color=_GREEN if values["fits"] else _RED)
    if not values["ranks"]:
        draw_needed(values, drawn.add_subplot())
    elif _needs_close_up(values):
        whole, close = drawn.subplots(2)
        draw_ranks(values, whole)
        draw_ranks(values, close, close_up=True)
        close.set_title("close-up: what is used, without the allocator's reserve", loc="left", fontsize="medium")
    else:
        draw_ranks(values, drawn.add_subplot())
    colours = _colours(values)
    patches = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in colours.items()]
    drawn.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 5))


def _chart_file(values: Mapping[str, Any], file_format: str) -> bytes:
    """The chart on white, as it may be opened anywhere."""
    dark = {key: "#222222" for key, value in FIGURE_SETTINGS.items() if value == PAGE_COLOUR}
    height = 3.0 if not values["ranks"] else 8.0 if _needs_close_up(values) else 5.0
    with matplotlib.rc_context({**FIGURE_SETTINGS, **dark, "figure.facecolor": "white"}):
        drawn = Figure(figsize=(10, height), layout="constrained")
        draw_chart(values, drawn)
        content = io.BytesIO()
        drawn.savefig(content, format=file_format, dpi=150, metadata={"Date": None} if file_format == "svg" else None)
    return content.getvalue()


_WRITERS: dict[str, Callable[[Mapping[str, Any]], bytes]] = {
    ".html": lambda values: render_page(values).encode(),
    ".png": lambda values: _chart_file(values, "png"),
    ".svg": lambda values: _chart_file(values, "svg"),
}

_STYLE = """
.fits, .short { font-size: 1.15rem; font-weight: 600; }
.fits { color: #2a9d78; }
.short { color: #d1495b; }
p { margin: .35rem 0; overflow-wrap: anywhere; }
figure { margin-bottom: 1.5rem; }
table.plan .text { text-align: left; }
table.plan td.text:last-child { white-space: normal; min-width: 12rem; }
table.plan .marked { color: #d1495b; font-weight: 600; }
"""
