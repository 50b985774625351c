"""The items of users in the splits of a dataset, read once: relevant items of a split, and items seen before it."""

from collections.abc import Sequence

from distembed.data.dataset.manifest import Manifest
from distembed.data.table.vocabulary import reserved_ids
from distembed.tasks.base import TaskContext
from distembed.tasks.catalogue.user_items import UserItems, count_unknown
from distembed.tasks.pair_columns import PairColumns
from distembed.tasks.seen_items import splits_of_seen_items


class SplitItems:
    """The known items of each known user.

    Rows with a missing or unknown user share an id and are of many users, who have no items here. A missing or unknown
    item may be any, and is no item.

    Args:
        context: The dataset.
        columns: Its columns of users and items.
        excludes_seen: Whether seen items are left out of rankings.

    Attributes:
        reserved_items: Ids of missing and unknown items.
        reserved_users: Ids of missing and unknown users; empty without a column of users.
    """

    def __init__(self, context: TaskContext, columns: PairColumns, excludes_seen: bool) -> None:
        manifest = Manifest.load(context.dataset)
        self.reserved_items = reserved_ids(manifest, columns.item)
        self.reserved_users = () if columns.user is None else reserved_ids(manifest, columns.user)
        self._context, self._columns, self._excludes_seen = context, columns, excludes_seen
        self._items: dict[tuple[str, ...], UserItems] = {}

    def of(self, *splits: str) -> UserItems:
        """Returns each user's distinct items in some splits, which are read at the first call."""
        if splits not in self._items:
            items = UserItems.of_splits(self._context.dataset, splits, self._columns)
            self._items[splits] = items.without(self.reserved_users, self.reserved_items)
        return self._items[splits]

    def seen_before(self, split: str | None) -> UserItems:
        """Returns the items that a ranking leaves out: each user's items in the splits before ``split``; None for all.

        There are none where seen items are candidates, and where only the dataset's metadata is here, without its rows.
        """
        context = self._context
        return self.of(*splits_of_seen_items(context.data, context.dataset, split, self._excludes_seen))

    def count_unknown(self, split: str) -> dict[str, int]:
        """Returns the numbers ``unknown_targets`` and ``unknown_users`` of pairs that no query of a split has."""
        reserved: Sequence[Sequence[int]] = (self.reserved_items, self.reserved_users)
        return count_unknown(self._context.dataset, split, self._columns, *reserved)
