"""The table and the plot of a figure or a table of a paper, made of the runs that have finished."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distembed.base.errors import RunError
from distembed.base.files import write_json, write_text
from distembed.reports.comparison import (
    RunGroup,
    difference_text,
    format_number,
    reported_metrics,
    sample_text,
)
from distembed.reports.pages import colour, dashes, render_svg
from distembed.reports.report import print_table, write_run_report
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.run_folder.folder import holds_run
from distembed.training.run_folder.record import RunInfo, RunRecord, RunSummary
from distembed.training.sweeps.papers import Item
from distembed.training.sweeps.sweep import SWEEP_REPORT, PlannedRun

if TYPE_CHECKING:
    from rich.console import Console

TABLE, PLOT, RESULTS = "table.md", "plot.svg", "results.json"


@dataclass(frozen=True)
class Reproduced:
    """The finished runs of an item, by variant in the item's order."""

    item: Item
    groups: Mapping[str, RunGroup]

    @classmethod
    def read(cls, item: Item, runs: Sequence[PlannedRun]) -> "Reproduced":
        """Reads the runs that have finished; variants without any are left out.

        Raises:
            RunError: Runs of a variant were trained on datasets whose ids differ.
        """
        recipes = dict.fromkeys(run.recipe for run in runs)  # in the order of the variants
        finished = {
            name: [run for run in runs if run.recipe == recipe and _is_finished(run)]
            for name, recipe in zip(item.variants, recipes, strict=True)
        }
        groups = {
            name: RunGroup(name, tuple(RunSummary.from_record(RunRecord.read(run.folder), run.name) for run in own))
            for name, own in finished.items()
            if own
        }
        for name, group in groups.items():
            if len({run.info.id_fingerprint for run in group.runs}) > 1:
                folders = ", ".join(str(run.path) for run in group.runs)
                raise RunError(
                    f"the runs of {name!r} were trained on different datasets, so that their mean says nothing: "
                    f"{folders}. Remove the runs of one dataset."
                )
        return cls(item, groups)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the headings and the cells: means and standard deviations over seeds, and the paper's figures.

        The difference of the first metric is to the variant that ``of`` names, in brackets in standard errors.
        """
        runs = [run for group in self.groups.values() for run in group.runs]
        known = {metric.name: metric for metric in reported_metrics(runs)}
        metrics = [known.get(name, ReportedMetric(name, name)) for name in self.item.metrics]
        headings = ["variant", "seeds", "parameters", "in tables"]
        first = metrics[0]
        headings += [*(metric.heading for metric in metrics), f"{first.heading}, difference"]
        has_reported = any(variant.reported for variant in self.item.variants.values())
        headings += ["paper"] if has_reported else []
        rows = []
        for name, group in self.groups.items():
            base = self.groups.get(self.item.variants[name].of or "")
            rows.append(
                [
                    name,
                    str(group.num_seeds),
                    format_number(group.runs[0].info.parameters, ",.0f"),
                    format_number(group.runs[0].info.embedding_parameters, ",.0f"),
                    *(sample_text(group.sample(metric.name), metric.number_format) for metric in metrics),
                    ""
                    if base is None
                    else difference_text(group.sample(first.name), base.sample(first.name), first.number_format),
                    *([self.item.variants[name].reported] if has_reported else []),
                ]
            )
        return headings, rows

    def results(self) -> list[dict[str, object]]:
        """Returns each variant's metrics by seed."""
        return [
            {
                "variant": name,
                "seeds": [run.info.seed for run in group.runs],
                "parameters": group.runs[0].info.parameters,
                "parameters_in_tables": group.runs[0].info.embedding_parameters,
                **{metric: [run.metric(metric) for run in group.runs] for metric in self.item.metrics},
            }
            for name, group in self.groups.items()
        ]

    def plot(self) -> str:
        """Returns the plot as SVG: means with standard deviations over seeds, a mark or a curve for each variant."""
        draw = {"variant": self._draw_variants, "parameters": self._draw_parameters, "rows": self._draw_curves}

        def draw_axes(figure: Figure) -> None:
            axes = figure.add_subplot()
            draw[self.item.plot.x](axes)

        height = 1.2 + 0.28 * len(self.groups) if self.item.plot.x == "variant" else 4.2
        return render_svg(draw_axes, (7.5, height))

    def _draw_variants(self, axes: Axes) -> None:
        for number, (name, mean, deviation) in enumerate(self._points()):
            axes.errorbar([mean], [name], xerr=[deviation], fmt="o", capsize=3, color=colour(number))
        axes.invert_yaxis()
        axes.set_xlabel(self.item.plot.y)

    def _draw_parameters(self, axes: Axes) -> None:
        for number, (name, mean, deviation) in enumerate(self._points()):
            x = self.groups[name].runs[0].info.embedding_parameters
            axes.errorbar([x], [mean], yerr=[deviation], fmt="o", capsize=3, color=colour(number))
            beside: Any = {"xytext": (6, 3), "textcoords": "offset points", "fontsize": 8, "color": colour(number)}
            axes.annotate(name, (x, mean), **beside)
        axes.set_xscale("log")
        axes.set_xlabel("parameters in tables")
        axes.set_ylabel(self.item.plot.y)

    def _draw_curves(self, axes: Axes) -> None:
        for number, (name, group) in enumerate(self.groups.items()):
            values: dict[float, list[float]] = {}
            for run in group.runs:
                for line in RunRecord.read(run.path).validation_evals():
                    values.setdefault(line.metric("samples"), []).append(line.metric(self.item.plot.y))
            means = [statistics.fmean(at) for at in values.values()]
            spreads = [statistics.pstdev(at) for at in values.values()]
            low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
            axes.plot([*values], means, color=colour(number), dashes=dashes(number), label=name)
            axes.fill_between([*values], low, high, color=colour(number), alpha=0.15, linewidth=0)
        axes.set_xlabel("rows read")
        axes.set_ylabel(f"validation {self.item.plot.y}")
        axes.legend(fontsize=8)

    def _points(self) -> list[tuple[str, float, float]]:
        """Returns each variant's name, and the mean and the deviation of the plotted metric."""
        samples = {name: group.sample(self.item.plot.y) for name, group in self.groups.items()}
        return [(name, own.mean, own.standard_deviation if own.number > 1 else 0.0) for name, own in samples.items()]


def report_item(
    item: Item, runs: Sequence[PlannedRun], files: Mapping[str, str], folder: Path, console: "Console"
) -> None:
    """Writes the table, the plot, the values and the report of an item into its folder, and prints the table.

    Nothing is written before the first run has finished.

    Args:
        item: The item.
        runs: Its runs, finished or not.
        files: SHA-256 of each raw file of its dataset.
        folder: Its folder.
        console: Where the table is printed.
    """
    found = Reproduced.read(item, runs)
    if not found.groups:
        return
    headings, rows = found.table()
    lines = [headings, ["---"] * len(headings), *rows]
    write_text(folder / TABLE, "".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    write_text(folder / PLOT, found.plot())
    write_json(folder / RESULTS, {"files": files, "variants": found.results()})
    write_run_report([run.path for group in found.groups.values() for run in group.runs], folder / SWEEP_REPORT)
    print_table(headings, rows, console)
    for text in filter(None, (item.reported, item.remark)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    written = ", ".join(str(folder / name) for name in (TABLE, PLOT, RESULTS, SWEEP_REPORT))
    console.print(written, markup=False, highlight=False, soft_wrap=True)


def _is_finished(run: PlannedRun) -> bool:
    return holds_run(run.folder) and RunInfo.read(run.folder / "run.json").status == "finished"
