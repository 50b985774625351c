"""The options of a dataset of interactions, the columns that are read, and the split.

``last-one``         the last interaction of each user tests
``last-two``         the last tests, and the one before it validates
``time:0.8,0.1,0.1`` the first 80% of all interactions train, the next 10% validate, the last 10% test
``random:0.8,0.2``   shares of a random order; two shares leave out the validation
``files``            every file is named for one split

Interactions without times, or with equal times, are in the order of the input.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.hashing import mix64_array
from distembed.data.prepare.options import parse_shares

TRAIN, VALIDATION, TEST = range(3)  # numbers of the splits: places in ``SPLIT_NAMES``
BY_FILES = "files"
_LAST = {"last-one": 1, "last-two": 2}
_TIME, _RANDOM = "time", "random"


@dataclass(frozen=True)
class InteractionSplit:
    """How interactions are split."""

    # How many of each user's last interactions do not train; None where the other fields say it.
    num_last: int | None = None
    shares: tuple[Fraction, ...] | None = None  # shares of training, validation (where there are three) and test
    is_random: bool = False  # whether the shares are of a random order, rather than of the order of time

    @classmethod
    def parse(cls, text: str) -> InteractionSplit:
        """Reads a split in one of the forms that the module's docstring lists."""
        if text in _LAST:
            return cls(num_last=_LAST[text])
        if text == BY_FILES:
            return cls()
        refusal = (
            f"split (--split) is {text[:100]!r}: it must be 'last-one', 'last-two', or 'time:' or 'random:' with two "
            "or three positive shares that add up to 1, such as 'time:0.8,0.1,0.1'; files of their own for the test "
            "are named with --test"
        )
        kind, _, shares_text = text.partition(":")
        if kind not in (_TIME, _RANDOM):
            raise UserError(refusal)
        shares = parse_shares(shares_text, refusal)
        if len(shares) not in (2, 3):
            raise UserError(refusal)
        return cls(shares=shares, is_random=kind == _RANDOM)

    @property
    def is_by_files(self) -> bool:
        return self.num_last is None and self.shares is None

    @property
    def has_validation(self) -> bool:
        return self.num_last == 2 or (self.shares is not None and len(self.shares) == 3)

    def in_sql(self, in_time: str, num_rows: int) -> tuple[str, str]:
        """Returns SQL expressions of a row's split, in terms of ``n``, and of ``n``, the row's number in an order.

        ``in_time`` is SQL of the time order. For the last interactions, n counts a user's rows from the last, and is
        null for a user with so few that none would train: all of them train. For shares of time, n counts all rows.
        """
        if self.num_last is not None:
            user = f"(partition by k0 order by {f'{in_time} desc'.replace(',', ' desc,')}"
            history = f"count(*) over {user} rows between unbounded preceding and unbounded following)"
            number = f"case when {history} > {self.num_last} then row_number() over {user}) end"
            return f"case n when 1 then {TEST} when {self.num_last} then {VALIDATION} else {TRAIN} end", number
        if self.shares is None or self.is_random:
            return "part", "null"
        cases = " ".join(f"when n <= {stop} then {split}" for split, stop in self._stops(num_rows))
        return f"case {cases} else {TEST} end", f"row_number() over (order by {in_time})"

    def random_splits(self, num_rows: int, seed: int) -> NDArray[np.uint8]:
        """Returns the split of each interaction: shares of a random order, by hashes of row and seed."""
        words = mix64_array(np.arange(num_rows, dtype=np.uint64) + mix64_array(np.array([seed], np.uint64)))
        order = np.argsort(words, kind="stable")
        splits = np.full(num_rows, TEST, np.uint8)
        for split, stop in reversed(self._stops(num_rows)):
            splits[order[:stop]] = split
        return splits

    def _stops(self, num_rows: int) -> list[tuple[int, int]]:
        """Returns each split but the last, with the number of rows up to its end."""
        assert self.shares is not None, "splits of other kinds have no shares"
        return [(split, int(num_rows * sum(self.shares[: split + 1]))) for split in range(len(self.shares) - 1)]


RATING = "rating"  # name of the label's column in a dataset of ratings
COLUMNS, LISTS = "columns", "lists"
LATEST, ALL = "latest", "all"
DUPLICATES = ("first", "last", "keep", "error")


@dataclass(frozen=True)
class InteractionColumns:
    """The columns of the input: their names there or, without a header, their numbers from 1."""

    user: str | None = None  # column of the user; ``user``, or the first one, unless given
    item: str | None = None  # column of the item; ``item``, or the second one, unless given
    rating: str | None = None  # column of a number; None where there is none
    time: str | None = None  # column of the time, a number or a date; None where rows are in the order of time
    categorical: tuple[str, ...] = ()  # columns of categorical attributes, for example a genre
    dense: tuple[str, ...] = ()  # columns of numeric attributes, as a price or the time; values may be missing
    has_header: bool = True  # whether text files begin with the names of their columns
    newlines_in_values: bool = False  # whether a value in quotation marks of a text file may have several lines

    def __post_init__(self) -> None:
        names = [*self.keys, *self.numbers]
        if self.time is not None and self.time not in self.dense:  # a time may also be an attribute
            names.append(self.time)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(
                f"the columns are {', '.join(map(repr, names))}: {repeated[0]!r} has two roles; give it one"
            )
        require_free_names(self, {USER, ITEM})
        for name in self.categorical:
            if "/" in name or "\0" in name or len(name.encode()) > 200:
                raise UserError(f"an attribute is named {name!r}, as no file can be; rename the column in the input")

    @property
    def user_column(self) -> str:
        return self.user or (USER if self.has_header else "1")

    @property
    def item_column(self) -> str:
        return self.item or (ITEM if self.has_header else "2")

    @property
    def keys(self) -> list[str]:
        return [self.user_column, self.item_column, *self.categorical]

    @property
    def key_names(self) -> list[str]:
        return [USER, ITEM, *self.categorical]

    @property
    def numbers(self) -> list[str]:
        return [*([] if self.rating is None else [self.rating]), *self.dense]


@dataclass(frozen=True)
class InteractionOptions:
    """How interactions are chosen and split."""

    split: str  # how they are split; see :class:`~distembed.data.prepare.interactions.options.InteractionSplit`
    min_rating: float | None = None  # interactions with a lower rating are left out; None keeps all
    k_core: int = 1  # users and items with fewer interactions are left out, until all have so many; 1 keeps all
    # Which of several interactions of a user with an item are kept: the ``first``, the ``last``, or all (``keep``);
    # ``error`` refuses them.
    duplicates: str = "first"
    max_rejected: float = 0.01  # largest share of malformed rows that is no error; they are listed in ``rejected.tsv``
    seed: int = 0  # seed of a random split

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        InteractionSplit.parse(self.split)
        one_of("duplicates", self.duplicates, DUPLICATES)
        if self.min_rating is not None and not math.isfinite(self.min_rating):
            raise UserError(f"min_rating (--min-rating) is {self.min_rating}: it must be a finite number")
        _require_between("k_core", self.k_core, 1, 2**31 - 1)
        _require_between("max_rejected", self.max_rejected, 0, 1)
        _require_between("seed", self.seed, 0, 2**63 - 1)

    def to_json(self) -> dict[str, Any]:
        unused = set() if InteractionSplit.parse(self.split).is_random else {"seed"}
        return {"kind": self.kind} | {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass(frozen=True)
class RatingOptions(InteractionOptions):
    """How interactions become a dataset with a row for each."""

    split: str = "random:0.8,0.1,0.1"

    kind = "ratings"


@dataclass(frozen=True)
class SequenceOptions(InteractionOptions):
    """How interactions become a dataset with a row for a stretch of a user's history."""

    split: str = "last-two"
    duplicates: str = "keep"
    max_length: int = 50  # most items of a training row, plus the last one, which is only predicted; 1 or more
    # Which training rows a user has: ``latest`` for one with the most recent items, or ``all`` for as many as it takes
    # that each item but the first is predicted once.
    windows: str = LATEST
    format: str = COLUMNS  # ``columns``, or ``lists`` for lines of a user and items in the order of time

    kind = "sequences"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("windows", self.windows, (LATEST, ALL))
        one_of("format", self.format, (COLUMNS, LISTS))
        _require_between("max_length", self.max_length, 1, 2**31 - 1)
        if InteractionSplit.parse(self.split).is_random:
            raise UserError(
                f"split (--split) is {self.split!r}: what follows in a sequence is predicted, so it is split in the "
                "order of time: 'last-two', 'last-one', or 'time:' with three shares"
            )


def require_free_names(columns: InteractionColumns, used_names: Collection[str]) -> None:
    """Raises a UserError if an attribute has one of ``used_names``, the names of the dataset's other columns."""
    for name in (*columns.categorical, *columns.dense):
        if name in used_names:
            raise UserError(
                f"an attribute is named {name!r}, as a column of the dataset is; rename the column in the input"
            )


def _require_between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UserError(f"{name} (--{name.replace('_', '-')}) is {value}: it must be in {least} to {most}")
