"""The statistics of a dataset, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distembed.files import finite

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""The quantiles of a column of numbers that are said."""
TOP_SIZES = (1, 10, 100, 1000)
"""Of how many of the commonest ids the share of all is said."""


@dataclass(frozen=True)
class RowsStatistics:
    """Some rows: of a split, or of a part of it.

    Attributes:
        num_rows: Number of rows.
        label_rate: Mean of the label, by the rows' weights; None without rows or labels.
    """

    num_rows: int
    label_rate: float | None


@dataclass(frozen=True)
class CommonId:
    """One of the commonest ids of a feature in training.

    Attributes:
        id: The id.
        value: What it stands for, as text; None where the dataset does not say.
        count: How often training rows have it.
        label_rate: Mean label of the rows that have it, each as often as they have it; None without labels.
    """

    id: int
    value: str | None
    count: int
    label_rate: float | None


@dataclass(frozen=True)
class IdsOfSplit:
    """The ids of one feature in one split, as shares of all its ids there; of a list, each of its ids counts.

    Attributes:
        num_ids: Number of ids, with repetitions.
        missing: Share of those that stand for a missing value; of lists, the share of rows whose list is empty.
        out_of_vocabulary: Share of those that stand for values without an id of their own.
        unseen: Share of ids, but for these two, that no training row has.
        distinct_unseen: Number of distinct ids that no training row has.
    """

    num_ids: int
    missing: float
    out_of_vocabulary: float
    unseen: float
    distinct_unseen: int


@dataclass(frozen=True)
class FeatureStatistics:
    """A categorical feature.

    Attributes:
        num_embeddings: Number of ids of its table.
        cardinality: Number of distinct ids in training, but for those of missing and unknown values.
        top_shares: Share of all ids in training that the 1, 10, 100 and 1000 commonest have, but for those two.
        entropy_bits: Entropy of all ids in training; 2 to its power is a number of equally common ids.
        zipf_exponent: Slope s of the counts, by rank to the power -s; None for fewer than three ids.
        counts_by_rank: Counts of the ids at ranks 1, 2, 4, 8 and so on, the commonest first.
        commonest: The commonest ids in training.
        splits: The ids by split.
        sampled: Share of the ids that were counted; always 1.
    """

    num_embeddings: int
    cardinality: int
    top_shares: Mapping[int, float]
    entropy_bits: float
    zipf_exponent: float | None
    counts_by_rank: Mapping[int, int]
    commonest: tuple[CommonId, ...]
    splits: Mapping[str, IdsOfSplit]
    sampled: float = 1.0


@dataclass(frozen=True)
class NumbersOfSplit:
    """A column of numbers in one split; NaN where there is none.

    Attributes:
        missing: Share of rows without a number.
        mean: Mean of the numbers.
        deviation: Their standard deviation.
        quantiles: Those of :data:`QUANTILES`.
        every: Quantiles, but the first and last, are of one row in so many; 1 for all.
    """

    missing: float
    mean: float
    deviation: float
    quantiles: tuple[float, ...]
    every: int


@dataclass(frozen=True)
class EqualRows:
    """Rows that are equal in all columns, times left out.

    Attributes:
        repeated: Number of rows that are equal to one before them, in any split.
        in_training: Share of the rows of each other split that are equal to a training row.
        sampled: Share of all distinct rows that were compared; below 1, numbers are estimates.
    """

    repeated: int
    in_training: Mapping[str, float]
    sampled: float


@dataclass(frozen=True)
class DatasetStatistics:
    """A dataset.

    Attributes:
        dataset: Its path or URL.
        train: Name of the split that others are compared with.
        splits: Rows by split.
        periods: Rows by day (UTC) where rows have times; else by tenths of each split, in the order of its rows.
        features: Categorical features by name.
        columns: Columns of numbers by name, and by split.
        equal_rows: Rows that are equal.
        is_weighted: Whether rows have weights, by which label rates of rows are means; those of ids are not.
        filled: Columns of numbers whose missing values were replaced when the dataset was prepared, so that how many
            there were is not known.
    """

    dataset: str
    train: str
    splits: Mapping[str, RowsStatistics]
    periods: Mapping[str, RowsStatistics]
    features: Mapping[str, FeatureStatistics]
    columns: Mapping[str, Mapping[str, NumbersOfSplit]]
    equal_rows: EqualRows
    is_weighted: bool
    filled: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns all of it in plain values; numbers that JSON cannot hold are null."""
        value: dict[str, Any] = finite(dataclasses.asdict(self))
        return value
