"""The metrics of a task as reports show them; a run records them, so that runs of any task are compared."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ReportedMetric:
    """A metric of an evaluation.

    Attributes:
        name: Its name in the evaluation.
        heading: Text above its column.
        number_format: Format of its value, for example ``.4f``.
        better: Whether the ``higher`` or the ``lower`` value is better; None where neither is.
        in_terminal: Whether the narrower table in a terminal has it too.
    """

    name: str
    heading: str
    number_format: str = ".4f"
    better: Literal["higher", "lower"] | None = None
    in_terminal: bool = True

    @property
    def label(self) -> str:
        """The label of the metric in a task of several, such as ``click`` of ``click.auc``; empty in other tasks."""
        return self.name.rpartition(".")[0]

    def of_same_label(self, kind: str, metrics: Sequence["ReportedMetric"]) -> "ReportedMetric | None":
        """Returns the metric of a kind, such as ``logloss``, of this metric's label; None where there is none."""
        name = f"{self.label}.{kind}" if self.label else kind
        return next((metric for metric in metrics if metric.name == name), None)


CLICK_METRICS = (
    ReportedMetric("auc", "AUC", better="higher"),
    ReportedMetric("logloss", "logloss", better="lower"),
    ReportedMetric("normalized_entropy", "normalised entropy", better="lower", in_terminal=False),
    ReportedMetric("calibration", "calibration", ".3f", in_terminal=False),
)
"""The metrics of clicks, and of runs that record none."""


GROUPED_METRICS = (
    ReportedMetric("gauc", "GAUC", better="higher"),
    ReportedMetric("gauc_groups", "groups of GAUC", ",.0f", in_terminal=False),
    ReportedMetric("gauc_rows", "rows of GAUC", ",.0f", in_terminal=False),
)
"""The metrics of clicks within groups of rows."""


def headline_first(metrics: Sequence[ReportedMetric], headline: str | None) -> tuple[ReportedMetric, ...]:
    """Returns metrics with the headline metric first, and the rest in their order; unchanged for None."""
    return tuple(sorted(metrics, key=lambda metric: headline is not None and metric.name != headline))


def ranking_metric_names(kinds: Sequence[str], cutoffs: Sequence[int], among: int | None = None) -> list[str]:
    """Returns the names of ranking metrics, the largest cutoff first: ``ndcg@10``, or ``ndcg@10_of_101`` of 101 items.

    ``mrr`` has no cutoff. ``cutoffs`` are in rising order.
    """
    suffix = "" if among is None else f"_of_{among}"
    names = [kind if kind == "mrr" else f"{kind}@{k}" for k in reversed(cutoffs) for kind in kinds]
    return [f"{name}{suffix}" for name in dict.fromkeys(names)]


def parse_metrics(values: Any) -> tuple[ReportedMetric, ...]:
    """Returns the metrics that a run recorded as plain values, without damaged ones; click metrics if none is left."""
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
    return tuple(ReportedMetric(**metric) for metric in listed if _is_whole(metric)) or CLICK_METRICS


def _is_whole(values: Any) -> bool:
    """Returns whether plain values have every field of a ReportedMetric, and a format that formats a number."""
    if not isinstance(values, Mapping) or set(values) != set(ReportedMetric.__dataclass_fields__):
        return False
    texts = values["name"], values["heading"], values["number_format"]
    if not all(isinstance(text, str) for text in texts) or values["better"] not in ("higher", "lower", None):
        return False
    try:
        string.Formatter().format_field(0.5, values["number_format"])
    except ValueError:
        return False
    return isinstance(values["in_terminal"], bool)
