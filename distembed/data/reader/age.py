"""Weights of training rows by their age: half as much for each half-life between a row's time and the newest row's.

The weight of a row of time t, in a split whose newest row has the time T, is ::

    0.5 ** ((T - t) / half_life)            divided by its mean over the split

Rows with weights of their own count by them in this mean. The mean keeps the loss of a step about as large as without
ages, so that learning rates stay as they are, and cancels T: a given time in its place would change nothing.
Trade-off: the times of the whole split are read once before training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups

_SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True)
class AgeWeights:
    """How the rows of a split are weighted by their age.

    Attributes:
        time: The dataset's column of times, int64 seconds.
        half_life_days: Days after which a row weighs half.
        log_mean: The base-2 logarithm of the mean of ``2 ** (t / half_life)`` over the split.
    """

    time: str
    half_life_days: float
    log_mean: float = 0.0

    def of_rows(self, rows: pa.Table) -> NDArray[np.float64]:
        """Returns the weight of each row [N]."""
        return np.asarray(np.exp2(self._half_lives(rows) - self.log_mean))

    def _half_lives(self, rows: pa.Table) -> NDArray[np.float64]:
        times: NDArray[np.int64] = rows.column(self.time).to_numpy()
        return times / (_SECONDS_A_DAY * self.half_life_days)

    @classmethod
    def of_split(
        cls, dataset_dir: str | os.PathLike[str], split: str, half_life_days: float, skip_unreadable: bool
    ) -> AgeWeights:
        """Reads the times of all rows of a split, and the rows' own weights.

        Raises a UserError where the dataset has no times, and for a row group that cannot be read, unless it is
        to be skipped.
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
        log_sum, total = -np.inf, 0.0
        for group in list_row_groups(folder, manifest, split):
            try:
                rows = group.read([schema.time] if schema.weight is None else [schema.time, schema.weight])
            except (UserError, RunError):
                if not skip_unreadable:
                    raise
                continue
            own = np.ones(len(rows)) if schema.weight is None else rows.column(schema.weight).to_numpy()
            with np.errstate(divide="ignore"):  # of weights of 0
                log_sum = np.logaddexp2(log_sum, np.logaddexp2.reduce(unscaled._half_lives(rows) + np.log2(own)))
            total += float(own.sum(dtype=np.float64))
        return cls(schema.time, half_life_days, float(log_sum - np.log2(total)) if total else 0.0)
