"""How a preparation says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressUpdate:
    """How far one stage of a preparation is.

    Attributes:
        stage: Name of the stage: ``read``, ``vocabulary`` (Criteo rows only) or ``write``, in this order.
        bytes_done: Bytes of the stage's work that are done.
        bytes_total: What ``bytes_done`` is when the stage is over.
        rows_done: Rows that the stage has dealt with; of Criteo rows, well-formed ones.
    """

    stage: str
    bytes_done: int
    bytes_total: int
    rows_done: int


ProgressCallback = Callable[[ProgressUpdate], None]
