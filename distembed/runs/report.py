"""``distembed report``: one self-contained HTML file with the plots and the comparison of runs.

Figures are SVG inside of the page, see :mod:`distembed.runs.pages`. Runs that are still going on, or were killed, are
shown as far as they came.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from distembed.errors import UserError
from distembed.files import write_text
from distembed.outputs import require_file
from distembed.runs import plots
from distembed.runs.group_table import UNKNOWN, GroupTable
from distembed.runs.metrics import ReportedMetric
from distembed.runs.pages import colour, figure, page, section, swatch
from distembed.runs.record import RunRecord, RunSummary, unique_names

if TYPE_CHECKING:
    from rich.console import Console


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
    metrics = reported_metrics(summaries)
    return [
        ReportColumn("tables", lambda run: describe_schemes(run), in_terminal=False),
        ReportColumn("parameters", lambda run: _format(run.info.parameters, ",.0f")),
        ReportColumn("embedding MB", lambda run: _format(run.info.embedding_bytes / 1e6, ",.1f"), in_terminal=False),
        *(_metric_column(metric) for metric in metrics),
        ReportColumn("samples/s", lambda run: _format(run.samples_per_second, ",.0f")),
        ReportColumn("status", lambda run: describe_status(run)),
    ]


def reported_metrics(summaries: Sequence[RunSummary]) -> list[ReportedMetric]:
    """Returns the metrics that the tasks of the runs report, each once; the headline metric of the first run first."""
    by_name: dict[str, ReportedMetric] = {}
    for run in summaries:
        for metric in run.info.metrics:
            by_name.setdefault(metric.name, metric)
    return list(by_name.values())


def _metric_column(metric: ReportedMetric) -> ReportColumn:
    sign = -1 if metric.better == "higher" else 1
    return ReportColumn(
        metric.heading,
        text=lambda run: _format(run.metric(metric.name), metric.number_format),
        sort_key=None if metric.better is None else lambda run: sign * run.metric(metric.name),
        in_terminal=metric.in_terminal,
    )


def write_run_report(
    runs: Sequence[Path], output: Path, overwrite: bool = False, baseline: str | None = None
) -> list[RunSummary]:
    """Writes the HTML file, whole or not at all.

    Args:
        runs: Run folders, in the order in which to show them.
        output: The file to write; its folder is made where it is missing. A report that is there is replaced.
        overwrite: Whether any other file is replaced, too.
        baseline: Name of the run, or of the group of runs that differ in their seed alone, that the others are compared
            with; None for none.

    Returns:
        One summary a run, in the same order.

    Raises:
        UserError: One of the runs is no run folder or is given twice, or ``output`` cannot be a file, or is one that is
            no report and not to be replaced; or there is no such baseline.
        RunError: The file cannot be written.
    """
    if not runs:
        raise UserError("report needs one run folder or more; give folders that `distembed train` made.")
    resolved = [os.path.realpath(run) for run in runs]
    twice = [str(run) for run, path in zip(runs, resolved, strict=True) if resolved.count(path) > 1]
    if twice:
        raise UserError(f"the same run is given more than once: {', '.join(twice)}.")
    require_file("--output", output, overwrite, may_replace_own=True)
    records = [RunRecord.read(run) for run in runs]
    named = dict(zip(unique_names(records), records, strict=True))
    summaries = [RunSummary.from_record(record, name) for name, record in named.items()]
    write_text(output, render_run_report(named, summaries, baseline), make_folder=True)
    return summaries


def print_comparison(summaries: Sequence[RunSummary], console: "Console", baseline: str | None = None) -> None:
    """Prints the comparison as a table of one run a line, and below it the means over seeds, if there are any.

    Raises:
        UserError: There is no such baseline.
    """
    columns = [column for column in report_columns(summaries) if column.in_terminal]
    rows = [[run.name, *(column.text(run) for column in columns)] for run in summaries]
    _print_table(["run", *(column.heading for column in columns)], rows, console)
    metrics = [metric for metric in reported_metrics(summaries) if metric.in_terminal]
    means = GroupTable.of(summaries, metrics, baseline)
    if means is not None:
        console.print()
        _print_table(means.headings, means.rows, console)
        console.print(means.note, markup=False, highlight=False)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], console: "Console") -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="left" if heading == "status" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def render_run_report(named: dict[str, RunRecord], summaries: Sequence[RunSummary], baseline: str | None = None) -> str:
    """Returns the page's HTML.

    Args:
        named: Name -> what the folder of the run holds.
        summaries: The same runs in the same order, summed up.
        baseline: Name of the run or group that the others are compared with; None for none.

    Raises:
        UserError: There is no such baseline.
    """
    means = GroupTable.of(summaries, reported_metrics(summaries), baseline)
    sections = [
        section("Comparison" if len(named) > 1 else "Result", _comparison(summaries)),
        "" if means is None else section("Means over seeds", _means(means)),
        section("Curves", _legend(summaries) + _figures(named, summaries)),
        section("Runs", "".join(_run_details(run, name) for name, run in named.items())),
    ]
    return page(f"distembed: {', '.join(named)}", "".join(sections), _STYLE)


def describe_schemes(run: RunSummary) -> str:
    """Returns such as ``20 quotient_remainder, 6 full``."""
    return ", ".join(f"{count} {scheme}" for scheme, count in run.info.schemes.items()) or UNKNOWN


def describe_status(run: RunSummary) -> str:
    """Returns such as ``finished``, or with the split that was evaluated last: ``unfinished (validation)``."""
    status = run.info.status
    return f"{status} ({run.evaluated_on})" if status != "finished" and run.evaluated_on else status


def _comparison(summaries: Sequence[RunSummary]) -> str:
    """Returns the table of one run a row."""
    columns = report_columns(summaries)
    headings = "".join(f"<th>{escape(column.heading)}</th>" for column in columns)
    rows = []
    for index, run in enumerate(summaries):
        cells = "".join(_cell(column, run, summaries) for column in columns)
        rows.append(f'<tr><th scope="row">{swatch(colour(index))}{escape(run.name)}</th>{cells}</tr>')
    return f'<div class="wide"><table><tr><th>run</th>{headings}</tr>{"".join(rows)}</table></div>\n'


def _means(means: GroupTable) -> str:
    """Returns the table of one group of runs a row."""
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in means.headings)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in means.rows
    )
    return f'<div class="wide"><table><tr>{headings}</tr>{rows}</table></div>\n<p>{escape(means.note)}</p>\n'


def _cell(column: ReportColumn, run: RunSummary, summaries: Sequence[RunSummary]) -> str:
    """Returns a run's cell, in bold face where it is the best of several."""
    text = escape(column.text(run))
    # metrics on different splits are not compared
    comparable = len(summaries) > 1 and len({other.evaluated_on for other in summaries}) == 1
    is_best = column.sort_key is not None and comparable and column.sort_key(run) == _lowest(column.sort_key, summaries)
    return f"<td>{f'<strong>{text}</strong>' if is_best else text}</td>"


def _lowest(value: Callable[[RunSummary], float], summaries: Sequence[RunSummary]) -> float:
    """Returns the lowest known value of the runs; NaN where none is known."""
    return min((found for run in summaries if not math.isnan(found := value(run))), default=math.nan)


def _legend(summaries: Sequence[RunSummary]) -> str:
    """Returns the runs' names beside their colours."""
    runs = "".join(f"<span>{swatch(colour(index))}{escape(run.name)}</span>" for index, run in enumerate(summaries))
    return f'<p class="legend">{runs}</p>\n'


def _figures(named: dict[str, RunRecord], summaries: Sequence[RunSummary]) -> str:
    """Returns the figures with their captions."""
    metrics = reported_metrics(summaries)
    headline = metrics[0]
    curve = plots.metric_curve(named, headline.name, headline.heading)
    figures = [
        ("Loss", "Training windows thin, evaluations marked. The first tenth may be cut off.", plots.loss_curve(named)),
        (headline.heading, "Training windows thin, evaluations marked.", curve),
        ("Throughput", "Training alone, evaluations not counted.", plots.throughput_curve(named)),
    ]
    if any(metric.name == "calibration" for metric in metrics):
        caption = "Final evaluation; on the dashed line predictions are right."
        figures.append(("Calibration", caption, plots.calibration_diagram(named)))
    if len(summaries) > 1:
        cost = next((metric for metric in metrics if metric.name == "logloss"), headline)
        caption = f"{'Higher' if cost.better == 'higher' else 'Lower'} and further left is better."
        drawn = plots.parameters_against(summaries, cost.name, cost.heading)
        figures.append((f"Parameters against {cost.heading}", caption, drawn))
    return f'<div class="figures">{"".join(figure(*each) for each in figures)}</div>\n'


def _run_details(run: RunRecord, name: str) -> str:
    """Returns what is known of one run beside its metrics, folded away behind its name."""
    info = run.info
    facts = {
        "folder": run.path,
        "status": f"{info.status} ({info.error})" if info.error else info.status,
        "started": info.started,
        "finished": info.finished,
        "seed": info.seed,
        "ranks": info.world_size,
        "batch size": info.batch_size,
        "last step": run.train[-1].step if run.train else None,
        "versions": ", ".join(f"{package} {version}" for package, version in info.versions.items()) or None,
    }
    rows = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value is not None
    )
    return f"<details><summary>{escape(name)}</summary><dl>{rows}</dl><pre>{escape(run.config_yaml)}</pre></details>\n"


def _format(value: float, spec: str) -> str:
    """Returns a number as text, or a dash for NaN."""
    return UNKNOWN if math.isnan(value) else format(value, spec)


_STYLE = """
td:last-child, th:last-child { text-align: left; }
td:nth-child(2), tr:first-child th:nth-child(2) { text-align: left; white-space: normal; min-width: 10rem; }
"""
