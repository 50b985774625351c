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
                            1970, whatever the time column's format; of a single time, there is no validation
``column:NAME``             the column says it: ``train``, ``validation`` or ``test``
``column:NAME=a,b,c``       so, in other words; of two, there is no validation

A share of validation or test may be 0, and then there is no such split. Rows keep the order of the input in a split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Literal

from distembed.errors import UserError

SPLIT_NAMES = ("train", "validation", "test")
TRAIN = 0
"""Number of the training split among those that a dataset has."""
BY_DAYS, ALL_TRAIN = "days", "none"
EVALUATED = SPLIT_NAMES[1:]
"""Splits that all rows may be in, where another dataset says what ids mean."""

# Exponents would allow numbers that take hours to write out.
_SHARE = re.compile(r"[0-9]{0,20}\.?[0-9]{1,20}|[0-9]{1,20}/[0-9]{1,20}", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)

# One file without marks between its days is cut as the public DLRM cuts the Kaggle file, which has seven.
_DAYS_IN_ONE_FILE = 7

_TIME, _COLUMN = "time", "column"


def parse_shares(text: str, wanted: str, least: int = 1) -> tuple[Fraction, ...]:
    """Reads shares that add up to 1, separated by commas.

    Args:
        text: Shares such as ``0.8,0.1,0.1`` or ``1/2,1/2``.
        wanted: Text of the error, which says what is allowed.
        least: How many of the shares, from the first on, are above 0; 0 stands for all.

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
    if min(shares[: least or None]) <= 0 or sum(shares) != 1:
        raise UserError(wanted)
    return shares


@dataclass(frozen=True)
class SplitRule:
    """How rows are divided, as the module's docstring lists it.

    Attributes:
        kind: ``shares`` of the rows, ``days``, ``none``, where all are in one split, ``time`` or ``column``.
        names: The splits that there are, in order; training is the first, where there is one.
        shares: Shares of the splits, exact numbers that add up to 1, of ``shares`` and ``time``; () without.
        times: Times at which the splits after training begin, of ``time`` without shares.
        column: Column whose values say it, of ``column``.
        values: Values of the splits in that column.
    """

    kind: Literal["shares", "days", "none", "time", "column"]
    names: tuple[str, ...] = SPLIT_NAMES
    shares: tuple[Fraction, ...] = ()
    times: tuple[int, ...] = ()
    column: str = ""
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        """Reads what the module's docstring lists.

        Raises:
            UserError: The text is nothing of it.
        """
        kind, _, rest = text.partition(":")
        if text == BY_DAYS:
            return cls("days")
        if text == ALL_TRAIN:
            return cls("none", SPLIT_NAMES[:1])
        if text in EVALUATED:
            return cls("none", (text,))
        if kind == _TIME:
            return _parse_times(text, rest)
        if kind == _COLUMN:
            return _parse_column(text, rest)
        wanted = (
            f"split (--split) is {text[:100]!r}: it must be three shares that add up to 1, such as '0.8,0.1,0.1' or "
            "'1/2,1/4,1/4', of which the second and the third may be 0; 'days'; 'none'; 'time:' with such shares, or "
            "with the times at which validation and test begin; 'column:' with the name of a column; or, with "
            "--vocabulary, 'validation' or 'test'"
        )
        shares = parse_shares(text, wanted)
        if len(shares) != len(SPLIT_NAMES):
            raise UserError(wanted)
        return cls("shares", *_present(shares))

    @property
    def trains(self) -> bool:
        """Whether there is a split that trains."""
        return self.names[TRAIN] == SPLIT_NAMES[TRAIN]

    @property
    def needs_time(self) -> bool:
        """Whether rows have to have a time."""
        return self.kind == _TIME

    def bounds(self, source_rows: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows where each split begins, and where the last one ends, of a rule in the order of the input.

        Args:
            source_rows: Number of well-formed rows of each input, in order.
        """
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


def _present(shares: Sequence[Fraction]) -> tuple[tuple[str, ...], tuple[Fraction, ...]]:
    """Returns the names and the shares of the splits whose share is not 0."""
    present = [(name, share) for name, share in zip(SPLIT_NAMES, shares, strict=True) if share]
    return tuple(name for name, _ in present), tuple(share for _, share in present)


def _split_names(count: int) -> tuple[str, ...]:
    """Returns the names of two or three splits; two are training and test."""
    return SPLIT_NAMES if count == len(SPLIT_NAMES) else (SPLIT_NAMES[0], SPLIT_NAMES[-1])


def _parse_times(text: str, rest: str) -> SplitRule:
    wanted = (
        f"split (--split) is {text[:100]!r}: after 'time:' there must be three shares that add up to 1, such as "
        "'0.8,0.1,0.1', or the times at which validation and test begin, in rising order, such as "
        "'2014-10-28,2014-10-30' or seconds since 1970; a single time is that of the test"
    )
    parts = [part.strip() for part in rest.split(",")]
    if len(parts) == len(SPLIT_NAMES):
        return SplitRule("time", *_present(parse_shares(rest, wanted)))
    times = tuple(_parse_time(part, wanted) for part in parts)
    if len(times) > 2 or list(times) != sorted(set(times)):
        raise UserError(wanted)
    return SplitRule("time", _split_names(len(times) + 1), times=times)


def _parse_time(text: str, wanted: str) -> int:
    """Returns a time in seconds since 1970, of a date in UTC; a number is itself.

    Raises:
        UserError: The text is neither.
    """
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(wanted) from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


def _parse_column(text: str, rest: str) -> SplitRule:
    wanted = (
        f"split (--split) is {text[:100]!r}: after 'column:' there must be the name of a column with the values train, "
        "validation and test, or NAME=A,B,C with the values that stand for them; of NAME=A,C there is no validation"
    )
    name, given, values_text = rest.partition("=")
    values = tuple(part.strip() for part in values_text.split(",")) if given else SPLIT_NAMES
    if not name or "" in values or len(set(values)) != len(values) or len(values) not in (2, 3):
        raise UserError(wanted)
    return SplitRule("column", _split_names(len(values)), column=name, values=values)
