"""Decodes rows of clicks, ratings and several labels, which have a column for each feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import Schema
from distembed.data.table.encoder import raw_schema
from distembed.data.table.schema import TableSchema
from distembed.serving.rows.decoder import DecodedRows, Decoder, with_all_lists

Extra = Literal["label", "weight"]
"""Columns of raw rows that evaluations need and models are not given."""


class TableRowDecoder(Decoder):
    """Decodes rows of clicks and ratings; ``extras`` are columns for metrics, which rows must then have.

    With ``features``, rows have these alone: ids and numbers of other features are missing, and lists of ids are empty.
    Of several labels, rows need ``labels`` alone where these are given.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        extras: Collection[Extra] = (),
        features: Collection[str] | None = None,
        labels: Collection[str] | None = None,
    ) -> None:
        schema = raw_schema(manifest)
        needed = {name: column for name, column in schema.labels.items() if labels is None or name in labels}
        if (
            len(needed) == 1
        ):  # a schema has several labels or none: the rest, which no task reads, have this one's values
            needed = dict.fromkeys(schema.labels, *needed.values())
        if features is not None:
            schema = schema.with_features(features)
        schema = dataclasses.replace(
            schema,
            label=schema.label if "label" in extras else None,
            labels=needed if "label" in extras else {},
            weight=schema.weight if "weight" in extras else None,
            time=None,
            split=TableSchema.split,
            parser="table",
        )
        super().__init__(folder, manifest, schema)
        self._dataset_schema = manifest.schema

    def decode(self, table: pa.Table) -> DecodedRows:
        """Returns the rows of a table, as :meth:`RowDecoder.decode` says."""
        parsed = self._parser.parse(table)
        is_good = np.ones(table.num_rows, bool)
        is_good[[row.line for row in parsed.rejected]] = False
        block = self._encoder.encode(parsed)
        empty = np.zeros(len(block.records), np.int64)
        return DecodedRows(is_good, with_all_lists(self._dataset_schema, block, empty), parsed.rejected)


def features_read(schema: Schema, lists: Collection[str]) -> list[str]:
    """Returns the names of a dataset's features, but of its lists the names in ``lists`` alone."""
    single = [feature.name for feature in schema.categorical if not feature.multi_hot]
    return [*schema.dense, *single, *lists]
