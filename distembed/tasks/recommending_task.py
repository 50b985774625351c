"""The base of tasks that rank all items for each query: metrics, coverage, and recommended items as predictions."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from distembed.tasks.base import Outputs, Rows, Sums, Task
from distembed.tasks.ranking_metrics import RankingMetrics, coverage, coverage_metric
from distembed.tasks.recommendations import RECOMMENDATIONS, id_columns, prediction_columns
from distembed.tasks.recommending_config import RecommendingConfig
from distembed.tasks.reported_metrics import ReportedMetric, headline_first
from distembed.tasks.seen_items import seen_items_rule


class RecommendingTask(Task):
    """Ranks all items for each query of an evaluation; predictions are the best items.

    Args:
        settings: The section of the task; the first two of its kinds of metrics are shown in the terminal.
        more_metrics: Reported metrics of the task beside them.
        has_users: Whether each query has a user, who is named in predictions.
    """

    prediction_outputs = ("users", "best_scores")

    def __init__(
        self,
        settings: RecommendingConfig,
        more_metrics: Sequence[ReportedMetric] = (),
        has_users: bool = True,
    ) -> None:
        self._settings = settings
        self._metrics = RankingMetrics(tuple(settings.cutoffs))
        self._num_best = max(settings.cutoffs)
        shown = tuple(f"{kind}@{self._num_best}" for kind in settings.kinds[:2])
        reported = (*self._metrics.reported(settings.kinds, shown), *more_metrics, coverage_metric(self._num_best))
        self.reported_metrics = headline_first(reported, settings.headline)
        first = 0 if has_users else 1
        self.prediction_columns = prediction_columns(self._num_best)[first:]
        self.id_columns = id_columns(self._num_best)[first:]
        self._row_name = "users" if has_users else "rows"
        self._unknown: Mapping[str, int] = {}  # numbers of pairs that no query of an evaluation has
        self.outputs = ("metrics", "excluded_targets", *RECOMMENDATIONS[first:])

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """The number of items that may be ranked."""

    @property
    def excludes_seen(self) -> bool:
        """Whether items that a user has are left out."""
        return self._settings.excludes_seen

    def metrics(self, rows: Rows) -> dict[str, float]:
        """Returns the number of queries, the rule of seen items, the means of the metrics, and the coverage.

        A task whose queries are users adds ``unknown_targets`` and ``unknown_users``: the pairs of the split that was
        evaluated last whose item or user is missing or out of the vocabulary.
        """
        excluded = rows["excluded_targets"]
        counts = {"rows": len(excluded), "exclude_seen": self.excludes_seen, "excluded_targets": int(excluded.sum())}
        shown = {f"coverage@{self._num_best}": coverage(rows["best"], self.num_candidates)}
        return counts | {**self._unknown} | self._metrics.means(rows["metrics"]) | shown

    def predictions(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """Returns the best items of each query and their scores; -1 and -inf where there are fewer."""
        best, scores = (rows[name].reshape(-1, self._num_best).T for name in ("best", "best_scores"))
        users = [rows["users"]] if "users" in self.outputs else []
        return dict(zip(self.prediction_columns, [*users, *best, *scores], strict=True))

    def training_sums(self, outputs: Outputs) -> Outputs:
        """Returns nothing: the loss says how training goes."""
        return {}

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        return {}

    def describe(self, metrics: Mapping[str, Any]) -> str:
        shown = [
            f"{metric.heading} {metrics[metric.name]:.4f}" for metric in self.reported_metrics if metric.in_terminal
        ]
        notes = f"{metrics['rows']:,} {self._row_name}; {seen_items_rule(self.excludes_seen)}{self._remarks(metrics)}"
        return f"{'  '.join(shown)}  ({notes})"

    def _remarks(self, metrics: Mapping[str, Any]) -> str:
        """Returns further notes of an evaluation's line, each after a semicolon."""
        return ""

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return ""
