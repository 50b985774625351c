"""The statistics of a dataset as tables in a terminal."""

from rich.console import Console
from rich.table import Table

from distembed.statistics.texts import (
    equal_rows,
    estimates,
    missing_numbers,
    number,
    rate,
    rate_of_rows,
    share,
)
from distembed.statistics.values import DatasetStatistics

_SHOWN_QUANTILES = {"least": 0, "5%": 2, "median": 4, "95%": 6, "most": 8}
"""Column heading -> place among the quantiles."""


def print_statistics(statistics: DatasetStatistics, console: Console) -> None:
    """Prints rows by split and by period, features, columns of numbers, and what is estimated."""
    console.print(_rows_table(statistics))
    if statistics.features:
        console.print(_features_table(statistics))
    if statistics.columns:
        console.print(_columns_table(statistics))
    for text in (equal_rows(statistics), *estimates(statistics)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _rows_table(statistics: DatasetStatistics) -> Table:
    table = _table("rows", "number", rate_of_rows(statistics))
    for name, rows in {**statistics.splits, **statistics.periods}.items():
        if name == next(iter(statistics.periods), None):
            table.add_row()
        table.add_row(name, f"{rows.num_rows:,}", rate(rows.label_rate))
    return table


def _features_table(statistics: DatasetStatistics) -> Table:
    others = [name for name in statistics.splits if name != statistics.train]
    headings = ["feature", "distinct", "top 1", "top 100", "bits", "Zipf", "missing", "unknown"]
    table = _table(*headings, *(f"{what} in {name}" for name in others for what in ("unknown", "unseen")))
    for name, feature in statistics.features.items():
        own = feature.splits.get(statistics.train)
        row = [name, f"{feature.cardinality:,}", share(feature.top_shares[1]), share(feature.top_shares[100])]
        row += [f"{feature.entropy_bits:.1f}", "" if feature.zipf_exponent is None else f"{feature.zipf_exponent:.2f}"]
        row += ["", ""] if own is None else [share(own.missing), share(own.out_of_vocabulary)]
        for other in others:
            found = feature.splits.get(other)
            row += ["", ""] if found is None else [share(found.out_of_vocabulary), share(found.unseen)]
        table.add_row(*row)
    return table


def _columns_table(statistics: DatasetStatistics) -> Table:
    table = _table("numbers", "missing", "mean", "deviation", *_SHOWN_QUANTILES)
    for name, splits in statistics.columns.items():
        found = splits[statistics.train]
        quantiles = [number(found.quantiles[place]) for place in _SHOWN_QUANTILES.values()]
        missing = missing_numbers(statistics, name, found)
        table.add_row(name, missing, number(found.mean), number(found.deviation), *quantiles)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
