"""Pieces of a stream to the rows of steps, on rank 0: parsed and encoded as ``distembed prepare`` does.

::

    pieces    | a       | b   | c            |      good rows only, end to end
    steps     | 64 rows | 64 rows | 64 rows | ..    a step may have rows of several pieces
    position      a:64      c:20      c:84          the last piece of a step, and the number of its rows that are used

A step waits for its last row. Only the last step of a stream that has ended may have fewer rows.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distembed.base.errors import TemporaryFailure, UserError, one_line
from distembed.base.units import enumerate_names
from distembed.data.dataset.config import StreamConfig
from distembed.data.dataset.periods import SECONDS, rows_by_period
from distembed.data.dataset.records import RecordBlock
from distembed.data.stream.journal import Journal
from distembed.data.stream.source import Piece, StreamSource
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.encoder import RowEncoder

_TICK_SECONDS = 0.5
_MOST_EXAMPLES = 5
_ERRORS_OF_FILES = (None, errno.ENOENT, errno.EINVAL)
"""The ``errno`` of system errors that another try repeats: Arrow gives none to damaged files."""


@dataclass(frozen=True)
class Position:
    """The place of a stream after a step.

    Attributes:
        piece: Number, in the journal, of the piece of the last row.
        part: Number of that row's part of the piece, as the source counts parts.
        line: Number of rows of the piece before that part, malformed ones included.
        row: Number of well-formed rows of the part that are used.
        rows: Number of rows that are used of the whole stream.
        before: Counts of all that is before the part.
        counts: Counts of all pieces read for the rows until here: ``rejected_rows``, ``late_rows`` and
            ``bad_files``.
    """

    piece: int = 0
    part: int = 0
    line: int = 0
    row: int = 0
    rows: int = 0
    before: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Step:
    """The rows of a step; no rows where none are there now (a pause), or where the stream has ended.

    Attributes:
        rows: All rows, or a rank's part of them.
        num_rows: Number of rows on all ranks.
        periods: Number of these rows by period, where metrics are reported by period.
        position: The place after them.
        is_end: Whether the stream has ended.
        notes: Lines to print.
    """

    rows: RecordBlock | None = None
    num_rows: int = 0
    periods: Mapping[int, int] = field(default_factory=dict)
    position: Position = Position()
    is_end: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class _Waiting:
    """Rows that wait for their step, and the position before the first of them."""

    rows: RecordBlock
    position: Position


class StreamRows:
    """Reads a stream from a position on, step by step.

    Args:
        source: The source, not restored.
        journal: The pieces found until now.
        encoder: Gives the dataset's values to parsed rows.
        config: The stream's section of the config.
        batch_size: Rows of a step.
        start: The position to begin at.
        oldest_piece: Returns the number of the first piece that a checkpoint may still need.
    """

    def __init__(
        self,
        source: StreamSource,
        journal: Journal,
        encoder: RowEncoder,
        config: StreamConfig,
        batch_size: int,
        start: Position,
        oldest_piece: Callable[[], int] = lambda: 0,
    ) -> None:
        self._source, self._journal, self._encoder, self._config = source, journal, encoder, config
        self._batch_size, self._start, self._num_used = batch_size, start, start.rows
        self._oldest_piece = oldest_piece
        self._waiting = deque[_Waiting]()
        self._num_waiting = 0
        self._notes: list[str] = []
        self._num_examples = 0

    def steps(self) -> Iterator[Step]:
        """Yields the steps, with pauses of half a second at most where there are no rows, then the end.

        Raises:
            UserError: No row came at all, or too many are malformed.
            TemporaryFailure: The source does not answer, or the system cannot read a file.
        """
        self._source.restore([*self._journal.summary, *self._journal.pieces])
        counts = Counter(self._start.before)
        for number, piece in self._numbered_pieces():
            if piece is None:
                yield Step(notes=self._taken_notes())
                continue
            start = self._start if number == self._start.piece else Position(number)
            to_skip, part, num_rows = start.row, start, 0
            for found in self._blocks(piece, dataclasses.replace(start, row=0, before=dict(counts)), counts):
                if found is None:
                    yield Step(notes=self._taken_notes())
                    continue
                if found[0] is not part:
                    part, num_rows = found[0], 0
                block, rows = found[1], self._encoder.encode(found[1])
                if (kind := self._config.metrics_by) is not None:
                    rows = dataclasses.replace(rows, periods=self._encoder.times(block) // SECONDS[kind])
                position = dataclasses.replace(part, row=num_rows, counts=dict(counts))
                num_rows += block.num_rows
                used, to_skip = min(to_skip, block.num_rows), max(0, to_skip - block.num_rows)
                if used < block.num_rows:
                    position = dataclasses.replace(position, row=position.row + used)
                    self._waiting.append(_Waiting(rows.between(used, block.num_rows), position))
                    self._num_waiting += block.num_rows - used
                self._require_few(counts)
                while self._num_waiting >= (size := self._next_size) > 0:
                    yield self._step(size)
                if size == 0:
                    break
            if self._next_size == 0:
                break
        if self._num_waiting and (size := min(self._num_waiting, self._next_size)):
            yield self._step(size)
        if self._num_used == 0:
            raise UserError(
                f"no row came from {self._config.source} (--follow) within data.stream.until_idle="
                f"{self._config.until_idle:g} seconds{_as_text(counts)}; see whether rows are written there."
            )
        yield Step(is_end=True, notes=self._taken_notes())

    @property
    def _next_size(self) -> int:
        """Number of rows of the next full step, fewer where ``max_rows`` ends the stream."""
        most = self._config.max_rows
        return self._batch_size if most is None else min(self._batch_size, most - self._num_used)

    def _numbered_pieces(self) -> Iterator[tuple[int, Piece | None]]:
        """Yields pieces with their numbers, None where there is none now; ends after ``until_idle`` seconds."""
        number, idle_since = self._start.piece, float("inf")
        while True:
            while number < self._journal.stop:
                yield number, self._journal.piece(number)
                number += 1
                idle_since = float("inf")
            if new := self._source.new_pieces():
                self._journal.add(new)
                if self._journal.is_long:
                    self._journal.drop_before(self._oldest_piece(), self._source.summary)
                continue
            now = time.monotonic()
            idle_since = now if self._source.is_pending else min(idle_since, now)
            if self._config.until_idle is not None and now - idle_since >= self._config.until_idle:
                return
            wake = now + self._config.poll_seconds
            while (left := wake - time.monotonic()) > 0:
                time.sleep(min(left, _TICK_SECONDS))
                yield number, None

    def _blocks(
        self, piece: Piece, start: Position, counts: Counter[str]
    ) -> Iterator[tuple[Position, ParsedBlock] | None]:
        """Yields the parsed rows of a piece from a part on, None where they are slow to come, and counts.

        Blocks come with the beginning of their part. A file that cannot be read ends where it cannot.
        """
        place, num_lines, part = self._source.describe(piece), start.line, start
        try:
            for found in self._source.blocks(piece, start.part):
                if found is None:
                    yield None
                    continue
                number, block = found
                if number != part.part:
                    part = Position(start.piece, number, num_lines, before=dict(counts))
                counts["rejected_rows"] += len(block.rejected)
                if piece.get("late"):
                    counts["late_rows"] += block.num_lines
                for row in block.rejected:
                    if self._num_examples < _MOST_EXAMPLES:
                        text = row.text[:80].decode(errors="replace")
                        self._notes.append(f"malformed: {place}, row {num_lines + row.line}, {row.reason}: {text!r}")
                    self._num_examples += 1
                num_lines += block.num_lines
                yield part, block
        except UserError as error:
            cause = error.__cause__
            if cause is not None and _may_pass(cause):
                reason = getattr(cause, "strerror", None) or one_line(cause)
                raise TemporaryFailure(
                    f"{place} cannot be read now: {reason}; see to it, or move the file away, and --resume."
                ) from error
            counts["bad_files"] += 1
            self._notes.append(f"malformed: the rest of {place} is left out after {num_lines} rows: {error}")
            most = self._config.max_bad_files
            if most is not None and counts["bad_files"] > most:
                raise UserError(
                    f"{counts['bad_files']} files of the stream cannot be read, more than data.stream.max_bad_files="
                    f"{most}; put the last one back, even if all its rows are used, or raise the limit: {error}"
                ) from error
        if piece.get("late"):
            self._notes.append(f"late: {place} came after files of later names; its {num_lines} rows are read now")

    def _require_few(self, counts: Counter[str]) -> None:
        """Refuses more malformed rows than the share ``max_rejected``, once a thousand rows are read."""
        most, rejected = self._config.max_rejected, counts["rejected_rows"]
        read = rejected + self._num_used + self._num_waiting
        if most is not None and read >= 1000 and rejected > most * read:
            raise UserError(
                f"{rejected:,} of {read:,} rows of the stream are malformed, more than data.stream.max_rejected="
                f"{most:g}: {enumerate_names(self._notes, 3)}"
            )

    def _step(self, size: int) -> Step:
        """Takes the first ``size`` rows that wait."""
        self._num_used += size
        self._num_waiting -= size
        num_rows_of_step, parts = size, []
        while True:
            first = self._waiting[0]
            num_rows, position = len(first.rows.records), first.position
            count = min(size, num_rows)
            parts.append(first.rows.between(0, count))
            size -= count
            position = dataclasses.replace(position, row=position.row + count)
            if count == num_rows:
                self._waiting.popleft()
            else:
                self._waiting[0] = _Waiting(first.rows.between(count, num_rows), position)
            if not size:
                rows = parts[0] if len(parts) == 1 else RecordBlock.concatenate(parts)
                position = dataclasses.replace(position, rows=self._num_used)
                periods = {} if rows.periods is None else rows_by_period(rows.periods)
                return Step(rows, num_rows_of_step, periods, position, notes=self._taken_notes())

    def _taken_notes(self) -> tuple[str, ...]:
        notes = (*self._notes, *self._source.notes)
        self._notes.clear()
        self._source.notes.clear()
        return notes


def _may_pass(cause: BaseException) -> bool:
    """Returns whether the system or the server refused a file, which may be good: an error, or no permission."""
    is_refused = isinstance(cause, PermissionError) or getattr(cause, "status", None) in (401, 403)
    is_error = isinstance(cause, OSError) and cause.errno not in _ERRORS_OF_FILES
    return is_refused or is_error or "Credential" in type(cause).__name__


def _as_text(counts: Counter[str]) -> str:
    listed = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items() if count)
    return f" ({listed})" if listed else ""
