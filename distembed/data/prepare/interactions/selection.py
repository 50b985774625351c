"""Which interactions a dataset is made of: those with a rating that is high enough, each once, and the k-core.

The k-core is the largest set of interactions in which every user and every item has at least k of them. It is what is
left when users and items with fewer are taken away again and again, in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from distembed.data.prepare.interactions.interactions import Interactions
from distembed.data.prepare.interactions.options import InteractionOptions
from distembed.errors import UserError


@dataclass(frozen=True)
class LeftOut:
    """Numbers of interactions that a dataset leaves out.

    Attributes:
        below_rating: Those with a lower rating than ``min_rating``.
        duplicates: Those of a user with an item that were there before, or come again.
        outside_core: Those of users and items with fewer than ``k_core``.
    """

    below_rating: int = 0
    duplicates: int = 0
    outside_core: int = 0

    def to_json(self) -> dict[str, int]:
        """Returns the numbers that are not 0."""
        return {name: count for name, count in asdict(self).items() if count}


def select(found: Interactions, options: InteractionOptions) -> tuple[Interactions, LeftOut]:
    """Returns the interactions that the options keep, in the same order, and how many they leave out and why.

    Raises:
        UserError: Duplicates are an error and there are some, or nothing is left.
    """
    steps: list[Callable[[Interactions], Interactions]] = [
        lambda rows: _rated(rows, options.min_rating),
        lambda rows: _distinct(rows, options.duplicates),
        lambda rows: (
            rows.take(core(rows.users.codes, rows.items.codes, options.k_core)) if options.k_core > 1 else rows
        ),
    ]
    counts = []
    for step in steps:
        before = found.num_rows
        found = step(found)
        counts.append(before - found.num_rows)
    left_out = LeftOut(*counts)
    if not found.num_rows:
        listed = ", ".join(f"{name} {count:,}" for name, count in left_out.to_json().items())
        raise UserError(
            f"no interaction is left; left out: {listed}. Lower --min-rating or --k-core, or give more rows"
        )
    return found, left_out


def _rated(rows: Interactions, min_rating: float | None) -> Interactions:
    return rows if min_rating is None or rows.ratings is None else rows.take(rows.ratings >= np.float32(min_rating))


def _distinct(rows: Interactions, keep: str) -> Interactions:
    """Returns the rows of which each pair of user and item has one, or all of them; training comes before the test.

    Raises:
        UserError: Duplicates are an error and there are some.
    """
    if keep == "keep":
        return rows
    order = np.lexsort([rows.parts] if rows.times is None else [rows.times, rows.parts])
    order = order[::-1] if keep == "last" else order
    pairs = rows.users.codes.astype(np.int64) * len(rows.items.keys) + rows.items.codes
    kept = np.sort(order[np.unique(pairs[order], return_index=True)[1]])
    if keep == "error" and len(kept) < len(pairs):
        again = int(np.setdiff1d(np.arange(len(pairs)), kept)[0])
        user, item = (column.keys[int(column.codes[again])].as_py() for column in (rows.users, rows.items))
        raise UserError(
            f"{len(pairs) - len(kept):,} interactions of a user with an item are there more than once, such as user "
            f"{user!r} and item {item!r}: keep one (--duplicates first, or last) or all (--duplicates keep)"
        )
    return rows if len(kept) == len(pairs) else rows.take(kept)


def core(users: NDArray[np.int32], items: NDArray[np.int32], k: int) -> NDArray[np.int64]:
    """Returns the numbers of the interactions of the k-core, in order.

    Args:
        users: Number of each interaction's user.
        items: Number of each interaction's item.
        k: Least number of interactions of a user and of an item.
    """
    rows = np.arange(len(users))
    while len(rows):
        kept = (np.bincount(users[rows])[users[rows]] >= k) & (np.bincount(items[rows])[items[rows]] >= k)
        if kept.all():
            break
        rows = rows[kept]
    return rows
