"""Scores the rows of several requests at once: raw values -> ids and numbers -> the program -> each request's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.serving.given_rows import given_rows, missing_columns
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.model_folder.programs import Program
from distembed.serving.row_decoder import BadRow, bad_rows, decode_rows
from distembed.serving.server.outputs import Outputs, ProgramOutputs
from distembed.serving.server.raw_rows import raw_rows

DATASET_FOLDER = "dataset"
_MOST_NAMES = 1000
"""Columns of a request that are looked at for what a missing one may have been named."""


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
        outputs: A column for each output of the model, with a value for each row; missing ones for bad rows.
        bad: The rows that cannot be scored.
        problem: What is wrong with the request as a whole, such as a missing column; None for nothing.
    """

    outputs: Outputs = field(default_factory=dict)
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
        self._rows = raw_rows(folder / DATASET_FOLDER, Manifest.load(folder / DATASET_FOLDER), manifest)
        self._columns = self._rows.columns
        self._needed = [name for name in self._columns.kinds if name not in self._rows.optional]
        self._outputs = ProgramOutputs(folder, manifest)

    def score(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns an answer for each request; what is wrong with one changes nothing for the others."""
        answers: list[Answer | None] = [self._refusal(request) for request in requests]
        joined = [
            (place, request)
            for place, request in enumerate(requests)
            if request.table is None and answers[place] is None and request.num_rows
        ]
        if joined:
            found = self._score_rows([row for _, request in joined for row in request.rows])
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
        missing = missing_columns(request.rows, self._needed) if request.rows else []
        if not missing:
            return None
        names = dict.fromkeys(islice((name for row in request.rows for name in row), _MOST_NAMES))
        present = [name for name in self._columns.kinds if name not in missing]  # or not needed
        try:
            self._columns.require(
                pa.schema([(name, pa.null()) for name in dict.fromkeys((*names, *present))]), "the request"
            )
        except UserError as error:
            return Answer(problem=str(error))
        raise AssertionError(f"{missing} are missing")

    def _score_alone(self, request: Request) -> Answer:
        """Returns the answer to a request of Arrow, or without rows."""
        if not request.num_rows:
            return Answer(self._outputs.columns({}, np.empty(0, bool)))
        try:
            return self._score_rows(request.table)
        except UserError as error:
            return Answer(problem=str(error))

    def _score_rows(self, rows: Sequence[Mapping[str, Any]] | pa.Table) -> Answer:
        """Returns the answer to rows.

        Raises:
            UserError: A table lacks a column, or one is of a type that has no such values.
        """
        raw = given_rows(rows, self._columns)
        table = raw.table
        for name in self._rows.optional - set(table.column_names):
            table = table.append_column(name, pa.nulls(table.num_rows))
        raw = dataclasses.replace(raw, table=table)
        decoded = decode_rows(self._rows.decode, raw)
        outputs = self._run(self._rows.inputs(decoded.block, self._most_rows))
        return Answer(self._outputs.columns(outputs, decoded.is_good), bad_rows(raw, decoded.rejected, self._columns))

    def _run(self, batches: Iterable[Sequence[Tensor]]) -> dict[str, NDArray[Any]]:
        """Returns the outputs of the program for all rows of batches; nothing where there is none."""
        found: list[tuple[Tensor, ...]] = []
        with torch.inference_mode():
            for inputs in batches:
                outputs = self._program(*inputs)
                found.append((outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
        return {
            name: torch.cat([outputs[place] for outputs in found]).numpy()
            for place, name in enumerate(self.manifest.network.outputs if found else ())
        }


def _part(answer: Answer, start: int, num_rows: int) -> Answer:
    """Returns the answer to one of the requests whose rows were scored together."""
    rows = range(start, start + num_rows)
    bad = [BadRow(each.row - start, each.field, each.reason) for each in answer.bad if each.row in rows]
    return Answer({name: values[start : rows.stop] for name, values in answer.outputs.items()}, bad)
