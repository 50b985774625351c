"""How rows are divided into training, validation and test.

``0.8,0.1,0.1``             the first 80% of the rows train, the next 10% validate, the last 10% test
``days``                    every input is a day (one input is cut into seven); the last day is halved into validation
                            and test, the others train
``none``                    all rows train
``validation``, ``test``    all rows are in this split and none trains: new files that are only evaluated, by the ids of
                            another dataset (``--vocabulary``)
``time:0.8,0.1,0.1``        as shares, in the order of the time column; rows of the time at which a split begins are all
                            in that split
``time:2014-10-28,2014-10-30``  validation begins at the first time, test at the second; numbers are seconds since
                            1970, in any format of the time column; of a single time, there is no validation
``column:NAME``             the column says it: ``train``, ``validation`` or ``test``
``column:NAME=a,b,c``       so, in other words; of two, there is no validation

A share of validation or test may be 0, and then the dataset lacks that split. Rows keep the order of the input.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Literal

from distembed.base.errors import UserError

SPLIT_NAMES = ("train", "validation", "test")
TRAIN = 0
"""Number of the training split among the splits of a dataset."""

# Exponents would allow numbers that take hours to write out.
_SHARE = re.compile(r"[0-9]{0,20}\.?[0-9]{1,20}|[0-9]{1,20}/[0-9]{1,20}", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)

# One file without marks between its days is cut as the public DLRM cuts the Kaggle file, which has seven.
_DAYS_IN_ONE_FILE = 7

SplitKind = Literal["shares", "days", "none", "time", "column"]
_WANTED = {
    "time": "after 'time:' there must be three shares that add up to 1, such as '0.8,0.1,0.1', or the times at which "
    "validation and test begin, in rising order, such as '2014-10-28,2014-10-30' or seconds since 1970; a single time "
    "is that of the test",
    "column": "after 'column:' there must be the name of a column with the values train, validation and test, or "
    "NAME=A,B,C with the values that stand for them; of NAME=A,C there is no validation",
    "shares": "it must be three shares that add up to 1, such as '0.8,0.1,0.1' or '1/2,1/4,1/4', of which the second "
    "and the third may be 0; 'days'; 'none'; 'time:' with such shares, or with the times at which validation and test "
    "begin; 'column:' with the name of a column; or, with --vocabulary, 'validation' or 'test'",
}
"""The allowed forms of each kind of rule, for errors."""


def parse_shares(text: str, wanted: str) -> tuple[Fraction, ...]:
    """Reads shares that add up to 1, as ``0.8,0.1,0.1`` or ``1/2,1/2``; errors have the text ``wanted``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_SHARE.fullmatch(part) for part in parts):
        raise UserError(wanted)
    try:
        shares = tuple(Fraction(part) for part in parts)
    except ZeroDivisionError:
        raise UserError(wanted) from None
    if shares[0] <= 0 or sum(shares) != 1:
        raise UserError(wanted)
    return shares


@dataclass(frozen=True)
class SplitRule:
    """How rows are divided, as the module's docstring lists it."""

    kind: SplitKind  # ``none``: all are in one split
    names: tuple[str, ...] = SPLIT_NAMES  # of the splits that there are, in order; only the first may train
    shares: tuple[Fraction, ...] = ()  # of the splits, exact numbers that add up to 1, of ``shares`` and ``time``
    times: tuple[int, ...] = ()  # at which the splits after training begin, of ``time`` without shares
    column: str = ""  # whose values say the split, of ``column``
    values: tuple[str, ...] = ()  # of the splits in that column

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        """Reads a text that the module's docstring lists."""
        if text == "days":
            return cls("days")
        if text in ("none", *SPLIT_NAMES[1:]):
            return cls("none", (SPLIT_NAMES[TRAIN] if text == "none" else text,))
        prefix, _, rest = text.partition(":")
        kind: SplitKind = "time" if prefix == "time" else "column" if prefix == "column" else "shares"
        wanted = f"split (--split) is {text[:100]!r}: {_WANTED[kind]}"
        if kind == "column":
            column, given, values_text = rest.partition("=")
            values = tuple(part.strip() for part in values_text.split(",")) if given else SPLIT_NAMES
            if not column or "" in values or len(set(values)) != len(values) or len(values) not in (2, 3):
                raise UserError(wanted)
            return cls(kind, _split_names(len(values)), column=column, values=values)
        parts = [part.strip() for part in (rest if kind == "time" else text).split(",")]
        if kind == "shares" or len(parts) == len(SPLIT_NAMES):
            shares = parse_shares(",".join(parts), wanted)
            if len(shares) != len(SPLIT_NAMES):
                raise UserError(wanted)
            names = tuple(name for name, share in zip(SPLIT_NAMES, shares, strict=True) if share)
            return cls(kind, names, tuple(share for share in shares if share))
        times = tuple(_parse_time(part, wanted) for part in parts)
        if len(times) > 2 or list(times) != sorted(set(times)):
            raise UserError(wanted)
        return cls(kind, _split_names(len(times) + 1), times=times)

    @property
    def trains(self) -> bool:
        return self.names[TRAIN] == SPLIT_NAMES[TRAIN]

    def bounds(self, source_rows: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows where each split begins and the last ends, given the rows of each input in order."""
        total = sum(source_rows)
        if self.kind == "none":
            return 0, total
        if self.kind == "shares":
            return tuple(int(total * sum(self.shares[:count])) for count in range(len(self.shares) + 1))
        if len(source_rows) > 1:
            last_day = total - source_rows[-1]
        else:
            last_day = total * (_DAYS_IN_ONE_FILE - 1) // _DAYS_IN_ONE_FILE
        return 0, last_day, last_day + (total - last_day) // 2, total


def _split_names(count: int) -> tuple[str, ...]:
    return SPLIT_NAMES if count == len(SPLIT_NAMES) else (SPLIT_NAMES[0], SPLIT_NAMES[-1])


def _parse_time(text: str, wanted: str) -> int:
    """Returns a time in seconds since 1970, of a date in UTC; a number is itself."""
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(wanted) from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
