"""How a preparation says how far it is, and what a user should know of the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressUpdate:
    """How far one stage of a preparation is.

    Attributes:
        stage: Name of the stage: ``read``, ``vocabulary`` (but of interactions), ``write``, in this order, and small
            ones between and after them.
        bytes_done: Bytes of the stage's work that are done.
        bytes_total: What ``bytes_done`` is when the stage is over; None where that is not known, as with pipes.
        rows_done: Well-formed rows that the stage has dealt with.
    """

    stage: str
    bytes_done: int
    bytes_total: int | None
    rows_done: int


ProgressCallback = Callable[[ProgressUpdate], None]
NoteCallback = Callable[[str], None]
"""Takes one sentence about the input, such as that a header was left out."""


def ignore(_: object) -> None:
    """Takes a progress or a note, and does nothing."""
