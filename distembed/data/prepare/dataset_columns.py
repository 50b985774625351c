"""The means, deviations and bins that are learnt of columns of numbers over the training rows, and applied to all.

The distinct numbers are counted (``count.py``) and added up exactly, so that the result depends neither on the order
of the rows, nor on how they were cut into blocks, nor on the memory.

Bins: of n numbers in rising order, x_0 to x_(n-1), a bin begins at x_(k n // num_bins) for k = 1, 2, ..., and the first
at the lowest number of all. Bins that would begin with the same number are one, so that equal numbers stay together::

    numbers    1 1 1 1 2 3 7 9        4 bins would begin at 1, 1, 2, 7: edges 2, 7
    ids        1 1 1 1 2 2 3 3        0 is a missing number
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.dataset.schema import CategoricalFeature, Label, Schema
from distembed.data.prepare.count import Database, count_distinct, values_at_ranks
from distembed.data.prepare.feature_ids import Base, FeatureValues, LookupTables, build_vocabulary
from distembed.data.prepare.spool import RowSplits
from distembed.data.prepare.write_parquet import OutputColumn, spooled_ids, spooled_number_lists, spooled_numbers
from distembed.data.table.blocks import BlockLayout, NumberColumn
from distembed.data.table.encoder import num_bins, number_change
from distembed.data.table.vocabulary import HashMap, IdMap


def learn_numbers(splits: RowSplits, column_index: int, column: NumberColumn, database: Database) -> dict[str, Any]:
    """Returns ``mean`` and ``std``, or ``edges`` of bins, of a column's numbers in the training rows.

    Without numbers, the mean is 0, the deviation 1, and there are no edges; a deviation of 0 is replaced by 1.
    """

    def training() -> Iterator[NDArray[np.float32]]:
        for block in splits.blocks:
            numbers = block.numbers(column_index)[splits.train_rows(block)]
            yield numbers[~np.isnan(numbers)] + np.float32(0)  # -0.0 + 0 is 0.0: both zeros count as one value

    total = count_distinct(database, training(), pa.float32())
    if not total:
        return {"edges": []} if column.transform == "quantile_bins" else {"mean": 0.0, "std": 1.0}
    if column.transform == "quantile_bins":
        ranks = [k * total // column.num_bins for k in range(column.num_bins)]
        return {"edges": np.unique(values_at_ranks(database, ranks, pa.float32()))[1:].astype(float).tolist()}
    mean = math.fsum(value * count for value, count in _values(database)) / total
    squares = math.fsum((value - mean) ** 2 * count for value, count in _values(database))
    return {"mean": mean, "std": math.sqrt(squares / total) or 1.0}


def _values(database: Database) -> Iterator[tuple[float, int]]:
    for batch in database.batches("select value, count from counted order by value"):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


# Names that every file system takes as a file's, and that are no other column's number.
_PLAIN_NAME = re.compile(r"(?!column-[0-9]+$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", re.ASCII | re.IGNORECASE)
_GROUP_KEYS = 1 << 20  # most keys of columns that are counted in one database: opening and closing one takes 0.1 s
ColumnsLearnt = dict[str, dict[str, Any]]
"""By column: its ``feature`` and ``vocabulary`` fields, and the parameters that its transform ``learnt``, or None."""


@dataclass(frozen=True)
class DatasetColumns:
    """The dataset's columns: the vocabularies and transforms learnt, and the files' and schema's columns."""

    layout: BlockLayout  # the columns of the blocks
    base: Base | None  # dataset whose ids are applied, if there is one
    memory_bytes: int  # memory that counting one column may take
    folder: Path  # dataset folder that is being written
    work: Path  # folder for ids of blocks and for counting
    splits: RowSplits  # all rows, and which of them train

    @property
    def _learnt_numbers(self) -> dict[str, int]:
        return {column.name: index for index, column in enumerate(self.layout.numbers) if column.transform != "none"}

    def groups(self) -> list[list[str]]:
        """Groups the columns with a vocabulary or learnt transform for one database each, most keys first.

        A feature that shares a vocabulary counts with the vocabulary's owner. A group has at most _GROUP_KEYS keys, or
        one column with more.
        """
        keys = dict.fromkeys(self._learnt_numbers, 0)
        for name, (index, column) in self.layout.feature_keys.items():
            owner = column.vocabulary or name
            keys[owner] = keys.get(owner, 0) + sum(block.num_keys(index) for block in self.splits.blocks)
        groups: list[list[str]] = []
        room = 0
        for name in sorted(keys, key=lambda name: -keys[name]):
            if not groups or keys[name] > room:
                groups.append([])
                room = _GROUP_KEYS
            groups[-1].append(name)
            room -= keys[name]
        return groups

    def learn(self, names: Sequence[str]) -> ColumnsLearnt:
        """Learns the named columns, one by one: writes vocabularies and lookup tables, or computes transforms."""
        scratch = Path(tempfile.mkdtemp(prefix="learning-", dir=self.work))
        with Database(scratch / "counting", self.memory_bytes) as database:
            learnt: ColumnsLearnt = {}
            for name in names:
                if (index := self._learnt_numbers.get(name)) is None:
                    learnt |= self._map_features(name, database, scratch)
                    continue
                column = self.layout.numbers[index]
                numbers = self.base.learnt(name) if self.base else learn_numbers(self.splits, index, column, database)
                feature = asdict(CategoricalFeature(name, num_bins(numbers))) if column.role == "bins" else None
                learnt[name] = {"feature": feature, "vocabulary": None, "learnt": numbers}
        shutil.rmtree(scratch)
        return learnt

    def in_order(self, learnt: ColumnsLearnt) -> ColumnsLearnt:
        return {name: learnt[name] for name in (*self.layout.feature_keys, *self._learnt_numbers)}

    def _map_features(self, name: str, database: Database, scratch: Path) -> ColumnsLearnt:
        """Gives ids to a feature and to all features that share its vocabulary, and writes their lookup tables."""
        features = [
            FeatureValues(self.splits, index, column)
            for index, column in self.layout.feature_keys.values()
            if name in (column.name, column.vocabulary)
        ]
        features.sort(key=lambda values: values.column.name != name)  # the owner of the vocabulary first
        owner, entries = features[0], dict[str, Vocabulary]()
        id_map: IdMap
        if owner.column.hash_size is not None:
            id_map = HashMap(owner.column.hash_size, owner.column.hash_seed)
        else:
            stem = name if _PLAIN_NAME.fullmatch(name) else f"column-{owner.place}"
            file = self.folder / "vocabulary" / f"{stem}.parquet"
            file.parent.mkdir(exist_ok=True)
            id_map, entries = build_vocabulary(features, file, database, scratch, self.base)
        return {
            values.column.name: self._mapped(values, id_map, entries.get(values.column.name)) for values in features
        }

    def _mapped(self, values: FeatureValues, id_map: IdMap, vocabulary: Vocabulary | None) -> dict[str, Any]:
        """Writes a feature's lookup tables (code to id, for each block), and returns its entry of ColumnsLearnt."""
        column, base = values.column, self.base
        lookup = self._lookup(values.place, id_map.num_embeddings)
        lookup.write(self.splits.blocks, values.place, id_map)
        if vocabulary is not None and base is not None:
            vocabulary = replace(vocabulary, rows_dropped_by_split=values.out_of_vocabulary(lookup))
        mean_ids = 1.0
        if column.is_list:
            is_known = base and not base.grows
            mean_ids = base.feature(column.name).mean_ids_per_row if base and is_known else values.mean_values_per_row()
        name, size, most = column.name, id_map.num_embeddings, column.max_length
        feature = CategoricalFeature(
            name, size, column.is_list, mean_ids, table=column.vocabulary, max_ids_per_row=most
        )
        entry = None if vocabulary is None else asdict(vocabulary)
        return {"feature": asdict(feature), "vocabulary": entry, "learnt": None}

    def _lookup(self, index: int, num_embeddings: int) -> LookupTables:
        """Describes the file of lookup tables of key column ``index``; does not read or write it."""
        starts = np.cumsum([0, *(block.num_keys(index) for block in self.splits.blocks)])
        dtype = np.dtype(np.int32 if num_embeddings <= 2**31 else np.int64)
        return LookupTables(self.work / f"lookup-{index}", dtype, starts)

    def schema(self, learnt: ColumnsLearnt) -> Schema:
        by_role = {column.role: column for column in self.layout.numbers if column.role in ("weight", "time")}
        labels = [
            Label(column.name, "binary" if column.file_dtype == np.int8 else "number")
            for column in self.layout.numbers
            if column.role == "label"
        ]
        only_label = labels[0] if len(labels) == 1 else None
        dense = [column for column in self.layout.numbers if column.role == "dense"]
        lists = {column.name: column.beside for column in dense if column.beside is not None}
        return Schema(
            label=None if only_label is None else only_label.name,
            dense=tuple(column.name for column in dense if column.beside is None),
            categorical=tuple(CategoricalFeature(**learnt[name]["feature"]) for name in self.layout.features),
            dense_sequences=tuple(lists),
            beside=tuple(lists.values()),
            label_kind="binary" if only_label is None else only_label.kind,
            missing_dense=any(column.keeps_missing for column in dense),
            weight=by_role["weight"].name if "weight" in by_role else None,
            time=by_role["time"].name if "time" in by_role else None,
            labels=() if only_label is not None else tuple(labels),
        )

    def outputs(self, learnt: ColumnsLearnt) -> list[OutputColumn]:
        """Returns the columns of the files: labels, weight, time and dense numbers, then features in schema order."""
        outputs: dict[str, OutputColumn] = {}
        dense_keeps_missing = any(column.keeps_missing for column in self.layout.numbers if column.role == "dense")
        for index, column in enumerate(self.layout.numbers):
            parameters = learnt[column.name]["learnt"] if column.name in learnt else None
            has_missing = dense_keeps_missing if column.role == "dense" else column.keeps_missing
            change = number_change(column, parameters)
            type_ = pa.int32() if column.role == "bins" else pa.from_numpy_dtype(column.file_dtype)
            read = partial(spooled_numbers, index=index, change=change, type_=type_ if has_missing else None)
            if column.beside is not None:
                beside, _ = self.layout.feature_keys[column.beside]
                read, type_ = partial(spooled_number_lists, **read.keywords, beside=beside), pa.list_(type_)
            outputs[column.name] = pa.field(column.name, type_), read
        numbers = [outputs[column.name] for column in self.layout.numbers if column.role != "bins"]
        return [*numbers, *(outputs.get(name) or self._id_output(name, learnt) for name in self.layout.features)]

    def _id_output(self, name: str, learnt: ColumnsLearnt) -> OutputColumn:
        index, column = self.layout.feature_keys[name]
        lookup = self._lookup(index, learnt[name]["feature"]["num_embeddings"])
        type_ = pa.from_numpy_dtype(lookup.dtype)
        field = pa.field(name, pa.list_(type_) if column.is_list else type_)
        return field, partial(spooled_ids, index=index, lookup=lookup)

    def mean_values(self) -> float:
        """Returns the mean number of values of a row in the column with the longest lists; 1 without lists."""
        blocks = self.splits.blocks
        lists = [index for index, column in self.layout.feature_keys.values() if column.is_list]
        num_rows = sum(block.num_rows for block in blocks)
        return max((sum(block.num_values(index) for block in blocks) / num_rows for index in lists), default=1.0)

    def recorded(self, learnt: ColumnsLearnt) -> dict[str, Any]:
        numbers = {name: learnt[name]["learnt"] for name in self._learnt_numbers}
        recorded: dict[str, Any] = {"learnt": numbers} if numbers else {}
        return recorded | ({} if self.base is None else {"base": self.base.recorded})
