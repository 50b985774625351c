"""The chart of an assessment: the memory and the time of each rank, by what takes it.

Memory stands below the device's capacity; where little of that is used, what is used is drawn as large as there is
room. Where there is no plan, the chart is of what tables need beside what is left for them.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator

from distembed.capacity.assessment import Assessment
from distembed.capacity.by_rank import (
    MEMORY_ITEMS,
    TIME_ITEMS,
    RankItem,
    RankQuantity,
    memory_by_rank,
    time_by_rank,
)
from distembed.capacity.texts import verdict
from distembed.outputs import MADE_BY
from distembed.planning.planned_rank import PlannedRank
from distembed.runs.pages import COLOURS, FIGURE_SETTINGS, PAGE_COLOUR
from distembed.units import binary_unit, format_bytes

MAX_BARS = 64
"""Ranks that have a bar each; those of a larger cluster are drawn as an area."""
MAX_STEPS = 1024
"""Steps of an area; where ranks differ more, each step is as high as the first of the ranks that it stands for."""
RED, GREEN = "#d1495b", "#2a9d78"

_COLOURS = {
    item.name: item.colour if isinstance(item.colour, str) else COLOURS[item.colour]
    for item in (*MEMORY_ITEMS, *TIME_ITEMS)
}
_DEMAND_COLOURS = {
    "weights": _COLOURS["tables"],
    "optimizer_state": _COLOURS["optimizer"],
    "gradients": _COLOURS["gradients"],
}


def draw_ranks(quantity: RankQuantity, axes: Axes) -> None:
    """Draws the memory or the time of each rank, stacked by item.

    Up to :data:`MAX_BARS` ranks have a bar each. More are an area, from the rank with most to that with least.
    """
    limit, highest = quantity.limit, max(*map(quantity.bar, quantity.ranks), quantity.limit or 0.0) or 1.0
    label, unit = quantity.axis(highest)
    axes.set_ylabel(label)
    if len(quantity.ranks) <= MAX_BARS:
        _draw_bars(quantity, axes, unit)
    else:
        _draw_area(quantity, axes, unit)
    if limit is not None:
        _draw_capacity(axes, limit / unit, f"capacity {quantity.text(limit)}")
    axes.set_ylim(0, highest / unit * (1.05 if limit is None else 1.12))
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)


def _draw_bars(quantity: RankQuantity, axes: Axes, unit: float) -> None:
    """Draws a bar of each rank, whose parts have ids such as ``memory-3-step-buffers`` in an SVG."""
    num_ranks = len(quantity.ranks)
    for item, bottom, top in _stacked(quantity, quantity.ranks, unit):
        for rank, bar in enumerate(axes.bar(range(num_ranks), top - bottom, bottom=bottom, color=_COLOURS[item.name])):
            bar.set_gid(f"{quantity.name}-{rank}-{item.name.replace(' ', '-')}")
    margin = max(0.0, (6 - num_ranks) / 2)  # a bar of one rank does not fill the width
    axes.set_xlim(-0.5 - margin, num_ranks - 0.5 + margin)
    axes.xaxis.set_major_locator(FixedLocator(range(num_ranks)) if num_ranks < 6 else MaxNLocator(integer=True))
    axes.set_xlabel("rank")


def _draw_area(quantity: RankQuantity, axes: Axes, unit: float) -> None:
    """Draws ranks side by side, from the one with most to that with least."""
    groups, (most, least) = quantity.sorted_groups, quantity.extremes
    steps = range(0, len(groups), math.ceil(len(groups) / MAX_STEPS))
    edges = np.cumsum([0, *(len(group.ranks) for group in groups)])[[*steps, -1]]
    for item, bottom, top in _stacked(quantity, [groups[step].first for step in steps], unit):
        axes.stairs(top, edges, baseline=bottom, fill=True, color=_COLOURS[item.name])
    axes.set_xlim(0, len(quantity.ranks))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"number of ranks, from the {most} to the {least}")


def _stacked(
    quantity: RankQuantity, ranks: Sequence[PlannedRank], unit: float
) -> Iterator[tuple[RankItem, np.ndarray, np.ndarray]]:
    """Yields each item with its lower and its upper end on each rank."""
    bottom = np.zeros(len(ranks))
    for item in quantity.bar_items:
        top = bottom + np.array([item.amount(rank) / unit for rank in ranks])
        yield item, bottom, top
        bottom = top


def draw_demand(assessment: Assessment, axes: Axes) -> None:
    """Draws what all tables need, stacked by item, beside what is left for them on all ranks."""
    storage, left = assessment.one_copy, assessment.bytes_left_for_tables
    needed = {"weights": storage.weights, "optimizer_state": storage.optimizer_state, "gradients": storage.gradients}
    total = sum(needed.values())
    label, unit = binary_unit(max(total, left, 1))
    axes.set_xlabel(label)
    start = 0.0
    for name, size in needed.items():
        (bar,) = axes.barh([0], [size / unit], left=[start], color=_DEMAND_COLOURS[name])
        bar.set_gid(f"needed-{name}")
        start += size / unit
    (bar,) = axes.barh([1], [left / unit], color=GREEN)
    bar.set_gid("left")
    axes.set_yticks([0, 1], [f"needed: {format_bytes(total)}", f"left: {format_bytes(left)}"])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)


def item_colours(quantity: RankQuantity) -> dict[str, str]:
    """Returns the colours of a rank's items, by their name."""
    return {item.name: _COLOURS[item.name] for item in quantity.bar_items}


def demand_colours() -> dict[str, str]:
    """Returns the colours of what tables need and of what is left for them, by their name."""
    return {**{name.replace("_", " "): colour for name, colour in _DEMAND_COLOURS.items()}, "left for tables": GREEN}


def render_chart(assessment: Assessment, file_format: str) -> bytes:
    """Returns a file with the chart alone, on white, with the verdict above and its legend below.

    Args:
        assessment: Assessment to draw.
        file_format: ``png`` or ``svg``.
    """
    dark = {key: "#222222" for key, value in FIGURE_SETTINGS.items() if value == PAGE_COLOUR}
    height = 9.0 if assessment.ranks else 3.0
    with matplotlib.rc_context({**FIGURE_SETTINGS, **dark, "figure.facecolor": "white"}):
        figure = Figure(figsize=(10, height), layout="constrained")
        _draw_chart(assessment, figure)
        content = io.BytesIO()
        # a date would make other bytes of the same values
        metadata = {"Date": None, "Creator": MADE_BY} if file_format == "svg" else {"Software": MADE_BY}
        figure.savefig(content, format=file_format, dpi=150, metadata=metadata)
    return content.getvalue()


def _draw_chart(assessment: Assessment, figure: Figure) -> None:
    """Draws the chart that stands alone."""
    figure.suptitle(verdict(assessment), x=0.01, ha="left", parse_math=False, color=GREEN if assessment.fits else RED)
    if not assessment.ranks:
        draw_demand(assessment, figure.add_subplot())
        _draw_legend(figure, demand_colours())
        return
    parts: Any = figure.subfigures(2)
    for part, by_rank in zip(parts, (memory_by_rank, time_by_rank), strict=True):
        quantity = by_rank(assessment)
        axes = part.subplots()
        draw_ranks(quantity, axes)
        axes.set_title(f"{quantity.heading}. {quantity.caption}", loc="left", fontsize="medium")
        _draw_legend(part, item_colours(quantity))


def _draw_legend(figure: FigureBase, colours: Mapping[str, str]) -> None:
    """Draws below a figure what has which colour."""
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 5))


def _draw_capacity(axes: Axes, height: float, text: str) -> None:
    """Draws a dashed line with a text above its end."""
    axes.axhline(height, color=matplotlib.rcParams["text.color"], linestyle=(0, (4, 3)), linewidth=1.4)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(text, (1, height), (0, 3), ha="right", va="bottom", **place)
