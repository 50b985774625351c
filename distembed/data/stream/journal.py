"""The order in which a run reads the pieces of a stream: a line of JSON for each piece, in the run's folder.

A piece is recorded before its rows are read. So a run that was killed reads the pieces in the same order again, even if
further pieces have arrived since, and a checkpoint's position is the number of a piece and of a row.

Pieces that no checkpoint needs any more are dropped, ten thousand or more at once, where few of them tell the source
which rows it has read. A topic's pieces do; a folder's do not, and its journal keeps the name of each file::

    {"dropped": 20000, "summary": [{"partition": 0, ..}, {"partition": 1, ..}]}     the last ones of each partition
    {"partition": 0, ..}                                                            piece 20000
    {"partition": 1, ..}                                                            piece 20001
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from distembed.base.errors import TemporaryFailure, UserError
from distembed.base.files import whole_file
from distembed.data.stream.source import Piece

JOURNAL = "stream.jsonl"
_PIECES_BETWEEN_DROPS = 10_000


class Journal:
    """The pieces that a run has found; a line that a killed process has not finished is dropped.

    Attributes:
        first: Number of the first piece of ``pieces``.
        pieces: The pieces from there on.
        summary: Pieces that tell a source which rows came before them.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        text = self._path.read_bytes() if self._path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self._path, len(whole))
        try:
            self.pieces: list[Piece] = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise UserError(f"{self._path} is damaged ({error}); put back a copy, or start a new run.") from error
        self.first, self.summary = 0, list[Piece]()
        if self.pieces and "dropped" in self.pieces[0]:
            head = self.pieces.pop(0)
            self.first, self.summary = head["dropped"], head["summary"]
        self._long = len(self.pieces) + _PIECES_BETWEEN_DROPS

    @property
    def stop(self) -> int:
        """Number of the last piece, plus 1."""
        return self.first + len(self.pieces)

    @property
    def is_long(self) -> bool:
        """Whether :meth:`drop_before` may drop pieces: ten thousand have come since it was last called."""
        return len(self.pieces) >= self._long

    def piece(self, number: int) -> Piece:
        return self.pieces[number - self.first]

    def add(self, pieces: Sequence[Piece]) -> None:
        """Writes further pieces to the disk; a TemporaryFailure where it cannot be written."""
        try:
            with self._path.open("ab") as file:
                file.write(_lines(pieces))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TemporaryFailure(
                f"{self._path} cannot be written: {error.strerror}; make room, and --resume."
            ) from error
        self.pieces.extend(pieces)

    def drop_before(self, number: int, summarize: Callable[[Sequence[Piece]], Sequence[Piece]]) -> None:
        """Drops the pieces before a number, if their summary is short; the file is replaced whole.

        Raises:
            RunError: The file cannot be written; the one before it stays.
        """
        count = number - self.first
        summary = list(summarize([*self.summary, *self.pieces[: max(0, count)]]))
        if len(summary) < count:
            head = {"dropped": number, "summary": summary}
            with whole_file(self._path) as temporary:
                Path(temporary).write_bytes(_lines([head, *self.pieces[count:]]))
            self.first, self.summary, self.pieces = number, summary, self.pieces[count:]
        self._long = len(self.pieces) + _PIECES_BETWEEN_DROPS


def _lines(values: Sequence[Piece]) -> bytes:
    return "".join(f"{json.dumps(dict(value))}\n" for value in values).encode()
