"""The statistics of a dataset in a terminal, and as one HTML page with plots: tables of texts, which both show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter
from rich.console import Console
from rich.table import Table

from distembed.reports import pages
from distembed.reports.pages import PAGE_COLOUR, colour, figure, page, render_svg, section
from distembed.reports.statistics.values import QUANTILES, DatasetStatistics, RowsStatistics

_MOST_NAMED = 8
"""Most features that have a colour and a name, by the number of their ids."""
_SHOWN_QUANTILES = {"least": "0%", "5%": "5%", "median": "50%", "95%": "95%", "most": "100%"}


@dataclass(frozen=True)
class TextTable:
    """A table of texts."""

    headings: Sequence[str]  # heading of each column
    lines: Sequence[Sequence[str]]  # texts of each line

    def only(self, headings: Mapping[str, str]) -> TextTable:
        """Returns some columns, given their new and their present headings."""
        indices = [self.headings.index(heading) for heading in headings.values()]
        return TextTable(list(headings), [[line[index] for index in indices] for line in self.lines])


def rows_table(statistics: DatasetStatistics, rows: Mapping[str, RowsStatistics]) -> TextTable:
    """Returns the number of rows and the label rate of splits or periods; of several labels, also how many miss."""
    labels, rate = statistics.labels, rate_of_rows(statistics)
    headings = ["rows", "number"] if labels else ["rows", "number", rate]
    mean = "weighted mean" if statistics.is_weighted else "mean"
    headings += [heading for label in labels for heading in (f"{mean} of {label}", "missing")]
    lines = []
    for name, some_rows in rows.items():
        line = [name, f"{some_rows.num_rows:,}"]
        line += [] if labels else [_rate(some_rows.label_rate)]
        for label in labels:
            line += [_rate(some_rows.labels[label].rate), f"{some_rows.labels[label].missing:,}"]
        lines.append(line)
    return TextTable(headings, lines)


def features_table(statistics: DatasetStatistics) -> TextTable:
    """Returns a line for each categorical feature."""
    headings = ["feature", "ids of its table", "distinct", "top 1", "top 10", "top 100", "top 1000", "bits", "Zipf"]
    shares = {"missing": "missing", "unknown": "out_of_vocabulary", "unseen": "unseen"}
    headings += [f"{text} in {split}" for split in statistics.splits for text in shares]
    lines = []
    for name, feature in statistics.features.items():
        line = [name, f"{feature.num_embeddings:,}", f"{feature.cardinality:,}"]
        line += map(_share, feature.top_shares.values())
        line += [f"{feature.entropy_bits:.2f}", "" if feature.zipf_exponent is None else f"{feature.zipf_exponent:.2f}"]
        for split in statistics.splits:
            split_ids = feature.splits.get(split)
            names = shares.values()
            line += ["" if split_ids is None else _share(getattr(split_ids, attribute)) for attribute in names]
        lines.append(line)
    return TextTable(headings, lines)


def numbers_table(statistics: DatasetStatistics, splits: Sequence[str]) -> TextTable:
    """Returns a line for each column of numbers and each of some splits."""
    lines = []
    for name, by_split in statistics.columns.items():
        for split in splits:
            numbers = by_split[split]
            missing = "filled" if name in statistics.filled else _share(numbers.missing)
            lines.append([name, split, missing, *map(_number, (numbers.mean, numbers.deviation, *numbers.quantiles))])
    headings = ["numbers", "split", "missing", "mean", "deviation", *(f"{quantile:.0%}" for quantile in QUANTILES)]
    return TextTable(headings, lines)


def commonest_table(statistics: DatasetStatistics, feature: str) -> TextTable:
    """Returns the commonest ids of a feature."""
    commonest = statistics.features[feature].commonest
    rate = "unweighted label rate" if statistics.is_weighted else "label rate"
    lines = [[str(id_.id), id_.value or "", f"{id_.count:,}", _rate(id_.label_rate)] for id_ in commonest]
    table = TextTable(["id", "value", "count", rate], lines)
    return table.only({name: name for name in table.headings if name != rate}) if statistics.labels else table


def _share(value: float) -> str:
    """Returns a share in percent; a dash for zero, so that other shares stand out."""
    if math.isnan(value):
        return ""
    if value == 0:
        return "-"
    return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"


def _rate(value: float | None) -> str:
    """Returns a label rate; nothing where there is none."""
    return "" if value is None else f"{value:.4f}"


def rate_of_rows(statistics: DatasetStatistics) -> str:
    """Returns the name of the label rate of rows."""
    return "weighted label rate" if statistics.is_weighted else "label rate"


def _number(value: float) -> str:
    """Returns a number with four digits that count; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"


def equal_rows(statistics: DatasetStatistics) -> str:
    """Returns a sentence: how many rows repeat an earlier row, and the share of other splits' rows in training."""
    equal = statistics.equal_rows
    total = sum(rows.num_rows for rows in statistics.splits.values())
    about = "" if equal.sampled == 1 else "about "
    text = f"{about}{equal.repeated:,} of {total:,} rows are equal to one before them in all columns"
    shares = [f"{_share(value)} of {name}" for name, value in equal.in_training.items() if value]
    text += f"; rows of {statistics.train} are {', '.join(shares)}" if shares else ""
    return f"{text}."


def estimates(statistics: DatasetStatistics) -> list[str]:
    """Returns a sentence on quantiles of sampled numbers, and one on sampled rows; [] where everything was counted."""
    sentences = []
    every = max((numbers.every for column in statistics.columns.values() for numbers in column.values()), default=1)
    if every > 1:
        sentences.append(
            f"Quantiles of numbers come from one row in {every:,}; the least and the greatest come from all rows."
        )
    if statistics.equal_rows.sampled < 1:
        sentences.append(f"Of all distinct rows {statistics.equal_rows.sampled:.2%} were compared with others.")
    return sentences


def print_statistics(statistics: DatasetStatistics, console: Console) -> None:
    """Prints rows by split and by period, features, columns of numbers, and notes on estimates."""
    splits, periods = (rows_table(statistics, rows) for rows in (statistics.splits, statistics.periods))
    lines = [*splits.lines, [], *periods.lines] if periods.lines else splits.lines
    console.print(_drawn(TextTable(splits.headings, lines)))
    if statistics.features:
        shown = {name: name for name in ("feature", "distinct", "top 1", "top 100", "bits", "Zipf")}
        shown |= {kind: f"{kind} in {statistics.train}" for kind in ("missing", "unknown")}
        other_splits = [split for split in statistics.splits if split != statistics.train]
        shown |= {name: name for split in other_splits for name in (f"unknown in {split}", f"unseen in {split}")}
        console.print(_drawn(features_table(statistics).only(shown)))
    if statistics.columns:
        shown = {name: name for name in ("numbers", "missing", "mean", "deviation")} | _SHOWN_QUANTILES
        console.print(_drawn(numbers_table(statistics, [statistics.train]).only(shown)))
    for text in (equal_rows(statistics), *estimates(statistics)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _drawn(texts: TextTable) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in texts.headings:
        table.add_column(heading, justify="right" if table.columns else "left")
    for line in texts.lines:
        table.add_row(*line)
    return table


def render_page(statistics: DatasetStatistics) -> str:
    """Returns the page's HTML."""
    notes = "".join(f"<p>{escape(text)}</p>\n" for text in (equal_rows(statistics), *estimates(statistics)))
    content = section("Rows", _table(rows_table(statistics, statistics.splits)) + notes)
    content += f'<div class="figures">{_figures(statistics)}</div>\n'
    content += section("Features", _features(statistics)) if statistics.features else ""
    content += section("Numbers", _table(numbers_table(statistics, [*statistics.splits]))) if statistics.columns else ""
    commonest = {escape(name): _table(commonest_table(statistics, name)) for name in statistics.features}
    details = (f"<details><summary>{name}</summary>{table}</details>\n" for name, table in commonest.items())
    content += section("Commonest ids", "".join(details))
    content += section("Rows by time", _table(rows_table(statistics, statistics.periods)))
    return page(f"Statistics of {statistics.dataset}", content)


def _features(statistics: DatasetStatistics) -> str:
    """Returns a table of the features in training, and one of missing, unknown and unseen ids by split."""
    whole = features_table(statistics)
    of_splits = [name for name in whole.headings if any(name.endswith(f" in {split}") for split in statistics.splits)]
    of_training = [name for name in whole.headings if name not in of_splits]
    parts = (of_training, [whole.headings[0], *of_splits])
    return "".join(_table(whole.only({name: name for name in names})) for names in parts)


def _figures(statistics: DatasetStatistics) -> str:
    plots: list[tuple[str, str, Callable[[Axes, DatasetStatistics], None]]] = [
        (f"Label rate of {label}", f"Mean of {label} in the order of time.", partial(_draw_rates, label=label))
        for label in statistics.labels
    ] or [("Label rate", "Mean label in the order of time.", _draw_rates)]
    plots.append(("Rows", "Number of rows in the order of time.", _draw_rows))
    plots.append(("Skew", f"How often {statistics.train} has the ids of a feature, by rank.", _draw_skew))
    plots.append(("Unknown ids", "Share without an id of their own, or that training has not.", _draw_unknown))
    drawn = ((title, text, render_svg(partial(_draw, draw, statistics), (5.6, 3.5))) for title, text, draw in plots)
    return "".join(figure(title, text, svg) for title, text, svg in drawn if svg)


def _draw(draw: Callable[[Axes, DatasetStatistics], None], statistics: DatasetStatistics, drawn: Figure) -> None:
    draw(drawn.add_subplot(), statistics)


def _draw_rates(axes: Axes, statistics: DatasetStatistics, label: str | None = None) -> None:
    """Draws the rate of one of several labels, or of the only one, in each period."""
    periods = statistics.periods.values()
    rates = [rows.label_rate if label is None else rows.labels[label].rate for rows in periods]
    drawn = [math.nan if rate is None else rate for rate in rates]
    axes.plot(range(len(drawn)), drawn, marker="o", markersize=3, color=colour(0))
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
    ordered = sorted(statistics.features.items(), key=lambda item: -item[1].cardinality)
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
    other_splits = [name for name in statistics.splits if name != statistics.train]
    width = 0.8 / max(len(other_splits), 1)
    for index, split in enumerate(other_splits):
        by_feature = [feature.splits.get(split) for feature in statistics.features.values()]
        values = [0.0 if ids is None else ids.out_of_vocabulary + ids.unseen for ids in by_feature]
        axes.bar([bar + index * width for bar in range(len(names))], values, width, color=colour(index), label=split)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if other_splits:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _table(table: TextTable) -> str:
    """Returns the HTML of a table."""
    return pages.table(table.headings, [[escape(text) for text in line] for line in table.lines])
