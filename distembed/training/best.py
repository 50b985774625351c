"""The best evaluation of a run so far: it decides which checkpoint is kept, and when training stops.

An evaluation is better than all before it where its metric improves by more than ``train.min_improvement`` (other
libraries' ``min_delta``); training stops after ``train.stop_after_evaluations`` in a row that are not (``patience``).
An evaluation whose metric is not defined (the AUC of one class) is passed over: it counts neither way.
The best evaluation is part of the training state, so that a resumed run stops where it would have stopped.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distembed.base.errors import UserError
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.train_config import TrainConfig


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation on the validation split until now.

    Attributes:
        step: Number of steps until it; None before any.
        value: Its headline metric; None before any.
        last_step: Number of steps until the last evaluation; 0 before any.
        evaluations_since: Number of evaluations since the best one whose metric is defined.
    """

    step: int | None = None
    value: float | None = None
    last_step: int = 0
    evaluations_since: int = 0

    def after(self, step: int, value: float, metric: ReportedMetric, min_improvement: float) -> "BestEvaluation":
        """Returns the best evaluation after a further one, which counts once, and not where its value is not finite.

        Args:
            step: Number of steps until the evaluation.
            value: Its headline metric.
            metric: The headline metric; it says whether higher or lower values are better.
            min_improvement: The difference by which a better value exceeds the best one.
        """
        if step <= self.last_step:
            return self
        if not math.isfinite(value):
            return dataclasses.replace(self, last_step=step)
        if self._is_better(value, metric.better, min_improvement):
            return BestEvaluation(step, value, last_step=step)
        return dataclasses.replace(self, last_step=step, evaluations_since=self.evaluations_since + 1)

    def _is_better(self, value: float, better: Literal["higher", "lower"] | None, min_improvement: float) -> bool:
        if self.value is None:
            return True
        improvement = value - self.value if better == "higher" else self.value - value
        return improvement > min_improvement

    def is_reason_to_stop(self, train: TrainConfig) -> bool:
        """Returns whether training stops, since none of the last evaluations was better."""
        if self.step is None or train.stop_after_evaluations is None:
            return False
        return self.evaluations_since >= train.stop_after_evaluations

    def reason_to_stop(self, metric: ReportedMetric) -> str:
        """Returns why training stops, in words."""
        return (
            f"stopped: {self.evaluations_since} evaluations in a row had no better {metric.name} than step {self.step}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which :meth:`from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> "BestEvaluation":
        """Returns the evaluation of :meth:`to_json`; one before any evaluation where a run has recorded none."""
        return cls() if values is None else cls(**values)


def require_comparable(metric: ReportedMetric) -> None:
    """Refuses a headline metric without a better direction."""
    if metric.better is None:
        raise UserError(
            f"train.keep_best and train.stop_after_evaluations compare evaluations by {metric.name!r}, of which "
            "neither higher nor lower values are better; leave both out for this task."
        )
