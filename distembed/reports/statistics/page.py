"""The statistics of a dataset as one HTML page with plots."""

import math
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from distembed.reports.pages import PAGE_COLOUR, colour, figure, page, render_svg, section
from distembed.reports.statistics.texts import (
    TextTable,
    commonest_table,
    equal_rows,
    estimates,
    features_table,
    numbers_table,
    rate_of_rows,
    rows_table,
)
from distembed.reports.statistics.values import DatasetStatistics

_MOST_NAMED = 8
"""Most features that have a colour and a name, by the number of their ids."""


def render_page(statistics: DatasetStatistics) -> str:
    """Returns the page's HTML."""
    notes = "".join(f"<p>{escape(text)}</p>\n" for text in (equal_rows(statistics), *estimates(statistics)))
    content = section("Rows", _table(rows_table(statistics, statistics.splits)) + notes)
    content += f'<div class="figures">{_figures(statistics)}</div>\n'
    content += section("Features", _table(features_table(statistics))) if statistics.features else ""
    content += section("Numbers", _table(numbers_table(statistics, [*statistics.splits]))) if statistics.columns else ""
    commonest = {escape(name): _table(commonest_table(statistics, name)) for name in statistics.features}
    details = (f"<details><summary>{name}</summary>{table}</details>\n" for name, table in commonest.items())
    content += section("Commonest ids", "".join(details))
    content += section("Rows by time", _table(rows_table(statistics, statistics.periods)))
    return page(f"Statistics of {statistics.dataset}", content)


def _figures(statistics: DatasetStatistics) -> str:
    plots: list[tuple[str, str, Callable[[Axes, DatasetStatistics], None]]] = [
        ("Label rate", "Mean label in the order of time.", _draw_rates),
        ("Rows", "Number of rows in the order of time.", _draw_rows),
    ]
    if statistics.features:
        plots.append(("Skew", f"How often {statistics.train} has the ids of a feature, by rank.", _draw_skew))
        plots.append(("Unknown ids", "Share without an id of their own, or that training has not.", _draw_unknown))
    return "".join(
        figure(title, text, render_svg(partial(_draw, draw, statistics), (5.6, 3.5))) for title, text, draw in plots
    )


def _draw(draw: Callable[[Axes, DatasetStatistics], None], statistics: DatasetStatistics, drawn: Figure) -> None:
    draw(drawn.add_subplot(), statistics)


def _draw_rates(axes: Axes, statistics: DatasetStatistics) -> None:
    rates = [math.nan if rows.label_rate is None else rows.label_rate for rows in statistics.periods.values()]
    axes.plot(range(len(rates)), rates, marker="o", markersize=3, color=colour(0))
    _name_periods(axes, statistics)
    axes.set_ylabel(rate_of_rows(statistics))


def _draw_rows(axes: Axes, statistics: DatasetStatistics) -> None:
    counts = [rows.num_rows for rows in statistics.periods.values()]
    axes.bar(range(len(counts)), counts, color=colour(0))
    _name_periods(axes, statistics)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _name_periods(axes: Axes, statistics: DatasetStatistics) -> None:
    """Names the first, some and the last of the periods."""
    names = list(statistics.periods)
    step = max(1, -(-len(names) // 8))
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=30, ha="right")


def _draw_skew(axes: Axes, statistics: DatasetStatistics) -> None:
    ordered = sorted(statistics.features.items(), key=lambda each: -each[1].cardinality)
    for index, (name, feature) in enumerate(ordered):
        counts, is_named = feature.counts_by_rank, index < _MOST_NAMED
        look: Any = {"color": colour(index), "label": name} if is_named else {"color": PAGE_COLOUR, "alpha": 0.25}
        axes.plot(list(counts), list(counts.values()), linewidth=1, zorder=2 + is_named, **look)
    axes.set_xlabel("rank of the id")
    axes.set_ylabel("count")
    if any(feature.counts_by_rank for _, feature in ordered):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(fontsize=7, ncols=2)


def _draw_unknown(axes: Axes, statistics: DatasetStatistics) -> None:
    names = list(statistics.features)
    others = [name for name in statistics.splits if name != statistics.train]
    width = 0.8 / max(len(others), 1)
    for index, split in enumerate(others):
        found = [feature.splits.get(split) for feature in statistics.features.values()]
        values = [0.0 if each is None else each.out_of_vocabulary + each.unseen for each in found]
        axes.bar(
            [place + index * width for place in range(len(names))], values, width, color=colour(index), label=split
        )
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if others:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _table(table: TextTable) -> str:
    """Returns the HTML of a table."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in line)}</tr>\n" for line in table.lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}</table></div>\n'
