"""Numbers of statistics as text, the same in the terminal and on a page."""

import math

from distembed.statistics.values import DatasetStatistics, NumbersOfSplit


def share(value: float) -> str:
    """Returns a share in percent; a dash for none, so that what is there stands out."""
    if math.isnan(value):
        return ""
    if value == 0:
        return "-"
    return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"


def rate(value: float | None) -> str:
    """Returns a label rate; nothing where there is none."""
    return "" if value is None else f"{value:.4f}"


def rate_of_rows(statistics: DatasetStatistics) -> str:
    """Returns what the label rate of rows is called, which is a mean by their weights where they have some."""
    return "weighted label rate" if statistics.is_weighted else "label rate"


def rate_of_ids(statistics: DatasetStatistics) -> str:
    """Returns what the label rate of an id is called, to which all rows count alike."""
    return "unweighted label rate" if statistics.is_weighted else "label rate"


def number(value: float) -> str:
    """Returns a number with four digits that count; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"


def missing_numbers(statistics: DatasetStatistics, name: str, found: NumbersOfSplit) -> str:
    """Returns the share of rows without a number in a column, or that missing ones were filled at preparation."""
    return "filled" if name in statistics.filled else share(found.missing)


def equal_rows(statistics: DatasetStatistics) -> str:
    """Returns in a sentence how many rows are equal to others."""
    equal = statistics.equal_rows
    total = sum(rows.num_rows for rows in statistics.splits.values())
    about = "" if equal.sampled == 1 else "about "
    text = f"{about}{equal.repeated:,} of {total:,} rows are equal to one before them in all columns"
    shares = [f"{share(value)} of {name}" for name, value in equal.in_training.items() if value]
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
