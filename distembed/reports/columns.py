"""The columns of a comparison of runs, in a page and in a terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distembed.base.units import format_duration
from distembed.reports.group_table import UNKNOWN
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.run_folder.record import RunSummary


@dataclass(frozen=True)
class ReportColumn:
    """A column of the comparison.

    Attributes:
        heading: Text above the column.
        text: Returns the text of a run's cell.
        sort_key: Returns the number that is lowest for the best of several runs, which is marked; None to mark none.
        in_terminal: Whether the narrower table in a terminal has the column too.
    """

    heading: str
    text: Callable[[RunSummary], str]
    sort_key: Callable[[RunSummary], float] | None = None
    in_terminal: bool = True


def report_columns(summaries: Sequence[RunSummary]) -> list[ReportColumn]:
    """Returns the columns of the comparison, with every metric that the task of one of the runs reports."""
    return [
        ReportColumn("tables", lambda run: describe_schemes(run), in_terminal=False),
        ReportColumn("parameters", lambda run: format_number(run.info.parameters, ",.0f")),
        ReportColumn("embedding rows", lambda run: _embedding_rows(run), in_terminal=False),
        ReportColumn("embedding MB", lambda run: _embedding_megabytes(run), in_terminal=False),
        ReportColumn("compression", lambda run: _compression(run)),
        ReportColumn("split", lambda run: run.evaluated_on or UNKNOWN),
        *(_metric_column(metric) for metric in reported_metrics(summaries)),
        ReportColumn("training", lambda run: _training_time(run)),
        ReportColumn("samples/s", lambda run: format_number(run.samples_per_second, ",.0f")),
        ReportColumn("status", lambda run: run.info.status),
    ]


def reported_metrics(summaries: Sequence[RunSummary]) -> list[ReportedMetric]:
    """Returns the metrics that the tasks of the runs report, each once; the headline metric of the first run first."""
    by_name: dict[str, ReportedMetric] = {}
    for run in summaries:
        for metric in run.info.metrics:
            by_name.setdefault(metric.name, metric)
    return list(by_name.values())


def describe_schemes(run: RunSummary) -> str:
    """Returns such as ``20 quotient_remainder, 6 full``."""
    return ", ".join(f"{count} {scheme}" for scheme, count in run.info.schemes.items()) or UNKNOWN


def format_number(value: float, spec: str) -> str:
    """Returns a number as text, or a dash for NaN."""
    return UNKNOWN if math.isnan(value) else format(value, spec)


def _metric_column(metric: ReportedMetric) -> ReportColumn:
    sign = -1 if metric.better == "higher" else 1
    return ReportColumn(
        metric.heading,
        text=lambda run: format_number(run.metric(metric.name), metric.number_format),
        sort_key=None if metric.better is None else lambda run: sign * run.metric(metric.name),
        in_terminal=metric.in_terminal,
    )


def _embedding_rows(run: RunSummary) -> str:
    """Returns the rows of a run's tables, and which share of those of full tables that is."""
    rows, full = run.info.embedding_rows, run.info.full_embedding_rows
    return format_number(rows, ",.0f") + _share(rows, full)


def _embedding_megabytes(run: RunSummary) -> str:
    """Returns the megabytes of a run's tables, and which share of those of full tables that is."""
    num_bytes, full = run.info.embedding_bytes, run.info.full_embedding_bytes
    return format_number(num_bytes / 1e6, ",.1f") + _share(num_bytes, full)


def _compression(run: RunSummary) -> str:
    """Returns how many times the bytes full tables have, such as ``3.9x``."""
    num_bytes, full = run.info.embedding_bytes, run.info.full_embedding_bytes
    return f"{full / num_bytes:.1f}x" if num_bytes > 0 and not math.isnan(full) else UNKNOWN


def _share(part: float, whole: float) -> str:
    return f" ({part / whole:.1%})" if whole > 0 and not math.isnan(part) else ""


def _training_time(run: RunSummary) -> str:
    seconds = run.training_seconds
    return UNKNOWN if math.isnan(seconds) else format_duration(seconds)
