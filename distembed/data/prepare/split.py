"""Where the training, validation and test rows of files in time order begin and end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from distembed.errors import UserError

SPLIT_NAMES = ("train", "validation", "test")
BY_DAYS = "days"

# Exponents would allow numbers that take hours to write out.
_SHARE = re.compile(r"[0-9]{0,20}\.?[0-9]{1,20}|[0-9]{1,20}/[0-9]{1,20}", re.ASCII)

# One file without marks between its days is cut as the public DLRM cuts the Kaggle file, which has seven.
_DAYS_IN_ONE_FILE = 7


def parse_shares(text: str, wanted: str) -> tuple[Fraction, ...]:
    """Reads positive shares that add up to 1, separated by commas.

    Args:
        text: Shares such as ``0.8,0.1,0.1`` or ``1/2,1/2``.
        wanted: Text of the error, which says what is allowed.

    Raises:
        UserError: The text is none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(_SHARE.fullmatch(part) for part in parts):
        raise UserError(wanted)
    try:
        shares = tuple(Fraction(part) for part in parts)
    except ZeroDivisionError:
        raise UserError(wanted) from None
    if min(shares) <= 0 or sum(shares) != 1:
        raise UserError(wanted)
    return shares


@dataclass(frozen=True)
class SplitRule:
    """How rows are cut into splits: by days, or by shares.

    Attributes:
        fractions: Shares of training, validation and test, exact numbers that add up to 1; None cuts by days.
    """

    fractions: tuple[Fraction, Fraction, Fraction] | None

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        """Reads ``days``, or three shares such as ``0.8,0.1,0.1``.

        Raises:
            UserError: The text is neither.
        """
        if text == BY_DAYS:
            return cls(None)
        wanted = (
            f"split (--split) is {text[:100]!r}: it must be 'days', or three positive shares that add up to 1, such as "
            "'0.8,0.1,0.1' or '1/2,1/4,1/4'"
        )
        shares = parse_shares(text, wanted)
        if len(shares) != 3:
            raise UserError(wanted)
        return cls((shares[0], shares[1], shares[2]))

    def bounds(self, source_rows: Sequence[int]) -> tuple[int, int, int, int]:
        """Returns the rows where training (0), validation and test begin, and where test ends.

        Args:
            source_rows: Number of well-formed rows of each file, in time order.
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
