"""Statistics of a dataset: labels over time, ids and their skew, numbers, missing values, unseen ids and equal rows.

A dataset is read once, row group by row group, and memory does not grow with its rows: counts of ids that exceed it are
in temporary files. Counts are exact. Quantiles of long columns are estimated from every k-th row, and the number
of equal rows among many rows from a share of their hashes; the statistics say so.
"""

from distembed.reports.statistics.dataset import dataset_statistics
from distembed.reports.statistics.values import DatasetStatistics

__all__ = ["DatasetStatistics", "dataset_statistics"]
