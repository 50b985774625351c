"""Scores the rows of several requests at once: raw values -> ids and numbers -> the program -> scores a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.records import RecordBlock
from distembed.data.reader import Batch
from distembed.data.table.vocabulary import FIRST_ID
from distembed.serving.export.feature_vectors import plain_tensors
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.model_folder.programs import Program
from distembed.serving.rows.decoder import RowDecoder, batches_of, decode_rows
from distembed.serving.rows.given import given_rows, missing_columns
from distembed.serving.rows.malformed import BadRow, bad_rows
from distembed.serving.rows.sequence_rows import SequenceRowDecoder
from distembed.serving.rows.table_rows import TableRowDecoder, features_read
from distembed.serving.rows.user_rows import QueryItemsRowDecoder, UserItemsRowDecoder

Outputs = Mapping[str, NDArray[Any] | pa.Array]
"""A column for each output by its name: float32, NaN for a bad row; or a list for each row, null for a bad one."""
_DATASET_FOLDER = "dataset"
_ITEMS = "items"


@dataclass(frozen=True)
class RowRequest:
    """The rows of a request: of JSON, each with its values by column, or else an Arrow table."""

    rows: Sequence[dict[str, Any]] = ()
    table: pa.Table | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.rows) if self.table is None else self.table.num_rows


@dataclass(frozen=True)
class Scores:
    """The scores of a request: a column for each output, the malformed rows, or a problem of the whole request.

    ``version`` names the version of the model that gave them.
    """

    outputs: Outputs = field(default_factory=dict)
    bad: Sequence[BadRow] = ()
    problem: str | None = None
    version: str = ""


class Scorer:
    """Scores requests, at most ``most_rows`` rows at once; any number of threads may use it."""

    def __init__(self, folder: Path, manifest: ExportManifest, program: Program, most_rows: int) -> None:
        self.manifest = manifest
        self._program, self._most_rows = program, most_rows
        dataset = Manifest.load(folder / _DATASET_FOLDER)
        self._decoder = _decoder(folder / _DATASET_FOLDER, dataset, manifest)
        self._schema = getattr(self._decoder, "batch_schema", dataset.schema)
        optional = getattr(self._decoder, "optional", ())
        self._needed = [name for name in self._decoder.columns.kinds if name not in optional]
        self._takes_numbers = "dense" in manifest.network.inputs
        vocabularies = {feature.name: feature.vocabulary for feature in manifest.features}
        self._recommends = manifest.recommends is not None
        file = None if manifest.recommends is None else vocabularies.get(manifest.recommends.feature)
        self._items = None if file is None else _raw_values(folder / file)

    def score(self, requests: Sequence[RowRequest]) -> list[Scores]:
        """Returns the scores of each request; a fault in one request does not change the scores of another.

        Rows of JSON are decoded and scored together. A table is scored alone, since its columns have types; so is a
        request that lacks a column, whose error names the columns that are there.
        """
        joined = [index for index, request in enumerate(requests) if self._can_be_joined(request)]
        answers: dict[int, Scores] = {}
        if joined:
            scores = self._score_rows([row for index in joined for row in requests[index].rows])
            start = 0
            for index in joined:
                answers[index] = _part(scores, start, requests[index].num_rows)
                start += requests[index].num_rows
        return [answers.get(index) or self._score_alone(request) for index, request in enumerate(requests)]

    def _can_be_joined(self, request: RowRequest) -> bool:
        return len(request.rows) > 0 and not missing_columns(request.rows, self._needed)

    def _score_alone(self, request: RowRequest) -> Scores:
        if not request.num_rows:
            return Scores(self._columns({}, np.empty(0, bool)))
        try:
            return self._score_rows(request.rows if request.table is None else request.table)
        except UserError as error:
            return Scores(problem=str(error))

    def _score_rows(self, rows: Sequence[Mapping[str, Any]] | pa.Table) -> Scores:
        """Decodes and scores rows; a :class:`UserError` names a column that is missing or of a wrong type."""
        raw = given_rows(rows, self._decoder.columns)
        decoded = decode_rows(self._decoder.decode, raw)
        outputs = self._run(decoded.block)
        return Scores(self._columns(outputs, decoded.is_good), bad_rows(raw, decoded.rejected, self._decoder.columns))

    def _run(self, block: RecordBlock) -> dict[str, NDArray[Any]]:
        """Returns the program's outputs by name for decoded rows; an empty dictionary where there are no rows."""
        chunks: list[tuple[Tensor, ...]] = []
        with torch.inference_mode():
            for batch in batches_of(self._schema, block, self._most_rows):
                outputs = self._program(*self._inputs(batch).values())
                chunks.append((outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
        return {
            name: torch.cat([outputs[index] for outputs in chunks]).numpy()
            for index, name in enumerate(self.manifest.network.outputs if chunks else ())
        }

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        return plain_tensors(batch, self.manifest.features, self._takes_numbers, self.manifest.sequences)

    def _columns(self, outputs: Mapping[str, NDArray[Any]], is_good: NDArray[np.bool_]) -> Outputs:
        """Returns a column of all rows for each output; ``outputs`` have the good rows alone: [good] or [good, k]."""
        column = self._list_column if self._recommends else _number_column
        return {name: column(name, outputs.get(name), is_good) for name in self.manifest.network.outputs}

    def _list_column(self, name: str, values: NDArray[Any] | None, is_good: NDArray[np.bool_]) -> pa.Array:
        if values is None:
            ids = pa.int64() if self._items is None else pa.string()
            return pa.nulls(len(is_good), pa.list_(ids if name == _ITEMS else pa.float32()))
        # a row with fewer items than num_best has ids of -1 and scores of -inf
        is_none = values < 0 if name == _ITEMS else ~np.isfinite(values)
        flat = pa.array(values.reshape(-1), mask=is_none.reshape(-1))
        if name == _ITEMS and self._items is not None:
            flat = self._items.take(flat)
        # a good row's list has k entries and a bad row's none: rows good, bad, good have the offsets 0, k, k, 2k
        offsets = np.concatenate([[0], np.cumsum(is_good)]).astype(np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(~is_good))


def _decoder(folder: Path, dataset: Manifest, manifest: ExportManifest) -> RowDecoder:
    """Returns the decoder of a task's raw rows."""
    task = manifest.task
    if task == "retrieval":
        assert manifest.recommends is not None
        names = [*(each.name for each in manifest.features), *(each.name for each in manifest.numbers)]
        return QueryItemsRowDecoder(folder, dataset, names, manifest.recommends.feature)
    if task == "ranking":
        return UserItemsRowDecoder(folder, dataset)
    lists = [*(each.name for each in manifest.features if each.is_list), *(each.name for each in manifest.sequences)]
    if task == "next_item":
        return SequenceRowDecoder(folder, dataset, lists)
    return TableRowDecoder(folder, dataset, features=features_read(dataset.schema, lists))


def _number_column(_: str, values: NDArray[Any] | None, is_good: NDArray[np.bool_]) -> NDArray[Any]:
    if values is not None and is_good.all():
        return values
    spread = np.full(len(is_good), np.nan, np.float32 if values is None else values.dtype)
    if values is not None:
        spread[is_good] = values
    return spread


def _part(answer: Scores, start: int, num_rows: int) -> Scores:
    """Returns the scores of one request out of ``answer`` for joined requests: ``num_rows`` rows from ``start``."""
    rows = range(start, start + num_rows)
    bad = [BadRow(bad_row.row - start, bad_row.field, bad_row.reason) for bad_row in answer.bad if bad_row.row in rows]
    return Scores({name: values[start : rows.stop] for name, values in answer.outputs.items()}, bad)


def _raw_values(file: Path) -> pa.Array:
    """Reads a vocabulary file; returns the raw value, as text, at the place of each id, null for the reserved ids."""
    with file.open(encoding="utf-8") as lines:
        return pa.array([*[None] * FIRST_ID, *(str(json.loads(line)) for line in lines)], pa.string())
