"""How often training looks up the ids of a table: counted by the dataset's vocabulary, or as Zipf's law has it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.config import Config
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.prepare.vocabulary import FIRST_ID
from distembed.errors import UserError


class CountedIds:
    """Ids of a vocabulary.

    Args:
        counts: Count of each id; those of a vocabulary that has grown are in no order.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._rising_counts = np.sort(counts)

    def num_ids_above(self, threshold: float) -> int:
        """Returns how many ids are looked up more often than a threshold.

        Between two whole numbers it grows step by step, so that of the ids of one count any number can be taken.
        """
        count = math.ceil(threshold)
        first, behind = np.searchsorted(self._rising_counts, (count, count + 1))
        return int(len(self._rising_counts) - behind) + round((count - threshold) * int(behind - first))


@dataclass(frozen=True)
class ZipfIds:
    """Ids with Zipf's distribution: id i, from 1, is looked up 1/i times as often as id 1."""

    num_ids: int  # number of ids of the table
    first_count: float = 1.0  # count of the first id

    def num_ids_above(self, threshold: float) -> int:
        """Returns how many ids are looked up more often than a threshold."""
        if threshold * self.num_ids <= self.first_count:
            return self.num_ids
        return int(self.first_count / threshold)


IdCounts = CountedIds | ZipfIds
"""How often each id of a table is looked up in training."""


def load_id_counts(config: Config, features: Sequence[CategoricalFeature]) -> dict[str, IdCounts]:
    """Returns the counts of each feature's ids by its name, from the config's dataset where that has a vocabulary.

    Raises:
        UserError: A vocabulary cannot be read.
    """
    unknown: dict[str, IdCounts] = {feature.name: ZipfIds(feature.num_embeddings) for feature in features}
    # hashed ids are in no order of frequency
    if config.data.path is None or config.embedding.default.hash_seed is not None:
        return unknown
    dataset = config.data.require_path()
    manifest = Manifest.load(dataset)
    if not manifest.vocabularies:
        return unknown
    num_rows = manifest.split(config.data.train).num_rows
    counts: dict[str, IdCounts] = {}
    for feature in features:
        if feature.name in manifest.vocabularies:
            file = manifest.require_unchanged(dataset, manifest.vocabularies[feature.name].file)
            counts[feature.name] = CountedIds(_read_counts(file))
        else:
            # the sum of 1/i is about the logarithm and Euler's constant
            harmonic = math.log(feature.num_embeddings) + np.euler_gamma
            first_count = max(1.0, num_rows * feature.mean_ids_per_row / harmonic)
            counts[feature.name] = ZipfIds(feature.num_embeddings, first_count)
    return counts


def _read_counts(vocabulary: Path) -> NDArray[np.int64]:
    """Returns the count of each id; the reserved ones come first, and count as much as the most frequent."""
    try:
        counts = pq.read_table(vocabulary, columns=["count"])["count"].to_numpy()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"the vocabulary {vocabulary} cannot be read: {error}; prepare the dataset again.") from error
    return np.concatenate([np.full(FIRST_ID, counts.max(initial=1)), counts])
