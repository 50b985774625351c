"""The table of means over seeds, with differences to a baseline in standard errors: rows of text for any output."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distembed.reports.run_groups import RunGroup, Sample, find_baseline, group_runs
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.run_folder.record import RunSummary

UNKNOWN = "–"
"""What stands in place of a number that is not known."""


@dataclass(frozen=True)
class GroupTable:
    """A row for each group of runs that differ in their seed alone.

    Attributes:
        headings: Text above each column.
        rows: The cells of each group, the first of which is its name.
        note: What the numbers are, in a sentence or two.
    """

    headings: list[str]
    rows: list[list[str]]
    note: str

    @classmethod
    def of(
        cls, summaries: Sequence[RunSummary], metrics: Sequence[ReportedMetric], baseline: str | None
    ) -> "GroupTable | None":
        """Returns the table of some metrics; None where nothing is compared and no run has another with its config.

        Raises:
            UserError: There is no such baseline.
        """
        groups = group_runs(summaries)
        base = None if baseline is None else find_baseline(groups, baseline)
        if base is None and all(group.num_seeds == 1 for group in groups):
            return None
        headings = ["runs", "seeds", "split"]
        for metric in metrics:
            headings += [metric.heading] if base is None else [metric.heading, f"{metric.heading} difference"]
        rows = [
            [group.name, str(group.num_seeds), group.evaluated_on or UNKNOWN, *_cells(group, metrics, base)]
            for group in groups
        ]
        return cls(headings, rows, _note(base))


def _cells(group: RunGroup, metrics: Sequence[ReportedMetric], base: RunGroup | None) -> list[str]:
    cells = []
    for metric in metrics:
        sample = group.sample(metric.name)
        known = f" ({sample.number} of {group.num_seeds})" if 0 < sample.number < group.num_seeds else ""
        cells.append(f"{_sample_text(sample, metric.number_format)}{known}")
        if group is base:
            cells.append("baseline")
        elif base is not None:
            other = base.sample(metric.name) if group.evaluated_on == base.evaluated_on else Sample.of([])
            cells.append(_difference_text(sample, other, metric.number_format))
    return cells


def _sample_text(sample: Sample, number_format: str) -> str:
    """Returns such as ``0.1234 ± 0.0012``, or the mean alone where there is no standard deviation."""
    if math.isnan(sample.mean):
        return UNKNOWN
    mean = format(sample.mean, number_format)
    deviation = sample.standard_deviation
    return mean if math.isnan(deviation) else f"{mean} ± {format(deviation, number_format)}"


def _difference_text(sample: Sample, base: Sample, number_format: str) -> str:
    """Returns such as ``+0.0034 ± 0.0008 (+4.2 s.e.)``, or the difference alone where its noise is not known."""
    difference = sample.mean - base.mean
    if math.isnan(difference):
        return UNKNOWN
    error, signed = sample.standard_error(base), f"{'-' if difference < 0 else '+'}{abs(difference):{number_format}}"
    if math.isnan(error):
        return f"{signed} (no s.e.)"
    return f"{signed} ± {error:{number_format}} ({difference / error:+.1f} s.e.)"


def _note(base: RunGroup | None) -> str:
    means = "Mean ± standard deviation over the runs that differ in their seed alone."
    if base is None:
        return means
    return (
        f"{means} Differences are to {base.name}, ± the standard error (s.e.) of the difference of two means, and in "
        "numbers of it: beyond 2 a difference is hardly chance, with two or three runs beyond 4. Where a group has one "
        "run, or all of both have one value, no standard error is known."
    )
