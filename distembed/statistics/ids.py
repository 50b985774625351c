"""Counts the ids of one feature: exactly, or of a share of the ids where all would not fit the memory.

Which ids are in the share is decided by a hash of the id, so that each split counts the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.prepare.vocabulary import MISSING_ID, OUT_OF_VOCABULARY_ID
from distembed.data.splitmix import mix64_array
from distembed.statistics.values import TOP_SIZES, CommonId, FeatureStatistics, IdsOfSplit

_NUM_COMMONEST = 10
BYTES_PER_ID = 8 + 8 + 1
"""Memory that counting takes for each id of a table."""


@dataclass
class _SplitCounts:
    """What is counted of a split; numbers are those of all ids, whether or not they are in the share."""

    num_ids: int = 0
    num_missing: int = 0
    num_out_of_vocabulary: int = 0
    num_rows: int = 0
    num_empty: int = 0
    num_looked_up: int = 0  # ids that are in the share
    num_unseen: int = 0
    distinct_unseen: int = 0


class IdCounter:
    """Counts the ids of one feature, the training split's first.

    Args:
        feature: The feature.
        reserved: Its ids that stand for no single value.
        most_bytes: Memory that the counts may take.
    """

    def __init__(self, feature: CategoricalFeature, reserved: tuple[int, ...], most_bytes: int) -> None:
        self._feature, self._reserved = feature, reserved
        most_slots = max(1024, most_bytes // BYTES_PER_ID)
        self._one_in = -(-feature.num_embeddings // most_slots)
        num_slots = min(feature.num_embeddings, most_slots)
        self._ids = np.full(num_slots, -1, np.int64) if self._one_in > 1 else None
        self._counts = np.zeros(num_slots, np.int64)
        self._labels = np.zeros(num_slots)
        self._unseen = np.zeros(num_slots, bool)
        self._splits: dict[str, _SplitCounts] = {}

    def add(
        self,
        split: str,
        is_training: bool,
        ids: NDArray[np.int64],
        labels: NDArray[np.float64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Counts the ids of some rows.

        Args:
            split: Name of the rows' split.
            is_training: Whether it is the split that others are compared with, of which all rows are added first.
            ids: Ids of the rows, end to end.
            labels: Label of each id's row; empty without labels.
            lengths: Number of ids of each row; empty for one each.
        """
        found = self._splits.setdefault(split, _SplitCounts())
        found.num_ids += len(ids)
        found.num_rows += len(lengths)
        found.num_empty += int((lengths == 0).sum())
        found.num_missing += int((ids == MISSING_ID).sum()) if MISSING_ID in self._reserved else 0
        if OUT_OF_VOCABULARY_ID in self._reserved:
            found.num_out_of_vocabulary += int((ids == OUT_OF_VOCABULARY_ID).sum())
        slots, is_in = self._slots(ids)
        labels = labels[is_in] if len(labels) else labels
        if is_training:
            self._count(slots, labels)
            return
        is_plain = ~np.isin(ids[is_in], self._reserved)
        unseen = slots[is_plain & (self._counts[slots] == 0)]
        found.num_looked_up += int(is_plain.sum())
        found.num_unseen += len(unseen)
        found.distinct_unseen += len(np.unique(unseen[~self._unseen[unseen]]))
        self._unseen[unseen] = True

    def end_split(self) -> None:
        """Forgets which ids of the last split were unseen."""
        self._unseen[:] = False

    def _slots(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns where the ids that are in the share are counted, and which of all ids these are."""
        if self._ids is None:
            return ids, np.ones(len(ids), bool)
        # one of so many consecutive ids, drawn for each such group of ids
        groups = ids // self._one_in
        chosen = groups * self._one_in + (mix64_array(groups.astype(np.uint64)) % np.uint64(self._one_in)).astype(
            np.int64
        )
        is_in = ids == chosen
        self._ids[groups[is_in]] = ids[is_in]
        return groups[is_in], is_in

    def _count(self, slots: NDArray[np.int64], labels: NDArray[np.float64]) -> None:
        if len(self._counts) <= 4 * len(slots):  # a pass over all counts costs less than one over the ids
            self._counts += np.bincount(slots, minlength=len(self._counts))
            self._labels += np.bincount(slots, labels, len(self._counts)) if len(labels) else 0.0
        else:
            np.add.at(self._counts, slots, 1)
            if len(labels):
                np.add.at(self._labels, slots, labels)

    def result(self, has_labels: bool) -> FeatureStatistics:
        """Returns what was counted, without what the commonest ids stand for."""
        plain = self._counts.copy()
        for reserved in self._reserved:
            slots, _ = self._slots(np.array([reserved]))
            plain[slots] = 0
        ordered = np.sort(plain[plain > 0])[::-1]
        total = int(self._counts.sum())
        cumulated = np.cumsum(ordered)
        commonest = np.argsort(-self._counts, kind="stable")[:_NUM_COMMONEST]
        sampled = 1 / self._one_in
        return FeatureStatistics(
            num_embeddings=self._feature.num_embeddings,
            cardinality=round(len(ordered) / sampled),
            sampled=sampled,
            top_shares={
                size: self._most_of(cumulated, size * sampled) / total if len(ordered) else 0.0 for size in TOP_SIZES
            },
            # each id stands for so many of its count
            entropy_bits=_entropy_bits(self._counts[self._counts > 0]) + (math.log2(self._one_in) if total else 0.0),
            zipf_exponent=_zipf_exponent(ordered),
            counts_by_rank={
                self._one_in * 2**power: int(ordered[2**power - 1]) for power in range(len(ordered).bit_length())
            },
            commonest=tuple(self._common(int(slot), has_labels) for slot in commonest if self._counts[slot]),
            splits={name: self._of_split(counts, sampled) for name, counts in self._splits.items()},
        )

    @staticmethod
    def _most_of(cumulated: NDArray[np.int64], num_ids: float) -> float:
        """Returns the sum of the counts of the commonest ids in the share; NaN for less than one of them."""
        if num_ids < 1:
            return math.nan
        return float(np.interp(num_ids, np.arange(1, len(cumulated) + 1), cumulated))

    def _common(self, slot: int, has_labels: bool) -> CommonId:
        count = int(self._counts[slot])
        found = slot if self._ids is None else int(self._ids[slot])
        return CommonId(found, None, count, float(self._labels[slot]) / count if has_labels else None)

    def _of_split(self, counts: _SplitCounts, sampled: float) -> IdsOfSplit:
        num_ids = max(counts.num_ids, 1)
        is_list = self._feature.multi_hot
        return IdsOfSplit(
            num_ids=counts.num_ids,
            missing=counts.num_empty / max(counts.num_rows, 1) if is_list else counts.num_missing / num_ids,
            out_of_vocabulary=counts.num_out_of_vocabulary / num_ids,
            unseen=counts.num_unseen / max(counts.num_looked_up, 1),
            distinct_unseen=round(counts.distinct_unseen / sampled),
        )


def _entropy_bits(counts: NDArray[np.int64]) -> float:
    """Returns the entropy of ids with these counts, none of which is 0."""
    if not len(counts):
        return 0.0
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def _zipf_exponent(ordered: NDArray[np.int64]) -> float | None:
    """Returns s of counts ``c / rank**s``, by least squares of the logarithms at ranks 1, 2, 4, 8 and so on."""
    if len(ordered) < 3:
        return None
    ranks = 2 ** np.arange(math.floor(math.log2(len(ordered))) + 1)
    slope = np.polyfit(np.log(ranks), np.log(ordered[ranks - 1]), 1)[0]
    return float(-slope) + 0.0
