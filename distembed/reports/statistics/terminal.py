"""The statistics of a dataset as tables in a terminal."""

from rich.console import Console
from rich.table import Table

from distembed.reports.statistics.texts import (
    TextTable,
    equal_rows,
    estimates,
    features_table,
    numbers_table,
    rows_table,
)
from distembed.reports.statistics.values import DatasetStatistics

_SHOWN_QUANTILES = {"least": "0%", "5%": "5%", "median": "50%", "95%": "95%", "most": "100%"}


def print_statistics(statistics: DatasetStatistics, console: Console) -> None:
    """Prints rows by split and by period, features, columns of numbers, and what is estimated."""
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
