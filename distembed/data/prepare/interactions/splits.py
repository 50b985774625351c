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

from distembed.data.prepare.split import SPLIT_NAMES, parse_shares
from distembed.data.splitmix import mix64_array
from distembed.errors import UserError

TRAIN, VALIDATION, TEST = range(3)
"""Numbers of the splits: places in ``SPLIT_NAMES``."""
BY_FILES = "files"

_LAST = {"last-one": 1, "last-two": 2}
_TIME, _RANDOM = "time", "random"


@dataclass(frozen=True)
class InteractionSplit:
    """How interactions are split.

    Attributes:
        num_last: How many of each user's last interactions do not train; None where the other fields say it.
        shares: Shares of training, validation (where there are three) and test.
        is_random: Whether the shares are of a random order, rather than of the order of time.
    """

    num_last: int | None = None
    shares: tuple[Fraction, ...] | None = None
    is_random: bool = False

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

    def has_validation(self, has_files: bool) -> bool:
        """Returns whether there is a validation split.

        Args:
            has_files: Whether files of it were named.
        """
        if self.shares is not None:
            return len(self.shares) == 3
        return has_files if self.num_last is None else self.num_last == 2

    def parts(
        self, users: NDArray[np.int32], times: NDArray[np.int64] | NDArray[np.float64] | None, seed: int
    ) -> NDArray[np.uint8]:
        """Returns the split of each interaction: ``TRAIN``, ``VALIDATION`` or ``TEST``.

        A user all of whose interactions would be taken away, but for the first one, trains with all.

        Args:
            users: Number of the user of each interaction, in the order of the input.
            times: Time of each; None where the order of the input is that of time.
            seed: Seed of a random order.
        """
        if self.num_last is not None:
            return _last_parts(users, times, self.num_last)
        assert self.shares is not None, "files say themselves what they are for"
        if self.is_random:
            order = _random_order(len(users), seed)
        else:
            order = np.arange(len(users)) if times is None else np.argsort(times, kind="stable")
        return _shared_parts(order, self.shares)


def time_order(
    users: NDArray[np.int32], times: NDArray[np.int64] | NDArray[np.float64] | None, parts: NDArray[np.uint8] | None
) -> NDArray[np.int64]:
    """Returns the interactions by user and, for a user, by split and time; equal ones stay in order.

    Args:
        users: Number of the user of each interaction.
        times: Time of each; None where the order of the input is that of time.
        parts: Split of each; None where it plays no role.
    """
    keys = [key for key in (times, parts, users) if key is not None]
    return np.lexsort(keys)


def user_bounds(sorted_users: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns where each user's interactions begin, and where the last one's end."""
    begins = np.flatnonzero(np.diff(sorted_users, prepend=-1))
    return np.append(begins, len(sorted_users))


def _last_parts(
    users: NDArray[np.int32], times: NDArray[np.int64] | NDArray[np.float64] | None, num_last: int
) -> NDArray[np.uint8]:
    order = time_order(users, times, None)
    bounds = user_bounds(users[order])
    ends = bounds[1:][np.diff(bounds) > num_last]
    parts = np.full(len(users), TRAIN, np.uint8)
    parts[order[ends - 1]] = TEST
    if num_last == 2:
        parts[order[ends - 2]] = VALIDATION
    return parts


def _shared_parts(order: NDArray[np.int64], shares: tuple[Fraction, ...]) -> NDArray[np.uint8]:
    names = (TRAIN, VALIDATION, TEST) if len(shares) == len(SPLIT_NAMES) else (TRAIN, TEST)
    parts = np.full(len(order), names[-1], np.uint8)
    start, share = 0, Fraction(0)
    for part, one in zip(names[:-1], shares, strict=False):
        share += one
        stop = int(len(order) * share)
        parts[order[start:stop]] = part
        start = stop
    return parts


def _random_order(length: int, seed: int) -> NDArray[np.int64]:
    """Returns an order in which each row has a place that depends on the seed and the row's number."""
    words = mix64_array(np.arange(length, dtype=np.uint64) + mix64_array(np.array([seed], np.uint64)))
    return np.argsort(words, kind="stable")
