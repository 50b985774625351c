"""The order in which a run reads the pieces of a stream: a line of JSON for each piece, in the run's folder.

A piece is recorded before its rows are read. So a run that was killed reads the pieces in the same order again, even if
further pieces have arrived since, and a checkpoint's position is the number of a piece and of a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from distembed.base.errors import TemporaryFailure, UserError
from distembed.data.stream.source import Piece

JOURNAL = "stream.jsonl"


class Journal:
    """The pieces that a run has found; a line that a killed process has not finished is dropped."""

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

    def add(self, pieces: Sequence[Piece]) -> None:
        """Writes further pieces to the disk; a TemporaryFailure where it cannot be written."""
        try:
            with self._path.open("ab") as file:
                file.write("".join(f"{json.dumps(dict(piece))}\n" for piece in pieces).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TemporaryFailure(
                f"{self._path} cannot be written: {error.strerror}; make room, and --resume."
            ) from error
        self.pieces.extend(pieces)
