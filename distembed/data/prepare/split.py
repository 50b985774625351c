"""Where the training, validation and test rows of a file in time order begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from distembed.errors import UserError

SPLIT_NAMES = ("train", "validation", "test")
BY_DAYS = "days"

# One file without marks between its days is cut as the public DLRM cuts the Kaggle file, which has seven.
_DAYS_IN_ONE_FILE = 7


@dataclass(frozen=True)
class SplitRule:
    """How to cut: by days (``fractions`` is None) or by these shares of the rows, exact numbers that add up to 1."""

    fractions: tuple[Fraction, Fraction, Fraction] | None

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        """``days``, or three shares such as ``0.8,0.1,0.1``."""
        if text == BY_DAYS:
            return cls(None)
        wanted = f"split is {text!r}: it must be 'days', or three positive shares that add up to 1: '0.8,0.1,0.1'"
        try:
            shares = tuple(Fraction(part.strip()) for part in text.split(","))
        except (ValueError, ZeroDivisionError):
            raise UserError(wanted) from None
        if len(shares) != 3 or min(shares) <= 0 or sum(shares) != 1:
            raise UserError(wanted)
        return cls((shares[0], shares[1], shares[2]))

    def bounds(self, source_rows: Sequence[int]) -> tuple[int, int, int, int]:
        """Where train begins (0), validation, test, and where test ends, counted in well-formed rows.

        Args:
            source_rows: well-formed rows of each file, in time order.
        """
        total = sum(source_rows)
        if self.fractions is not None:
            train, validation, _ = self.fractions
            return 0, int(total * train), int(total * (train + validation)), total
        if len(source_rows) > 1:
            last_day = total - source_rows[-1]
        else:
            last_day = total * (_DAYS_IN_ONE_FILE - 1) // _DAYS_IN_ONE_FILE
        return 0, last_day, last_day + (total - last_day) // 2, total
