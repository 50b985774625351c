"""Weights of training rows by their age: half as much for each half-life between a row's time and the newest row's.

The weight of a row of time t, in a split whose newest row has the time T, is ::

    0.5 ** ((T - t) / half_life)            divided by its mean over the split

Rows with weights of their own count by them in this mean. The mean keeps the loss of a step about as large as without
ages, so that learning rates stay as they are, and cancels T: a given time in its place would change nothing.
Trade-off: the bytes of the whole split are read once before training, since checksums are of whole row groups.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups, too_many_unreadable

_SECONDS_A_DAY = 86_400.0
_LEAST_SHARE = 0.01  # a half-life of 1/288 of equal days; one time in the far future has less


@dataclass(frozen=True)
class AgeWeights:
    """How the rows of a split are weighted by their age.

    Attributes:
        time: The dataset's column of times, int64 seconds.
        half_life_days: Days after which a row weighs half.
        log_mean: The base-2 logarithm of the mean of ``2 ** (t / half_life)`` over the split.
        effective_rows: The number of rows of equal weight whose mean varies as much as the weighted mean of the
            split's rows, ``sum(w) ** 2 / sum(w ** 2)`` (Kish, Survey Sampling, 1965, section 11.7).
        unreadable: The problem of each row group whose times could not be read, by its name.
    """

    time: str
    half_life_days: float
    log_mean: float = 0.0
    effective_rows: float = 0.0
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def weights(self, times: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the weight of each row [N], given its time [N]."""
        return np.asarray(np.exp2(self._half_lives(times) - self.log_mean))

    def _half_lives(self, times: NDArray[np.int64]) -> NDArray[np.float64]:
        return times / (_SECONDS_A_DAY * self.half_life_days)

    @classmethod
    def of_split(
        cls, dataset_dir: str | os.PathLike[str], split: str, half_life_days: float, skip_unreadable: int
    ) -> AgeWeights:
        """Reads the times of all rows of a split, and the rows' own weights.

        Raises a UserError where the dataset has no times, for a row without a time, for more than ``skip_unreadable``
        row groups that cannot be read, and where the rows count as less than 1% of their count without ages.
        """
        folder = dataset_folder(dataset_dir)
        manifest = Manifest.load(folder)
        schema = manifest.schema
        if schema.time is None:
            raise UserError(
                f"train.half_life_days is {half_life_days:g}, and the dataset has no times of rows; prepare it with "
                "`time: {column: ...}` in the schema, or leave the setting out."
            )
        unscaled = cls(schema.time, half_life_days)
        log_sum = log_squares = -np.inf
        total, squares, newest = 0.0, 0.0, np.iinfo(np.int64).min
        unreadable: dict[str, str] = {}
        for group in list_row_groups(folder, manifest, split):
            try:
                rows = group.read([schema.time] if schema.weight is None else [schema.time, schema.weight])
            except (UserError, RunError) as error:
                if not skip_unreadable:
                    raise
                unreadable[str(group)] = str(error)
                if len(unreadable) > skip_unreadable:
                    raise too_many_unreadable(unreadable, skip_unreadable) from error
                continue
            own = np.ones(len(rows))
            if schema.weight is not None:
                own = rows.column(schema.weight).to_numpy().astype(np.float64)
            times = group.times(rows, schema.time)
            with np.errstate(divide="ignore"):  # of weights of 0
                log_weights = unscaled._half_lives(times) + np.log2(own)
            log_sum = np.logaddexp2(log_sum, np.logaddexp2.reduce(log_weights))
            log_squares = np.logaddexp2(log_squares, np.logaddexp2.reduce(2 * log_weights))
            total, squares = total + float(own.sum()), squares + float((own**2).sum())
            newest = max(newest, int(times[own > 0].max(initial=newest)))
        if not total:
            return cls(schema.time, half_life_days, unreadable=unreadable)
        effective = float(np.exp2(2 * log_sum - log_squares))
        if effective < _LEAST_SHARE * total**2 / squares:
            raise UserError(
                f"train.half_life_days is {half_life_days:g}, and by age the rows of split {split!r} of {dataset_dir} "
                f"count as {effective:,.1f} rows of equal weight, less than 1% of {total**2 / squares:,.1f} without "
                f"ages. The newest time in column {schema.time!r} is {np.datetime64(newest, 's')}: correct it if it is "
                "wrong; else leave out old rows, or set a longer half-life."
            )
        return cls(schema.time, half_life_days, float(log_sum - np.log2(total)), effective, unreadable)
