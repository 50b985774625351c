"""What the rows of requests are, by the kind of the model: raw values -> the tensors that its program takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.jagged import Jagged
from distembed.data.prepare.blocks import RejectedRow
from distembed.data.prepare.vocabulary import FIRST_ID
from distembed.data.reader.decode import Block, RecordLayout
from distembed.data.table.encoder import LIST_SEPARATOR, RowEncoder, raw_schema
from distembed.data.table.parser import TableParser
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import TableSchema
from distembed.serving.export.batches import plain_tensors
from distembed.serving.export.feature_vectors import PlainFeature
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.recommender_rows import SequenceRowDecoder
from distembed.serving.row_decoder import DecodedRows, RowDecoder, TableRowDecoder, batches_of


class RawRows(Protocol):
    """Rows of requests; any number of threads may use it.

    Attributes:
        schema: What the columns of rows mean.
        columns: The same, and of which types each may be.
        optional: Columns that a request may lack.
    """

    schema: TableSchema
    columns: TableColumns
    optional: frozenset[str]

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`~distembed.serving.row_decoder.RowDecoder.decode` says."""

    def inputs(self, block: Block, most_rows: int) -> Iterator[Sequence[Tensor]]:
        """Yields the inputs of the program for decoded rows, at most so many at a time."""


class DatasetRows:
    """Rows with the columns of a dataset, or with histories of items alone.

    Args:
        folder: Folder of the dataset, or of what a model keeps of it.
        dataset: Its manifest.
        manifest: The model's manifest.
    """

    optional: frozenset[str] = frozenset()

    def __init__(self, folder: Path, dataset: Manifest, manifest: ExportManifest) -> None:
        is_sequence = manifest.task == "next_item"
        decoder: RowDecoder
        decoder = SequenceRowDecoder(folder, dataset) if is_sequence else TableRowDecoder(folder, dataset)
        self.schema, self.columns, self.decode = decoder.schema, decoder.columns, decoder.decode
        self._dataset_schema = dataset.schema
        self._features = [PlainFeature(feature.name, feature.is_list) for feature in manifest.features]
        self._takes_numbers = "dense" in manifest.network.inputs

    def inputs(self, block: Block, most_rows: int) -> Iterator[Sequence[Tensor]]:
        """Yields the inputs of the program, as :meth:`RawRows.inputs` says."""
        for batch in batches_of(self._dataset_schema, block, most_rows):
            yield list(plain_tensors(batch, self._features, self._takes_numbers).values())


class UserRows:
    """Rows with a user each, and a list of items that are not to be recommended, which may be missing.

    A user that the dataset has not is malformed, since nothing is known of it; such items are left out of the list.

    Args:
        folder: Folder of the dataset, or of what a model keeps of it.
        dataset: Its manifest.
        manifest: The model's manifest.
    """

    optional = frozenset({ITEM})

    def __init__(self, folder: Path, dataset: Manifest, manifest: ExportManifest) -> None:
        whole = raw_schema(dataset)
        items = dataclasses.replace(whole.categorical[ITEM], separator=LIST_SEPARATOR)
        categorical = {USER: whole.categorical[USER], ITEM: items}
        self.schema = dataclasses.replace(whole, label=None, dense={}, categorical=categorical)
        self._parser = TableParser(self.schema)
        self.columns = self._parser.columns
        self._encoder = RowEncoder(folder, dataset, self._parser.layout)
        single = [feature.name for feature in RecordLayout.from_schema(dataset.schema).single]
        self._place = single.index(USER)
        self._order = [feature.name for feature in manifest.features]

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RawRows.decode` says."""
        parsed = self._parser.parse(table)
        assert not parsed.rejected, "every text is a value"
        block = self._encoder.encode(parsed)
        is_good = block.records[:, self._place] >= FIRST_ID
        rejected = [RejectedRow(row, "user", b"", USER) for row in np.flatnonzero(~is_good).tolist()]
        return DecodedRows(is_good, block.gather(np.flatnonzero(is_good)), tuple(rejected))

    def inputs(self, block: Block, most_rows: int) -> Iterator[Sequence[Tensor]]:
        """Yields the inputs of the program, as :meth:`RawRows.inputs` says."""
        for start in range(0, len(block.records), most_rows):
            own = block.gather(np.arange(start, min(start + most_rows, len(block.records))))
            users = own.records[:, self._place].astype(np.int64)
            columns = {USER: Jagged.from_lengths(users, np.ones(len(users), np.int64)), ITEM: _known(own.jagged[ITEM])}
            values = np.concatenate([columns[name].values for name in self._order]).astype(np.int64)
            lengths = np.stack([columns[name].lengths for name in self._order]).astype(np.int64)
            yield torch.from_numpy(values), torch.from_numpy(lengths)


def _known(items: Jagged) -> Jagged:
    """Returns lists of items without those that the dataset has not."""
    is_known = items.values >= FIRST_ID
    rows = np.repeat(np.arange(len(items.lengths)), items.lengths)[is_known]
    return Jagged.from_lengths(items.values[is_known], np.bincount(rows, minlength=len(items.lengths)))


def raw_rows(folder: Path, dataset: Manifest, manifest: ExportManifest) -> RawRows:
    """Returns what the rows of a model are.

    Raises:
        UserError: Raw rows cannot be decoded, as the dataset was made elsewhere.
    """
    return (UserRows if manifest.task == "ranking" else DatasetRows)(folder, dataset, manifest)
