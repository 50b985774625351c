"""Parsed rows to the columns of a dataset that is there: ids by its vocabularies, transforms as they were learnt.

What comes out is, value for value, what preparing the same rows with the dataset's vocabularies would have written, in
the form that the reader decodes files to (:class:`~distembed.data.reader.decode.Block`)::

    parsed     numbers as in the table, keys of a block's own        ->  log, mean and deviation, bins; ids
    row        price 12.5   site "a"   device (missing)                  price 0.31    site 17   device 0

The vocabularies are in memory as sorted keys, 16 bytes an id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.data.dataset.manifest import Manifest
from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import BlockLayout, IdColumn, ParsedBlock
from distembed.data.prepare.learnt_numbers import bin_ids, number_change
from distembed.data.prepare.vocabulary import MISSING_ID
from distembed.data.reader.decode import Block, RecordLayout
from distembed.data.table.given_values import given_column
from distembed.data.table.keys import KEY_KINDS, coded, id_column
from distembed.data.table.raw_columns import VALUE_TYPES, one_array, plain_array, type_kind
from distembed.data.table.schema import CategoricalColumn, DenseColumn, LabelColumn, TableSchema
from distembed.data.table.unknown_values import UnknownValues
from distembed.data.table.vocabularies import column_id_map

# A manifest's source of datasets that `distembed prepare ratings` and `sequences` made.
INTERACTIONS = "interactions"
# Between two values of a list in a text, of raw sequences.
LIST_SEPARATOR = " "


class RowEncoder:
    """Gives the values of a dataset, or of a run's copy of it, to parsed rows; any number of threads may use it.

    The parsed blocks may lack the label, the weight, and features with one value a row, which then is missing.

    Raises:
        UserError: A vocabulary is missing or damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest, layout: BlockLayout) -> None:
        self._layout, self._records = layout, RecordLayout.from_schema(manifest.schema)
        self._learnt: Mapping[str, Any] = manifest.preparation.get("learnt", {})
        self._weight = manifest.schema.weight
        self._missing = pa.array(raw_schema(manifest).text.missing_values, pa.string())
        self._changes = {each.name: number_change(each, self._learnt.get(each.name)) for each in layout.numbers}
        self._keys = [column for column in layout.ids if column.role == "feature"]
        self._unknown = UnknownValues(manifest)
        self._id_maps = {column.name: column_id_map(folder, manifest, column) for column in self._keys}

    def encode(self, block: ParsedBlock) -> Block:
        """Returns the well-formed rows of a block; a missing label is NaN, and a missing weight 1."""
        numbers, ids = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
        lists: dict[str, Jagged] = {}
        for column, values in zip(self._layout.numbers, block.numbers, strict=True):
            if column.role == "bins":
                ids[column.name] = bin_ids(values, self._learnt[column.name])
            else:
                change = self._changes[column.name]
                numbers[column.name] = values if change is None else change(values)
        for key, found in zip(self._layout.ids, block.ids, strict=True):
            if key.role != "feature":
                continue
            own = self._ids(key.name, found)
            self._unknown.add(key.name, own)
            if found.lengths is None:
                ids[key.name] = own
            else:
                lists[key.name] = Jagged.from_lengths(own, found.lengths.astype(np.int64))
        return Block(self._fill(block.num_rows, numbers, ids), lists)

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature; None and texts that stand for a missing value are missing ones.

        Raises:
            UserError: No column of values has ids in the feature's table, or a value is none of its kind.
        """
        kinds = {column.name: column.kind for column in self._keys}
        if feature not in kinds:
            raise UserError(
                f"the raw values of {feature!r} are not known: its ids are bins of numbers, or no feature has that "
                f"name. Known: {enumerate_names(list(kinds))}; give ids for others."
            )
        if isinstance(values, str | bytes):
            raise UserError(f"the values of {feature!r} are the one text {values!r}; give a list with it.")
        given, bad = given_column(values, feature)
        given = plain_array(one_array(given) if isinstance(given, pa.ChunkedArray) else given)
        if bad:
            raise UserError(f"value {bad[0]} of {feature!r} is {values[bad[0]]!r}, which is no text or number.")
        allowed = VALUE_TYPES[kinds[feature]]
        if type_kind(given.type) not in (*allowed, None):
            raise UserError(
                f"the values of {feature!r} are of type {given.type}; give a list of {' or '.join(allowed)}."
            )
        found = coded(given, self._missing)
        keys = KEY_KINDS[kinds[feature]](found.distinct)
        if keys.wrong.any():
            place = int(np.argmax(np.concatenate([[False], keys.wrong])[found.codes]))
            raise UserError(f"value {place} ({values[place]!r}) of {feature!r} is none of its kind, {kinds[feature]}.")
        return self._ids(feature, id_column(found, keys, None))

    def _ids(self, feature: str, column: IdColumn) -> NDArray[np.int64]:
        """Returns the id of each value; what repeats within the block is searched for once."""
        table = np.concatenate([np.array([MISSING_ID]), self._id_maps[feature].ids(column.keys[1:])])
        return table[column.codes]

    def _fill(
        self, num_rows: int, numbers: Mapping[str, NDArray[Any]], ids: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        """Returns the records of single-valued columns."""
        layout = self._records
        records = np.zeros((num_rows, layout.width), layout.dtype)
        floats = records.view(np.float32)
        for place, feature in enumerate(layout.single):
            records[:, place] = ids.get(feature.name, MISSING_ID)
        for place, name in enumerate(layout.numbers, start=layout.first_float):
            floats[:, place] = numbers.get(name, 1.0 if name == self._weight else np.nan)
        return records


def raw_schema(manifest: Manifest) -> TableSchema:
    """Returns the schema of the raw rows that are scored by a model of a dataset.

    Of a dataset of ratings or of sequences they have the columns of the dataset, with users and items as texts; lists
    are those of JSON or Parquet, or texts with a space between two values. Others are refused by a UserError.
    """
    schema = manifest.schema
    if manifest.preparation.get("source") != INTERACTIONS:
        return TableSchema.of_manifest(manifest)
    return TableSchema(
        label=None if schema.label is None else LabelColumn(schema.label, kind="number", name=schema.label),
        dense={name: DenseColumn(missing="keep" if schema.missing_dense else "zero") for name in schema.dense},
        categorical={
            feature.name: CategoricalColumn(separator=LIST_SEPARATOR if feature.multi_hot else None)
            for feature in schema.categorical
        },
    )
