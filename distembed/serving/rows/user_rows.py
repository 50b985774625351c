"""Decodes rows of users who get recommendations, with items to leave out where a model takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import RecordBlock, RecordLayout
from distembed.data.dataset.schema import ITEM, USER, Schema
from distembed.data.table.encoder import raw_schema
from distembed.data.table.schema import TableSchema
from distembed.data.table.vocabulary import FIRST_ID
from distembed.serving.rows.decoder import DecodedRows, Decoder, kept_entries, unknown_rows


class UserRowDecoder(Decoder):
    """Decodes rows with a user each; a user that the dataset does not have is malformed."""

    def __init__(self, folder: Path, manifest: Manifest, features: Sequence[str] = (USER,)) -> None:
        full = dataclasses.replace(raw_schema(manifest), label=None)
        super().__init__(folder, manifest, full.with_features(features))
        self._user_column = [feature.name for feature in RecordLayout.from_schema(manifest.schema).single].index(USER)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says; unknown entries of lists are left out."""
        parsed = self._parser.parse(table)
        assert not parsed.rejected, "every text is a value"
        block = self._encoder.encode(parsed)
        lists = {name: kept_entries(items, items.values >= FIRST_ID) for name, items in block.jagged.items()}
        is_good = block.records[:, self._user_column] >= FIRST_ID
        known = RecordBlock(block.records, lists).gather(np.flatnonzero(is_good))
        return DecodedRows(is_good, known, unknown_rows(table[USER], ~is_good, "user", USER))


class UserItemsRowDecoder(UserRowDecoder):
    """Decodes rows with a user each and, optionally, a list of items to leave out of the user's recommendations.

    ``batch_schema`` is the schema of the decoded rows: the dataset's user and item, with the item as a list.
    """

    optional = (ITEM,)

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        features = {feature.name: feature for feature in manifest.schema.categorical}
        items = dataclasses.replace(features[ITEM], multi_hot=True)
        self.batch_schema = Schema(label=None, dense=(), categorical=(features[USER], items))
        super().__init__(folder, dataclasses.replace(manifest, schema=self.batch_schema), (USER, ITEM))

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        return super().decode(table if ITEM in table.column_names else table.append_column(ITEM, pa.nulls(len(table))))


class QueryItemsRowDecoder(Decoder):
    """Decodes rows with the features of users and, optionally, a list of items to leave out of the recommendations.

    ``batch_schema`` is the schema of the decoded rows, with the item as a list; ``optional`` names it.

    Args:
        folder: The folder in which an exported model keeps parts of its dataset.
        manifest: Its manifest.
        names: The features of users, categorical and dense, and the item.
        item: The item.
    """

    def __init__(self, folder: Path, manifest: Manifest, names: Collection[str], item: str) -> None:
        self.optional = (item,)
        full, raw = manifest.schema, raw_schema(manifest).with_features(names)
        features = [
            dataclasses.replace(feature, multi_hot=feature.multi_hot or feature.name == item, table=None)
            for feature in full.categorical
            if feature.name in names
        ]
        dense = tuple(name for name in full.dense if name in names)
        self.batch_schema = Schema(None, dense, tuple(features), missing_dense=full.missing_dense)
        categorical = {**raw.categorical, item: dataclasses.replace(raw.categorical[item], is_list=True)}
        raw = dataclasses.replace(
            raw,
            label=None,
            labels={},
            weight=None,
            time=None,
            split=TableSchema.split,
            parser="table",
            categorical=categorical,
        )
        super().__init__(folder, dataclasses.replace(manifest, schema=self.batch_schema), raw)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        (column,) = [self.schema.categorical[name].column or name for name in self.optional]
        if column not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table)))
        parsed = self._parser.parse(table)
        is_good = np.ones(table.num_rows, bool)
        is_good[[row.line for row in parsed.rejected]] = False
        return DecodedRows(is_good, self._encoder.encode(parsed), parsed.rejected)
