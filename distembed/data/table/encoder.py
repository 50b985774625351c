"""Parsed rows to the columns of a prepared dataset: ids by its vocabularies, and transforms as they were learnt.

The result equals, value for value, the rows that preparing with the dataset's vocabularies would have written::

    parsed     numbers as in the table, keys of the block            ->  log, mean and deviation, bins; ids
    row        price 12.5   site "a"   device (missing)                  price 0.31    site 17   device 0

The vocabularies are in memory as sorted keys, 16 bytes an id.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import Jagged, RecordBlock, RecordLayout
from distembed.data.dataset.schema import ITEM
from distembed.data.table.blocks import BlockLayout, IdColumn, NumberColumn, ParsedBlock
from distembed.data.table.columns import CategoricalColumn, DenseColumn, LabelColumn
from distembed.data.table.keys import KEY_KINDS, coded, keyed_column
from distembed.data.table.raw_columns import VALUE_TYPES, one_array, plain_array, type_kind
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import schema_of_manifest
from distembed.data.table.values import given_column
from distembed.data.table.vocabulary import MISSING_ID, OUT_OF_VOCABULARY_ID, column_id_map

_LOG = logging.getLogger("distembed")
_LEAST_VALUES, _LEAST_SHARE, _TIMES, _MORE = 100, 0.5, 3, 0.1


class UnknownValues:
    """Counts unknown values (out of the vocabulary) in scored rows; warns once a feature, by the logger ``distembed``.

    Warns after at least 100 values if the unknown share exceeds both 1/2 and 3 t + 0.1, where t is the unknown share of
    the training rows.
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
        """Counts ids of a feature with a vocabulary, and warns once if too many are out-of-vocabulary."""
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


Change = Callable[[NDArray[Any]], NDArray[Any]]


def _changed(numbers: NDArray[Any], learnt: Mapping[str, Any] | None, keeps_missing: bool) -> NDArray[Any]:
    """Subtracts the mean and divides by the deviation where these are learnt; NaN becomes 0 unless it is kept."""
    if learnt is not None:
        numbers = ((numbers.astype(np.float64) - learnt["mean"]) / learnt["std"]).astype(np.float32)
    return numbers if keeps_missing else np.nan_to_num(numbers, copy=False, nan=0.0)


def number_change(column: NumberColumn, learnt: Mapping[str, Any] | None) -> Change | None:
    """Returns the function from parsed numbers to the dataset's values; None if the parsed numbers are the values.

    ``learnt`` has the parameters fitted on training rows: ``mean`` and ``std``, or ``edges`` of bins; None without any.
    """
    if column.role == "bins":
        return partial(bin_ids, learnt=learnt or {})
    keeps_missing = column.role != "dense" or column.keeps_missing
    return None if learnt is None and keeps_missing else partial(_changed, learnt=learnt, keeps_missing=keeps_missing)


def bin_ids(numbers: NDArray[np.float32], learnt: Mapping[str, Any]) -> NDArray[np.int32]:
    """Returns 1 + the number of ``edges`` that are at most each number; 0 for NaN. The edges are ascending."""
    edges = np.array(learnt["edges"], np.float32)
    bins = np.searchsorted(edges, numbers, side="right").astype(np.int32) + 1
    return np.where(np.isnan(numbers), np.int32(0), bins)


def num_bins(learnt: Mapping[str, Any]) -> int:
    """Returns the number of ids of a column of bins: e edges divide the line into e + 1 bins, and id 0 is missing."""
    return len(learnt["edges"]) + 2


# A manifest's source of datasets that `distembed prepare ratings` and `sequences` made.
INTERACTIONS = "interactions"

# Between two values of a list in a text, of raw sequences.
LIST_SEPARATOR = " "
# Key in a manifest's ``preparation``: the list of numbers that is the time since a user's first interaction, or null.
TIME_SINCE_FIRST = "time_since_first"


class RowEncoder:
    """Gives a dataset's values to parsed rows, which may lack labels, weight and features; threads share it."""

    def __init__(self, folder: Path, manifest: Manifest, layout: BlockLayout) -> None:
        self._layout, self._records = layout, RecordLayout.from_schema(manifest.schema)
        self._learnt: Mapping[str, Any] = manifest.preparation.get("learnt", {})
        self._weight = manifest.schema.weight
        self._missing = pa.array(raw_schema(manifest).text.missing_values, pa.string())
        self._changes = {number.name: number_change(number, self._learnt.get(number.name)) for number in layout.numbers}
        self._keys = [column for column in layout.ids if column.role == "feature"]
        self._unknown = UnknownValues(manifest)
        self._id_maps = {column.name: column_id_map(folder, manifest, column) for column in self._keys}

    def encode(self, block: ParsedBlock) -> RecordBlock:
        """Encodes the well-formed rows of a block, and counts their unknown ids, which may log a warning.

        A column that the block lacks is filled: labels and dense numbers with NaN, the weight with 1, ids with 0.
        """
        numbers, ids = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
        lists: dict[str, Jagged] = {}
        for column, values in zip(self._layout.numbers, block.numbers, strict=True):
            if column.role == "bins":
                ids[column.name] = bin_ids(values, self._learnt[column.name])
                continue
            change = self._changes[column.name]
            changed = values if change is None else change(values)
            if column.beside is None:
                numbers[column.name] = changed
            else:
                index, _ = self._layout.feature_keys[column.beside]
                lists[column.name] = Jagged.from_lengths(changed, _lengths(block.ids[index]))
        for key, column_values in zip(self._layout.ids, block.ids, strict=True):
            if key.role != "feature":
                continue
            column_ids = self._ids(key.name, column_values)
            self._unknown.add(key.name, column_ids)
            if column_values.lengths is None:
                ids[key.name] = column_ids
            else:
                lists[key.name] = Jagged.from_lengths(column_ids, _lengths(column_values))
        return RecordBlock(self._fill(block.num_rows, numbers, ids), lists)

    def times(self, block: ParsedBlock) -> NDArray[np.int64]:
        """Returns the times of a block's well-formed rows, in seconds; its schema has a time."""
        roles = [column.role for column in self._layout.numbers]
        return block.numbers[roles.index("time")]

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature; None and the schema's missing texts have id 0.

        Raises a UserError for a feature without raw values, and for a value that is not of the feature's kind.
        """
        kinds = {column.name: column.kind for column in self._keys}
        if feature not in kinds:
            raise UserError(
                f"the raw values of {feature!r} are not known: its ids are bins of numbers, or no feature has that "
                f"name. Known: {enumerate_names(list(kinds))}; give ids for others."
            )
        if isinstance(values, str | bytes):
            raise UserError(f"the values of {feature!r} are the one text {values!r}; give a list with it.")
        value_column, bad = given_column(values, feature)
        value_column = plain_array(
            one_array(value_column) if isinstance(value_column, pa.ChunkedArray) else value_column
        )
        if bad:
            raise UserError(f"value {bad[0]} of {feature!r} is {values[bad[0]]!r}, which is no text or number.")
        allowed = VALUE_TYPES[kinds[feature]]
        if type_kind(value_column.type) not in (*allowed, None):
            raise UserError(
                f"the values of {feature!r} are of type {value_column.type}; give a list of {' or '.join(allowed)}."
            )
        coded_values = coded(value_column, self._missing)
        keys = KEY_KINDS[kinds[feature]](coded_values.distinct)
        if keys.wrong.any():
            index = int(np.argmax(np.concatenate([[False], keys.wrong])[coded_values.codes]))
            raise UserError(f"value {index} ({values[index]!r}) of {feature!r} is none of its kind, {kinds[feature]}.")
        return self._ids(feature, keyed_column(coded_values, keys, None))

    def _ids(self, feature: str, column: IdColumn) -> NDArray[np.int64]:
        """Looks up the id of each distinct key of a block once, and returns the id of each value."""
        table = np.concatenate([np.array([MISSING_ID]), self._id_maps[feature].ids(column.keys[1:])])
        return table[column.codes]

    def _fill(
        self, num_rows: int, numbers: Mapping[str, NDArray[Any]], ids: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        layout = self._records
        records = np.zeros((num_rows, layout.width), layout.dtype)
        floats = records.view(np.float32)
        for index, feature in enumerate(layout.single):
            records[:, index] = ids.get(feature.name, MISSING_ID)
        for index, name in enumerate(layout.numbers, start=layout.first_float):
            floats[:, index] = numbers.get(name, 1.0 if name == self._weight else np.nan)
        return records


def _lengths(column: IdColumn) -> NDArray[np.int64]:
    assert column.lengths is not None, "the column has lists"
    return column.lengths.astype(np.int64)


def raw_schema(manifest: Manifest) -> TableSchema:
    """Returns the schema of raw rows that are scored; of interactions, the dataset's columns as texts and lists.

    A sequence's time is a list of times, in the unit of the files that the dataset was prepared from.
    """
    schema = manifest.schema
    if manifest.preparation.get("source") != INTERACTIONS:
        return schema_of_manifest(manifest)
    return TableSchema(
        label=None if schema.label is None else LabelColumn(schema.label, kind="number", name=schema.label),
        dense={
            **{name: DenseColumn(missing="keep" if schema.missing_dense else "zero") for name in schema.dense},
            **{
                name: DenseColumn(
                    missing="keep",
                    beside=ITEM,
                    separator=LIST_SEPARATOR,
                    since_first=name == manifest.preparation.get(TIME_SINCE_FIRST),
                )
                for name in schema.dense_sequences
            },
        },
        categorical={
            feature.name: CategoricalColumn(separator=LIST_SEPARATOR if feature.multi_hot else None)
            for feature in schema.categorical
        },
    )
