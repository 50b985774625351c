"""The sources of a stream of raw rows, by the beginning of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from distembed.base.errors import UserError
from distembed.data.dataset.config import StreamConfig
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.schema import TableSchema

Piece = Mapping[str, Any]
"""A part of a source that is complete and never changes (a file, a range of messages), in values for JSON."""

KAFKA = "kafka://"


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
        """Returns pieces, few where that is possible, of which :meth:`restore` learns as much as of all these."""

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
