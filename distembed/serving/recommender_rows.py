"""Raw rows of recommenders: users to rank items for, and sequences of items to continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import Jagged, RecordBlock, RecordLayout
from distembed.data.dataset.schema import ITEM, USER, Schema
from distembed.data.table.blocks import RejectedRow
from distembed.data.table.encoder import RowEncoder, raw_schema
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema
from distembed.data.table.vocabulary import FIRST_ID
from distembed.serving.row_decoder import DecodedRows


class _FeatureRows:
    """Decodes rows of some features of a dataset of users and items; the first feature decides which rows are good."""

    _reason: str

    def __init__(self, folder: Path, manifest: Manifest, features: Sequence[str]) -> None:
        whole = raw_schema(manifest)
        kept = {name: each for name, each in whole.categorical.items() if name in features}
        self.schema: TableSchema = dataclasses.replace(whole, label=None, dense={}, categorical=kept)
        self._parser = TableParser(self.schema)
        self.columns = self._parser.columns
        self._encoder = RowEncoder(folder, manifest, self._parser.layout)
        self._feature = features[0]

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature."""
        return self._encoder.ids_of(feature, values)

    def _encoded(self, table: pa.Table) -> RecordBlock:
        """Returns the rows of a table, whose lists of items have the items of the dataset alone."""
        parsed = self._parser.parse(table)
        assert not parsed.rejected, "every text is a value"
        block = self._encoder.encode(parsed)
        lists = {}
        for name, items in block.jagged.items():
            is_known = items.values >= FIRST_ID
            rows = np.repeat(np.arange(len(items.lengths)), items.lengths)[is_known]
            lengths = np.bincount(rows, minlength=len(items.lengths))
            lists[name] = Jagged.from_lengths(items.values[is_known], lengths)
        return RecordBlock(block.records, lists)

    def _good_and_bad(self, table: pa.Table, block: RecordBlock, is_good: NDArray[np.bool_]) -> DecodedRows:
        texts = table[self._feature]
        rejected = [
            RejectedRow(row, self._reason, str(texts[row].as_py()).encode(), self._feature)
            for row in np.flatnonzero(~is_good).tolist()
        ]
        return DecodedRows(is_good, block.gather(np.flatnonzero(is_good)), tuple(rejected))


class UserRowDecoder(_FeatureRows):
    """Decodes rows with a user each; a user that the dataset does not have is malformed."""

    _reason = "user"

    def __init__(self, folder: Path, manifest: Manifest, features: Sequence[str] = (USER,)) -> None:
        super().__init__(folder, manifest, features)
        self._place = [each.name for each in RecordLayout.from_schema(manifest.schema).single].index(USER)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`~distembed.serving.row_decoder.RowDecoder.decode` says."""
        block = self._encoded(table)
        return self._good_and_bad(table, block, block.records[:, self._place] >= FIRST_ID)


class UserItemsRowDecoder(UserRowDecoder):
    """Decodes rows with a user each, and a list of items that are not to be recommended, which a table may lack.

    Attributes:
        batch_schema: The columns of decoded rows: the user, and the list of items.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        features = {each.name: each for each in manifest.schema.categorical}
        items = dataclasses.replace(features[ITEM], multi_hot=True)
        self.batch_schema = Schema(label=None, dense=(), categorical=(features[USER], items))
        super().__init__(folder, dataclasses.replace(manifest, schema=self.batch_schema), (USER, ITEM))

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`~distembed.serving.row_decoder.RowDecoder.decode` says."""
        return super().decode(table if ITEM in table.column_names else table.append_column(ITEM, pa.nulls(len(table))))


class SequenceRowDecoder(_FeatureRows):
    """Decodes rows with a list of items each, the earliest first; columns other than the items are ignored.

    Items that the dataset does not have are left out, and a row without any other item is malformed.

    Raises:
        UserError: The dataset has other values for each item, which raw rows would need too.
    """

    _reason = "sequence"

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        schema = manifest.schema
        others = [each.name for each in schema.categorical if each.multi_hot and each.name != ITEM]
        if others or schema.dense_sequences:
            raise UserError(
                f"the dataset has {', '.join((*others, *schema.dense_sequences))} beside the items of a sequence, and "
                "raw sequences are of items alone: prepare the rows, and predict them by --split."
            )
        super().__init__(folder, manifest, (ITEM,))

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`~distembed.serving.row_decoder.RowDecoder.decode` says."""
        block = self._encoded(table)
        return self._good_and_bad(table, block, block.jagged[ITEM].lengths > 0)
