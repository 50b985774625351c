"""Runs that differ in their seed alone, and how far the mean of such a group is from that of another.

A difference is told in standard errors, ``(m - m_0) / sqrt(s^2 / n + s_0^2 / n_0)``, with the standard deviations s of
the groups' own runs (Welch, Biometrika 1947): beyond about 2 it is hardly chance, and with groups of two or three runs
beyond about 4. A group of one run has no standard deviation, so nothing is said then.
"""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from distembed.base.names import one_of
from distembed.training.run_folder.record import RunSummary

_OWN_SETTINGS = ("  seed:", "  checkpoint_dir:")
_BETWEEN = "-_./=, "
"""What stands in names between what differs and the rest."""


@dataclass(frozen=True)
class Sample:
    """The values of a metric in the runs of a group.

    Attributes:
        number: Number of values that are known, such as those of the seeds of a group.
        mean: Their mean; NaN without any.
        standard_deviation: Their standard deviation, with ``number - 1`` in the denominator; NaN of fewer than two.
    """

    number: int
    mean: float
    standard_deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Returns the sample of these values, of which some may be NaN."""
        known = [value for value in values if not math.isnan(value)]
        deviation = statistics.stdev(known) if len(known) > 1 else math.nan
        return cls(len(known), statistics.fmean(known) if known else math.nan, deviation)

    def standard_error(self, baseline: "Sample") -> float:
        """Returns the standard error of the difference of two means; NaN where it is not known, or 0."""
        variances = (each.standard_deviation**2 / each.number for each in (self, baseline) if each.number)
        error = math.sqrt(sum(variances))
        return error if error > 0 else math.nan

    def standard_errors_from(self, baseline: "Sample") -> float:
        """Returns how many standard errors the mean is above the baseline's; NaN where there is no such error."""
        return (self.mean - baseline.mean) / self.standard_error(baseline)


@dataclass(frozen=True)
class RunGroup:
    """Runs whose configs differ in ``train.seed`` alone, of one dataset's ids and evaluated on the same split.

    Attributes:
        name: What the names of its runs have in common, or the first one's.
        runs: The runs in their order.
    """

    name: str
    runs: tuple[RunSummary, ...]

    @property
    def evaluated_on(self) -> str:
        """The split that the metrics were computed on; empty where there are none."""
        return self.runs[0].evaluated_on

    @property
    def num_seeds(self) -> int:
        """The number of different seeds."""
        return len({run.info.seed for run in self.runs})

    def sample(self, metric: str) -> Sample:
        """Returns the values of a metric, one for each seed; those of one seed are averaged, as they are not chance."""
        by_seed: dict[int | None, list[float]] = {}
        for run in self.runs:
            by_seed.setdefault(run.info.seed, []).append(run.metric(metric))
        return Sample.of([Sample.of(values).mean for values in by_seed.values()])


def group_runs(summaries: Sequence[RunSummary]) -> list[RunGroup]:
    """Returns the groups in the order of their first runs, each run in one."""
    by_recipe: dict[tuple[str | None, ...], list[RunSummary]] = {}
    for run in summaries:
        # a path in two configs may be that of two datasets
        recipe = (without_seed(run.config_yaml), run.evaluated_on, run.info.id_fingerprint)
        by_recipe.setdefault(recipe, []).append(run)
    groups = list(by_recipe.values())
    names = [_common_name([run.name for run in runs]) for runs in groups]
    return [
        RunGroup(name if names.count(name) == 1 else runs[0].name, tuple(runs))
        for name, runs in zip(names, groups, strict=True)
    ]


def best_first(summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """Returns runs by the headline metric of the first, the best first; runs that differ in the seed alone together.

    Groups are ordered by the means of their runs; those of unfinished runs, whose metrics may be those of another
    split, and those of which it is not known come last.
    """
    if not summaries:
        return []
    headline = summaries[0].info.metrics[0]
    sign = -1 if headline.better == "higher" else 1

    def place(group: RunGroup) -> tuple[bool, bool, float]:
        mean = group.sample(headline.name).mean
        return any(run.info.status != "finished" for run in group.runs), math.isnan(mean), sign * mean

    return [run for group in sorted(group_runs(summaries), key=place) for run in group.runs]


def find_baseline(groups: Sequence[RunGroup], name: str) -> RunGroup:
    """Returns the group of a name, or that of a run of that name.

    Raises:
        UserError: There is none; the error names the nearest.
    """
    by_name = {run.name: group for group in groups for run in group.runs} | {group.name: group for group in groups}
    return by_name[one_of("--baseline", name, by_name)]


def without_seed(config_yaml: str) -> str:
    """Returns the text of a run's config without what each run of a group has of its own in the section ``train``.

    That is its seed, and the place of its checkpoints, where several runs are given one outside of their folders.
    """
    section, kept = "", []
    for line in config_yaml.splitlines():
        if not line.startswith((" ", "#")):
            section = line
        if not (section.startswith("train:") and line.startswith(_OWN_SETTINGS)):
            kept.append(line)
    return "\n".join(kept)


def _common_name(names: Sequence[str]) -> str:
    """Returns what names begin with, without a part such as ``-seed`` or ``/`` before what differs.

    Names that say nothing but the seed, as those of a sweep over it alone, have ``run`` in common.
    """
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("0123456789").rstrip(_BETWEEN)
    return common.removesuffix("seed").rstrip(_BETWEEN) or ("run" if common else names[0])
