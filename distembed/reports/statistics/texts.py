"""Statistics as tables of texts and as sentences, for the terminal and for the page, and their output in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from distembed.reports.statistics.values import QUANTILES, DatasetStatistics, RowsStatistics

_SHOWN_QUANTILES = {"least": "0%", "5%": "5%", "median": "50%", "95%": "95%", "most": "100%"}


@dataclass(frozen=True)
class TextTable:
    """A table of texts."""

    headings: Sequence[str]  # heading of each column
    lines: Sequence[Sequence[str]]  # texts of each line

    def only(self, headings: Mapping[str, str]) -> TextTable:
        """Returns some columns, given their new and their present headings."""
        places = [self.headings.index(heading) for heading in headings.values()]
        return TextTable(list(headings), [[line[place] for place in places] for line in self.lines])


def rows_table(statistics: DatasetStatistics, rows: Mapping[str, RowsStatistics]) -> TextTable:
    """Returns the number of rows and the label rate of splits or periods."""
    lines = [[name, f"{found.num_rows:,}", _rate(found.label_rate)] for name, found in rows.items()]
    return TextTable(["rows", "number", rate_of_rows(statistics)], lines)


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
            found = feature.splits.get(split)
            line += ["" if found is None else _share(getattr(found, attribute)) for attribute in shares.values()]
        lines.append(line)
    return TextTable(headings, lines)


def numbers_table(statistics: DatasetStatistics, splits: Sequence[str]) -> TextTable:
    """Returns a line for each column of numbers and each of some splits."""
    lines = []
    for name, by_split in statistics.columns.items():
        for split in splits:
            found = by_split[split]
            missing = "filled" if name in statistics.filled else _share(found.missing)
            lines.append([name, split, missing, *map(_number, (found.mean, found.deviation, *found.quantiles))])
    headings = ["numbers", "split", "missing", "mean", "deviation", *(f"{each:.0%}" for each in QUANTILES)]
    return TextTable(headings, lines)


def commonest_table(statistics: DatasetStatistics, feature: str) -> TextTable:
    """Returns the commonest ids of a feature."""
    commonest = statistics.features[feature].commonest
    rate = "unweighted label rate" if statistics.is_weighted else "label rate"
    lines = [[str(each.id), each.value or "", f"{each.count:,}", _rate(each.label_rate)] for each in commonest]
    return TextTable(["id", "value", "count", rate], lines)


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
    """Returns in a sentence how many rows are equal to others."""
    equal = statistics.equal_rows
    total = sum(rows.num_rows for rows in statistics.splits.values())
    about = "" if equal.sampled == 1 else "about "
    text = f"{about}{equal.repeated:,} of {total:,} rows are equal to one before them in all columns"
    shares = [f"{_share(value)} of {name}" for name, value in equal.in_training.items() if value]
    text += f"; rows of {statistics.train} are {', '.join(shares)}" if shares else ""
    return f"{text}."


def estimates(statistics: DatasetStatistics) -> list[str]:
    """Returns a sentence for each thing that is estimated."""
    found = []
    every = max((each.every for column in statistics.columns.values() for each in column.values()), default=1)
    if every > 1:
        found.append(f"Quantiles of numbers, but the least and the most, are those of one row in {every:,}.")
    if statistics.equal_rows.sampled < 1:
        found.append(f"Of all distinct rows {statistics.equal_rows.sampled:.2%} were compared with others.")
    return found


def print_statistics(statistics: DatasetStatistics, console: Console) -> None:
    """Prints rows by split and by period, features, columns of numbers, and notes on estimates."""
    splits, periods = (rows_table(statistics, rows) for rows in (statistics.splits, statistics.periods))
    lines = [*splits.lines, [], *periods.lines] if periods.lines else splits.lines
    console.print(_drawn(TextTable(splits.headings, lines)))
    if statistics.features:
        shown = {name: name for name in ("feature", "distinct", "top 1", "top 100", "bits", "Zipf")}
        shown |= {share: f"{share} in {statistics.train}" for share in ("missing", "unknown")}
        others = [split for split in statistics.splits if split != statistics.train]
        shown |= {name: name for split in others for name in (f"unknown in {split}", f"unseen in {split}")}
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
