"""Counts the ids of all features in one table of a database.

Each row group adds rows ``(feature, split, id, num_ids, label)``: how often an id occurs, and the sum of its labels.
They are added up to one row for each id, with a column for each split::

    feature  id  in_0  in_1  in_2  label     in_0: the training split
    0        17  5     1     NULL  2.0       NULL: the split does not have the id
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.prepare.count import Database
from distembed.data.table.vocabulary import MISSING_ID, OUT_OF_VOCABULARY_ID
from distembed.reports.statistics.values import TOP_SIZES, CommonId, FeatureStatistics, IdsOfSplit

_NUM_COMMONEST = 10
_GIVEN = pa.schema(
    {"feature": pa.int16(), "split": pa.int16(), "id": pa.int64(), "num_ids": pa.float64(), "label": pa.float64()}
)
"""Numbers of ids are sums of whole doubles, which DuckDB adds up faster than integers."""


def id_counts(
    feature: int, split: int, ids: NDArray[np.int64], labels: NDArray[np.float64], num_embeddings: int
) -> pa.RecordBatch:
    """Returns how often ids occur, for the numbers of a feature and a split."""
    counts = np.ones(len(ids))
    if num_embeddings <= 4 * len(ids):  # a pass over the table costs less than to group the ids
        num_ids, sums = np.bincount(ids), np.bincount(ids, labels)
        ids = np.flatnonzero(num_ids)
        counts, labels = num_ids[ids].astype(np.float64), sums[ids].astype(np.float64)
    columns = np.full(len(ids), feature, np.int16), np.full(len(ids), split, np.int16), ids, counts, labels
    return pa.record_batch([pa.array(*each) for each in zip(columns, _GIVEN.types, strict=True)], schema=_GIVEN)


def feature_statistics(
    database: Database,
    splits: Mapping[str, int],
    features: Mapping[CategoricalFeature, int],
    batches: Iterable[pa.RecordBatch],
    num_empty: Mapping[str, Mapping[str, int]],
) -> Iterator[FeatureStatistics]:
    """Yields the statistics of each feature, without the values of the commonest ids."""
    columns = [f"in_{number}" for number in range(len(splits))]
    sums = ", ".join(f"sum(num_ids) filter (split = {number}) as in_{number}" for number in range(len(splits)))
    sums += ", sum(label) filter (split = 0) as label"
    database.add("counts", batches, _GIVEN, f"select feature, id, {sums} from given group by feature, id")
    numbered = list(features)
    for batch in database.batches(_totals(columns, list(features.values()))) if features else ():
        for found in batch.to_pylist():
            feature = numbered[found["feature"]]
            yield _statistics(feature, splits, found, num_empty[feature.name])


def _totals(columns: Sequence[str], reserved: Sequence[int]) -> str:
    """Returns SQL that makes one row of totals for each feature."""
    features = ", ".join(map(str, enumerate(reserved)))
    by_split = ", ".join(
        f"""struct_pack(
            num_ids := coalesce(sum({column}), 0),
            missing := coalesce(sum({column}) filter (id = {MISSING_ID} and not is_plain), 0),
            unknown := coalesce(sum({column}) filter (id = {OUT_OF_VOCABULARY_ID} and not is_plain), 0),
            plain := coalesce(sum({column}) filter (is_plain), 0),
            unseen := coalesce(sum({column}) filter (is_plain and in_0 is null), 0),
            distinct_unseen := count({column}) filter (is_plain and in_0 is null)
        )"""
        for column in columns
    )
    # sizes: the ids of equal count together, the commonest first, far fewer than ids
    return f"""
        with ids as (
            select *, id >= num_reserved as is_plain
            from (values {features}) as features(feature, num_reserved) left join counts using (feature)
        ), sizes as (
            select feature, list([in_0, num_ids, is_plain::double] order by in_0 desc, is_plain) as sizes
            from (select feature, in_0, is_plain, count(*) as num_ids from ids where in_0 > 0 group by all)
            group by feature
        ), totals as (
            select feature, [{by_split}] as splits,
                max(struct_pack(num_ids := in_0, id := -id, label := label), {_NUM_COMMONEST})
                    filter (in_0 > 0) as commonest
            from ids group by feature
        )
        select totals.*, sizes from totals left join sizes using (feature) order by feature"""


def _statistics(
    feature: CategoricalFeature, num_rows: Mapping[str, int], found: Mapping[str, Any], num_empty: Mapping[str, int]
) -> FeatureStatistics:
    """Returns the statistics of a feature, given its row and the number of rows by split."""
    counts, num_ids, is_plain = np.array(found["sizes"] or [], np.float64).reshape(-1, 3).T
    total = max(float(counts @ num_ids), 1.0)
    entropy_bits = -(num_ids * counts / total * np.log2(counts / total)).sum()
    counts, num_ids = counts[is_plain > 0], num_ids[is_plain > 0]
    ranks, cumulated = np.cumsum(num_ids), np.cumsum(counts * num_ids)
    cardinality = int(num_ids.sum())
    by_rank = {2**n: int(counts[np.searchsorted(ranks, 2**n)]) for n in range(cardinality.bit_length())}
    splits = {}
    for name, own in zip(num_rows, found["splits"], strict=True):
        num_own = max(own["num_ids"], 1)
        splits[name] = IdsOfSplit(
            num_ids=int(own["num_ids"]),
            missing=num_empty[name] / max(num_rows[name], 1) if feature.multi_hot else own["missing"] / num_own,
            out_of_vocabulary=own["unknown"] / num_own,
            unseen=own["unseen"] / max(own["plain"], 1),
            distinct_unseen=own["distinct_unseen"],
        )
    commonest = []
    for each in found["commonest"] or ():
        rate = None if math.isnan(each["label"]) else each["label"] / each["num_ids"]
        commonest.append(CommonId(-each["id"], None, int(each["num_ids"]), rate))
    return FeatureStatistics(
        num_embeddings=feature.num_embeddings,
        cardinality=cardinality,
        top_shares={n: float(np.interp(n, [0, *ranks], [0, *cumulated])) / total for n in TOP_SIZES},
        entropy_bits=float(entropy_bits) + 0.0,
        zipf_exponent=_zipf_exponent(by_rank) if cardinality > 2 else None,
        counts_by_rank=by_rank,
        commonest=tuple(commonest),
        splits={name: found for name, found in splits.items() if num_rows[name]},
    )


def _zipf_exponent(by_rank: Mapping[int, int]) -> float:
    """Returns s of counts ``c / rank**s``, by least squares of the logarithms."""
    slope = np.polyfit(np.log(list(by_rank)), np.log(list(by_rank.values())), 1)[0]
    return float(-slope) + 0.0
