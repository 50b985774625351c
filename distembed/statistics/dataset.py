"""Reads a dataset and counts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import RowGroup, list_row_groups
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare.vocabulary import MISSING_ID, OUT_OF_VOCABULARY_ID, reserved_ids
from distembed.data.table.schema import CRITEO, TABLE, TableSchema
from distembed.errors import UserError
from distembed.statistics.equal import EqualRowsCounter, RowHashes
from distembed.statistics.group_columns import GroupColumns
from distembed.statistics.ids import BYTES_PER_ID, IdCounter
from distembed.statistics.numbers import NumberCounter
from distembed.statistics.values import DatasetStatistics, FeatureStatistics, NumbersOfSplit, RowsStatistics

DEFAULT_MEMORY_BYTES = 2 << 30
_NUM_PARTS = 10
_RESERVED_VALUES = {MISSING_ID: "missing", OUT_OF_VOCABULARY_ID: "out of vocabulary"}


def dataset_statistics(
    dataset: str | os.PathLike[str],
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetStatistics:
    """Returns what the rows of a dataset are like.

    Args:
        dataset: Folder or URL of the dataset.
        memory_bytes: Memory that counts of ids may take. Features whose counts take more together are counted one part
            after another, for which their columns are read one after another.
        progress: Function that is called with the number of rows read, and of those to be read in all.

    Raises:
        UserError: There is no such dataset, it has no rows at all, or a file of it is damaged.
    """
    folder = dataset_folder(dataset)
    manifest = Manifest.load(folder)
    if not manifest.splits:
        raise UserError(f"{dataset} has no splits: there is nothing to count.")
    train = "train" if "train" in manifest.splits else next(iter(manifest.splits))
    names = [train, *(name for name in manifest.splits if name != train)]
    groups = {name: list_row_groups(folder, manifest, name) for name in names}
    parts = _feature_parts(manifest.schema, memory_bytes)
    report = _Progress(progress, len(parts) * sum(manifest.splits[name].num_rows for name in names))

    whole = _WholeRows(manifest, names)
    features: dict[str, FeatureStatistics] = {}
    for number, part in enumerate(parts):
        counters = {each.name: _counter(manifest, each, memory_bytes) for each in part}
        for name in names:
            for group in groups[name]:
                columns = _read(group, manifest.schema, None if number == 0 else part)
                _count_ids(columns, part, counters, name, name == train)
                if number == 0:
                    whole.add(name, columns)
                report.add(columns.num_rows)
            for counter in counters.values():
                counter.end_split()
        for name, counter in counters.items():
            features[name] = counter.result(manifest.schema.label is not None)
    named = {
        each.name: _with_values(manifest, folder, each, features[each.name]) for each in manifest.schema.categorical
    }
    return whole.result(str(dataset), named)


class _Progress:
    """Adds up the rows that were read."""

    def __init__(self, tell: Callable[[int, int], None] | None, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def add(self, num_rows: int) -> None:
        self._done += num_rows
        if self._tell is not None:
            self._tell(self._done, self._total)


class _WholeRows:
    """Counts what takes all columns of a row, or none but its label and time."""

    def __init__(self, manifest: Manifest, names: list[str]) -> None:
        self._manifest, self._schema, self._names = manifest, manifest.schema, names
        self._sizes = {name: manifest.splits[name].num_rows for name in names}
        self._done = dict.fromkeys(names, 0)
        # number of rows, of weights and of weighted labels, by what has them
        self._splits = {name: np.zeros(3) for name in names}
        self._periods: dict[str, NDArray[np.float64]] = {}
        self._equal = EqualRowsCounter(sum(self._sizes.values()), names)
        per_row = {name: max(1.0, manifest.schema.mean_list_length) for name in manifest.schema.dense_sequences}
        self._numbers = {
            column: {name: NumberCounter(int(self._sizes[name] * per_row.get(column, 1.0))) for name in names}
            for column in (*manifest.schema.dense, *manifest.schema.dense_sequences)
        }

    def add(self, split: str, columns: GroupColumns) -> None:
        """Counts the next rows of a split."""
        sums = np.stack([np.ones(columns.num_rows), columns.weights(), np.zeros(columns.num_rows)])
        if self._schema.label is not None:
            sums[2] = sums[1] * columns.labels()
        self._splits[split] += sums.sum(1)
        for period, rows in self._rows_by_period(split, columns):
            self._periods.setdefault(period, np.zeros(3))
            self._periods[period] += sums[:, rows].sum(1)
        self._done[split] += columns.num_rows
        hashes = RowHashes(columns.num_rows)
        for name in (each for each in (self._schema.label, self._schema.weight) if each is not None):
            hashes.add_numbers(columns.numbers(name)[0])
        for name, counters in self._numbers.items():
            values, lengths = columns.numbers(name)
            counters[split].add(values)
            if name in self._schema.dense:
                hashes.add_numbers(values)
            else:
                hashes.add_lists(values.view(np.uint32).astype(np.uint64), lengths)
        for feature in self._schema.categorical:
            ids, lengths = columns.ids(feature)
            if feature.multi_hot:
                hashes.add_lists(ids.astype(np.uint64), lengths)
            else:
                hashes.add_ids(ids)
        self._equal.add(split, hashes.values)

    def _rows_by_period(self, split: str, columns: GroupColumns) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Yields each period that the rows lie in, and which rows these are."""
        days = columns.days()
        if len(days):
            for day in np.unique(days).tolist():
                date = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)
                yield date.date().isoformat(), days == day
        elif columns.num_rows:
            rows = np.arange(self._done[split], self._done[split] + columns.num_rows)
            parts = rows * _NUM_PARTS // self._sizes[split]
            for part in np.unique(parts).tolist():
                yield f"{split} {part + 1}/{_NUM_PARTS}", parts == part

    def result(self, dataset: str, features: dict[str, FeatureStatistics]) -> DatasetStatistics:
        """Returns the statistics of the dataset, with those of its features."""
        numbers: dict[str, dict[str, NumbersOfSplit]] = {
            column: {name: counter.result() for name, counter in counters.items()}
            for column, counters in self._numbers.items()
        }
        in_order = sorted(self._periods) if self._schema.time is not None else list(self._periods)
        return DatasetStatistics(
            dataset=dataset,
            train=self._names[0],
            splits={name: self._rows(sums) for name, sums in self._splits.items()},
            periods={name: self._rows(self._periods[name]) for name in in_order},
            features=features,
            columns=numbers,
            equal_rows=self._equal.result(),
            filled=_filled_columns(self._manifest),
            is_weighted=self._schema.weight is not None,
        )

    def _rows(self, sums: NDArray[np.float64]) -> RowsStatistics:
        num_rows, weights, labels = sums.tolist()
        has_rate = self._schema.label is not None and weights > 0
        return RowsStatistics(int(num_rows), labels / weights if has_rate else None)


def _filled_columns(manifest: Manifest) -> tuple[str, ...]:
    """Returns the columns of numbers whose missing values the preparation replaced; none where that is not known."""
    if manifest.preparation.get("source") not in (TABLE, CRITEO):
        return ()
    dense = TableSchema.of_manifest(manifest).dense
    return tuple(name for name in manifest.schema.dense if name in dense and dense[name].missing == "zero")


def _feature_parts(schema: Schema, memory_bytes: int) -> list[list[CategoricalFeature]]:
    """Returns the features in parts whose counts fit the memory together; at least one part, maybe without features."""
    parts: list[list[CategoricalFeature]] = [[]]
    free = memory_bytes
    for feature in schema.categorical:
        needed = min(feature.num_embeddings * BYTES_PER_ID, memory_bytes)
        if needed > free:
            parts.append([])
            free = memory_bytes
        parts[-1].append(feature)
        free -= needed
    return parts


def _counter(manifest: Manifest, feature: CategoricalFeature, memory_bytes: int) -> IdCounter:
    return IdCounter(feature, reserved_ids(manifest, feature.table_name), memory_bytes)


def _read(group: RowGroup, schema: Schema, features: list[CategoricalFeature] | None) -> GroupColumns:
    """Reads what some features need of a row group, or all of it."""
    if features is None:
        return GroupColumns(group, schema, [*schema.columns, *([schema.time] if schema.time is not None else [])])
    labels = [schema.label] if schema.label is not None else []
    return GroupColumns(group, schema, [*labels, *(feature.name for feature in features)])


def _count_ids(
    columns: GroupColumns,
    features: list[CategoricalFeature],
    counters: dict[str, IdCounter],
    split: str,
    is_training: bool,
) -> None:
    labels = columns.labels()
    for feature in features:
        ids, lengths = columns.ids(feature)
        own = np.repeat(labels, lengths) if feature.multi_hot and len(labels) else labels
        counters[feature.name].add(split, is_training, ids, own, lengths)


def _with_values(
    manifest: Manifest, folder: os.PathLike[str], feature: CategoricalFeature, found: FeatureStatistics
) -> FeatureStatistics:
    """Returns the statistics of a feature with the values that its commonest ids stand for."""
    vocabulary = manifest.vocabularies.get(feature.table_name)
    values: dict[int, str] = {}
    if vocabulary is not None:
        path = manifest.require_unchanged(folder, vocabulary.file)
        wanted = pc.field("id").isin([each.id for each in found.commonest])
        keys = pq.read_table(path, columns=["id", "key"], filters=wanted)
        is_hexadecimal = keys["key"].type == pa.uint32()
        values = {
            number: f"{key:08x}" if is_hexadecimal else str(key)
            for number, key in zip(keys["id"].to_pylist(), keys["key"].to_pylist(), strict=True)
        }
    values |= {number: _RESERVED_VALUES[number] for number in reserved_ids(manifest, feature.table_name)}
    commonest = tuple(dataclasses.replace(each, value=values.get(each.id)) for each in found.commonest)
    return dataclasses.replace(found, commonest=commonest)
