"""``distembed report``: one self-contained HTML file with the plots and the comparison of runs, also of a sweep's.

Figures are SVG inside of the page (:mod:`distembed.reports.pages`). Unfinished and killed runs are shown up to their
last step.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distembed.base.errors import UserError
from distembed.base.files import require_file, write_text
from distembed.base.units import enumerate_names
from distembed.base.validation import parse_yaml
from distembed.reports import plots
from distembed.reports.comparison import (
    UNKNOWN,
    GroupTable,
    ReportColumn,
    RunGroup,
    best_first,
    format_number,
    group_runs,
    report_columns,
    reported_metrics,
    without_seed,
)
from distembed.reports.pages import breakable, figure, line_swatch, page, section, table
from distembed.reports.plots import ShownRun
from distembed.training.run_folder.folder import holds_run
from distembed.training.run_folder.record import RunRecord, RunSummary, unique_names
from distembed.training.sweeps.sweep import SWEEP_REPORT, Sweep

if TYPE_CHECKING:
    from rich.console import Console

MOST_SETTINGS = 16
"""Number of settings that a table has at most: whole sections that differ would make it endless."""
_MOST_CHARACTERS = 60


@dataclass(frozen=True)
class ConfigDifferences:
    """The settings in which configs differ."""

    keys: tuple[str, ...]  # dotted keys of the settings, in the order of the configs; at most :data:`MOST_SETTINGS`
    values: tuple[tuple[str, ...], ...]  # the text of each setting, by config; empty where a config has none
    num_others: int  # number of further settings that differ

    @classmethod
    def of(cls, configs: Sequence[str]) -> "ConfigDifferences":
        """Returns the settings in which YAML configs differ; a config that cannot be read has none."""
        settings = [dict(_settings(config)) for config in configs]
        keys = dict.fromkeys(key for values_of_run in settings for key in values_of_run)
        differ = [key for key in keys if len({values_of_run.get(key) for values_of_run in settings}) > 1]
        shown = differ[:MOST_SETTINGS]
        values = tuple(tuple(values_of_run.get(key, "") for key in shown) for values_of_run in settings)
        return cls(tuple(shown), values, len(differ) - len(shown))


def _settings(config_yaml: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the text of every setting."""
    try:
        values = parse_yaml(config_yaml, "the config")
    except UserError:  # the report shows a damaged run as far as it can be read
        return
    if isinstance(values, Mapping):
        yield from _flat(values, "")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    """Returns a value as text; of a long text the first :data:`_MOST_CHARACTERS` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


MOST_NAMED = 8
"""Number of lines of the comparison up to which points of figures carry names; of more they carry numbers."""
_MOST_LABEL_CHARACTERS = 28


def write_run_report(
    runs: Sequence[Path], output: Path, overwrite: bool = False, baseline: str | None = None
) -> list[RunSummary]:
    """Writes the HTML file, whole or not at all.

    Args:
        runs: Run folders, in the order in which to show them.
        output: The file to write; its folder is made where it is missing. A report that is there is replaced.
        overwrite: Whether any other file is replaced, too.
        baseline: Name of the run, or of the group of runs that differ in their seed alone, that all others are compared
            with; None for none.

    Returns:
        One summary a run, in order.

    Raises:
        UserError: One of the runs is no run folder or is given twice, or ``output`` cannot be a file, or is one that is
            no report and not to be replaced; or no run or group has the baseline's name.
        RunError: The file cannot be written.
    """
    if not runs:
        raise UserError("report needs one run folder or more; give folders that `distembed train` made.")
    resolved = [os.path.realpath(run) for run in runs]
    twice = [str(run) for run, path in zip(runs, resolved, strict=True) if resolved.count(path) > 1]
    if twice:
        raise UserError(f"the same run is given more than once: {', '.join(twice)}.")
    require_file("--output", output, overwrite, may_replace_own=True)
    records = [_with_sizes(RunRecord.read(run)) for run in runs]
    record_of_run = dict(zip(unique_names(records), records, strict=True))
    summaries = [RunSummary.from_record(record, name) for name, record in record_of_run.items()]
    write_text(output, render_run_report(record_of_run, summaries, baseline), make_folder=True)
    return summaries


def _with_sizes(record: RunRecord) -> RunRecord:
    """Returns a run with the sizes of its tables, from its config and dataset where ``run.json`` lacks them.

    Early versions did not record them; they stay unknown where the dataset is not here or the config is not valid now.
    """
    if not math.isnan(record.info.full_embedding_training_bytes):
        return record
    from distembed.training.describe import describe
    from distembed.training.resume import choose_dataset, load_run_config

    try:
        config = load_run_config(record.path)
        dataset = choose_dataset(record.path, config, None, needs_rows=False)
        description = describe(replace(config, data=replace(config.data, path=dataset)))
    except UserError:
        return record
    sizes: dict[str, Any] = {
        **description.sizes_as_json(),
        "embedding_rows": description.embedding_rows,
        "full_embedding_rows": description.full_embedding_rows,
    }
    return replace(record, info=replace(record.info, **sizes))


def print_comparison(summaries: Sequence[RunSummary], console: "Console", baseline: str | None = None) -> None:
    """Prints the comparison as a table of one run a line, and below it the means over seeds, if there are any."""
    columns = [column for column in report_columns(summaries) if column.in_terminal]
    rows = [[run.name, *(column.text(run) for column in columns)] for run in summaries]
    print_table(["run", *(column.heading for column in columns)], rows, console)
    if note := _dataset_note(summaries):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    metrics = [metric for metric in reported_metrics(summaries) if metric.in_terminal]
    means = GroupTable.of(summaries, metrics, baseline)
    if means is not None:
        console.print()
        print_table(means.headings, means.rows, console)
        console.print(means.note, markup=False, highlight=False)


def _dataset_note(summaries: Sequence[RunSummary]) -> str:
    """Returns a sentence where the ids of the runs' datasets stand for different values; empty where none is known."""
    num_kinds = len({run.info.id_fingerprint for run in summaries} - {None})
    return f"The ids of the runs' datasets stand for different values ({num_kinds} kinds)." if num_kinds > 1 else ""


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], console: "Console") -> None:
    """Prints a table whose first column is on the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="left" if heading == "status" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def render_run_report(
    record_of_run: dict[str, RunRecord], summaries: Sequence[RunSummary], baseline: str | None = None
) -> str:
    """Returns the page's HTML, given the records by name, and their summaries in this order."""
    means = GroupTable.of(summaries, reported_metrics(summaries), baseline)
    groups = group_runs(summaries)
    is_numbered = not _names_fit(groups)
    shown = _shown_runs(record_of_run, groups, summaries, is_numbered)
    sections = [
        section("Comparison" if len(record_of_run) > 1 else "Result", _comparison(shown, is_numbered)),
        "" if means is None else section("Means over seeds", _means(means)),
        "" if len(record_of_run) == 1 else section("What differs", _differences(groups, is_numbered)),
        _periods(record_of_run, summaries),
        section("Curves", _legend(groups, is_numbered) + curves) if (curves := _figures(shown)) else "",
        section("Runs", "".join(_run_details(run, name) for name, run in record_of_run.items())),
    ]
    return page(f"distembed: {enumerate_names(list(record_of_run), most=6)}", "".join(sections), _STYLE)


def _names_fit(groups: Sequence[RunGroup]) -> bool:
    """Returns whether points of figures can carry the names of the groups."""
    return len(groups) <= MOST_NAMED and all(len(group.name) <= _MOST_LABEL_CHARACTERS for group in groups)


def _shown_runs(
    record_of_run: dict[str, RunRecord], groups: Sequence[RunGroup], summaries: Sequence[RunSummary], is_numbered: bool
) -> list[ShownRun]:
    """Returns the runs with the labels of their groups in figures: names, or numbers from 1."""
    group_numbers = {run.name: number for number, group in enumerate(groups) for run in group.runs}
    labels = [str(number) if is_numbered else group.name for number, group in enumerate(groups, start=1)]
    numbered = [(run, group_numbers[run.name]) for run in summaries]
    return [ShownRun(record_of_run[run.name], run, number, labels[number]) for run, number in numbered]


def _comparison(shown: Sequence[ShownRun], is_numbered: bool) -> str:
    """Returns the table of one run a row."""
    summaries = [run.summary for run in shown]
    columns = report_columns(summaries)
    lines = []
    for run in shown:
        cells = [_cell(column, run.summary, summaries) for column in columns]
        number = f"{run.label} " if is_numbered else ""
        lines.append([f"{line_swatch(run.number)}{number}{breakable(run.summary.name)}", *cells])
    note = _dataset_note(summaries)
    # the schemes of the tables, and the status
    compared = table(["run", *(column.heading for column in columns)], lines, texts=(1, len(columns)))
    return compared + (f"<p>{escape(note)}</p>\n" if note else "")


def _differences(groups: Sequence[RunGroup], is_numbered: bool) -> str:
    """Returns the table of the settings in which runs differ, the seed aside, one group of runs a row."""
    differences = ConfigDifferences.of([without_seed(group.runs[0].config_yaml) for group in groups])
    if not differences.keys:
        return f"<p>{'Nothing but the seed.' if len(groups) == 1 else 'No setting.'}</p>\n"
    lines = [
        [_group_name(number, group, is_numbered), *(breakable(value or UNKNOWN) for value in values)]
        for number, (group, values) in enumerate(zip(groups, differences.values, strict=True))
    ]
    further = f"<p>{differences.num_others:,} further settings differ.</p>\n" if differences.num_others else ""
    return table(["runs", *differences.keys], lines, texts=range(1, len(differences.keys) + 1)) + further


def _group_name(number: int, group: RunGroup, is_numbered: bool) -> str:
    """Returns the line of a group of runs, its number where figures have numbers, and its name."""
    return f"{line_swatch(number)}{f'{number + 1} ' if is_numbered else ''}{breakable(group.name)}"


def _periods(record_of_run: Mapping[str, RunRecord], summaries: Sequence[RunSummary]) -> str:
    """Returns the section of the metrics of streams by day or hour; empty where no run has any.

    One run has a column for each metric, several runs have one each for the first metric.
    """
    by_run = {name: {line.split: line for line in run.periods} for name, run in record_of_run.items() if run.periods}
    lines = [line for run in by_run.values() for line in run.values()]
    metrics = [metric for metric in reported_metrics(summaries) if any(metric.name in line.metrics for line in lines)]
    if not metrics:
        return ""
    is_one = len(by_run) == 1
    columns = [(name, metric) for name in by_run for metric in (metrics if is_one else metrics[:1])]
    headings = ["UTC", "rows", *(metric.heading if is_one else name for name, metric in columns)]
    rows = []
    for period in sorted({line.split for line in lines}):
        num_rows = max(line.metric("rows") for line in lines if line.split == period)
        cells = [escape(period), format_number(num_rows, ",.0f")]
        for name, metric in columns:
            line = by_run[name].get(period)
            cells.append(format_number(math.nan if line is None else line.metric(metric.name), metric.number_format))
        rows.append(cells)
    note = (
        f"{'Metrics' if is_one else metrics[0].heading} of rows by their own time, each scored before it was trained."
    )
    return section("By time", f"{table(headings, rows)}<p>{escape(note)}</p>\n")


def _means(means: GroupTable) -> str:
    """Returns the table of one group of runs a row."""
    lines = [[breakable(name), *map(escape, cells)] for name, *cells in means.rows]
    return f"{table(means.headings, lines)}<p>{escape(means.note)}</p>\n"


def _cell(column: ReportColumn, run: RunSummary, summaries: Sequence[RunSummary]) -> str:
    """Returns a run's cell, in bold face where it is the best of several."""
    text = breakable(column.text(run))
    # metrics on different splits are not compared
    comparable = len(summaries) > 1 and len({summary.evaluated_on for summary in summaries}) == 1
    is_best = column.sort_key is not None and comparable and column.sort_key(run) == _lowest(column.sort_key, summaries)
    return f"<strong>{text}</strong>" if is_best else text


def _lowest(value: Callable[[RunSummary], float], summaries: Sequence[RunSummary]) -> float:
    """Returns the lowest value of the runs but NaN; NaN where all are, which no comparison finds equal."""
    return min((number for run in summaries if not math.isnan(number := value(run))), default=math.nan)


def _legend(groups: Sequence[RunGroup], is_numbered: bool) -> str:
    """Returns the line and the name of each group of runs."""
    runs = "".join(f"<span>{_group_name(i, group, is_numbered)}</span>" for i, group in enumerate(groups))
    return f'<p class="legend">{runs}</p>\n'


def _figures(shown: Sequence[ShownRun]) -> str:
    """Returns the figures with their captions, which say the splits that were evaluated."""
    summaries = [run.summary for run in shown]
    metrics = reported_metrics(summaries)
    headline = metrics[0]
    validation = _splits(line.split for run in shown for line in run.record.validation_evals())
    marked = f"Training windows thin, evaluations on {validation} marked." if validation else "Training windows."
    final = _splits(run.evaluated_on for run in summaries)
    figures = [
        ("Loss", f"{marked} The first tenth may be cut off.", plots.loss_curve(shown)),
        (headline.heading, marked, plots.metric_curve(shown, headline.name, headline.heading)),
        ("Throughput", "Training alone, evaluations not counted.", plots.throughput_curve(shown)),
    ]
    if headline.of_same_label("calibration", metrics) is not None:
        calibrated = _splits(run.record.evaluation.split for run in shown if run.record.evaluation is not None)
        caption = (
            f"Final evaluation{f' on {calibrated}' if calibrated else ''}; on the dashed line predictions are right."
        )
        figures.append(("Calibration", caption, plots.calibration_diagram(shown)))
    if len(summaries) > 1:
        cost = headline.of_same_label("logloss", metrics) or headline
        better = "Higher" if cost.better == "higher" else "Lower"
        caption = f"{f'On {final}; ' if final else ''}{better.lower() if final else better} and further left is better."
        drawn = plots.parameters_against(shown, cost.name, cost.heading)
        figures.append((f"Parameters against {cost.heading}", caption, drawn))
    drawn = "".join(figure(*drawing) for drawing in figures if drawing[-1])
    return f'<div class="figures">{drawn}</div>\n' if drawn else ""


def _splits(names: Iterable[str]) -> str:
    """Returns the names of splits, each once."""
    return " and ".join(dict.fromkeys(name for name in names if name))


def _run_details(run: RunRecord, name: str) -> str:
    """Returns the facts of one run and its config, folded away under its name."""
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
    config = f"<details><summary>config</summary><pre>{escape(run.config_yaml)}</pre></details>"
    return f"<details><summary>{escape(name)}</summary><dl>{rows}</dl>{config}</details>\n"


_STYLE = """
details details { border: 0; padding: .6rem 0 0; }
"""


def report_sweep(sweep: Sweep, console: "Console", say: Callable[[str], None]) -> None:
    """Writes the report of all runs that have begun, and prints their comparison, the best first."""
    begun = {run.name: run for run in sweep.runs if holds_run(run.folder)}
    if not begun:
        return
    ordered = best_first([RunSummary.from_record(RunRecord.read(run.folder), name) for name, run in begun.items()])
    # any run of a recipe stands for all of it
    baseline = next((run.name for run in begun.values() if sweep.baseline in (run.name, run.recipe)), None)
    output = sweep.folder / SWEEP_REPORT
    summaries = write_run_report([run.path for run in ordered], output, baseline=baseline)
    print_comparison(summaries, console, baseline)
    say(f"report {output}")
