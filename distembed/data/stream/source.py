"""The sources of a stream of raw rows, by the beginning of their names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from distembed.base.errors import TemporaryFailure, UserError
from distembed.data.dataset.config import StreamConfig
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.schema import TableSchema

Piece = Mapping[str, Any]
"""A part of a source that is complete and never changes (a file, a range of messages), in values for JSON."""

KAFKA = "kafka://"


GONE_SECONDS = 60.0
"""Time without an answer after which a run ends."""
_NOTED_SECONDS = 3.0


class Patience:
    """Waits for a server that does not answer; adds a line to ``notes`` when that lasts, and when it answers again."""

    def __init__(self, server: str, notes: list[str]) -> None:
        self._server, self._notes = server, notes
        self._silent_since: float | None = None  # the time of the first question without an answer
        self._is_noted = False

    def failed(self, reason: str) -> None:
        """Notes a question without an answer; a TemporaryFailure after a minute without any."""
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        silent = now - self._silent_since
        if silent > GONE_SECONDS:
            raise TemporaryFailure(
                f"{self._server}: no answer for {GONE_SECONDS:g} s ({reason}); see whether it runs and has the rows, "
                "and --resume."
            )
        if silent >= _NOTED_SECONDS and not self._is_noted:
            self._is_noted = True
            self._notes.append(
                f"waiting: {self._server}: no answer ({reason}); after {GONE_SECONDS:g} s the run saves and ends"
            )

    def answered(self) -> None:
        if self._is_noted:
            self._notes.append(f"{self._server}: answers again")
        self._silent_since, self._is_noted = None, False


class StreamSource(Protocol):
    """Finds pieces as they become complete, and reads them.

    Attributes:
        is_pending: Whether something has arrived that is not complete yet, or the source does not answer: the stream is
            not idle.
        notes: Lines to print, which the reader takes away.
    """

    is_pending: bool
    notes: list[str]

    def restore(self, pieces: Sequence[Piece]) -> None:
        """Takes the pieces that the run has found before, in order; called once, before :meth:`new_pieces`."""

    def new_pieces(self) -> list[Piece]:
        """Returns the pieces that have become complete since the last call, in the order in which they are read.

        Raises:
            TemporaryFailure: The source has not answered for a minute.
            UserError: The source cannot be read.
        """

    def summary(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Returns pieces, few where that is possible, that tell :meth:`restore` as much as all these pieces do."""

    def blocks(self, piece: Piece, part: int = 0) -> Iterator[tuple[int, ParsedBlock] | None]:
        """Yields the rows of a piece, equal whenever they are read; None after a second in which none came.

        Each block has the number of its part of the piece: another call may begin at a part, to read no earlier rows.

        Raises:
            TemporaryFailure: The source does not answer.
            UserError: The piece cannot be read.
        """

    def describe(self, piece: Piece) -> str:
        """Returns the piece's place, for messages."""

    def close(self) -> None:
        """Closes the connections to the source at the end of a run."""


def open_source(config: StreamConfig, schema: TableSchema) -> StreamSource:
    """Opens the source of a stream.

    Args:
        config: The stream's section of the config.
        schema: The columns of its rows.

    Raises:
        UserError: The folder or the topic does not exist, or cannot be read; or a package is missing.
        TemporaryFailure: No server answers.
    """
    if config.source.startswith(KAFKA):
        from distembed.data.stream.kafka import KafkaSource

        return KafkaSource(config, schema)
    if config.kafka_properties is not None:
        raise UserError(
            f"data.stream.kafka_properties is {config.kafka_properties!r}, and data.stream.source={config.source!r} is "
            f"no {KAFKA}HOST:PORT/TOPIC; leave kafka_properties out."
        )
    from distembed.data.stream.folder import FolderSource

    return FolderSource(config.source, schema)
