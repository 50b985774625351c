"""The statistics of a dataset as one HTML page with plots."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from distembed.files import write_text
from distembed.outputs import require_file
from distembed.runs.pages import PAGE_COLOUR, colour, figure, page, render_svg, section
from distembed.statistics.texts import (
    equal_rows,
    estimates,
    missing_numbers,
    number,
    rate,
    rate_of_ids,
    rate_of_rows,
    share,
)
from distembed.statistics.values import QUANTILES, DatasetStatistics, RowsStatistics

_MOST_NAMED = 8
"""Most features that have a colour and a name, those of most ids first."""


def require_page(output: Path, overwrite: bool) -> None:
    """Refuses a file that the page cannot be written to, before anything is counted.

    Raises:
        UserError: It does not end in ``.html``, cannot be a file, or is there and is no page of distembed's.
        RunError: No file can be made in its folder.
    """
    require_file("--output", output, overwrite, may_replace_own=True)


def write_page(statistics: DatasetStatistics, output: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        RunError: It cannot be written.
    """
    write_text(output, render_page(statistics), make_folder=True)


def render_page(statistics: DatasetStatistics) -> str:
    """Returns the page's HTML."""
    notes = "".join(f"<p>{escape(text)}</p>\n" for text in (equal_rows(statistics), *estimates(statistics)))
    content = section("Rows", _rows_table(statistics, statistics.splits) + notes)
    content += f'<div class="figures">{_figures(statistics)}</div>\n'
    content += section("Features", _features_table(statistics)) if statistics.features else ""
    content += section("Numbers", _columns_table(statistics)) if statistics.columns else ""
    content += section("Commonest ids", "".join(_commonest(statistics, name) for name in statistics.features))
    content += section("Rows by time", _rows_table(statistics, statistics.periods))
    return page(f"Statistics of {statistics.dataset}", content)


def _figures(statistics: DatasetStatistics) -> str:
    figures = [
        figure("Label rate", "Mean label in the order of time.", _plot(lambda axes: _draw_rates(axes, statistics))),
        figure("Rows", "Number of rows in the order of time.", _plot(lambda axes: _draw_rows(axes, statistics))),
    ]
    if statistics.features:
        skew = _plot(lambda axes: _draw_skew(axes, statistics))
        new = _plot(lambda axes: _draw_unknown(axes, statistics))
        figures.append(figure("Skew", f"How often {statistics.train} has the ids of a feature, by rank.", skew))
        figures.append(figure("Unknown ids", "Share without an id of their own, or that training has not.", new))
    return "".join(figures)


def _plot(draw: Callable[[Axes], None]) -> str:
    def draw_axes(drawn: Figure) -> None:
        draw(drawn.add_subplot())

    return render_svg(draw_axes, (5.6, 3.5))


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
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rank of the id")
    axes.set_ylabel("count")
    if any(feature.counts_by_rank for _, feature in ordered):
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


def _rows_table(statistics: DatasetStatistics, rows: Mapping[str, RowsStatistics]) -> str:
    lines = ((name, f"{found.num_rows:,}", rate(found.label_rate)) for name, found in rows.items())
    return _table(("rows", "number", rate_of_rows(statistics)), lines)


def _features_table(statistics: DatasetStatistics) -> str:
    headings = ["feature", "ids of its table", "distinct", "top 1", "top 10", "top 100", "top 1000", "bits", "Zipf"]
    whats = {"missing": "missing", "out_of_vocabulary": "unknown", "unseen": "unseen"}
    headings += [f"{text} in {split}" for split in statistics.splits for text in whats.values()]
    lines = []
    for name, feature in statistics.features.items():
        line = [
            name,
            f"{feature.num_embeddings:,}",
            f"{feature.cardinality:,}",
            *map(share, feature.top_shares.values()),
        ]
        line += [f"{feature.entropy_bits:.2f}", "" if feature.zipf_exponent is None else f"{feature.zipf_exponent:.2f}"]
        for split in statistics.splits:
            found = feature.splits.get(split)
            line += ["" if found is None else share(getattr(found, what)) for what in whats]
        lines.append(line)
    return _table(headings, lines)


def _columns_table(statistics: DatasetStatistics) -> str:
    headings = ["numbers", "split", "missing", "mean", "deviation", *(f"{quantile:.0%}" for quantile in QUANTILES)]
    lines = [
        [
            *(name, split, missing_numbers(statistics, name, found)),
            *map(number, (found.mean, found.deviation, *found.quantiles)),
        ]
        for name, splits in statistics.columns.items()
        for split, found in splits.items()
    ]
    return _table(headings, lines)


def _commonest(statistics: DatasetStatistics, name: str) -> str:
    commonest = statistics.features[name].commonest
    lines = ((str(each.id), each.value or "", f"{each.count:,}", rate(each.label_rate)) for each in commonest)
    table = _table(("id", "value", "count", rate_of_ids(statistics)), lines)
    return f"<details><summary>{escape(name)}</summary>{table}</details>\n"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table of plain texts."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in line)}</tr>\n" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}</table></div>\n'
