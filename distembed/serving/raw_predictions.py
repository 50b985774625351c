"""Predictions of raw rows, on any number of ranks: a file with a line for each line of the input, in its order.

Rank 0 reads, parses and encodes the rows in a thread, and hands each rank a batch at a time; all ranks score::

    input     | piece | piece | piece | ...          pieces of some megabytes
    batches   |  0  |  1  |  2  |  3  | ...          8,192 well-formed rows, cut without regard to ranks
    ranks        0     1     0     1                 each step takes a batch a rank

So a batch, and what a network computes of it, is the same to the bit on any number of ranks, and that of a prepared
split if no row is malformed. Rank 0 holds two steps of rows and the pieces whose predictions are not yet there.

Trade-off: one process decodes, at some hundred thousand rows a second; a pipe can be read by one only. What is to be
scored faster than that is prepared, by several processes, and scored by ``--split``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distembed.base.errors import UserError
from distembed.base.files import whole_file
from distembed.base.ranks import Collectives, Ranks
from distembed.data.dataset.records import RecordBlock
from distembed.data.dataset.schema import Schema
from distembed.data.reader import Batch
from distembed.data.reader.batch import BatchAssembler
from distembed.data.reader.reader import Prefetcher
from distembed.serving.raw_inputs import RawInputs, ScoredPiece
from distembed.serving.requests import unknown_columns
from distembed.training.build import TrainingState
from distembed.training.inference import EVALUATION_BATCH_SIZE, LoadedRun, gather_outputs, score_prepared
from distembed.training.prediction_columns import PredictionColumns, recommended_values
from distembed.training.trained_run import PREDICTION_FORMATS, TrainedRun

_STEPS_AHEAD = 2


@dataclass(frozen=True)
class PredictedRows:
    """What was predicted.

    Attributes:
        num_lines: Number of lines of the file of predictions.
        rejected: Number of malformed rows, whose predictions are null, by reason.
    """

    num_lines: int
    rejected: dict[str, int]


@dataclass(frozen=True)
class RawScoring:
    """A model, and what its batches and predictions are.

    Attributes:
        state: The model with its task.
        schema: Columns of its dataset.
        columns: What predictions become in a file.
        ranks: This rank among all.
    """

    state: TrainingState
    schema: Schema
    columns: PredictionColumns
    ranks: Ranks

    @classmethod
    def of_run(cls, loaded: LoadedRun, run: TrainedRun, raw_values: bool = True) -> RawScoring:
        """Returns the scoring of a loaded run, whose predictions are of users and items as raw values or as ids."""
        task = loaded.state.task
        values = recommended_values(loaded.dataset) if raw_values and task.id_columns else {}
        columns = PredictionColumns(task, values, left_out=unknown_columns(run))
        return cls(loaded.state, run.manifest.schema, columns, loaded.ranks)

    def write(self, make_inputs: Callable[[], RawInputs], output: Path) -> PredictedRows | None:
        """Writes the prediction of each row of some inputs, with its keys; all ranks call it.

        Args:
            make_inputs: Returns the inputs; called on rank 0 alone.
            output: File to write, whole or not at all.

        Returns:
            What was predicted on rank 0, and None on other ranks.

        Raises:
            UserError: The inputs cannot be read, or too many rows are malformed.
            RunError: The file cannot be written.
        """
        collectives = Collectives.in_own_group()
        opened: list[RawInputs] = []
        collectives.on_first(lambda: opened.append(self._with_free_keys(make_inputs())))
        if not self.ranks.is_first:
            for outputs in score_prepared(self.state, self._batches(_Feed(collectives))):
                gather_outputs(outputs, self.ranks)
            return None
        with ExitStack() as resources:
            lines = resources.enter_context(_Lines.written_to(output, self.columns, opened[0].keys))
            steps = resources.enter_context(closing(Prefetcher(_Steps(opened[0], self.ranks.world_size), _STEPS_AHEAD)))
            for outputs in score_prepared(self.state, self._batches(_Feed(collectives, steps, lines))):
                rows = gather_outputs(outputs, self.ranks)
                lines.add_predictions([self.columns.table(self.state.task.predictions(own)) for own in rows])
            lines.finish()
        return PredictedRows(lines.num_lines, opened[0].rejected)

    def _with_free_keys(self, inputs: RawInputs) -> RawInputs:
        """Returns the inputs, whose keys have no name of a prediction.

        Raises:
            UserError: One has.
        """
        for key in inputs.keys:
            if key in self.columns.schema.names:
                raise UserError(f"--key is {key!r}, which a column of predictions is named; rename it in the input.")
        return inputs

    def _batches(self, feed: _Feed) -> Generator[Batch, None, None]:
        """Yields this rank's batches, as the task prepares them."""
        assembler = BatchAssembler(self.schema)
        while (block := feed.next()) is not None:
            num_rows = len(block.records)
            for batch in assembler.assemble([block] if num_rows else [], [max(1, num_rows)]):
                yield self.state.task.prediction_batch(batch)


@dataclass(frozen=True)
class _Step:
    """What the ranks score at once: a block of each, and the lines that some rows of these are the first of."""

    blocks: Sequence[RecordBlock]
    pieces: Sequence[ScoredPiece]


class _Steps:
    """Cuts the rows of inputs into steps.

    Args:
        inputs: The inputs.
        num_ranks: Number of blocks of a step.
    """

    def __init__(self, inputs: RawInputs, num_ranks: int) -> None:
        self._inputs, self._num_ranks = inputs, num_ranks

    def __call__(self) -> Iterator[_Step]:
        """Yields the steps; the last one may have blocks without rows, or no blocks at all."""
        size = EVALUATION_BATCH_SIZE * self._num_ranks
        waiting: list[RecordBlock] = []
        pieces: list[ScoredPiece] = []
        for piece in self._inputs.pieces():
            pieces.append(piece)
            waiting.append(piece.block)
            while sum(len(block.records) for block in waiting) >= size:
                rows = RecordBlock.concatenate(waiting)
                waiting = [_between(rows, size, len(rows.records))]
                yield _Step(self._cut(rows), pieces)
                pieces = []
        if pieces or waiting:
            rows = RecordBlock.concatenate(waiting)
            yield _Step(self._cut(rows) if len(rows.records) else [], pieces)

    def _cut(self, rows: RecordBlock) -> list[RecordBlock]:
        bounds = [EVALUATION_BATCH_SIZE * rank for rank in range(self._num_ranks + 1)]
        return [_between(rows, start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _between(rows: RecordBlock, start: int, stop: int) -> RecordBlock:
    """Returns some rows of a block, fewer where it has no more."""
    return rows.gather(np.arange(start, max(start, min(stop, len(rows.records)))))


class _Feed:
    """Hands each rank its block of each step; all ranks call :meth:`next` equally often.

    Args:
        collectives: The ranks.
        steps: The steps, on rank 0.
        lines: What is told the lines of the steps, on rank 0.
    """

    def __init__(
        self, collectives: Collectives, steps: Iterator[_Step] | None = None, lines: _Lines | None = None
    ) -> None:
        self._collectives, self._steps, self._lines = collectives, steps, lines

    def next(self) -> RecordBlock | None:
        """Returns this rank's block of the next step; None after the last one.

        Raises:
            Exception: Rank 0 could not read the rows; all ranks raise what it does.
        """
        found: Any = self._collectives.scatter(self._messages() if self._collectives.rank == 0 else None)
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, RecordBlock) else None

    def _messages(self) -> Sequence[RecordBlock | Exception | None]:
        """Returns what each rank is told: a block, that there is none, or why there is none."""
        assert self._steps is not None and self._lines is not None
        num_ranks = self._collectives.world_size
        try:
            for step in self._steps:
                self._lines.add_pieces(step.pieces)
                if step.blocks:
                    return step.blocks
        except Exception as error:
            return [error] * num_ranks
        return [None] * num_ranks


class _Lines:
    """The lines of the file of predictions, written once all predictions of a piece are there.

    Args:
        open_writer: Returns the writer for lines of these columns.
        columns: What predictions become in the file.
        keys: Names of the key columns, which are texts in a file without lines.

    Attributes:
        num_lines: Number of lines so far.
    """

    def __init__(
        self, open_writer: Callable[[pa.Schema], Any], columns: PredictionColumns, keys: Sequence[str]
    ) -> None:
        self._open_writer, self._columns, self._keys = open_writer, columns, keys
        self._writer: Any = None
        self._pieces: deque[ScoredPiece] = deque()
        self._predicted = columns.schema.empty_table()
        self.num_lines = 0

    @classmethod
    @contextmanager
    def written_to(cls, output: Path, columns: PredictionColumns, keys: Sequence[str]) -> Iterator[_Lines]:
        """Yields lines that are in a file at the end of the block, or nowhere after an error."""
        with ExitStack() as resources:
            temporary = resources.enter_context(whole_file(output))

            def open_writer(schema: pa.Schema) -> Any:
                try:
                    return resources.enter_context(PREDICTION_FORMATS[output.suffix](temporary, schema))
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    types = ", ".join(f"{key} {schema.field(key).type}" for key in keys)
                    raise UserError(
                        f"--output {output}: {output.suffix} does not hold key columns of such types ({types}: "
                        f"{error}); write .parquet, or keep other columns."
                    ) from error

            yield cls(open_writer, columns, keys)

    def add_pieces(self, pieces: Sequence[ScoredPiece]) -> None:
        """Takes the lines of a step, before its predictions are there.

        Raises:
            UserError: The file cannot have such keys.
        """
        self._pieces.extend(pieces)
        if self._writer is None and self._pieces:
            self._open(self._pieces[0].keys.schema)

    def add_predictions(self, tables: Sequence[pa.Table]) -> None:
        """Takes the predictions of the next rows, and writes the lines that are complete."""
        self._predicted = pa.concat_tables([self._predicted, *tables])
        while self._pieces and len(self._pieces[0].rows) <= len(self._predicted):
            piece = self._pieces.popleft()
            self._write(piece, self._predicted.slice(0, len(piece.rows)))
            self._predicted = self._predicted.slice(len(piece.rows))

    def finish(self) -> None:
        """Writes the last lines, which may be none."""
        self.add_predictions([])
        assert not self._pieces and not len(self._predicted), "each row has a prediction"
        if self._writer is None:
            self._open(pa.schema([(key, pa.string()) for key in self._keys]))

    def _open(self, keys: pa.Schema) -> None:
        self._writer = self._open_writer(pa.schema([*keys, *self._columns.schema]))

    def _write(self, piece: ScoredPiece, predicted: pa.Table) -> None:
        places = np.full(piece.num_lines, -1, np.int64)
        places[piece.rows] = np.arange(len(piece.rows))
        predictions = predicted.take(pa.array(places, mask=places < 0))
        names = [*piece.keys.column_names, *predictions.column_names]
        lines = pa.table([*piece.keys.columns, *predictions.columns], names=names)
        self._writer.write_table(lines)
        self.num_lines += len(lines)
