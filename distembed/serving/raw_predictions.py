"""Predictions of raw rows, on any number of ranks: a file with a line for each line of the input, in its order.

Rank 0 reads, parses and encodes the rows of files, pipes and URLs in a thread, and hands each rank a batch at a time;
all ranks score::

    input     | piece | piece | piece | ...          pieces of some megabytes
    batches   |  0  |  1  |  2  |  3  | ...          8,192 well-formed rows, cut without regard to ranks
    ranks        0     1     0     1                 each step takes a batch a rank

So a batch, and the network's result for it, is the same to the bit on any number of ranks, and equal to that of a
prepared split if no row is malformed. Rank 0 holds two steps of rows and the pieces whose predictions are not yet
there. A piece accounts for every line of its input::

    line      0    1    2         3          malformed: line 2
    key       a    b    -         d          the key of a line that is no row is not known
    rows      0    1              2          the rows of the piece's block

Trade-off: one process decodes, at some hundred thousand rows a second; a pipe can be read by one process only. To score
rows faster, prepare them, by several processes, and score them by ``--split``.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.files import whole_file
from distembed.base.ranks import Collectives
from distembed.data.dataset.records import RecordBlock
from distembed.data.prepare.ingest import RejectedRows
from distembed.data.prepare.table.source import TableSource
from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.reader import Batch
from distembed.data.reader.batch import BatchAssembler
from distembed.data.reader.reader import Prefetcher
from distembed.data.table.blocks import RejectedRow
from distembed.serving.rows.decoder import RowDecoder, decode_rows
from distembed.training.inference import EVALUATION_BATCH_SIZE, LoadedRun, gather_outputs, score_prepared
from distembed.training.prediction_columns import PredictionColumns, recommended_values
from distembed.training.trained_run import PREDICTION_FORMATS, TrainedRun

_BLOCK_BYTES = 4 << 20
_WHOLE = 1 << 62
_STEPS_AHEAD = 2


@dataclass(frozen=True, eq=False)
class ScoredPiece:
    """Consecutive lines of an input, decoded; each line gets a prediction, null if it is malformed.

    Attributes:
        num_lines: Number of the lines, malformed ones included.
        rows: The line, from 0 within this piece, of each well-formed row, in order.
        keys: The key columns of all lines, null for a line that cannot be split into columns.
        block: The well-formed rows as columns of the dataset.
    """

    num_lines: int
    rows: NDArray[np.int64]
    keys: pa.Table
    block: RecordBlock


class RawInputs:
    """Reads inputs of raw rows once, on one process, with the columns ``keys``, which are copied to the predictions.

    ``max_rejected`` is the largest share of malformed rows that is no error; ``rejected`` counts malformed rows by
    reason once :meth:`pieces` has ended.
    """

    def __init__(
        self, source: TableSource, decoder: RowDecoder, keys: Sequence[str] = (), max_rejected: float = 0.01
    ) -> None:
        self._source, self._decoder = source, decoder
        self.keys, self._max_rejected = tuple(dict.fromkeys(keys)), max_rejected
        self.rejected: dict[str, int] = {}
        self._key_types: dict[str, pa.DataType] = {}

    def pieces(self) -> Iterator[ScoredPiece]:
        """Yields the lines of all inputs, in order.

        Raises a :class:`UserError` early where most rows so far are malformed, and at the end where too many are.
        """
        source = self._source
        with tempfile.TemporaryDirectory() as folder:
            rejected = RejectedRows(
                Path(folder), source.inputs, source.reasons, self._max_rejected, source.wanted, source.hints
            )
            num_lines = 0
            for part in source.parts(_WHOLE):
                opened, lines_before = source.open(part, _BLOCK_BYTES), 0
                for raw in opened.raw_blocks():
                    piece, bad = self._piece(raw.rows(source.columns))
                    for row in bad:
                        line = opened.header_lines + lines_before + row.line + 1
                        rejected.add(part.source, line, row.reason, row.text)
                    lines_before += piece.num_lines
                    rejected.require_hope(num_lines + lines_before)
                    yield piece
                num_lines += lines_before
            rejected.close()
            self.rejected = dict(rejected.counts().by_reason)
            if num_lines:
                rejected.require_few(num_lines)

    def _piece(self, raw: RawRows) -> tuple[ScoredPiece, Sequence[RejectedRow]]:
        """Returns the decoded lines of a block, and the malformed lines with their problems."""
        decoded = decode_rows(self._decoder.decode, raw)
        # keys of lines that are no rows: taking a null index gives null
        row_of_line = np.full(raw.num_lines, -1, np.int64)
        row_of_line[raw.lines] = np.arange(len(raw.lines))
        index = pa.array(row_of_line, mask=row_of_line < 0)
        keys = pa.table({name: self._key(name, raw.table[name]).take(index) for name in self.keys})
        return ScoredPiece(raw.num_lines, np.flatnonzero(decoded.is_good), keys, decoded.block), decoded.rejected

    def _key(self, name: str, column: pa.ChunkedArray) -> Any:
        """Casts a block's key column to its type in the first block, since JSON may give each block another type."""
        key_type = self._key_types.setdefault(name, pa.string() if pa.types.is_null(column.type) else column.type)
        try:
            return column.cast(key_type)
        except pa.ArrowException as error:
            raise UserError(
                f"--key {name!r} has values of type {key_type}, and later ones of type {column.type} ({error}); write "
                "all of them as texts."
            ) from error


@dataclass(frozen=True)
class PredictedRows:
    """The number of lines of the file of predictions, and of malformed rows, with null predictions, by reason."""

    num_lines: int
    rejected: dict[str, int]


def predict_rows(
    loaded: LoadedRun, run: TrainedRun, make_inputs: Callable[[], RawInputs], output: Path, raw_values: bool = True
) -> PredictedRows | None:
    """Writes the prediction of each row of some inputs, with its keys, whole or not at all; all ranks call it.

    Args:
        loaded: The model of the run on these ranks.
        run: The run.
        make_inputs: Opens the inputs; called on rank 0 alone.
        output: The file to write.
        raw_values: Whether predictions have users and items as raw values, and not as ids.

    Returns:
        The counts on rank 0; None on other ranks.

    Raises:
        UserError: The inputs cannot be read, too many rows are malformed, or a key has the name of a prediction.
        RunError: The file cannot be written.
    """
    state, ranks, task = loaded.state, loaded.ranks, loaded.state.task
    values = recommended_values(loaded.dataset, task) if raw_values and task.id_columns else {}
    columns = PredictionColumns(task, values, left_out=task.unknown_columns)
    collectives = Collectives.in_own_group()
    opened: list[RawInputs] = []

    def open_inputs() -> None:
        opened.append(make_inputs())
        for key in opened[0].keys:
            if key in columns.schema.names:
                raise UserError(f"--key is {key!r}, which a column of predictions is named; rename it in the input.")

    def batches(blocks: Iterator[RecordBlock]) -> Generator[Batch, None, None]:
        """Yields the catalogue's batches if there is a catalogue, then this rank's batches, prepared by the task."""
        yield from task.catalogue_batches(EVALUATION_BATCH_SIZE)
        assembler = BatchAssembler(run.manifest.schema)
        for block in blocks:
            num_rows = len(block.records)
            for batch in assembler.assemble([block] if num_rows else [], [max(1, num_rows)]):
                yield task.prediction_batch(batch)

    collectives.on_first(open_inputs)
    if not ranks.is_first:
        for outputs in score_prepared(state, batches(_own_blocks(collectives, lambda: None))):
            gather_outputs(outputs, ranks)
        return None
    with ExitStack() as resources:
        lines = resources.enter_context(_Lines.written_to(output, columns, opened[0].keys))
        steps = resources.enter_context(closing(Prefetcher(partial(_steps, opened[0], ranks.world_size), _STEPS_AHEAD)))

        def next_blocks() -> Sequence[RecordBlock] | None:
            for blocks, pieces in steps:
                lines.add_pieces(pieces)
                if blocks:
                    return blocks
            return None

        for outputs in score_prepared(state, batches(_own_blocks(collectives, next_blocks))):
            rows = gather_outputs(outputs, ranks)
            lines.add_predictions([columns.table(task.predictions(rank_outputs)) for rank_outputs in rows])
        lines.finish()
    return PredictedRows(lines.num_lines, opened[0].rejected)


def _own_blocks(
    collectives: Collectives, next_blocks: Callable[[], Sequence[RecordBlock] | None]
) -> Iterator[RecordBlock]:
    """Yields this rank's block of each step; all ranks call it.

    ``next_blocks``, called on rank 0, returns a block for each rank, or None at the end. All ranks raise its error.
    """
    while True:
        messages: Sequence[RecordBlock | Exception | None] | None = None
        if collectives.rank == 0:
            try:
                messages = next_blocks() or [None] * collectives.world_size
            except Exception as error:
                messages = [error] * collectives.world_size
        message = collectives.scatter(messages)
        if isinstance(message, Exception):
            raise message
        if message is None:
            return
        yield message


def _steps(inputs: RawInputs, num_ranks: int) -> Iterator[tuple[Sequence[RecordBlock], Sequence[ScoredPiece]]]:
    """Cuts the rows of all pieces into steps; yields a block for each rank, and the pieces read for the step.

    ::

        pieces   | piece 0 | piece 1 |  piece 2  |        their well-formed rows, one after another
        steps    | rank 0 | rank 1 || rank 0 | rank 1 |   blocks of EVALUATION_BATCH_SIZE rows until the last step

    A piece comes with the step of its first rows. In the last step some blocks may be empty; without rows there are
    no blocks.
    """
    size = EVALUATION_BATCH_SIZE * num_ranks
    waiting: list[RecordBlock] = []
    pieces: list[ScoredPiece] = []
    for piece in inputs.pieces():
        pieces.append(piece)
        waiting.append(piece.block)
        while sum(len(block.records) for block in waiting) >= size:
            rows = RecordBlock.concatenate(waiting)
            waiting = [rows.between(size, len(rows.records))]
            yield _cut(rows, num_ranks), pieces
            pieces = []
    if pieces or waiting:
        rows = RecordBlock.concatenate(waiting)
        yield _cut(rows, num_ranks) if len(rows.records) else [], pieces


def _cut(rows: RecordBlock, num_ranks: int) -> list[RecordBlock]:
    bounds = [EVALUATION_BATCH_SIZE * rank for rank in range(num_ranks + 1)]
    return [rows.between(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


class _Lines:
    """Writes the lines of the file of predictions: a piece at a time, once its last row's prediction has arrived.

    Predictions arrive for well-formed rows alone, in the order of the rows; steps and pieces end at different rows.
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
        """Yields lines that are in a file at the end of the block; an error in the block leaves no file."""
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
        """Takes the pieces of a step, before its predictions; the first piece opens the file.

        A file format that cannot hold the types of the keys is a :class:`UserError`.
        """
        self._pieces.extend(pieces)
        if self._writer is None and self._pieces:
            self._open(self._pieces[0].keys.schema)

    def add_predictions(self, tables: Sequence[pa.Table]) -> None:
        """Takes the predictions of the next rows, and writes the complete lines."""
        self._predicted = pa.concat_tables([self._predicted, *tables])
        while self._pieces and len(self._pieces[0].rows) <= len(self._predicted):
            piece = self._pieces.popleft()
            self._write(piece, self._predicted.slice(0, len(piece.rows)))
            self._predicted = self._predicted.slice(len(piece.rows))

    def finish(self) -> None:
        """Writes the last pieces, which may have no rows; an input without lines gives a file with a header alone."""
        self.add_predictions([])
        assert not self._pieces and not len(self._predicted), "each row has a prediction"
        if self._writer is None:
            self._open(pa.schema([(key, pa.string()) for key in self._keys]))

    def _open(self, keys: pa.Schema) -> None:
        self._writer = self._open_writer(pa.schema([*keys, *self._columns.schema]))

    def _write(self, piece: ScoredPiece, predicted: pa.Table) -> None:
        row_of_line = np.full(piece.num_lines, -1, np.int64)
        row_of_line[piece.rows] = np.arange(len(piece.rows))
        predictions = predicted.take(pa.array(row_of_line, mask=row_of_line < 0))
        names = [*piece.keys.column_names, *predictions.column_names]
        lines = pa.table([*piece.keys.columns, *predictions.columns], names=names)
        self._writer.write_table(lines)
        self.num_lines += len(lines)
