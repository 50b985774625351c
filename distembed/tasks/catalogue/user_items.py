"""The items that each user has in some splits of a dataset, which are not drawn as negatives and not ranked again.

All (user, item) pairs lie in one sorted array of keys ``user * num_items + item``, in which one binary search finds a
pair, however unequally many items users have::

    user 0 has items 2 4        keys      2 4 | 11 12 | (none) | 31 33       num_items 10
    user 1 has items 1 2        offsets   0     2       4        4       6
    user 2 has none; user 3 has items 1 3
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import ITEM, USER, Schema
from distembed.tasks.pair_columns import PairColumns

_PAIRS = PairColumns()


@dataclass(frozen=True, eq=False)
class UserItems:
    """The distinct items of each user.

    Attributes:
        num_items: Number of ids of items, which lie in ``[0, num_items)``.
        offsets: Where each user's keys begin, and where the last one's end.
        keys: ``user * num_items + item`` of each pair, ascending and distinct.
    """

    num_items: int
    offsets: Int64[Tensor, " users_plus_1"]
    keys: Int64[Tensor, " pairs"]

    @classmethod
    def from_pairs(cls, users: Any, items: Any, num_users: int, num_items: int) -> UserItems:
        """Returns the items of pairs, given as two arrays in any order and maybe repeated.

        Raises:
            UserError: An id lies outside of its range.
        """
        users, items = np.asarray(users, np.int64), np.asarray(items, np.int64)
        return cls._from_keys([_keys(users, items, num_users, num_items)], num_users, num_items)

    @classmethod
    def of_splits(
        cls, dataset: str | os.PathLike[str], splits: Sequence[str], columns: PairColumns = _PAIRS
    ) -> UserItems:
        """Reads the items of each user from some splits of a dataset of ratings or of sequences.

        Sorting takes up to 17 bytes a pair in the files, the result 8 bytes a distinct pair.

        Raises:
            UserError: The dataset lacks a split, the users or the items, or its files are damaged.
        """
        manifest = Manifest.load(dataset)
        assert columns.user is not None
        num_users, num_items = (_num_ids(manifest.schema, name) for name in (columns.user, columns.item))
        groups = (group for split in splits for group in list_row_groups(dataset_folder(dataset), manifest, split))
        keys = [_keys(*columns.read(group), num_users, num_items) for group in groups]
        return cls._from_keys(keys, num_users, num_items)

    @classmethod
    def _from_keys(cls, key_arrays: list[NDArray[np.int64]], num_users: int, num_items: int) -> UserItems:
        """Returns the distinct pairs of unsorted keys; empties ``key_arrays``, to free their memory before sorting."""
        keys = np.concatenate([np.zeros(0, np.int64), *key_arrays])
        key_arrays.clear()
        keys.sort()
        is_first = np.ones(len(keys), bool)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        keys = keys[is_first]
        offsets = np.searchsorted(keys, np.arange(num_users + 1) * num_items)
        return cls(num_items, torch.from_numpy(offsets), torch.from_numpy(keys))

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device) -> UserItems:
        """Returns the same items with their arrays on a device."""
        return UserItems(self.num_items, self.offsets.to(device), self.keys.to(device))

    def without(self, users: Sequence[int], items: Sequence[int] = ()) -> UserItems:
        """Returns the items of other users alone, and other items alone; the given users have none."""
        is_left_out = torch.zeros_like(self.keys, dtype=torch.bool)
        for ids, left_out in ((self.keys // self.num_items, users), (self.keys % self.num_items, items)):
            is_left_out |= torch.isin(ids, torch.tensor(left_out, dtype=torch.int64))
        keys = self.keys[~is_left_out]
        offsets = torch.searchsorted(keys, torch.arange(self.num_users + 1) * self.num_items)
        return UserItems(self.num_items, offsets, keys)

    def of(self, users: Int64[Tensor, " rows"]) -> JaggedTensor:
        """Returns the items of each row's user, ascending; on a GPU the call synchronises, to learn their number."""
        starts, ends = self.offsets[users], self.offsets[users + 1]
        lengths = ends - starts
        items_before = lengths.cumsum(0) - lengths
        positions = torch.repeat_interleave(starts - items_before, lengths)
        positions = positions + torch.arange(len(positions), device=positions.device)
        return JaggedTensor(self.keys[positions] % self.num_items, lengths=lengths)

    def contains(self, users: Int64[Tensor, "*shape"], items: Int64[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Returns whether ``users[i]`` has ``items[i]``, for each i."""
        if not len(self.keys):
            return torch.zeros_like(items, dtype=torch.bool)
        keys = users * self.num_items + items
        positions = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return self.keys[positions] == keys

    def users_of_items(self) -> Int64[Tensor, " items"]:
        """Returns how many users have each item."""
        return torch.bincount(self.keys % self.num_items, minlength=self.num_items)


def _num_ids(schema: Schema, name: str) -> int:
    sizes = {feature.name: feature.num_embeddings for feature in schema.categorical}
    if name not in sizes:
        raise UserError(
            f"the dataset has no column {name!r}: its ids are in {', '.join(sizes) or 'no columns'}; make a dataset "
            "by `distembed prepare ratings` or `distembed prepare sequences`."
        )
    return sizes[name]


def count_items(dataset: str | os.PathLike[str], split: str, columns: PairColumns) -> Int64[Tensor, " items"]:
    """Returns how many pairs of a split each item is in; raises the errors of :meth:`UserItems.of_splits`."""
    manifest = Manifest.load(dataset)
    counts = np.zeros(_num_ids(manifest.schema, columns.item), np.int64)
    for group in list_row_groups(dataset_folder(dataset), manifest, split):
        _, items = replace(columns, user=None).read(group)
        counts += np.bincount(items, minlength=len(counts))
    return torch.from_numpy(counts)


def count_unknown(
    dataset: str | os.PathLike[str],
    split: str,
    columns: PairColumns,
    reserved_items: Sequence[int],
    reserved_users: Sequence[int],
) -> dict[str, int]:
    """Returns how many pairs of a split have a missing or unknown item, and a missing or unknown user.

    The keys are ``unknown_targets`` and ``unknown_users``. Rows are read where there are ids of unknown values alone.
    """
    unknown = {"unknown_targets": 0, "unknown_users": 0}
    if not (reserved_items or reserved_users):
        return unknown
    for group in list_row_groups(dataset_folder(dataset), Manifest.load(dataset), split):
        users, items = columns.read(group)
        unknown["unknown_targets"] += int(np.isin(items, reserved_items).sum())
        unknown["unknown_users"] += int(np.isin(users, reserved_users).sum())
    return unknown


def _keys(users: NDArray[np.int64], items: NDArray[np.int64], num_users: int, num_items: int) -> NDArray[np.int64]:
    """Returns the key of each pair; raises UserError for an id outside of its range."""
    for name, ids, size in ((USER, users, num_users), (ITEM, items, num_items)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise UserError(
                f"a pair has the {name} {ids.min() if ids.min() < 0 else ids.max()}: ids are 0 to {size - 1}; prepare "
                "the data again."
            )
    return users * num_items + items
