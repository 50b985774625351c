"""The tables of a comparison of runs, as text for any output: one run a row, and means over seeds.

A difference of means is told in standard errors, ``(m - m_0) / sqrt(s^2 / n + s_0^2 / n_0)``, with the standard
deviations s of the groups' own runs (Welch, Biometrika 1947): beyond about 2 it is hardly chance, and with groups of
two or three runs beyond about 4. A group of one run has no standard deviation, so nothing is said then.
"""

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distembed.base.names import one_of
from distembed.base.units import format_duration
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.run_folder.record import RunSummary

_OWN_SETTINGS = ("  seed:", "  checkpoint_dir:")
_BETWEEN = "-_./=, "
"""Characters that separate the common part of runs' names from the part that differs."""


@dataclass(frozen=True)
class Sample:
    """The values of a metric in the runs of a group."""

    number: int  # number of known values
    mean: float  # their mean; NaN without any
    standard_deviation: float  # their standard deviation, with `number - 1` in the denominator; NaN of fewer than two

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Returns number, mean and standard deviation of the values that are not NaN."""
        numbers = [value for value in values if not math.isnan(value)]
        deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
        return cls(len(numbers), statistics.fmean(numbers) if numbers else math.nan, deviation)

    def standard_error(self, baseline: "Sample") -> float:
        """Returns the standard error of the difference of two means; NaN where it is not known, or where it is 0."""
        # sqrt(s^2 / n + s_0^2 / n_0); a group of one run has s = NaN, and so has the result
        variances = (sample.standard_deviation**2 / sample.number for sample in (self, baseline) if sample.number)
        error = math.sqrt(sum(variances))
        return error if error > 0 else math.nan

    def standard_errors_from(self, baseline: "Sample") -> float:
        """Returns how many standard errors the mean is above the baseline's; NaN where the error is not known."""
        return (self.mean - baseline.mean) / self.standard_error(baseline)


@dataclass(frozen=True)
class RunGroup:
    """Runs whose configs differ in ``train.seed`` alone, of one dataset's ids and evaluated on one split."""

    name: str  # the common beginning of the runs' names, or the first name
    runs: tuple[RunSummary, ...]  # the runs in their order

    @property
    def evaluated_on(self) -> str:
        """The split that the metrics were computed on; empty where there are none."""
        return self.runs[0].evaluated_on

    @property
    def num_seeds(self) -> int:
        """The number of different seeds."""
        return len({run.info.seed for run in self.runs})

    def sample(self, metric: str) -> Sample:
        """Returns one value of a metric for each seed, the mean of the seed's runs: repeats of a seed are no sample."""
        by_seed: dict[int | None, list[float]] = {}
        for run in self.runs:
            by_seed.setdefault(run.info.seed, []).append(run.metric(metric))
        return Sample.of([Sample.of(values).mean for values in by_seed.values()])


def group_runs(summaries: Sequence[RunSummary]) -> list[RunGroup]:
    """Groups runs with equal configs but for the seed, equal ids and an equal evaluated split.

    Groups are in the order of their first runs. A name that two groups would share gives way to the first run's name.
    """
    by_recipe: dict[tuple[str | None, ...], list[RunSummary]] = {}
    for run in summaries:
        # equal paths in two configs may be two datasets, so the fingerprint of the ids is compared too
        recipe = (without_seed(run.config_yaml), run.evaluated_on, run.info.id_fingerprint)
        by_recipe.setdefault(recipe, []).append(run)
    groups = list(by_recipe.values())
    names = [_common_name([run.name for run in runs]) for runs in groups]
    return [
        RunGroup(name if names.count(name) == 1 else runs[0].name, tuple(runs))
        for name, runs in zip(names, groups, strict=True)
    ]


def best_first(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """Sorts runs by the mean of their group in the headline metric of the first run, the best group first.

    Runs of a group stay together. Finished groups without the metric follow, and last groups with unfinished runs,
    whose metrics may be of another split.
    """
    if not summaries:
        return []
    headline = summaries[0].info.metrics[0]
    sign = -1 if headline.better == "higher" else 1

    def group_order(group: RunGroup) -> tuple[bool, bool, float]:
        mean = group.sample(headline.name).mean
        return any(run.info.status != "finished" for run in group.runs), math.isnan(mean), sign * mean

    return [run for group in sorted(group_runs(summaries), key=group_order) for run in group.runs]


def find_baseline(groups: Sequence[RunGroup], name: str) -> RunGroup:
    """Returns the group of this name, or the group of the run of this name; a UserError names the nearest."""
    by_name = {run.name: group for group in groups for run in group.runs} | {group.name: group for group in groups}
    return by_name[one_of("--baseline", name, by_name)]


def without_seed(config_yaml: str) -> str:
    """Returns the text of a run's config without the settings of ``train`` that differ within a group.

    That is its seed, and the place of its checkpoints, where several runs are given one outside of their folders.
    """
    section, lines = "", []
    for line in config_yaml.splitlines():
        if not line.startswith((" ", "#")):
            section = line
        if not (section.startswith("train:") and line.startswith(_OWN_SETTINGS)):
            lines.append(line)
    return "\n".join(lines)


def _common_name(names: Sequence[str]) -> str:
    """Returns the common beginning of names, less digits, separators and ``seed`` at its end: dlrm of dlrm-seed1.

    ``run`` stands for names that consist of the seed alone, like the names of a sweep over the seed.
    """
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("0123456789").rstrip(_BETWEEN)
    return common.removesuffix("seed").rstrip(_BETWEEN) or ("run" if common else names[0])


UNKNOWN = "–"
"""The text in place of an unknown number."""


@dataclass(frozen=True)
class GroupTable:
    """A row for each group of runs that differ in their seed alone."""

    headings: list[str]  # text above each column
    rows: list[list[str]]  # the cells of each group; the first cell is the group's name
    note: str  # explains the numbers in a sentence or two

    @classmethod
    def of(
        cls, summaries: Sequence[RunSummary], metrics: Sequence[ReportedMetric], baseline: str | None
    ) -> "GroupTable | None":
        """Returns the table of some metrics; None without a baseline where every group has a single seed.

        A UserError refuses the name of a baseline that no run and no group has.
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
        count_text = f" ({sample.number} of {group.num_seeds})" if 0 < sample.number < group.num_seeds else ""
        cells.append(f"{sample_text(sample, metric.number_format)}{count_text}")
        if group is base:
            cells.append("baseline")
        elif base is not None:
            baseline_sample = base.sample(metric.name) if group.evaluated_on == base.evaluated_on else Sample.of([])
            cells.append(difference_text(sample, baseline_sample, metric.number_format))
    return cells


def sample_text(sample: Sample, number_format: str) -> str:
    """Returns text like ``0.1234 ± 0.0012``, or the mean alone where there is no standard deviation."""
    if math.isnan(sample.mean):
        return UNKNOWN
    mean = format(sample.mean, number_format)
    deviation = sample.standard_deviation
    return mean if math.isnan(deviation) else f"{mean} ± {format(deviation, number_format)}"


def difference_text(sample: Sample, base: Sample, number_format: str) -> str:
    """Returns text like ``+0.0034 ± 0.0008 (+4.2 s.e.)``, or the difference alone where its noise is not known."""
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


@dataclass(frozen=True)
class ReportColumn:
    """A column of the comparison."""

    heading: str  # text above the column
    text: Callable[[RunSummary], str]  # returns the text of a run's cell
    # returns the number that is lowest for the best of several runs, which is marked; None to mark none
    sort_key: Callable[[RunSummary], float] | None = None
    in_terminal: bool = True  # whether the narrower table in a terminal has the column too


def report_columns(summaries: Sequence[RunSummary]) -> list[ReportColumn]:
    """Returns the columns of the comparison, with every metric that the task of one of the runs reports."""
    return [
        ReportColumn("tables", lambda run: describe_schemes(run), in_terminal=False),
        ReportColumn("parameters", lambda run: format_number(run.info.parameters, ",.0f")),
        ReportColumn("embedding rows", lambda run: _embedding_rows(run), in_terminal=False),
        ReportColumn("embedding MB", lambda run: _embedding_megabytes(run), in_terminal=False),
        ReportColumn("training MB", lambda run: _training_megabytes(run), in_terminal=False),
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
    """Returns text like ``20 quotient_remainder, 6 full``."""
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
    """Returns the rows of a run's tables, and their share of the rows of full tables."""
    rows, full = run.info.embedding_rows, run.info.full_embedding_rows
    return format_number(rows, ",.0f") + _share(rows, full)


def _embedding_megabytes(run: RunSummary) -> str:
    """Returns the megabytes of a run's tables, and their share of the megabytes of full tables."""
    num_bytes, full = run.info.embedding_bytes, run.info.full_embedding_bytes
    return format_number(num_bytes / 1e6, ",.1f") + _share(num_bytes, full)


def _training_megabytes(run: RunSummary) -> str:
    """Returns the megabytes of a run's tables with optimizer states, and their share of the full tables' megabytes."""
    num_bytes, full = run.info.embedding_training_bytes, run.info.full_embedding_training_bytes
    return format_number(num_bytes / 1e6, ",.1f") + _share(num_bytes, full)


def _compression(run: RunSummary) -> str:
    """Returns the training bytes of full fp32 tables over the training bytes of a run's tables, like ``3.9x``."""
    num_bytes, full = run.info.embedding_training_bytes, run.info.full_embedding_training_bytes
    return f"{full / num_bytes:.1f}x" if num_bytes > 0 and not math.isnan(full) else UNKNOWN


def _share(amount: float, total: float) -> str:
    return f" ({amount / total:.1%})" if total > 0 and not math.isnan(amount) else ""


def _training_time(run: RunSummary) -> str:
    seconds = run.training_seconds
    return UNKNOWN if math.isnan(seconds) else format_duration(seconds)
