"""Metrics of rankings, from the rank of each relevant item: the number of items ahead of it.

For a query with R relevant items, h of them with a rank below k:

=========== ==================================================================================================
hr@k        1 if h > 0, else 0 (hit rate)
precision@k h / k
recall@k    h / R
ndcg@k      sum over the h items of 1 / log2(rank + 2), over the most that it can be, with min(k, R) items in front
mrr         1 / (1 + lowest rank)
coverage@k  share of all items that are among the best k of any query; see :func:`coverage`
=========== ==================================================================================================

A relevant item that is no candidate has no rank: it is a miss, and one of the R. Each metric is the mean over the
queries that have a relevant item (Järvelin, Kekäläinen, ACM TOIS 2002, for NDCG with a gain of 1; He et al., WWW 2017,
for HR@k). Where a target is ranked among drawn items only, the name tells their number: ``ndcg@10_of_101`` ranks a
target among 100 others, which says nothing of a ranking of all items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.tasks.catalogue import NOT_RANKED
from distembed.tasks.reported_metrics import ReportedMetric, ranking_metric_names

_HEADINGS = {"ndcg": "NDCG", "hr": "HR", "precision": "P", "recall": "recall", "mrr": "MRR", "coverage": "coverage"}


@dataclass(frozen=True)
class RankingMetrics:
    """The metrics of the module's table but coverage.

    Attributes:
        cutoffs: The numbers k, in rising order.
        among: Number of items that a target is ranked among, itself included; None for all.
    """

    cutoffs: tuple[int, ...] = (1, 5, 10)
    among: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics' names in the order of :meth:`by_query`."""
        at_cutoffs = [f"{kind}@{k}" for k in self.cutoffs for kind in ("hr", "precision", "recall", "ndcg")]
        return tuple(f"{name}{self._suffix}" for name in (*at_cutoffs, "mrr"))

    @property
    def _suffix(self) -> str:
        return "" if self.among is None else f"_of_{self.among}"

    def by_query(
        self, ranks: Int64[Tensor, " relevant"], lengths: Int64[Tensor, " queries"]
    ) -> Float[Tensor, "queries metrics"]:
        """Returns the metrics of each query; NaN for a query that has no relevant item.

        Args:
            ranks: Number of items ahead of each relevant item, query after query; ``NOT_RANKED`` for no candidate.
            lengths: Number of relevant items of each query.
        """
        queries = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        num_relevant, zeros = lengths.double(), torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
        is_ranked = ranks != NOT_RANKED
        gains = torch.where(is_ranked, 1 / (ranks + 2).double().log2(), 0.0)
        columns = []
        for cutoff in self.cutoffs:
            is_hit = (is_ranked & (ranks < cutoff)).double()
            hits = zeros.index_add(0, queries, is_hit)
            gain = zeros.index_add(0, queries, is_hit * gains)
            columns += [(hits > 0).double(), hits / cutoff, hits / num_relevant, gain / _most_gain(cutoff, lengths)]
        reciprocal = torch.where(is_ranked, 1 / (ranks + 1).double(), 0.0)
        columns.append(zeros.scatter_reduce(0, queries, reciprocal, "amax"))
        values = torch.stack(columns, 1)
        return values.masked_fill((lengths == 0).unsqueeze(1), torch.nan).float()

    def num_known(self, values: npt.NDArray[np.float32]) -> int:
        """Returns the number of queries that :meth:`means` averages: rows of ``[queries, metrics]`` without NaN."""
        return int(np.count_nonzero(~np.isnan(values[:, 0]))) if values.size else 0

    def means(self, values: npt.NDArray[np.float32]) -> dict[str, float]:
        """Returns each metric's mean over queries ``[queries, metrics]`` with a relevant item; NaN without any."""
        defined_values = (
            values[~np.isnan(values[:, 0])].astype(np.float64) if values.size else np.empty((0, len(self.names)))
        )
        means = defined_values.mean(0) if len(defined_values) else np.full(len(self.names), np.nan)
        return dict(zip(self.names, means.tolist(), strict=True))

    def reported(self, kinds: Sequence[str], in_terminal: Sequence[str] = ("ndcg@10", "hr@10")) -> list[ReportedMetric]:
        """Returns the reported metrics of kinds, for example ``ndcg`` and ``mrr``, the largest cutoff first."""
        suffix = "" if self.among is None else f" of {self.among}"
        return [
            ReportedMetric(
                f"{name}{self._suffix}", f"{_heading(name)}{suffix}", better="higher", in_terminal=name in in_terminal
            )
            for name in ranking_metric_names(kinds, self.cutoffs)
        ]


def coverage(best: npt.NDArray[Any], num_items: int) -> float:
    """Returns the share of ``num_items`` items that are among ``best``, the best k items of any query.

    An item may be in ``best``, of any shape, more than once; -1 is no item.
    """
    return np.count_nonzero(np.unique(best) >= 0) / num_items if num_items else float("nan")


def coverage_metric(k: int) -> ReportedMetric:
    """Returns the reported metric of the coverage at k."""
    return ReportedMetric(f"coverage@{k}", f"coverage@{k}", in_terminal=False)


def _most_gain(k: int, lengths: Int64[Tensor, " queries"]) -> Float[Tensor, " queries"]:
    """Returns the DCG of a perfect ranking: the sum of ``1 / log2(rank + 2)`` over the first min(k, length) ranks."""
    gains = 1 / torch.arange(2, k + 2, dtype=torch.float64, device=lengths.device).log2()
    return torch.cat([gains.new_zeros(1), gains.cumsum(0)])[lengths.clamp(max=k)]


def _heading(name: str) -> str:
    kind, _, k = name.partition("@")
    return f"{_HEADINGS[kind]}@{k}" if k else _HEADINGS[kind]
