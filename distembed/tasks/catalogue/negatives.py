"""Draws negative items on the batch's device, repeatably, and never an item that the row's user excludes.

Each drawn item is a function of (seed, step, index of the row in the global batch, slot), so a run draws the same items
on any number of ranks and after a resume. SplitMix64, as for replaced ids (``sse/random_words.py``), maps the counter
``row * slots + slot`` to a random 63-bit integer, the *word* of the draw.

One word gives one item, without rejection sampling. Items have integer weights, laid end to end on ``[0, total)``. The
weights of a user's excluded items are removed; u, drawn from the weight left over, skips the excluded items before it::

    items      | 0 | 1  1  1 | 2 | 3  3 | 4 |      cumulative  0 1 4 5 7 8
    excluded         ^^^^^^^       ^^^^             left over  8 - 3 - 2 = 3; before item 1: 1, before item 3: 2
    left over  | 0 |           2 |        4 |      u = 2 skips both: 2 + 3 + 2 = 7 is item 4

All (user, excluded item) pairs have the key ``user * total + weight left over before the item``, in ascending order.
One binary search among these keys counts the excluded items that u skips. Trade-off: 8 bytes a pair more than
:class:`UserItems`. A draw favours some items by at most ``total / 2^63`` of their probability, below 2^-22. A user who
excludes every item has no negatives: its draws are item 0, and :meth:`NegativeDraws.has_items` is false.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.hashing import GOLDEN_GAMMA
from distembed.partitions.hashing import mix64
from distembed.sse.random_words import place_key, stream_key
from distembed.tasks.catalogue.user_items import UserItems

_MOST_TOTAL_BITS = 40
_KEY_BITS = 62


def item_weights(counts: Int64[Tensor, " items"], exponent: float, reserved: Sequence[int]) -> Float[Tensor, " items"]:
    """Returns the weights by which items are drawn: ``max(count, 1) ** exponent``, and 0 for reserved ids.

    Args:
        counts: How often each item occurs, for example :meth:`UserItems.users_of_items`.
        exponent: 0 draws items uniformly, 1 by their frequency.
        reserved: Ids that stand for no item.
    """
    weights = counts.clamp(min=1).double() ** exponent
    weights[list(reserved)] = 0.0
    return weights


class NegativeDraws:
    """Draws negative items by weight, with replacement, from the items that a row's user does not exclude.

    Args:
        weights: Weight of each item, as from :func:`item_weights`.
        excluded: Items that are not drawn for a user, on the device on which to draw; None to exclude none.
        seed: Seed of the run.
        name: Name of the stream of random numbers; streams of different names are independent.

    Attributes:
        users_without_items: The users who exclude every item that has a weight, ascending.

    Raises:
        UserError: No item has a weight.
    """

    def __init__(
        self, weights: Float[Tensor, " items"], excluded: UserItems | None, seed: int, name: str = "negatives"
    ) -> None:
        self._key = stream_key(seed, "negatives", name)
        self._excluded = excluded if excluded is not None and len(excluded.keys) else None
        num_users = 1 if excluded is None else excluded.num_users
        self._cumulative = _cumulative_units(weights, num_users)
        self.total = int(self._cumulative[-1])
        if self.total == 0:
            raise UserError(f"none of {len(weights)} items has a weight above 0: there is no item to draw.")
        self._first_item = _first_of_uniform(self._cumulative)
        self.users_without_items = torch.zeros(0, dtype=torch.int64)
        if self._excluded is not None:
            device = self._excluded.keys.device
            self._cumulative = self._cumulative.to(device)
            self._left_before, self._left = _left_over(self._cumulative, self._excluded)
            self.users_without_items = (self._left <= 0).nonzero().flatten()

    def draw(self, step: int, first_row: int, users: Int64[Tensor, " rows"], slots: int) -> Int64[Tensor, "rows slots"]:
        """Returns ``slots`` items for each row that its user does not exclude, on the users' device; they may repeat.

        Args:
            step: Number of the step over all epochs.
            first_row: Number of the first row among the rows of the step on all ranks.
            users: User of each row; one without negatives gets item 0.
            slots: Number of items of each row.
        """
        if self._excluded is None:
            return self.draw_for_all(step, first_row, len(users), slots)
        numbers = self._numbers(first_row, len(users), slots)
        return self.draw_numbered(step, numbers, users.unsqueeze(1).expand(-1, slots))

    def draw_numbered(
        self, step: int, numbers: Int64[Tensor, "*shape"], users: Int64[Tensor, "*shape"]
    ) -> Int64[Tensor, "*shape"]:
        """Returns one item for each counter in ``numbers``, which its user in ``users`` does not exclude.

        A counter is unique among the draws of all ranks in the step; :meth:`draw` uses ``row * slots + slot``.
        """
        words = self._words(step, numbers)
        if self._excluded is None:
            return self._items(words % self.total)
        # u + (excluded weight that u skips) is a point of [0, total), whose item is drawn. In the module's example
        # u = 2 skips items 1 and 3: the last of them ends at 7, with a weight of 2 left over before it, so 7 - 2 = 5
        # of excluded weight are skipped.
        u = words % self._left[users].clamp(min=1)
        # pairs of (user, excluded item) at or before u, including the pairs of earlier users
        num_pairs = torch.searchsorted(self._left_before, users * self.total + u, right=True)
        last_pair = (num_pairs - 1).clamp(min=0)
        skips_items = num_pairs > self._excluded.offsets[users]  # else the last pair is an earlier user's
        last_item = self._excluded.keys[last_pair] - users * self._excluded.num_items
        end_of_last = self._cumulative[torch.where(skips_items, last_item, 0) + 1]
        left_before_last = self._left_before[last_pair] - users * self.total
        drawn = self._items(u + torch.where(skips_items, end_of_last - left_before_last, 0))
        # a user without negatives skips the whole catalogue and gets the id num_items, which is out of range
        return torch.where(self.has_items(users), drawn, 0) if len(self.users_without_items) else drawn

    def has_items(self, users: Int64[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Returns, for each user, whether some item with a weight is not excluded."""
        return torch.ones_like(users, dtype=torch.bool) if self._excluded is None else self._left[users] > 0

    def draw_for_all(self, step: int, first_row: int, num_rows: int, slots: int) -> Int64[Tensor, "rows slots"]:
        """Returns ``slots`` items for each row, without any exclusion; the arguments are as in :meth:`draw`."""
        return self._items(self._words(step, self._numbers(first_row, num_rows, slots)) % self.total)

    def log_probabilities(
        self, items: Int64[Tensor, "rows slots"], users: Int64[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows slots"]:
        """Returns the logarithm of each item's probability; -inf for an item that is never drawn.

        Args:
            items: Any items; one that its user excludes counts as if it were not excluded.
            users: User of each row, for items of :meth:`draw`; None for items of :meth:`draw_for_all`.
        """
        units = (self._cumulative[items + 1] - self._cumulative[items]).double()
        if users is None or self._excluded is None:
            return (units / self.total).log().float()
        left = self._left[users].unsqueeze(1)
        return torch.where(left > 0, units / left.clamp(min=1), 0.0).log().float()

    def _numbers(self, first_row: int, num_rows: int, slots: int) -> Int64[Tensor, "rows slots"]:
        numbers = torch.arange(first_row * slots, (first_row + num_rows) * slots, device=self._cumulative.device)
        return numbers.view(num_rows, slots)

    def _words(self, step: int, numbers: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        """Returns the random 63-bit integer of each counter in a step."""
        state = int((self._key ^ place_key(step, 0)).view(np.int64))
        return mix64(numbers * _GOLDEN_GAMMA + state) & (2**63 - 1)

    def _items(self, numbers: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        if self._first_item is not None:
            return numbers + self._first_item
        return torch.searchsorted(self._cumulative[1:], numbers, right=True)


_GOLDEN_GAMMA = GOLDEN_GAMMA - 2**64  # as an int64


def _cumulative_units(weights: Float[Tensor, " items"], num_users: int) -> Int64[Tensor, " items_plus_1"]:
    """Returns the running sum of the items' integer weights, from 0 to the total.

    The total is limited so that the keys ``user * total + weight`` fit into 62 bits. Integer weights within the limit
    are kept. Otherwise weights are scaled to half the limit and rounded; positive weights become 1 or more.
    """
    most = 2.0 ** min(_MOST_TOTAL_BITS, _KEY_BITS - num_users.bit_length())
    total = float(weights.sum())
    units = weights.double()
    if total > most or bool((units != units.round()).any()):
        units = torch.where(units > 0, (units * (most / 2 / total)).round().clamp(min=1), 0)
    return torch.cat([weights.new_zeros(1, dtype=torch.long), units.long().cumsum(0)])


def _first_of_uniform(cumulative: Int64[Tensor, " items_plus_1"]) -> int | None:
    """Returns the first item with a weight if the weights are 0 ... 0 1 ... 1; else None.

    With these weights the number u stands for the item ``first + u``, and no search is needed.
    """
    first = len(cumulative) - 1 - int(cumulative[-1])
    is_uniform = first >= 0 and int(cumulative[first]) == 0 and bool((cumulative[first:].diff() == 1).all())
    return first if is_uniform else None


def _left_over(
    cumulative: Int64[Tensor, " items_plus_1"], excluded: UserItems
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " users"]]:
    """Returns the ascending keys of the excluded pairs, as the module describes, and the weight left over by user."""
    # in the module's example, of user 0 alone: items 1 3, excluded_before 0 3 5, left_before 1-0 5-3, remaining 8-5
    total = cumulative[-1]
    num_excluded = excluded.offsets.diff()
    users = torch.repeat_interleave(torch.arange(excluded.num_users, device=num_excluded.device), num_excluded)
    items = excluded.keys - users * excluded.num_items
    # the running sum over all users may overflow int64; differences of two sums are still exact modulo 2^64
    excluded_before = torch.cat([total.new_zeros(1), (cumulative[items + 1] - cumulative[items]).cumsum(0)])
    excluded_before_user = excluded_before[excluded.offsets]
    remaining = total - excluded_before_user.diff()
    left_before = cumulative[items] - (excluded_before[:-1] - excluded_before_user[users])
    return users * total + left_before, remaining
