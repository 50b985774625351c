"""Scores the rows of several requests at once: raw values -> ids and numbers -> the program -> each request's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.reader import Batch
from distembed.errors import UserError
from distembed.exported.manifest import ExportedFeature, ExportManifest
from distembed.exported.programs import Program
from distembed.exporting.batches import plain_inputs
from distembed.exporting.feature_vectors import PlainFeature
from distembed.server.rows import BadRow, JoinedRows, join_rows, missing_columns
from distembed.serving.row_decoder import RowDecoder, TableRowDecoder, batches_of

DATASET_FOLDER = "dataset"
_REASONS = {"dense": "is no finite number", "id": "is no value of this column's kind"}


@dataclass(frozen=True)
class Request:
    """The rows of a request: as JSON has them, or a table.

    Attributes:
        rows: The rows, each with its values by column.
        table: The rows as a table, where they came so.
    """

    rows: Sequence[dict[str, Any]] = ()
    table: pa.Table | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.rows) if self.table is None else self.table.num_rows


@dataclass(frozen=True)
class Answer:
    """What is said to a request.

    Attributes:
        outputs: Values of each row by the names of outputs; NaN for bad rows.
        bad: The rows that cannot be scored.
        problem: What is wrong with the request as a whole, such as a missing column; None for nothing.
    """

    outputs: dict[str, NDArray[Any]] = field(default_factory=dict)
    bad: Sequence[BadRow] = ()
    problem: str | None = None


class Scorer:
    """Scores requests; any number of threads may use it.

    Args:
        folder: Folder of the exported model.
        manifest: Its manifest.
        program: Its program.
        most_rows: Most rows that the program is given at once.

    Raises:
        UserError: Raw rows cannot be decoded, as the dataset was made elsewhere.
    """

    def __init__(self, folder: Path, manifest: ExportManifest, program: Program, most_rows: int) -> None:
        self.manifest = manifest
        self._program, self._most_rows = program, most_rows
        dataset = Manifest.load(folder / DATASET_FOLDER)
        self._schema = dataset.schema
        self._decoder: RowDecoder = TableRowDecoder(folder / DATASET_FOLDER, dataset)
        self._columns = self._decoder.columns
        self._features = [_plain(feature) for feature in manifest.features]
        self._takes_numbers = "dense" in manifest.network.inputs

    def score(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns an answer for each request; what is wrong with one changes nothing for the others."""
        answers: list[Answer | None] = [self._refusal(request) for request in requests]
        joined = [
            (place, request)
            for place, request in enumerate(requests)
            if request.table is None and answers[place] is None and request.num_rows
        ]
        if joined:
            rows = [row for _, request in joined for row in request.rows]
            found = self._score_table(join_rows(rows, self._columns))
            start = 0
            for place, request in joined:
                answers[place] = _part(found, start, request.num_rows)
                start += request.num_rows
        for place, request in enumerate(requests):
            if answers[place] is None:
                answers[place] = self._score_alone(request)
        return [answer for answer in answers if answer is not None]

    def _refusal(self, request: Request) -> Answer | None:
        """Returns what is wrong with the columns of a request of JSON."""
        if request.table is not None:
            return None
        missing = missing_columns(request.rows, self._columns.kinds) if request.rows else []
        if not missing:
            return None
        try:
            self._columns.require(pa.schema([(name, pa.null()) for name in _names(request.rows)]), "the request")
        except UserError as error:
            return Answer(problem=str(error))
        return Answer(problem=f"the request has no column {missing[0]!r}")

    def _score_alone(self, request: Request) -> Answer:
        if not request.num_rows:
            return Answer({name: np.empty(0, np.float32) for name in self.manifest.network.outputs})
        try:
            return self._score_table(JoinedRows(request.table))
        except UserError as error:
            return Answer(problem=str(error))

    def _score_table(self, joined: JoinedRows) -> Answer:
        decoded = self._decoder.decode(joined.table)
        bad = {each.row: each for each in joined.bad}
        for row in decoded.rejected:
            value = joined.table[row.column][row.line].as_py() if row.column in joined.table.column_names else "it"
            bad.setdefault(row.line, BadRow(row.line, row.column, f"{value!r} {_REASONS.get(row.reason, row.reason)}"))
        outputs = self._outputs(list(batches_of(self._schema, decoded.block, self._most_rows)))
        is_good = decoded.is_good
        if not is_good.all():
            outputs = {name: _spread(values, is_good) for name, values in outputs.items()}
        for values in outputs.values():
            values[[each.row for each in joined.bad]] = np.nan
        return Answer(outputs, sorted(bad.values(), key=lambda each: each.row))

    def _outputs(self, batches: Sequence[Batch]) -> dict[str, NDArray[Any]]:
        """Returns the outputs of the program for all rows of batches."""
        found: list[tuple[Tensor, ...]] = []
        with torch.inference_mode():
            for batch in batches:
                outputs = self._program(*plain_inputs(batch, self._features, self._takes_numbers).tensors.values())
                found.append((outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
        names = self.manifest.network.outputs
        return {
            name: torch.cat([outputs[place] for outputs in found]).numpy() if found else np.empty(0, np.float32)
            for place, name in enumerate(names)
        }


def _plain(feature: ExportedFeature) -> PlainFeature:
    return PlainFeature(feature.name, feature.is_list)


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _part(answer: Answer, start: int, num_rows: int) -> Answer:
    """Returns the answer to one of the requests whose rows were scored together."""
    rows = range(start, start + num_rows)
    bad = [BadRow(each.row - start, each.field, each.reason) for each in answer.bad if each.row in rows]
    return Answer({name: values[start : rows.stop] for name, values in answer.outputs.items()}, bad)


def _spread(values: NDArray[Any], is_good: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns the values of all rows: those of good ones, and NaN."""
    spread = np.full((len(is_good), *values.shape[1:]), np.nan, np.float32)
    spread[is_good] = values
    return spread
