"""A report as a page of HTML, or its chart alone: verdict, remedies, bars and tables of memory, time and tables."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch

from distembed.base.files import MADE_BY, whole_file
from distembed.base.units import binary_unit
from distembed.reports.pages import (
    COLOURS,
    FIGURE_SETTINGS,
    PAGE_COLOUR,
    breakable,
    figure,
    page,
    render_svg,
    section,
    swatch,
    table,
)
from distembed.reports.plan import tables
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.plan_files import require_known_suffix
from distembed.reports.plan.report import CapacityReport
from distembed.reports.plan.tables import LineT, PlanColumn, RankQuantity

_MAX_BARS = 64
_RED, _GREEN = "#d1495b", "#2a9d78"


def write_capacity_report(report: CapacityReport, file: Path) -> None:
    """Writes a report as a page (``.html``) or as the chart alone (``.png``, ``.svg``), whole or not at all."""
    require_known_suffix(file)
    suffix = file.suffix.lower()[1:]
    content = render_capacity_page(report).encode() if suffix == "html" else render_chart(report.assessment, suffix)
    with whole_file(file) as temporary:
        Path(temporary).write_bytes(content)


def render_capacity_page(report: CapacityReport) -> str:
    """Returns the page's HTML, which fetches nothing."""
    assessment, where = report.assessment, tables.cluster_text(report.assessment.cluster)
    kind = "fits" if assessment.fits else "short"
    quantities = (tables.memory_by_rank(assessment), tables.time_by_rank(assessment)) if assessment.ranks else None
    lines = [*tables.shortage_lines(assessment), *tables.host_lines(assessment)]
    lines += tables.step_lines(assessment, *quantities) if quantities else []
    lines += [*report.lines, *(f"fits with {argument}" for argument in report.remedies.arguments)]
    sections = [f'<p class="{kind}">{escape(tables.verdict(assessment))}</p>\n{_paragraphs(lines)}']
    sections += map(_rank_section, quantities or [])
    # where the tables lie, with the costs of other placements
    columns = [*tables.table_columns(assessment), *tables.reason_columns(assessment)]
    legend = [tables.ALTERNATIVES_LEGEND] * any(table_.alternatives for table_ in assessment.tables)
    placed = _table(columns, assessment.tables, tables.is_in_host_memory)
    sections.append(section("Tables", placed + _paragraphs(legend)))
    if report.notes:
        sections.append(section("Notes", _paragraphs(report.notes)))
    return page(f"distembed: plan for {where}", "".join(sections), _STYLE)


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>\n" for line in lines)


def _rank_section(quantity: RankQuantity) -> str:
    """Returns HTML with a chart and a table: a bar and a line for each group of ranks with equal numbers."""
    drawn = render_svg(lambda drawing: draw_ranks(quantity, drawing.add_subplot()), (9, 4))
    names = "".join(f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in _colours(quantity).items())
    groups, left_out = quantity.shown_groups(_MAX_BARS)
    numbers = _table(quantity.columns, groups, lambda group: not quantity.has_room(group[0])) + _paragraphs(left_out)
    shown = f'<p class="legend">{names}</p>\n{figure(quantity.heading, quantity.caption, drawn)}{numbers}'
    return section(quantity.name.capitalize(), shown)


def _table(columns: Sequence[PlanColumn[LineT]], rows: Sequence[LineT], is_marked: Callable[[LineT], bool]) -> str:
    """Returns an HTML table whose texts are escaped; marked rows are coloured."""
    texts = [number for number, column in enumerate(columns) if not column.is_number]
    marked = [number for number, row in enumerate(rows) if is_marked(row)]
    lines = [[breakable(column.text(row)) for column in columns] for row in rows]
    return table([column.heading for column in columns], lines, texts, marked)


def _colours(quantity: RankQuantity) -> Mapping[str, str]:
    return {
        item.name: item.colour if isinstance(item.colour, str) else COLOURS[item.colour] for item in quantity.bar_items
    }


def draw_ranks(quantity: RankQuantity, axes: Axes) -> None:
    """Draws a bar for each group of ranks, stacked by item; of more than 64 groups the largest and the smallest."""
    groups, _ = quantity.shown_groups(_MAX_BARS)
    highest, limit = max(map(quantity.bar, quantity.ranks)) or 1.0, quantity.limit
    has_limit = limit is not None and limit < 2.5 * highest  # where little is used the limit is far above the bars
    highest = max(highest, limit or 0.0) if has_limit else highest
    label, unit = "ms a step", 1
    if limit is not None:
        name, unit = binary_unit(int(highest))
        label = f"{name} a rank"
    bottom = np.zeros(len(groups))
    for item in quantity.bar_items:
        height = np.array([item.amount(group[0]) / unit for group in groups])
        axes.bar(range(len(groups)), height, bottom=bottom, color=_colours(quantity)[item.name])
        bottom += height
    if limit is not None and has_limit:
        axes.axhline(limit / unit, color=matplotlib.rcParams["text.color"], linestyle=(0, (4, 3)), linewidth=1.4)
    labels = [tables.group_text(group) for group in groups]
    axes.set_xticks(range(len(groups)), labels, rotation=90 if max(map(len, labels)) * len(groups) > 100 else 0)
    axes.set_xlim(-0.5, max(len(groups), 6) - 0.5)
    axes.set_ylim(0, 1.05 * highest / unit)
    axes.set_xlabel("rank")
    axes.set_ylabel(label)
    axes.grid(False, axis="x")
    axes.set_axisbelow(True)


def render_chart(assessment: Assessment, file_format: str) -> bytes:
    """Returns a file (``png`` or ``svg``) with the chart alone, on white; where there is no plan, with the shortage."""
    dark = {key: "#222222" for key, value in FIGURE_SETTINGS.items() if value == PAGE_COLOUR}
    with matplotlib.rc_context({**FIGURE_SETTINGS, **dark, "figure.facecolor": "white"}):
        drawing = Figure(figsize=(10, 9.0 if assessment.ranks else 3.0), layout="constrained")
        colour = _GREEN if assessment.fits else _RED
        drawing.suptitle(tables.verdict(assessment), x=0.01, ha="left", parse_math=False, color=colour)
        if assessment.ranks:
            halves: Any = drawing.subfigures(2)
            quantities = tables.memory_by_rank(assessment), tables.time_by_rank(assessment)
            for half, quantity in zip(halves, quantities, strict=True):
                axes = half.subplots()
                draw_ranks(quantity, axes)
                axes.set_title(f"{quantity.heading}. {quantity.caption}", loc="left", fontsize="medium")
                _draw_legend(half, _colours(quantity))
        else:
            text = "\n".join(tables.shortage_lines(assessment))
            drawing.text(0.01, 0.8, text, va="top", wrap=True, parse_math=False)
        content = io.BytesIO()
        # no date: equal values give equal bytes
        metadata = {"Date": None, "Creator": MADE_BY} if file_format == "svg" else {"Software": MADE_BY}
        drawing.savefig(content, format=file_format, dpi=150, metadata=metadata)
    return content.getvalue()


def _draw_legend(drawing: FigureBase, colours: Mapping[str, str]) -> None:
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    drawing.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 5))


_STYLE = f"""
.fits, .short {{ font-size: 1.15rem; font-weight: 600; }}
.fits {{ color: {_GREEN}; }}
.short {{ color: {_RED}; }}
p {{ margin: .35rem 0; overflow-wrap: anywhere; }}
figure {{ margin-bottom: 1.5rem; }}
"""
