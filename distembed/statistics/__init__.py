"""What the rows of a dataset are like: labels over time, ids and their skew, numbers, missing, unseen and equal rows.

A dataset is read once, row group by row group, and memory does not grow with its rows. Counts are exact. What is
estimated says so: quantiles of long columns (from every k-th row), equal rows of many (from a share of all hashes of
rows), and features whose counts would not fit the memory (from a share of the ids).
"""

from distembed.statistics.dataset import dataset_statistics
from distembed.statistics.values import DatasetStatistics

__all__ = ["DatasetStatistics", "dataset_statistics"]
