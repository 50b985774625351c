"""The figures of a report of runs, as SVG text."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from distembed.runs.pages import PAGE_COLOUR, colour, render_svg
from distembed.runs.record import MetricsLine, RunRecord, RunSummary

MOST_POINTS = 600
"""Number of points of a curve that are drawn at most: a long run would make a page of many megabytes."""


def loss_curve(runs: Mapping[str, RunRecord]) -> str:
    """Draws the loss of the training windows (thin) and of the evaluations (marked) against rows read.

    The scale leaves out each run's first tenth, beside whose losses the rest would be a flat line.
    """

    def scale(axes: Axes) -> None:
        late = [line.metric("loss") for run in runs.values() for line in run.train[math.ceil(len(run.train) / 10) :]]
        late += [line.metric("logloss") for run in runs.values() for line in run.validation_evals()]
        late = [loss for loss in late if not math.isnan(loss)]
        if len(late) > 1 and max(late) > min(late):
            margin = (max(late) - min(late)) / 10
            axes.set_ylim(min(late) - margin, min(axes.get_ylim()[1], max(late) + 3 * margin))

    has_logloss = any("logloss" in line.metrics for run in runs.values() for line in run.evals)
    return _curves(runs, "logloss" if has_logloss else "loss", "loss", "logloss", scale)


def metric_curve(runs: Mapping[str, RunRecord], metric: str, label: str) -> str:
    """Draws a metric of the training windows (thin) and of the evaluations (marked) against rows read."""
    return _curves(runs, label, metric, metric)


def throughput_curve(runs: Mapping[str, RunRecord]) -> str:
    """Draws the rows a second of the training windows against rows read."""

    def draw(axes: Axes) -> None:
        for index, run in enumerate(runs.values()):
            axes.plot(*_series(run.train, "samples_per_second"), color=colour(index))
        _label_rows(axes, "rows a second")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(bottom=0)

    return _render(draw)


def calibration_diagram(runs: Mapping[str, RunRecord]) -> str:
    """Draws mean label against mean prediction by bins of rows; a calibrated model lies on the diagonal."""

    def draw(axes: Axes) -> None:
        highest = 0.0
        for index, run in enumerate(runs.values()):
            bins = run.evaluation.calibration_bins if run.evaluation else ()
            points = [(each.predicted, each.observed) for each in bins]
            predicted, observed = zip(*points, strict=True) if points else ((), ())
            axes.plot(predicted, observed, marker="o", markersize=4, color=colour(index))
            highest = max([highest, *(value for point in points for value in point if not math.isnan(value))])
        end = min(1.0, highest * 1.05) or 1.0
        axes.plot([0, end], [0, end], color=PAGE_COLOUR, alpha=0.4, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
        axes.set_xlabel("predicted rate")
        axes.set_ylabel("observed rate")

    return _render(draw)


def parameters_against(summaries: Sequence[RunSummary], metric: str, label: str) -> str:
    """Draws one point a run: how much worse a metric is for how many parameters fewer.

    Args:
        summaries: The runs.
        metric: Name of the metric.
        label: Text beside its axis.
    """

    def draw(axes: Axes) -> None:
        for index, run in enumerate(summaries):
            place = [run.info.parameters], [run.metric(metric)]
            axes.plot(*place, marker="o", markersize=8, linestyle="", color=colour(index))
        axes.set_xscale("log")
        axes.margins(y=0.15)
        known = [run.info.parameters for run in summaries if run.info.parameters > 0]
        if known:
            axes.set_xlim(min(known) / 1.6, max(known) * 1.6)  # wide enough for a tick or two
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("parameters")
        axes.set_ylabel(label)

    return _render(draw)


def _curves(
    runs: Mapping[str, RunRecord],
    label: str,
    train_metric: str,
    eval_metric: str,
    scale: Callable[[Axes], None] = lambda axes: None,
) -> str:
    """Draws a metric of training and one of the evaluations against rows read, in a colour for each run.

    Args:
        runs: Name -> run.
        label: Text beside the vertical axis.
        train_metric: Name of the metric in training windows.
        eval_metric: Name of the metric in evaluations.
        scale: Sets the limits of the axes once everything is drawn.
    """

    def draw(axes: Axes) -> None:
        for index, run in enumerate(runs.values()):
            evals = run.validation_evals()
            alpha = 0.45 if evals else 1.0
            axes.plot(*_series(run.train, train_metric), color=colour(index), alpha=alpha, linewidth=1)
            axes.plot(*_series(evals, eval_metric), color=colour(index), marker="o", markersize=4)
        _label_rows(axes, label)
        scale(axes)

    return _render(draw)


def _series(lines: Sequence[MetricsLine], metric: str) -> tuple[list[float], list[float]]:
    """Returns rows read and values of at most :data:`MOST_POINTS` lines, the last one among them."""
    stride = max(1, math.ceil(len(lines) / MOST_POINTS))
    shown = lines[::-1][::stride][::-1]
    return [line.metric("samples") for line in shown], [line.metric(metric) for line in shown]


def _label_rows(axes: Axes, label: str) -> None:
    """Labels the axes of a figure against rows read."""
    axes.set_xlabel("rows read")
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _render(draw: Callable[[Axes], None]) -> str:
    """Returns what is drawn as SVG text, which says so where there is nothing yet."""

    def draw_axes(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(axes)
        if not _has_points(axes):
            axes.text(0.5, 0.5, "nothing recorded yet", transform=axes.transAxes, ha="center", va="center", alpha=0.6)

    return render_svg(draw_axes, (5.6, 3.5))


def _has_points(axes: Axes) -> bool:
    """Returns whether anything but the dashed line below the others was drawn."""
    return any(_finite(line.get_xdata()) and _finite(line.get_ydata()) and line.get_zorder() > 1 for line in axes.lines)


def _finite(values: Any) -> bool:
    """Returns whether any of matplotlib's values is finite."""
    return any(math.isfinite(float(value)) for value in values)
