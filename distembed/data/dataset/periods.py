"""Days and hours in UTC by which metrics of a stream's rows are reported, numbered since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

PeriodKind = Literal["day", "hour"]
SECONDS: Mapping[PeriodKind, int] = {"day": 86_400, "hour": 3_600}
MOST_PERIODS = 32
"""Number of periods that are summed up at a time: rows of further periods, as wrong times make them, are left out."""


@dataclass(frozen=True)
class StepPeriods:
    """The periods of a step's rows.

    Attributes:
        of_rows: The period of each row on this rank [rows].
        num_rows: The step's number of rows on all ranks by period, of the periods that are summed up.
    """

    of_rows: NDArray[np.int64]
    num_rows: Mapping[int, int]


def rows_by_period(of_rows: NDArray[np.int64]) -> dict[int, int]:
    """Returns the number of rows by period, given the period of each row [rows]; the largest ones first and alone."""
    numbers, counts = np.unique(of_rows, return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:MOST_PERIODS]
    return dict(zip(numbers[largest].tolist(), counts[largest].tolist(), strict=True))


def period_name(number: int, kind: PeriodKind) -> str:
    """Returns a period as ``2026-01-02``, or ``2026-01-02T13`` of an hour."""
    units: Any = {"day": "D", "hour": "h"}
    return str(np.datetime64(number, units[kind]))
