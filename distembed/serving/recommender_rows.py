"""Raw rows of recommenders: users to rank items for, and sequences of items whose next one is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import RejectedRow
from distembed.data.prepare.vocabulary import FIRST_ID
from distembed.data.reader.decode import Block, RecordLayout
from distembed.data.table.encoder import RowEncoder, raw_schema
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema
from distembed.serving.row_decoder import DecodedRows


class _NamedRows:
    """Decodes rows of some features of a dataset of users and items.

    Args:
        folder: Folder of the dataset, or of what a run keeps of it.
        manifest: Its manifest.
        features: Names of the features that rows have.
    """

    def __init__(self, folder: Path, manifest: Manifest, features: Collection[str]) -> None:
        whole = raw_schema(manifest)
        kept = {name: each for name, each in whole.categorical.items() if name in features}
        self.schema: TableSchema = dataclasses.replace(whole, label=None, dense={}, categorical=kept)
        self._parser = TableParser(self.schema)
        self.columns = self._parser.columns
        self._encoder = RowEncoder(folder, manifest, self._parser.layout)
        self._records = RecordLayout.from_schema(manifest.schema)

    def ids_of(self, feature: str, values: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the ids of raw values of a feature."""
        return self._encoder.ids_of(feature, values)

    def _encoded(self, table: pa.Table) -> Block:
        parsed = self._parser.parse(table)
        assert not parsed.rejected, "every text is a value"
        return self._encoder.encode(parsed)

    def _known(self, reason: str, table: pa.Table, block: Block, is_good: NDArray[np.bool_]) -> DecodedRows:
        """Returns the rows that are good, and the others as rejected ones."""
        names = self._parser.columns.names
        rejected = [
            RejectedRow(
                row, reason, " ".join(str(table[name][row].as_py()) for name in names).encode(), " ".join(names)
            )
            for row in np.flatnonzero(~is_good).tolist()
        ]
        return DecodedRows(is_good, block.gather(np.flatnonzero(is_good)), tuple(rejected))


class UserRowDecoder(_NamedRows):
    """Decodes rows with a user each; one that the dataset has not is malformed, since nothing is known of it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest, (USER,))

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`~distembed.serving.row_decoder.RowDecoder.decode` says."""
        block = self._encoded(table)
        place = [feature.name for feature in self._records.single].index(USER)
        return self._known("user", table, block, block.records[:, place] >= FIRST_ID)


class SequenceRowDecoder(_NamedRows):
    """Decodes rows with a list of items each, the earliest first; whose they are is not looked at.

    Items that the dataset has not are left out, and a row without any other is malformed.

    Raises:
        UserError: The dataset has numbers or other values beside the items, which raw rows would need for each item.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        schema = manifest.schema
        beside = [each.name for each in schema.categorical if each.multi_hot and each.name != ITEM]
        if beside or schema.dense_sequences:
            raise UserError(
                f"the dataset has {', '.join((*beside, *schema.dense_sequences))} beside the items of a sequence, and "
                "raw sequences are of items alone: prepare the rows, and predict them by --split."
            )
        super().__init__(folder, manifest, (ITEM,))

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`~distembed.serving.row_decoder.RowDecoder.decode` says."""
        block = self._encoded(table)
        items = block.jagged[ITEM]
        is_known = items.values >= FIRST_ID
        rows = np.repeat(np.arange(len(items.lengths)), items.lengths)[is_known]
        known = Jagged.from_lengths(items.values[is_known], np.bincount(rows, minlength=len(items.lengths)))
        return self._known("sequence", table, Block(block.records, {ITEM: known}), known.lengths > 0)
