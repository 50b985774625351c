"""Each rank's batches of a stream of raw rows, resumable at the exact row.

Rank 0 finds, reads and decodes the rows in a thread, ahead of the steps, and sends each rank its rows of a step. While
there are no rows, or the source is slow to answer, it sends a message without rows twice a second: no rank waits long
in a collective, and a signal is answered.

Trade-off: one process reads and decodes, 90,000 to 300,000 rows a second of 40 columns; a checkpoint holds one
position, which any number of ranks resumes from.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distembed.base.errors import RunError, UserError
from distembed.base.ranks import Collectives, sendable
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.periods import StepPeriods
from distembed.data.reader.batch import Batch, BatchAssembler
from distembed.data.reader.reader import Prefetcher
from distembed.data.stream.journal import JOURNAL, Journal
from distembed.data.stream.rows import Position, Step, StreamRows
from distembed.data.stream.source import open_source
from distembed.data.table.encoder import RowEncoder
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import schema_of_manifest

ENDLESS = 2**62
"""Number of rows and of batches of a stream, whose end nobody knows."""
_STEPS_AHEAD = 4
_MOST_IN_FLIGHT = 64
_PATIENCE_SECONDS = 0.5


class StreamReader:
    """Iterates over one rank's part of a stream's batches; all ranks construct it and iterate over it.

    An iteration ends where no rows are there now, where the stream has ended (``is_ended``), or where the source does
    not answer, cannot be read or has too many malformed rows (``failure``).

    Args:
        data: The ``data`` section of a config, with a stream.
        batch_size: Rows of a step on all ranks.
        run: The run's folder, which keeps the order of the stream's pieces.

    Attributes:
        say: Prints a line.
        kept_states: Returns the :meth:`state_dict` of each checkpoint that is kept; rank 0 calls it in its thread.

    Raises:
        UserError: The dataset's rows are of no known schema, or the source cannot be read.
        TemporaryFailure: The source does not answer.
    """

    num_rows = batches_per_epoch = ENDLESS

    def __init__(self, data: DataConfig, batch_size: int, run: Path) -> None:
        assert data.stream is not None
        folder = Path(data.require_path())
        self._config, self._batch_size, self._run, self._folder = data.stream, batch_size, run, folder
        self._manifest = Manifest.load(folder)
        self.schema = self._manifest.schema
        self._raw_schema = stream_schema(self._manifest)
        if data.stream.metrics_by is not None and self._raw_schema.time is None:
            raise UserError(
                f"data.stream.metrics_by is {data.stream.metrics_by!r}, and the schema of {folder} has no times of "
                "rows; prepare it with `time: {column: ...}`, or leave the setting out."
            )
        self._collectives = Collectives.in_own_group()
        self.unreadable: dict[str, str] = {}
        self.ages: None = None  # rows of a stream are not weighted by age
        self.is_ended = False
        self.failure: RunError | UserError | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.kept_states: Callable[[], list[Mapping[str, Any]]] = list
        self._positions = deque([Position()], _MOST_IN_FLIGHT)
        self._assembler = BatchAssembler(self.schema)
        self._prefetcher: Prefetcher[Step] | None = None
        # opened once before anything is written, so that a missing folder or topic is an error at the start
        self._collectives.on_first(lambda: open_source(self._config, self._raw_schema).close())

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of malformed and late rows and of files that cannot be read, until the last batch."""
        return {"rejected_rows": 0, **self._positions[-1].counts}

    def __iter__(self) -> Iterator[Batch]:
        while True:
            message = self._collectives.scatter(self._messages() if self._collectives.rank == 0 else None)
            if isinstance(message, RunError | UserError):
                self.failure = message
                return
            if isinstance(message, Exception):
                raise message
            self.is_ended = message.is_end
            if message.rows is None:
                return
            self._positions.append(message.position)
            periods = message.rows.periods
            for batch in self._assembler.assemble([message.rows], [message.num_rows]):
                by_period = None if periods is None else StepPeriods(periods, message.periods)
                yield dataclasses.replace(batch, periods=by_period)

    def state_dict(self, in_flight: int = 0) -> dict[str, Any]:
        """Returns the position after the batches that were handed out, but for the last ``in_flight``."""
        return {"stream": self._positions[-1 - in_flight].to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of a :meth:`state_dict` of any number of ranks."""
        if "stream" not in state:
            raise UserError(
                "--resume: the run's checkpoints are of the rows of a dataset, not of a stream; leave --follow out."
            )
        self.close()
        self._positions = deque([Position(**state["stream"])], _MOST_IN_FLIGHT)

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()

    def _messages(self) -> list[Step | Exception]:
        """Returns each rank's rows of the next step; rank 0 alone calls it."""
        world_size = self._collectives.world_size
        try:
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._steps, _STEPS_AHEAD)
            if not self._prefetcher.is_ready(_PATIENCE_SECONDS):
                return [Step()] * world_size
            step = next(self._prefetcher)
        except Exception as error:
            return [sendable(error)] * world_size
        for note in step.notes:
            self.say(note)
        if step.rows is None:
            return [step] * world_size
        bounds = [rank * step.num_rows // world_size for rank in range(world_size + 1)]
        parts = [step.rows.between(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        return [dataclasses.replace(step, rows=part) for part in parts]

    def _steps(self) -> Iterator[Step]:
        source = open_source(self._config, self._raw_schema)
        try:
            encoder = RowEncoder(self._folder, self._manifest, TableParser(self._raw_schema).layout)
            start, journal = self._positions[-1], Journal(self._run)
            if (start.rows and start.piece >= journal.stop) or start.piece < journal.first:
                raise UserError(
                    f"--resume: {self._run / JOURNAL} lists the pieces {journal.first + 1} to {journal.stop} of the "
                    f"stream, and the checkpoint is in piece {start.piece + 1}; put back the run's file and its "
                    "checkpoints, or start a new run."
                )
            config, size = self._config, self._batch_size
            yield from StreamRows(source, journal, encoder, config, size, start, self._oldest_piece).steps()
        finally:
            source.close()

    def _oldest_piece(self) -> int:
        """Returns the number of the first piece that a kept checkpoint needs; 0 where that cannot be found out now."""
        try:
            return min((state["stream"]["piece"] for state in self.kept_states()), default=0)
        except Exception:  # file systems raise errors of their own kinds; a checkpoint may just be removed
            return 0


def stream_schema(manifest: Manifest) -> TableSchema:
    """Returns the schema of the raw rows that a dataset was prepared from, without a column that says their split.

    Raises:
        UserError: The dataset is of none of ``distembed prepare table`` and ``prepare criteo``.
    """
    try:
        schema = schema_of_manifest(manifest)
    except UserError as error:
        raise UserError(f"--follow reads raw rows by the schema of data.path: {error}.") from error
    return dataclasses.replace(schema, split=TableSchema.split)
