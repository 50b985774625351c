"""Reads a dataset and counts its labels, numbers, equal rows and ids.

Each row group adds rows ``(feature, split, id, num_ids, label)`` to a table of a database: how often an id occurs, and
the sum of its labels. They are added up to one row for each id, with a column for each split::

    feature  id  in_0  in_1  in_2  label     in_0: the training split
    0        17  5     1     NULL  2.0       NULL: the split does not have the id
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.files import full_disk_explained
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import RowGroup, list_row_groups
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.hashing import mix64_array
from distembed.data.prepare.count import Database
from distembed.data.table.schema import CRITEO, TABLE
from distembed.data.table.schema_files import schema_of_manifest
from distembed.data.table.vocabulary import MISSING_ID, OUT_OF_VOCABULARY_ID, reserved_ids
from distembed.reports.statistics.values import (
    QUANTILES,
    TOP_SIZES,
    CommonId,
    DatasetStatistics,
    EqualRows,
    FeatureStatistics,
    IdsOfSplit,
    LabelStatistics,
    NumbersOfSplit,
    RowsStatistics,
)

DEFAULT_MEMORY_BYTES = 2 << 30
Lengths = NDArray[np.int64] | None
"""Number of values of each row of lists; None for a column with one value in each row."""
MOST_KEPT = 1_000_000
"""Most numbers of a column and a split that are kept for quantiles."""
MOST_HASHES = 8_000_000
"""Most rows that are compared, about."""
_NUM_PARTS = 10
_NUM_COMMONEST = 10
_GIVEN = pa.schema(
    {"feature": pa.int16(), "split": pa.int16(), "id": pa.int64(), "num_ids": pa.float64(), "label": pa.float64()}
)
"""Numbers of ids are sums of whole doubles, which DuckDB adds up faster than integers."""
_RESERVED_VALUES = {MISSING_ID: "missing", OUT_OF_VOCABULARY_ID: "out of vocabulary"}


def dataset_statistics(
    dataset: str | os.PathLike[str],
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetStatistics:
    """Returns the statistics of a dataset: labels, ids, numbers and equal rows."""
    folder = dataset_folder(dataset)
    manifest = Manifest.load(folder)
    if not manifest.splits:
        raise UserError(f"{dataset} has no splits: there is nothing to count.")
    train = "train" if "train" in manifest.splits else next(iter(manifest.splits))
    names = [train, *(name for name in manifest.splits if name != train)]
    rows = _Rows(folder, manifest, names, progress or (lambda rows_read, total: None))
    full = f"the disk of temporary files, {tempfile.gettempdir()}, is full; set TMPDIR to a folder on another disk"
    with (
        full_disk_explained(lambda error: full),
        tempfile.TemporaryDirectory() as scratch,
        Database(Path(scratch), memory_bytes) as database,
    ):
        reserved = {each: len(reserved_ids(manifest, each.table_name)) for each in manifest.schema.categorical}
        counted = _feature_statistics(database, rows.sizes, reserved, rows.read(), rows.num_empty)
        features = {
            feature.name: dataclasses.replace(ids, commonest=_with_values(manifest, folder, feature, ids.commonest))
            for feature, ids in zip(reserved, counted, strict=True)
        }
    in_order = sorted(rows.periods) if manifest.schema.time is not None else list(rows.periods)
    return DatasetStatistics(
        dataset=str(dataset),
        train=train,
        splits={name: _rates(rows.sums[name], manifest.schema) for name in names},
        periods={name: _rates(rows.periods[name], manifest.schema) for name in in_order},
        features=features,
        columns={
            column: {name: counter.result() for name, counter in counters.items()}
            for column, counters in rows.numbers.items()
        },
        equal_rows=rows.equal_rows(),
        is_weighted=manifest.schema.weight is not None,
        filled=_filled_columns(manifest),
    )


class _Rows:
    """Reads all rows once: collects labels, numbers and hashes of rows itself, and yields the counts of ids."""

    def __init__(
        self, folder: Path, manifest: Manifest, names: list[str], progress: Callable[[int, int], None]
    ) -> None:
        self._schema, self._progress = manifest.schema, progress
        self._groups = {name: list_row_groups(folder, manifest, name) for name in names}
        self.sizes = {name: manifest.splits[name].num_rows for name in names}
        # by split and by period: number of rows, then of each label the number of rows that have it, the sum of their
        # weights, and of their weighted labels
        self.sums = {name: np.zeros(1 + 3 * len(self._schema.all_labels)) for name in names}
        self.periods: dict[str, NDArray[np.float64]] = {}
        per_row = dict.fromkeys(self._schema.dense, 1.0)
        per_row |= {name: max(1.0, self._schema.mean_numbers_per_row(name)) for name in self._schema.dense_sequences}
        self.numbers = {
            column: {name: NumberCounter(int(self.sizes[name] * length)) for name in names}
            for column, length in per_row.items()
        }
        self.num_empty = {feature.name: Counter[str]() for feature in self._schema.categorical}
        self._hashes = {name: [np.zeros(0, np.uint64)] for name in names}
        self._one_in = max(1, -(-sum(self.sizes.values()) // MOST_HASHES))

    def read(self) -> Iterator[pa.RecordBatch]:
        """Reads the row groups of all splits, adds them to the collected values, and yields their counts of ids."""
        total = sum(self.sizes.values())
        num_read = 0
        for split, (name, groups) in enumerate(self._groups.items()):
            for group in groups:
                columns = GroupColumns(group, self._schema)
                self._add(name, columns)
                yield from self._id_counts(split, name, columns)
                num_read += columns.num_rows
                self._progress(num_read, total)

    def _id_counts(self, split: int, name: str, columns: GroupColumns) -> Iterator[pa.RecordBatch]:
        """Yields the counts of each feature's ids in a row group, and counts its empty lists."""
        labels = columns.doubles(self._schema.label, math.nan)
        for number, feature in enumerate(self._schema.categorical):
            ids, lengths = columns.ids[feature.name]
            if lengths is not None:
                self.num_empty[feature.name][name] += int((lengths == 0).sum())
            id_labels = labels if lengths is None else np.repeat(labels, lengths)
            yield _count_ids(number, split, ids, id_labels, feature.num_embeddings)

    def _add(self, split: str, columns: GroupColumns) -> None:
        """Counts labels, numbers and hashes of the next rows of a split."""
        weights = columns.doubles(self._schema.weight, 1.0)
        sums_of_labels = [np.ones(columns.num_rows)]
        for name in self._schema.label_names:
            labels = columns.doubles(name, math.nan)
            # rows may lack one of several labels; the mean of an only label that is missing somewhere is not known
            has_label = ~np.isnan(labels) if self._schema.labels else np.ones(len(labels), bool)
            sums_of_labels += [has_label, has_label * weights, np.where(has_label, weights * labels, 0.0)]
        sums = np.stack(sums_of_labels)
        for period, rows in self._periods(split, columns):
            self.periods[period] = self.periods.get(period, 0.0) + sums[:, rows].sum(1)
        self.sums[split] += sums.sum(1)
        for name, counters in self.numbers.items():
            counters[split].add(columns.numbers[name][0])
        self._hashes[split].append(columns.hashes[columns.hashes % np.uint64(self._one_in) == 0])

    def _periods(self, split: str, columns: GroupColumns) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Yields each period of a row group's rows, and a mask of its rows.

        A period is a day where rows have times, and else a tenth of the split.
        """
        row_numbers = np.arange(columns.num_rows) + int(self.sums[split][0])
        days = columns.days
        periods = row_numbers * _NUM_PARTS // self.sizes[split] if days is None else days
        for period in np.unique(periods).tolist():
            date = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=0 if days is None else period)
            yield f"{split} {period + 1}/{_NUM_PARTS}" if days is None else date.date().isoformat(), periods == period

    def equal_rows(self) -> EqualRows:
        """Returns how many rows are equal to a row before them, and the share of each other split that is in training.

        Rows are compared by 64-bit hashes. Of many rows only hashes divisible by k are kept, so that equal rows stay
        together, and the number is multiplied by k. Among n hashes two different rows are taken for equal with a
        probability of n^2 / 2^65, 3 in a million for 10 million.
        """
        hashes = [np.concatenate(chunks) for chunks in self._hashes.values()]
        _, distinct_indices, counts = np.unique(np.concatenate(hashes), return_inverse=True, return_counts=True)
        train, *other_rows = np.split(distinct_indices, np.cumsum([len(split_hashes) for split_hashes in hashes])[:-1])
        is_in_training = np.zeros(len(counts), bool)
        is_in_training[train] = True
        _, *names = self._hashes
        shares = {
            name: float(is_in_training[split_rows].mean()) if len(split_rows) else 0.0
            for name, split_rows in zip(names, other_rows, strict=True)
        }
        return EqualRows((len(distinct_indices) - len(counts)) * self._one_in, shares, 1 / self._one_in)


def _rates(sums: NDArray[np.float64], schema: Schema) -> RowsStatistics:
    """Returns the statistics of rows, given their number, and three sums for each label."""
    num_rows = int(sums[0])
    labels = {}
    for name, (num_labels, weights, weighted) in zip(schema.label_names, sums[1:].reshape(-1, 3).tolist(), strict=True):
        rate = weighted / weights if weights > 0 and not math.isnan(weighted) else None
        labels[name] = LabelStatistics(rate, num_rows - int(num_labels))
    if schema.label is not None:
        return RowsStatistics(num_rows, labels[schema.label].rate)
    return RowsStatistics(num_rows, None, labels)


def _filled_columns(manifest: Manifest) -> tuple[str, ...]:
    """Returns the columns of numbers whose missing values the preparation replaced; none where that is not known."""
    if manifest.preparation.get("source") not in (TABLE, CRITEO):
        return ()
    dense = schema_of_manifest(manifest).dense
    return tuple(name for name in manifest.schema.dense if name in dense and dense[name].missing == "zero")


def _with_values(
    manifest: Manifest, folder: Path, feature: CategoricalFeature, commonest: Sequence[CommonId]
) -> tuple[CommonId, ...]:
    """Returns ids of a feature with the values that they stand for, from the dataset's vocabulary if it has one."""
    values: dict[int, str] = {}
    if (vocabulary := manifest.vocabularies.get(feature.table_name)) is not None:
        path = manifest.require_unchanged(folder, vocabulary.file)
        is_commonest = pc.field("id").isin([common.id for common in commonest])
        keys = pq.read_table(path, columns=["id", "key"], filters=is_commonest)
        form = "{:08x}" if keys["key"].type == pa.uint32() else "{}"
        values = dict(zip(keys["id"].to_pylist(), map(form.format, keys["key"].to_pylist()), strict=True))
    values |= {number: _RESERVED_VALUES[number] for number in reserved_ids(manifest, feature.table_name)}
    return tuple(dataclasses.replace(common, value=values.get(common.id)) for common in commonest)


class GroupColumns:
    """All columns of a row group."""

    def __init__(self, group: RowGroup, schema: Schema) -> None:
        table = group.read([*schema.columns, *([schema.time] if schema.time is not None else [])])
        self.num_rows: int = len(table)
        # a hash of each row, times left out; NaN equals NaN, and 0 equals -0
        self.hashes = np.zeros(self.num_rows, np.uint64)
        # columns of numbers, labels and weight, row after row; NaN where there are none
        self.numbers: dict[str, tuple[NDArray[np.float32], Lengths]] = {}
        for name in (*schema.targets, *schema.dense, *schema.dense_sequences):
            values, lengths = _values(table, name)
            numbers = pc.cast(values, pa.float32(), safe=False).to_numpy(zero_copy_only=False)
            self.numbers[name] = numbers, lengths
            numbers = np.where(np.isnan(numbers), np.float32(np.nan), numbers + np.float32(0))
            self.hashes = _mixed(self.hashes, numbers.view(np.uint32), lengths)
        self.ids: dict[str, tuple[NDArray[np.int64], Lengths]] = {}
        for feature in schema.categorical:
            values, lengths = _values(table, feature.name)
            ids = _checked_ids(values, feature, str(group))
            self.ids[feature.name] = ids, lengths
            self.hashes = _mixed(self.hashes, ids.view(np.uint64), lengths)
        self.days = None  # of each row, counted from 1970
        if schema.time is not None:
            self.days = table[schema.time].to_numpy().astype(np.int64) // 86_400

    def doubles(self, name: str | None, default: float) -> NDArray[np.float64]:
        """Returns the number of each row, or ``default`` for all rows of a dataset without the column."""
        return np.full(self.num_rows, default) if name is None else self.numbers[name][0].astype(np.float64)


def _values(table: pa.Table, name: str) -> tuple[pa.Array, Lengths]:
    column = table[name].combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_nested(column.type):
        return column, None
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), lengths.astype(np.int64)


def _checked_ids(values: pa.Array, feature: CategoricalFeature, group: str) -> NDArray[np.int64]:
    """Returns the ids as an array; a UserError refuses missing ids, and ids outside of the feature's table."""
    if values.null_count:
        raise UserError(f"{group}, column {feature.name!r}: {values.null_count} rows have no id")
    ids = values.to_numpy(zero_copy_only=False).astype(np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= feature.num_embeddings):
        wrong = ids[((ids < 0) | (ids >= feature.num_embeddings)).argmax()]
        raise UserError(
            f"{group}, column {feature.name!r} has the id {wrong}: ids are in [0, {feature.num_embeddings})"
        )
    return ids


def _mixed(hashes: NDArray[np.uint64], values: NDArray[Any], lengths: Lengths) -> NDArray[np.uint64]:
    """Returns the hashes of rows after one more column.

    A list adds the sum of the hashes of its values, each mixed with its place in the list, and its length.
    """
    values = values.astype(np.uint64, copy=False)
    if lengths is None:
        return mix64_array(hashes ^ values)
    offsets = np.cumsum(lengths) - lengths
    positions = (np.arange(len(values)) - np.repeat(offsets, lengths)).astype(np.uint64)
    # sums modulo 2**64 from differences of running sums, which may overflow
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mix64_array(values ^ mix64_array(positions)))])
    hashes = mix64_array(hashes ^ (sums[offsets + lengths] - sums[offsets]))
    return mix64_array(hashes ^ lengths.astype(np.uint64))


class NumberCounter:
    """Collects statistics of the numbers of a column from pieces of it; keeps every k-th number for quantiles."""

    def __init__(self, num_rows: int) -> None:
        self._every = max(1, -(-num_rows // MOST_KEPT))
        self._sampled: list[NDArray[np.float32]] = []
        self._num_rows = 0
        self._moments: list[tuple[float, ...]] = []  # number, mean, variance, least and most of some rows

    def add(self, values: NDArray[np.float32]) -> None:
        """Adds the next numbers; NaN counts as missing."""
        # rows 0, k, 2k, ... of the whole column are kept: the first one of these rows is at -rows_before mod k
        sampled = values[-self._num_rows % self._every :: self._every]
        self._sampled.append(sampled[~np.isnan(sampled)])
        self._num_rows += len(values)
        numbers = values[~np.isnan(values)].astype(np.float64)
        if len(numbers):
            self._moments.append((len(numbers), numbers.mean(), numbers.var(), numbers.min(), numbers.max()))

    def result(self) -> NumbersOfSplit:
        """Returns the share of missing numbers, mean, deviation and quantiles.

        The least and the greatest number, which are the first and last quantile, are exact. The quantiles between them
        come from every k-th row; they are NaN if all of these rows are missing.
        """
        if not self._moments:
            missing = 1.0 if self._num_rows else math.nan
            return NumbersOfSplit(missing, math.nan, math.nan, (math.nan,) * len(QUANTILES), self._every)
        counts, means, variances, lows, highs = np.array(self._moments).T
        mean = float(np.average(means, weights=counts))
        # the variance of all is the mean of the parts' variances and the variance of their means
        deviation = math.sqrt(np.average(variances + (means - mean) ** 2, weights=counts))
        sampled = np.concatenate(self._sampled).astype(np.float64)
        inner = np.quantile(sampled if len(sampled) else [math.nan], QUANTILES[1:-1]).tolist()
        quantiles = (float(lows.min()), *inner, float(highs.max()))
        return NumbersOfSplit(1 - counts.sum() / self._num_rows, mean, deviation, quantiles, self._every)


def _count_ids(
    feature: int, split: int, ids: NDArray[np.int64], labels: NDArray[np.float64], num_embeddings: int
) -> pa.RecordBatch:
    """Returns rows ``(feature, split, id, count, sum of labels)``; the database adds up several rows of an id."""
    counts = np.ones(len(ids))
    if num_embeddings <= 4 * len(ids):  # a pass over the table costs less than to group the ids
        num_ids, sums = np.bincount(ids), np.bincount(ids, labels)
        ids = np.flatnonzero(num_ids)
        counts, labels = num_ids[ids].astype(np.float64), sums[ids].astype(np.float64)
    columns = np.full(len(ids), feature, np.int16), np.full(len(ids), split, np.int16), ids, counts, labels
    return pa.record_batch([pa.array(*column) for column in zip(columns, _GIVEN.types, strict=True)], schema=_GIVEN)


def _feature_statistics(
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
        for totals in batch.to_pylist():
            feature = numbered[totals["feature"]]
            yield _statistics(feature, splits, totals, num_empty[feature.name])


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
    # sizes: [count, number of ids with this count, whether they are plain], commonest first: far fewer rows than ids.
    # plain: neither the id of missing nor of unknown values. in_0 is null: no training row has the id.
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
    feature: CategoricalFeature, num_rows: Mapping[str, int], totals: Mapping[str, Any], num_empty: Mapping[str, int]
) -> FeatureStatistics:
    """Returns the statistics of a feature, given its row of :func:`_totals`, and rows and empty lists by split."""
    # ids that occur equally often are counted together: counts[i] is how often, num_ids[i] the number of such ids
    counts, num_ids, is_plain = np.array(totals["sizes"] or [], np.float64).reshape(-1, 3).T
    total = max(float(counts @ num_ids), 1.0)
    entropy_bits = -(num_ids * counts / total * np.log2(counts / total)).sum()
    counts, num_ids = counts[is_plain > 0], num_ids[is_plain > 0]
    ranks, cumulated = np.cumsum(num_ids), np.cumsum(counts * num_ids)
    cardinality = int(num_ids.sum())
    by_rank = {2**power: int(counts[np.searchsorted(ranks, 2**power)]) for power in range(cardinality.bit_length())}
    splits = {}
    for name, split_totals in zip(num_rows, totals["splits"], strict=True):
        num_in_split = max(split_totals["num_ids"], 1)
        num_missing = num_empty[name] if feature.multi_hot else split_totals["missing"]
        splits[name] = IdsOfSplit(
            num_ids=int(split_totals["num_ids"]),
            missing=num_missing / (max(num_rows[name], 1) if feature.multi_hot else num_in_split),
            out_of_vocabulary=split_totals["unknown"] / num_in_split,
            unseen=split_totals["unseen"] / max(split_totals["plain"], 1),
            distinct_unseen=split_totals["distinct_unseen"],
        )
    commonest = []
    for entry in totals["commonest"] or ():
        rate = None if math.isnan(entry["label"]) else entry["label"] / entry["num_ids"]
        commonest.append(CommonId(-entry["id"], None, int(entry["num_ids"]), rate))
    return FeatureStatistics(
        num_embeddings=feature.num_embeddings,
        cardinality=cardinality,
        top_shares={size: float(np.interp(size, [0, *ranks], [0, *cumulated])) / total for size in TOP_SIZES},
        entropy_bits=float(entropy_bits) + 0.0,
        zipf_exponent=_zipf_exponent(by_rank) if cardinality > 2 else None,
        counts_by_rank=by_rank,
        commonest=tuple(commonest),
        splits={name: ids for name, ids in splits.items() if num_rows[name]},
    )


def _zipf_exponent(by_rank: Mapping[int, int]) -> float:
    """Returns s of counts ``c / rank**s``: ``log count = log c - s log rank``, by least squares."""
    slope = np.polyfit(np.log(list(by_rank)), np.log(list(by_rank.values())), 1)[0]
    return float(-slope) + 0.0
