"""What a dataset of interactions depends on besides its input, and which columns of the input are read."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.prepare.interactions.splits import InteractionSplit

RATING = "rating"
"""Name of the label's column in a dataset of ratings."""
COLUMNS, LISTS = "columns", "lists"
LATEST, ALL = "latest", "all"
DUPLICATES = ("first", "last", "keep", "error")


@dataclass(frozen=True)
class InteractionColumns:
    """The columns of the input: their names there or, without a header, their numbers from 1.

    Raises:
        UserError: A column has two roles, or an attribute the name of a column that every such dataset has.
    """

    user: str | None = None  # column of the user; ``user``, or the first one, unless given
    item: str | None = None  # column of the item; ``item``, or the second one, unless given
    rating: str | None = None  # column of a number; None where there is none
    time: str | None = None  # column of the time, a number or a date; None where rows are in the order of time
    categorical: tuple[str, ...] = ()  # columns of other values that say more of an interaction, such as a genre
    dense: tuple[str, ...] = ()  # columns of numbers, such as a price; they may be missing
    has_header: bool = True  # whether text files begin with the names of their columns
    newlines_in_values: bool = False  # whether a value in quotation marks of a text file may have several lines

    def __post_init__(self) -> None:
        named = [*self.keys, *self.numbers, *([] if self.time is None else [self.time])]
        repeated = sorted({name for name in named if named.count(name) > 1})
        if repeated:
            raise UserError(
                f"the columns are {', '.join(map(repr, named))}: {repeated[0]!r} has two roles; give it one"
            )
        require_free_names(self, {USER, ITEM})
        for name in self.categorical:
            if "/" in name or "\0" in name or len(name.encode()) > 200:
                raise UserError(f"an attribute is named {name!r}, as no file can be; rename the column in the input")

    @property
    def user_column(self) -> str:
        """The column of the user."""
        return self.user or (USER if self.has_header else "1")

    @property
    def item_column(self) -> str:
        """The column of the item."""
        return self.item or (ITEM if self.has_header else "2")

    @property
    def keys(self) -> list[str]:
        """The columns of values that get ids: user, item, categorical."""
        return [self.user_column, self.item_column, *self.categorical]

    @property
    def key_names(self) -> list[str]:
        """Names of ``keys`` in the dataset."""
        return [USER, ITEM, *self.categorical]

    @property
    def numbers(self) -> list[str]:
        """The columns of numbers: rating, dense."""
        return [*([] if self.rating is None else [self.rating]), *self.dense]


@dataclass(frozen=True)
class InteractionOptions:
    """How interactions are chosen and split.

    Raises:
        UserError: An option is out of its range.
    """

    split: str  # how they are split; see :class:`~distembed.data.prepare.interactions.splits.InteractionSplit`
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
        """Returns the options, in the manifest's order."""
        unused = set() if InteractionSplit.parse(self.split).is_random else {"seed"}
        return {"kind": self.kind} | {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass(frozen=True)
class RatingOptions(InteractionOptions):
    """How interactions become a dataset with a row for each.

    Raises:
        UserError: An option is out of its range.
    """

    split: str = "random:0.8,0.1,0.1"

    kind = "ratings"


@dataclass(frozen=True)
class SequenceOptions(InteractionOptions):
    """How interactions become a dataset with a row for a stretch of a user's history.

    Raises:
        UserError: An option is out of its range.
    """

    split: str = "last-two"
    duplicates: str = "keep"
    max_length: int = 50  # most items of a training row, besides the last one, which only is predicted; 1 or more
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


def require_free_names(columns: InteractionColumns, taken: Collection[str]) -> None:
    """Makes sure that no attribute has the name of a column that the dataset has in any case.

    Raises:
        UserError: One has.
    """
    for name in (*columns.categorical, *columns.dense):
        if name in taken:
            raise UserError(
                f"an attribute is named {name!r}, as a column of the dataset is; rename the column in the input"
            )


def _require_between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UserError(f"{name} (--{name.replace('_', '-')}) is {value}: it must be in {least} to {most}")
