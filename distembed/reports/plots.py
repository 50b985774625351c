"""The figures of a report of runs, as SVG text.

Runs that differ in their seed alone have one colour; where there are more than there are colours, other dashes too.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from distembed.reports.pages import PAGE_COLOUR, colour, dashes, render_svg
from distembed.training.run_folder.record import MetricsLine, RunRecord, RunSummary

MOST_POINTS = 600
"""Number of points of a curve that are drawn at most: a long run would make a page of many megabytes."""


MOST_MARKS = 40
"""Number of evaluations of a run that are marked at most; between more, marks would cover the curve."""


@dataclass(frozen=True)
class ShownRun:
    """A run as the figures show it."""

    record: RunRecord  # the contents of its folder
    summary: RunSummary  # the run, summed up
    number: int  # number of the runs that differ from it in their seed alone, from 0, by which it has its colour
    label: str  # name of these runs in figures

    @property
    def style(self) -> dict[str, Any]:
        """The colour and the dashes of its lines."""
        return {"color": colour(self.number), "dashes": dashes(self.number)}


def loss_curve(runs: Sequence[ShownRun]) -> str:
    """Draws the loss of the training windows (thin) and of the evaluations (marked) against rows read.

    The scale leaves out each run's first tenth, whose high losses would flatten the rest.
    """

    def scale(axes: Axes) -> None:
        records = [run.record for run in runs]
        late = [line.metric("loss") for run in records for line in run.train[math.ceil(len(run.train) / 10) :]]
        late += [line.metric("logloss") for run in records for line in run.validation_evals()]
        late = [loss for loss in late if not math.isnan(loss)]
        if len(late) > 1 and max(late) > min(late):
            margin = (max(late) - min(late)) / 10
            axes.set_ylim(min(late) - margin, min(axes.get_ylim()[1], max(late) + 3 * margin))

    has_logloss = any("logloss" in line.metrics for run in runs for line in run.record.evals)
    return _curves(runs, "logloss" if has_logloss else "loss", "loss", "logloss", scale)


def metric_curve(runs: Sequence[ShownRun], metric: str, label: str) -> str:
    """Draws a metric of the training windows (thin) and of the evaluations (marked) against rows read."""
    return _curves(runs, label, metric, metric)


def throughput_curve(runs: Sequence[ShownRun]) -> str:
    """Draws the rows a second of the training windows against rows read."""

    def draw(axes: Axes) -> None:
        for run in runs:
            _plot_windows(axes, run, "samples_per_second")
        _label_rows(axes, "rows a second")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        top = axes.dataLim.y1
        axes.set_ylim(0, 1.05 * top if math.isfinite(top) else None)

    return _render(draw)


def calibration_diagram(runs: Sequence[ShownRun]) -> str:
    """Draws mean label against mean prediction by bins of rows; a calibrated model lies on the diagonal."""

    def draw(axes: Axes) -> None:
        highest = 0.0
        for run in runs:
            evaluation = run.record.evaluation
            bins = evaluation.calibration_bins if evaluation else ()
            points = [(bin_.predicted, bin_.observed) for bin_ in bins]
            predicted, observed = zip(*points, strict=True) if points else ((), ())
            axes.plot(predicted, observed, marker="o", markersize=4, **run.style)
            highest = max([highest, *(value for point in points for value in point if not math.isnan(value))])
        end = min(1.0, highest * 1.05) or 1.0
        axes.plot([0, end], [0, end], color=PAGE_COLOUR, alpha=0.4, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
        axes.set_xlabel("predicted rate")
        axes.set_ylabel("observed rate")

    return _render(draw)


def parameters_against(runs: Sequence[ShownRun], metric: str, label: str) -> str:
    """Draws a metric (upwards) against the number of parameters (logarithmic), a large labelled point for each group.

    It is the mean of the runs that differ in their seed alone; these are small points where there are several.
    """
    points = [(run, run.summary.info.parameters, run.summary.metric(metric)) for run in runs]
    drawn_points = [(run, x, y) for run, x, y in points if x > 0 and not math.isnan(y)]
    by_number: dict[int, list[tuple[ShownRun, float, float]]] = {}
    for point in drawn_points:
        by_number.setdefault(point[0].number, []).append(point)

    def draw(axes: Axes) -> None:
        for run, x, y in drawn_points:
            if len(by_number[run.number]) > 1:
                axes.plot([x], [y], marker="o", markersize=4, linestyle="", color=colour(run.number), alpha=0.55)
        for number, group_points in by_number.items():
            mean = group_points[0][1], statistics.fmean(y for *_, y in group_points)
            axes.plot(*([value] for value in mean), marker="o", markersize=8, linestyle="", color=colour(number))
            beside: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(group_points[0][0].label, mean, fontsize=8, color=colour(number), **beside)
        axes.set_xscale("log")
        axes.margins(y=0.15)
        if drawn_points:
            numbers = [x for _, x, _ in drawn_points]
            axes.set_xlim(min(numbers) / 1.6, max(numbers) * 1.6)  # wide enough for a tick or two
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("parameters")
        axes.set_ylabel(label)

    return _render(draw)


def _curves(
    runs: Sequence[ShownRun],
    label: str,
    train_metric: str,
    eval_metric: str,
    scale: Callable[[Axes], None] = lambda axes: None,
) -> str:
    """Draws a metric of the training windows (thin) and one of the evaluations (marked) against rows read.

    ``scale`` adjusts the axes after all is drawn. At most :data:`MOST_MARKS` evaluations are marked, the last included.
    """

    def draw(axes: Axes) -> None:
        for run in runs:
            evals = run.record.validation_evals()
            alpha = 0.35 if evals else 1.0
            _plot_windows(axes, run, train_metric, alpha=alpha, linewidth=0.8)
            marks: dict[str, Any] = {
                "marker": "o",
                "markersize": 5.5,
                "markeredgecolor": PAGE_COLOUR,
                "markeredgewidth": 0.7,
            }
            rows, values = _series(evals, eval_metric)
            every = max(1, math.ceil(len(rows) / MOST_MARKS))
            axes.plot(rows, values, zorder=3, markevery=((len(rows) - 1) % every, every), **marks, **run.style)
        _label_rows(axes, label)
        scale(axes)

    return _render(draw)


def _plot_windows(axes: Axes, run: ShownRun, metric: str, **look: Any) -> None:
    """Draws a metric of the training windows; a point where there is a single window, whose line has no length."""
    rows, values = _series(run.record.train, metric)
    axes.plot(rows, values, marker="." if len(rows) == 1 else None, **look, **run.style)


def _series(lines: Sequence[MetricsLine], metric: str) -> tuple[list[float], list[float]]:
    """Returns rows read and values of at most :data:`MOST_POINTS` lines, evenly spaced, the last one among them."""
    stride = max(1, math.ceil(len(lines) / MOST_POINTS))
    shown = lines[::-1][::stride][::-1]
    return [line.metric("samples") for line in shown], [line.metric(metric) for line in shown]


def _label_rows(axes: Axes, label: str) -> None:
    """Labels the axes of a figure against rows read."""
    axes.set_xlabel("rows read")
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _render(draw: Callable[[Axes], None]) -> str:
    """Returns the SVG of a figure that ``draw`` fills; empty where it draws no point."""
    return render_svg(lambda figure: draw(figure.add_subplot()), (5.6, 3.5))
