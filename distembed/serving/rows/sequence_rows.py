"""Decodes rows of sequences: the items, and the numbers beside them that a model reads, such as their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import RecordBlock
from distembed.data.dataset.schema import ITEM
from distembed.data.table.encoder import TIME_SINCE_FIRST, raw_schema
from distembed.data.table.vocabulary import FIRST_ID
from distembed.serving.rows.decoder import DecodedRows, Decoder, kept_entries, unknown_rows, with_all_lists


class SequenceRowDecoder(Decoder):
    """Decodes rows with a list of items each, the earliest first, and lists of numbers, such as the time of each item.

    Items that the dataset does not have are left out with their numbers, and a row without any known item is malformed.
    Times become the time since the row's first item, as in a prepared row that begins there.

    Args:
        folder: The folder of the dataset, or the folder ``dataset`` of a run.
        manifest: Its manifest.
        lists: Names of the lists that the model reads; other columns are ignored.

    Raises:
        UserError: The model reads other ids for each item, or a time that the dataset does not record as one.
    """

    def __init__(self, folder: Path, manifest: Manifest, lists: Collection[str]) -> None:
        full, self._dataset_schema = raw_schema(manifest), manifest.schema
        self._numbers = [name for name in manifest.schema.dense_sequences if name in lists]
        if other_ids := [name for name in full.categorical if name in lists and name != ITEM]:
            raise UserError(
                f"the model reads {', '.join(other_ids)} beside the items of a sequence, and raw sequences have items "
                "and numbers alone: prepare the rows, and predict them by --split."
            )
        if self._numbers and TIME_SINCE_FIRST not in manifest.preparation:
            raise UserError(
                f"the model reads {', '.join(self._numbers)} beside the items, and the dataset, prepared by distembed "
                f"{manifest.tool_version}, does not record which list is the time: prepare it again, and train or load "
                "the run on it (--data, data=); or predict by --split."
            )
        schema = dataclasses.replace(full, label=None).with_features([ITEM, *self._numbers])
        super().__init__(folder, manifest, schema)

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        if self._numbers:
            names = ", ".join(self._numbers)
            self.columns.require(table.schema, remedy=f" Give each row a list {ITEM!r} and lists as long of {names}.")
        parsed = self._parser.parse(table)
        is_good = np.ones(len(table), bool)
        is_good[[row.line for row in parsed.rejected]] = False
        block = self._encoder.encode(parsed)
        items = block.jagged[ITEM]
        is_known = items.values >= FIRST_ID  # lower ids are reserved for missing and unknown values
        block = with_all_lists(self._dataset_schema, block, items.lengths)
        lists = {name: kept_entries(entries, is_known) for name, entries in block.jagged.items()}
        has_items = lists[ITEM].lengths > 0
        is_unknown = np.zeros(len(table), bool)
        is_unknown[np.flatnonzero(is_good)[~has_items]] = True
        unknown = unknown_rows(table[ITEM], is_unknown, "sequence", ITEM)
        rejected = sorted([*parsed.rejected, *unknown], key=lambda row: row.line)
        known = RecordBlock(block.records, lists).gather(np.flatnonzero(has_items))
        return DecodedRows(is_good & ~is_unknown, known, tuple(rejected))
