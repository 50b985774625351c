"""How a preparation says how far it is, and what a user should know of the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressUpdate:
    """How far one stage of a preparation is."""

    stage: str  # ``read``, ``vocabulary`` (but of interactions), ``write`` in this order, or a small one beside these
    bytes_done: int  # of the stage's work
    bytes_total: int | None  # equals ``bytes_done`` when the stage is over; None where it is not known, as with pipes
    rows_done: int  # well-formed rows that the stage has dealt with


ProgressCallback = Callable[[ProgressUpdate], None]
NoteCallback = Callable[[str], None]
"""Takes one sentence about the input, such as that a header was left out."""


def ignore(_: object) -> None:
    """Takes a progress or a note, and does nothing."""
