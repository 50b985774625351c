"""The statistics of a dataset, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distembed.base.files import finite

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""The reported quantiles of a column of numbers."""
TOP_SIZES = (1, 10, 100, 1000)
"""Numbers of commonest ids whose share of all ids is reported."""


@dataclass(frozen=True)
class LabelStatistics:
    """One of several labels of some rows."""

    rate: float | None  # mean of the label, by the rows' weights; None where no row has it
    missing: int  # number of rows without it


@dataclass(frozen=True)
class RowsStatistics:
    """Some rows: of a split, or of a part of it."""

    num_rows: int
    label_rate: float | None  # mean of the only label, by the rows' weights; None without rows, or without one label
    labels: Mapping[str, LabelStatistics] = field(default_factory=dict)  # several labels, by name


@dataclass(frozen=True)
class CommonId:
    """One of the commonest ids of a feature in training."""

    id: int
    value: str | None  # the raw value as text; None where the dataset does not say
    count: int  # how often training rows have it
    label_rate: float | None  # mean label over the occurrences of the id; None without one label


@dataclass(frozen=True)
class IdsOfSplit:
    """Ids of one feature in one split. Shares are of all ids of the feature in the split; each id of a list counts."""

    num_ids: int  # number of ids, with repetitions
    missing: float  # share of ids of missing values; for lists, share of rows with an empty list
    out_of_vocabulary: float  # share of ids of values outside the vocabulary
    unseen: float  # share of ids, without these two, that no training row has
    distinct_unseen: int  # number of distinct ids that no training row has


@dataclass(frozen=True)
class FeatureStatistics:
    """Counts and shares of the ids of a categorical feature."""

    num_embeddings: int  # number of ids of its table
    cardinality: int  # number of distinct ids in training, without missing and unknown values
    # Share of the 1, 10, 100 and 1000 commonest ids in all ids in training, without missing and unknown values.
    top_shares: Mapping[int, float]
    entropy_bits: float  # entropy of all ids in training; 2 to its power is a number of equally common ids
    zipf_exponent: float | None  # slope s of the counts, by rank to the power -s; None for fewer than three ids
    counts_by_rank: Mapping[int, int]  # counts of the ids at ranks 1, 2, 4, 8 and so on, the commonest first
    commonest: tuple[CommonId, ...]
    splits: Mapping[str, IdsOfSplit]
    sampled: float = 1.0  # share of the ids that were counted; always 1


@dataclass(frozen=True)
class NumbersOfSplit:
    """A column of numbers in one split; NaN where there is none."""

    missing: float  # share of rows without a number
    mean: float
    deviation: float  # their standard deviation
    quantiles: tuple[float, ...]  # at :data:`QUANTILES`
    every: int  # inner quantiles are of every k-th row; k = 1: of all rows


@dataclass(frozen=True)
class EqualRows:
    """Rows that are equal in all columns, times left out."""

    repeated: int  # number of rows that are equal to one before them, in any split
    in_training: Mapping[str, float]  # share of the rows of each other split that are equal to a training row
    sampled: float  # share of all distinct rows that were compared; below 1, numbers are estimates


@dataclass(frozen=True)
class DatasetStatistics:
    """The statistics of a dataset: its rows, labels, features and numbers."""

    dataset: str  # its path or URL
    train: str  # name of the split that others are compared with
    splits: Mapping[str, RowsStatistics]  # rows by split
    # Rows by day (UTC) where rows have times; else by tenths of each split, in the order of its rows.
    periods: Mapping[str, RowsStatistics]
    features: Mapping[str, FeatureStatistics]  # categorical features by name
    columns: Mapping[str, Mapping[str, NumbersOfSplit]]  # columns of numbers by name, and by split
    equal_rows: EqualRows
    is_weighted: bool  # whether rows have weights, which weigh the label rates of rows, and not of ids
    # Columns of numbers whose missing values were replaced when the dataset was prepared, so that how many there were
    # is not known.
    filled: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of several labels; () where rows have one label or none."""
        return tuple(self.splits[self.train].labels)

    def as_json(self) -> dict[str, Any]:
        """Returns all of it in plain values; numbers that JSON cannot hold are null."""
        value: dict[str, Any] = finite(dataclasses.asdict(self))
        return value
