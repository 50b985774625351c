"""The ids of features: their values are counted over the training rows, and get ids that are written down.

The most frequent value has the first id, and equally frequent values are in the order of their keys. DuckDB counts and
sorts (``count.py``), so no step needs memory for all keys.

Where the vocabulary of another dataset is given, its ids stay as they are. If it grows, values that it lacks and that
are frequent enough get ids after the last one, by frequency among themselves::

    vocabulary     id 2 a 90    3 b 40                               (id, key, count)
    new rows       b 7  c 5  d 9  e 1                                seen so often, at least 2 for an id
    grown          id 2 a 90    3 b 47    4 d 9    5 c 5
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.files import replaced_file
from distembed.base.units import enumerate_names
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest, Vocabulary, id_fingerprint
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.records import Jagged
from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.prepare.count import Database
from distembed.data.prepare.spool import Rows, RowSplits, SpooledBlock
from distembed.data.remote import is_url
from distembed.data.table.blocks import BlockLayout, KeyColumn
from distembed.data.table.encoder import num_bins
from distembed.data.table.schema import CRITEO, TABLE, TableSchema
from distembed.data.table.schema_files import schema_of_manifest
from distembed.data.table.vocabulary import (
    KEY_TYPES,
    MISSING_ID,
    OUT_OF_VOCABULARY_ID,
    TEXTS_AT_A_TIME,
    VOCABULARY_GROUP_ROWS,
    IdMap,
    VocabularyMap,
    key_numbers,
    require_distinct_keys,
    vocabulary_batches,
    vocabulary_map,
    write_vocabulary,
)

_MOST_SAID = 5


@dataclass(frozen=True)
class Base:
    """A dataset whose vocabularies and learnt transforms are read, and no rows."""

    named: str  # by its folder or URL, or a run's folder
    folder: Path  # its own, the one in which a run keeps its vocabularies, or the one where a URL is fetched to
    manifest: Manifest
    grows: bool  # whether values that it lacks get ids

    @classmethod
    def load(cls, path: str | os.PathLike[str], grows: bool) -> Base:
        folder = dataset_folder(path)
        if not is_url(path) and not (folder / MANIFEST_NAME).is_file():
            kept_folder = kept_dataset(folder)
            if kept_folder is None:
                raise UserError(
                    f"{path} (--vocabulary) is neither a dataset (it has no {MANIFEST_NAME}) nor a run (no dataset/"
                    f"{MANIFEST_NAME}): name the folder of one"
                )
            folder = kept_folder
        return cls(str(path), folder, Manifest.load(folder), grows)

    def require_fits(self, layout: BlockLayout) -> None:
        """Raises a UserError unless this dataset has the layout's features, kinds of ids and learnt transforms."""
        names = self.manifest.schema.categorical_names
        if names != layout.features:
            raise UserError(
                f"the dataset {self.named} (--vocabulary) has the categorical features {enumerate_names(names)}, and "
                f"the rows have {enumerate_names(layout.features)}: name a dataset of such rows"
            )
        for _, column in layout.feature_keys.values():
            self._require_same_kind(column)
        for number in layout.numbers:
            learnt_key = "edges" if number.transform == "quantile_bins" else "mean"
            if number.transform != "none" and learnt_key not in self.learnt(number.name):
                raise UserError(
                    f"the dataset {self.named} (--vocabulary) learnt something else of the column {number.name!r} "
                    f"than {number.transform} takes: give the schema with which it was prepared"
                )

    def require_same_values(self, schema: TableSchema) -> None:
        """Raises a UserError if ``schema`` converts a column in another way than the schema of this dataset.

        Compares transforms, kinds and crosses of common columns; accepts a dataset that records no table schema.
        """
        if self.manifest.preparation.get("source") not in (TABLE, CRITEO):
            return
        if differing := sorted(_differences(schema, schema_of_manifest(self.manifest))):
            raise UserError(
                f"columns become other values than in the dataset {self.named} (--vocabulary), whose ids and means are "
                f"of its own: {enumerate_names(differing, _MOST_SAID)}. Give the schema and the options with which it "
                "was prepared, such as --missing"
            )

    def _require_same_kind(self, column: KeyColumn) -> None:
        """Compares lists, shared vocabularies and hashing of a column; the first difference is a UserError."""

        def described(is_list: bool, owner: str, hashing: tuple[int, int] | None) -> tuple[str, str, str]:
            ids = "a vocabulary" if hashing is None else f"hashes: {hashing[0]} ids with the seed {hashing[1]}"
            return "lists" if is_list else "one value a row", f"the ids of {owner!r}", ids

        name, feature, preparation = column.name, self.feature(column.name), self.manifest.preparation
        table_columns: Mapping[str, Any] = preparation.get("schema", {}).get("categorical", {})
        seed = table_columns[name].get("hash_seed", 0) if name in table_columns else preparation.get("hash_seed", 0)
        old_hashing = (feature.num_embeddings, seed) if name not in self.manifest.vocabularies else None
        new_hashing = None if column.hash_size is None else (column.hash_size, column.hash_seed)
        before = described(feature.multi_hot, feature.table or name, old_hashing)
        now = described(column.is_list, column.vocabulary or name, new_hashing)
        remedies = (
            "name a dataset of such rows",
            "give the `vocabulary` of the schema of that dataset",
            "give the hash size (--hash-size) and seed (--hash-seed) with which it was prepared, or none where it was "
            "prepared without",
        )
        for is_, must_be, remedy in zip(before, now, remedies, strict=True):
            if is_ != must_be:
                raise UserError(
                    f"the column {name!r} of the dataset {self.named} (--vocabulary) has {is_}, and its values are "
                    f"to have {must_be}: {remedy}"
                )

    def feature(self, name: str) -> CategoricalFeature:
        return next(feature for feature in self.manifest.schema.categorical if feature.name == name)

    def vocabulary(self, name: str) -> Path:
        return self.manifest.require_unchanged(self.folder, self.manifest.vocabularies[name].file)

    def learnt(self, name: str) -> dict[str, Any]:
        learnt: dict[str, Any] | None = self.manifest.preparation.get("learnt", {}).get(name)
        if learnt is None:
            raise UserError(
                f"the dataset {self.named} (--vocabulary) learnt nothing of the column {name!r}, which is to be "
                "standardised or cut into bins: give the schema with which it was prepared"
            )
        if "edges" in learnt:
            assert num_bins(learnt) == self.feature(name).num_embeddings, "a manifest's checksum holds its numbers"
        return learnt

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """Entry ``base`` in the manifest of a dataset prepared with these ids; reads all vocabularies once."""
        num_ids = {name: vocabulary.num_ids for name, vocabulary in self.manifest.vocabularies.items()}
        return {"id_fingerprint": id_fingerprint(self.folder, self.manifest), "grow": self.grows, "num_ids": num_ids}


def _differences(schema: TableSchema, earlier: TableSchema) -> Iterator[str]:
    """Yields each setting, in columns of both schemas, that changes the values which raw values become."""
    compared = {"dense": ("transform", "missing", "beside", "gap_to"), "categorical": ("kind",)}
    for section, settings in compared.items():
        columns, before = getattr(schema, section), getattr(earlier, section)
        for name, setting in product(columns.keys() & before.keys(), settings):
            new_value, old_value = getattr(columns[name], setting), getattr(before[name], setting)
            if new_value != old_value:
                yield f"{section}.{name}.{setting} is {new_value!r} and was {old_value!r}"
    for name in schema.categorical.keys() & earlier.categorical.keys():
        crosses = [table_schema.categorical[name].cross for table_schema in (schema, earlier)]
        if crosses.count(None) == 1:
            now, was = ("a column" if cross is None else f"a cross of {' and '.join(cross)}" for cross in crosses)
            yield f"categorical.{name} is {now} and was {was}"


_NEVER = 2**63 - 1  # a count that no value reaches
_SORTED_KEY_BYTES = 32  # memory that sorting takes for each key


@dataclass(frozen=True)
class FeatureValues:
    """The values of one feature in all rows."""

    splits: RowSplits  # all rows, and which of them train
    place: int  # index of the column among the key columns
    column: KeyColumn

    def counted(self, schema: pa.Schema, rows_missing: Counter[str]) -> Iterator[pa.RecordBatch]:
        """Yields keys and counts of the training rows of each block; adds rows without a value to ``rows_missing``."""
        for block in self.splits.blocks:
            rows = self.splits.train_rows(block)
            counts = np.bincount(self._codes(block, rows), minlength=block.num_keys(self.place))
            is_list = self.column.is_list
            missing = np.count_nonzero(block.lengths(self.place)[rows] == 0) if is_list else counts[MISSING_ID]
            rows_missing[self.column.name] += int(missing)
            seen_codes = np.flatnonzero(counts[1:]) + 1
            if len(seen_codes):
                texts = block.texts(self.place)
                keys = block.keys(self.place)[seen_codes] if texts is None else texts.take(seen_codes).cast(pa.string())
                yield pa.record_batch([pa.array(keys), pa.array(counts[seen_codes])], schema=schema)

    def out_of_vocabulary(self, lookup: LookupTables) -> dict[str, int]:
        """Counts the out-of-vocabulary values in each split, by the lookup tables of all blocks."""
        counts = dict.fromkeys(self.splits.rule.names, 0)
        for block in self.splits.blocks:
            is_out = lookup.table(block.index) == OUT_OF_VOCABULARY_ID
            if is_out.any():
                for split, name in enumerate(counts):
                    codes = self._codes(block, self.splits.rows(block, split))
                    counts[name] += int(np.count_nonzero(is_out[codes]))
        return counts

    def mean_values_per_row(self) -> float:
        splits = self.splits
        num_values = sum(len(self._codes(block, splits.train_rows(block))) for block in splits.blocks)
        return num_values / max(1, splits.num_rows[0])

    def _codes(self, block: SpooledBlock, rows: Rows) -> NDArray[Any]:
        """Reads the codes of the values of some rows of a block."""
        is_list = self.column.is_list
        return list_rows(block.lists(self.place), rows).values if is_list else block.codes(self.place)[rows]


def list_rows(lists: Jagged, rows: Rows) -> Jagged:
    """Returns some rows of a column of lists."""
    if not isinstance(rows, slice):
        return lists.gather(rows)
    offsets = lists.offsets[rows.start : rows.stop + 1]
    return Jagged(lists.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def build_vocabulary(
    features: Sequence[FeatureValues], path: Path, database: Database, scratch: Path, base: Base | None
) -> tuple[VocabularyMap, dict[str, Vocabulary]]:
    """Builds and writes the vocabulary that some features share, from their counts over the training rows.

    Keeps a base's ids; new values get ids only without a base or if the base grows, from ``min_count`` on.

    Args:
        features: The features, the owner of the vocabulary first.
        path: File to write.
        database: Its tables ``counted``, ``known``, ``unknown`` and ``ids`` are replaced.
        scratch: Folder for temporary files.
        base: Dataset with an earlier vocabulary.

    Returns:
        The map from keys to ids, and each feature's entry in the manifest.
    """
    column = features[0].column
    earlier = None if base is None else base.vocabulary(column.name)
    counted = pa.schema([("key", KEY_TYPES[column.kind]), ("count", pa.int64())])
    rows_missing = Counter({values.column.name: 0 for values in features})
    least_count = column.min_count if base is None or base.grows else _NEVER
    database.add(
        "counted",
        chain.from_iterable(values.counted(counted, rows_missing) for values in features),
        counted,
        "select key, sum(count)::bigint as count from given group by key",
    )
    unknown, queries = "counted", list[str]()
    if earlier is not None:
        database.add("known", vocabulary_batches(earlier, column.kind), pa.schema([("id", pa.int64()), *counted]))
        database.run("create or replace table unknown as select counted.* from counted anti join known using (key)")
        unknown = "unknown"
        queries.append(
            "select known.key, known.count + coalesce(counted.count, 0) from known left join counted "
            "using (key) order by id"
        )
    queries.append(f"select key, count from {unknown} where count >= {least_count} order by count desc, key")
    with replaced_file(path) as temporary:
        if base is not None and earlier is not None and not base.grows:
            shutil.copyfile(earlier, temporary)
            (num_ids,) = database.row("select count(*) from known")
        else:
            rows = TEXTS_AT_A_TIME if column.kind == "string" else VOCABULARY_GROUP_ROWS
            batches = chain.from_iterable(database.batches(query, rows=rows) for query in queries)
            num_ids = write_vocabulary(temporary, batches, column.kind)
    num_dropped, rows_dropped = database.row(
        f"select count(*), coalesce(sum(count), 0)::bigint from {unknown} where count < {least_count}"
    )
    file = f"{path.parent.name}/{path.name}"
    return _sorted_map(path, column, database, scratch, num_ids), {
        name: Vocabulary(file, num_ids, num_dropped, rows_dropped, missing) for name, missing in rows_missing.items()
    }


def _sorted_map(path: Path, column: KeyColumn, database: Database, scratch: Path, num_ids: int) -> VocabularyMap:
    """Sorts a vocabulary by key: in memory if it fits, else by SQL into memory-mapped temporary files."""
    if num_ids * _SORTED_KEY_BYTES <= database.memory_bytes:
        return vocabulary_map(path, column)
    schema = pa.schema([("key", pa.from_numpy_dtype(column.key_dtype)), ("id", pa.int64())])
    keys_and_ids = (
        pa.record_batch([pa.array(key_numbers(batch.column("key"))), batch.column("id")], schema=schema)
        for batch in vocabulary_batches(path, column.kind)
    )
    database.add("ids", keys_and_ids, schema)
    keys, ids = (
        np.memmap(TemporaryFile(dir=scratch), dtype, "w+", shape=(num_ids,)) for dtype in (column.key_dtype, np.int64)
    )
    num_sorted = 0
    for batch in database.batches("select key, id from ids order by key, id"):
        keys[num_sorted : num_sorted + len(batch)] = batch.column(0).to_numpy()
        ids[num_sorted : num_sorted + len(batch)] = batch.column(1).to_numpy()
        num_sorted += len(batch)
    require_distinct_keys(keys, ids, path, column)
    return VocabularyMap(keys, ids)


@dataclass(frozen=True)
class LookupTables:
    """One feature's tables from a block's codes to ids, block after block in one file; code 0 has the id 0."""

    path: Path  # file with the ids
    dtype: np.dtype[Any]  # type of the ids there
    starts: NDArray[np.int64]  # index of each block's first id there

    def table(self, block: int) -> NDArray[Any]:
        """Returns the id of each code of a block."""
        start, stop = self.starts[block : block + 2].tolist()
        return np.fromfile(self.path, self.dtype, stop - start, offset=start * self.dtype.itemsize)

    def write(self, blocks: Sequence[SpooledBlock], index: int, id_map: IdMap) -> None:
        with replaced_file(self.path) as path, open(path, "wb") as file:
            for block in blocks:
                ids = id_map.ids(block.keys(index)[1:])
                file.write(np.concatenate([np.array([MISSING_ID]), ids]).astype(self.dtype).data)
