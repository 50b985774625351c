"""A warning where far more values are out of the vocabulary than in training, as of another file's ids or spelling."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.vocabulary import MISSING_ID, OUT_OF_VOCABULARY_ID

_LOG = logging.getLogger("distembed")
_LEAST_VALUES, _LEAST_SHARE, _TIMES, _MORE = 100, 0.5, 3, 0.1


class UnknownValues:
    """Counts the values of rows that are scored, and warns of each feature once, through the logger ``distembed``.

    It warns from 100 values on, where more than half are unknown, and more than 10% beyond three times their share of
    the dataset's training rows.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._trained: dict[str, float] = {}
        train = manifest.splits.get("train")
        for feature in manifest.schema.categorical:
            if (entry := manifest.vocabularies.get(feature.name)) is not None:
                rows = 0 if train is None else train.num_rows
                values = rows * feature.mean_ids_per_row if feature.multi_hot else rows - entry.rows_missing
                self._trained[feature.name] = entry.rows_dropped / max(1.0, values)
        self._values, self._unknown = Counter[str](), Counter[str]()

    def add(self, feature: str, ids: NDArray[Any]) -> None:
        """Counts the ids of a feature's values in some rows."""
        trained = self._trained.get(feature)
        if trained is None:
            return
        self._values[feature] += int(np.count_nonzero(ids != MISSING_ID))
        self._unknown[feature] += int(np.count_nonzero(ids == OUT_OF_VOCABULARY_ID))
        values, unknown = self._values[feature], self._unknown[feature]
        if values < _LEAST_VALUES or unknown <= max(_LEAST_SHARE, _TIMES * trained + _MORE) * values:
            return
        if self._trained.pop(feature, None) is not None:  # threads may find it at the same time
            _LOG.warning(
                "%s: %s of the first %s values are not in the vocabulary that the model was trained with (%.1f%% of "
                "the values of training): see whether the column is the same and is written alike",
                *(feature, f"{unknown:,}", f"{values:,}", 100 * trained),
            )
