"""The chart of an assessment: the memory of each rank, by what takes it, below the device's capacity.

Where there is no plan, the chart is of what tables need beside what is left for them.
"""

import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distembed.capacity.assessment import Assessment
from distembed.capacity.texts import shown_items, verdict
from distembed.outputs import MADE_BY
from distembed.runs.pages import COLOURS, FIGURE_SETTINGS, PAGE_COLOUR
from distembed.units import binary_unit, format_bytes

MAX_BARS = 64
"""Ranks that have a bar each; those of a larger cluster are drawn as an area."""
RED, GREEN = "#d1495b", "#2a9d78"

_CLOSE_UP_SHARE = 0.4  # of the capacity; what is used is drawn once more, larger, where it is less
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
_DEMAND_COLOURS = {
    "weights": _ITEM_COLOURS["tables"],
    "optimizer_state": _ITEM_COLOURS["optimizer"],
    "gradients": _ITEM_COLOURS["gradients"],
}


def draw_ranks(assessment: Assessment, axes: Axes, close_up: bool = False) -> None:
    """Draws the memory of each rank, stacked by item: a bar each, or an area where there are many.

    Args:
        assessment: Assessment with a plan.
        axes: Axes to draw into.
        close_up: Whether to draw what is used, without the allocator's reserve and the capacity.
    """
    ranks = assessment.ranks
    items = [item for item in shown_items(assessment) if not (close_up and item.name == "allocator")]
    sizes = [np.array([item.bytes_on(rank) for rank in ranks], dtype=np.float64) for item in items]
    capacity, bottom = assessment.cluster.rank_bytes, np.zeros(len(ranks))
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


def draw_demand(assessment: Assessment, axes: Axes) -> None:
    """Draws what all tables need, stacked by item, beside what is left for them on all ranks."""
    storage, left = assessment.one_copy, assessment.bytes_left_for_tables
    needed = {"weights": storage.weights, "optimizer_state": storage.optimizer_state, "gradients": storage.gradients}
    total = sum(needed.values())
    unit = _label_bytes(axes, max(total, left, 1), axis="x")
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


def needs_close_up(assessment: Assessment) -> bool:
    """Returns whether the bars are so low that they are drawn once more, larger."""
    used = max(rank.memory.total for rank in assessment.ranks)
    return 0 < used < _CLOSE_UP_SHARE * assessment.cluster.rank_bytes


def legend_colours(assessment: Assessment) -> dict[str, str]:
    """Returns the colours by the name of what is drawn in them."""
    if not assessment.ranks:
        return {
            **{name.replace("_", " "): colour for name, colour in _DEMAND_COLOURS.items()},
            "left for tables": GREEN,
        }
    return {item.name: _ITEM_COLOURS[item.name] for item in shown_items(assessment)}


def render_chart(assessment: Assessment, file_format: str) -> bytes:
    """Returns a file with the chart alone, on white, with the verdict above and its legend below.

    Args:
        assessment: Assessment to draw.
        file_format: ``png`` or ``svg``.
    """
    dark = {key: "#222222" for key, value in FIGURE_SETTINGS.items() if value == PAGE_COLOUR}
    height = 3.0 if not assessment.ranks else 8.0 if needs_close_up(assessment) else 5.0
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
    elif needs_close_up(assessment):
        whole, close = figure.subplots(2)
        draw_ranks(assessment, whole)
        draw_ranks(assessment, close, close_up=True)
        close.set_title("close-up: what is used, without the allocator's reserve", loc="left", fontsize="medium")
    else:
        draw_ranks(assessment, figure.add_subplot())
    colours = legend_colours(assessment)
    patches = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 5))


def _draw_item(axes: Axes, heights: np.ndarray, bottom: np.ndarray, colour: str, name: str) -> None:
    """Draws one layer of the stack; ``name.format(rank)`` becomes the id of a rank's bar in an SVG."""
    if len(heights) > MAX_BARS:
        edges = np.arange(len(heights) + 1) - 0.5
        axes.stairs(bottom + heights, edges, baseline=bottom, fill=True, color=colour)
        return
    for rank, bar in enumerate(axes.bar(range(len(heights)), heights, bottom=bottom, color=colour)):
        bar.set_gid(name.format(rank))


def _draw_capacity(axes: Axes, height: float, text: str) -> None:
    """Draws a dashed line with a text above its end."""
    axes.axhline(height, color=matplotlib.rcParams["text.color"], linestyle=(0, (4, 3)), linewidth=1.4)
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(text, (1, height), (0, 3), ha="right", va="bottom", **place)


def _label_bytes(axes: Axes, highest: float, axis: str = "y") -> int:
    """Labels an axis with the unit of :func:`format_bytes` for the highest value, and returns the unit's bytes."""
    name, unit_bytes = binary_unit(int(highest))
    if axis == "y":
        axes.set_ylabel(f"{name} a rank")
    else:
        axes.set_xlabel(name)
    return unit_bytes
