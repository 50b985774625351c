"""The chart of an assessment: the memory and the time of each rank, by what takes it.

Memory stands below the device's capacity; where little of that is used, what is used is drawn as large as there is
room. Where there is no plan, the chart is of what tables need beside what is left for them.
"""

import io
import math
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator

from distembed.base.files import MADE_BY
from distembed.base.units import binary_unit, format_bytes
from distembed.reports.pages import COLOURS, FIGURE_SETTINGS, PAGE_COLOUR
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.by_rank import MEMORY_ITEMS, TIME_ITEMS, RankQuantity, memory_by_rank, time_by_rank
from distembed.reports.plan.texts import verdict

MAX_BARS = 64  # ranks that have a bar each; more ranks are drawn as an area
_MAX_STEPS = 1024  # of an area; where ranks differ more, a step is as high as the first of its ranks
RED, GREEN = "#d1495b", "#2a9d78"

ITEM_COLOURS = {
    item.name: item.colour if isinstance(item.colour, str) else COLOURS[item.colour]
    for item in (*MEMORY_ITEMS, *TIME_ITEMS)
}
# what tables need, with the items of ranks that have the same colour
_NEEDED = {"weights": "tables", "optimizer_state": "optimizer", "gradients": "gradients"}
DEMAND_COLOURS = {name.replace("_", " "): ITEM_COLOURS[item] for name, item in _NEEDED.items()}
DEMAND_COLOURS["left for tables"] = GREEN


def draw_ranks(quantity: RankQuantity, axes: Axes) -> None:
    """Draws the memory or the time of each rank, stacked by item.

    Up to :data:`MAX_BARS` ranks have a bar each, whose parts have ids such as ``memory-3-step-buffers`` in an SVG. More
    are an area, from the rank with most to that with least.
    """
    limit, num_ranks = quantity.limit, len(quantity.ranks)
    highest = max(*map(quantity.bar, quantity.ranks), limit or 0.0) or 1.0
    has_bars, label, unit = num_ranks <= MAX_BARS, "ms a step", 1
    if not quantity.unit:
        name, unit = binary_unit(int(highest))
        label = f"{name} a rank"
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if has_bars:
        shown = list(quantity.ranks)
        margin = max(0.0, (6 - num_ranks) / 2)  # a bar of one rank does not fill the width
        axes.set_xlim(-0.5 - margin, num_ranks - 0.5 + margin)
        axes.set_xlabel("rank")
        if num_ranks < 6:
            axes.xaxis.set_major_locator(FixedLocator(range(num_ranks)))
    else:
        groups, (most, least) = quantity.sorted_groups, quantity.extremes
        steps = range(0, len(groups), math.ceil(len(groups) / _MAX_STEPS))
        edges = np.cumsum([0, *map(len, groups)])[[*steps, -1]]
        shown = [groups[step][0] for step in steps]
        axes.set_xlim(0, num_ranks)
        axes.set_xlabel(f"number of ranks, from the {most} to the {least}")
    bottom = np.zeros(len(shown))
    for item in quantity.bar_items:
        top, colour = bottom + np.array([item.amount(rank) / unit for rank in shown]), ITEM_COLOURS[item.name]
        if has_bars:
            for rank, bar in enumerate(axes.bar(range(num_ranks), top - bottom, bottom=bottom, color=colour)):
                bar.set_gid(f"{quantity.name}-{rank}-{item.name.replace(' ', '-')}")
        else:
            axes.stairs(top, edges, baseline=bottom, fill=True, color=colour)
        bottom = top
    if limit is not None:
        # a dashed line with a text above its end
        axes.axhline(limit / unit, color=matplotlib.rcParams["text.color"], linestyle=(0, (4, 3)), linewidth=1.4)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(f"capacity {quantity.text(limit)}", (1, limit / unit), (0, 3), ha="right", va="bottom", **place)
    axes.set_ylim(0, highest / unit * (1.05 if limit is None else 1.12))
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)


def draw_demand(assessment: Assessment, axes: Axes) -> None:
    """Draws what all tables need, stacked by item, beside what is left for them on all ranks."""
    left, needed = assessment.bytes_left_for_tables, {name: getattr(assessment.one_copy, name) for name in _NEEDED}
    total = sum(needed.values())
    label, unit = binary_unit(max(total, left, 1))
    axes.set_xlabel(label)
    start = 0.0
    for name, size in needed.items():
        (bar,) = axes.barh([0], [size / unit], left=[start], color=ITEM_COLOURS[_NEEDED[name]])
        bar.set_gid(f"needed-{name}")
        start += size / unit
    (bar,) = axes.barh([1], [left / unit], color=GREEN)
    bar.set_gid("left")
    axes.set_yticks([0, 1], [f"needed: {format_bytes(total)}", f"left: {format_bytes(left)}"])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)


def render_chart(assessment: Assessment, file_format: str) -> bytes:
    """Returns a file (``png`` or ``svg``) with the chart alone, on white, its verdict above and its legend below."""
    dark = {key: "#222222" for key, value in FIGURE_SETTINGS.items() if value == PAGE_COLOUR}
    height = 9.0 if assessment.ranks else 3.0
    with matplotlib.rc_context({**FIGURE_SETTINGS, **dark, "figure.facecolor": "white"}):
        figure = Figure(figsize=(10, height), layout="constrained")
        colour = GREEN if assessment.fits else RED
        figure.suptitle(verdict(assessment), x=0.01, ha="left", parse_math=False, color=colour)
        if assessment.ranks:
            parts: Any = figure.subfigures(2)
            for part, quantity in zip(parts, (memory_by_rank(assessment), time_by_rank(assessment)), strict=True):
                axes = part.subplots()
                draw_ranks(quantity, axes)
                axes.set_title(f"{quantity.heading}. {quantity.caption}", loc="left", fontsize="medium")
                _draw_legend(part, {item.name: ITEM_COLOURS[item.name] for item in quantity.bar_items})
        else:
            draw_demand(assessment, figure.add_subplot())
            _draw_legend(figure, DEMAND_COLOURS)
        content = io.BytesIO()
        # a date would make other bytes of the same values
        metadata = {"Date": None, "Creator": MADE_BY} if file_format == "svg" else {"Software": MADE_BY}
        figure.savefig(content, format=file_format, dpi=150, metadata=metadata)
    return content.getvalue()


def _draw_legend(figure: FigureBase, colours: Mapping[str, str]) -> None:
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 5))
