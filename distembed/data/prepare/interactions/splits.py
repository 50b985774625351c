"""Which interactions train, validate and test.

``last-one``         the last interaction of each user tests
``last-two``         so, and the one before it validates
``time:0.8,0.1,0.1`` the first 80% of all interactions train, the next 10% validate, the last 10% test
``random:0.8,0.2``   so, in a random order; two shares leave out the validation
``files``            every file is named for one split

What is last in time is also last in the input where there are no times, and among equal times.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.prepare.split import parse_shares
from distembed.data.splitmix import mix64_array

TRAIN, VALIDATION, TEST = range(3)
"""Numbers of the splits: places in ``SPLIT_NAMES``."""
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
        """Reads what the module's docstring lists.

        Raises:
            UserError: The text is nothing of it.
        """
        if text in _LAST:
            return cls(num_last=_LAST[text])
        if text == BY_FILES:
            return cls()
        wanted = (
            f"split (--split) is {text[:100]!r}: it must be 'last-one', 'last-two', or 'time:' or 'random:' with two "
            "or three positive shares that add up to 1, such as 'time:0.8,0.1,0.1'; files of their own for the test "
            "are named with --test"
        )
        kind, _, shares_text = text.partition(":")
        if kind not in (_TIME, _RANDOM):
            raise UserError(wanted)
        shares = parse_shares(shares_text, wanted)
        if len(shares) not in (2, 3):
            raise UserError(wanted)
        return cls(shares=shares, is_random=kind == _RANDOM)

    @property
    def is_by_files(self) -> bool:
        """Whether the files say it."""
        return self.num_last is None and self.shares is None

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split, where files do not say it."""
        return self.num_last == 2 or (self.shares is not None and len(self.shares) == 3)

    def in_sql(self, in_time: str, num_rows: int) -> tuple[str, str]:
        """Returns SQL of the number of a row's split, and of its column ``n`` that this is made of.

        A user all of whose interactions would be taken away, but for the first one, trains with all.
        """
        if self.num_last is not None:
            user = f"(partition by k0 order by {f'{in_time} desc'.replace(',', ' desc,')}"
            history = f"count(*) over {user} rows between unbounded preceding and unbounded following)"
            number = f"case when {history} > {self.num_last} then row_number() over {user}) end"
            return f"case n when 1 then {TEST} when {self.num_last} then {VALIDATION} else {TRAIN} end", number
        if self.shares is None or self.is_random:
            return "part", "null"
        cases = " ".join(f"when n <= {stop} then {part}" for part, stop in self._stops(num_rows))
        return f"case {cases} else {TEST} end", f"row_number() over (order by {in_time})"

    def random_parts(self, total: int, seed: int) -> NDArray[np.uint8]:
        """Returns the split of each interaction in a random order, which the seed and the rows' numbers give."""
        words = mix64_array(np.arange(total, dtype=np.uint64) + mix64_array(np.array([seed], np.uint64)))
        order = np.argsort(words, kind="stable")
        parts = np.full(total, TEST, np.uint8)
        for part, stop in reversed(self._stops(total)):
            parts[order[:stop]] = part
        return parts

    def _stops(self, total: int) -> list[tuple[int, int]]:
        """Returns each split but the last, with the number of rows up to its end."""
        assert self.shares is not None, "splits of other kinds have no shares"
        return [(part, int(total * sum(self.shares[: part + 1]))) for part in range(len(self.shares) - 1)]
