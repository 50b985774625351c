"""Whether items that a user has already are candidates: the setting ``task.exclude_seen``, decided when a run starts.

Candidates never depend on the target. Either seen items stay, or they are left out and a target among them is a miss.
``auto`` measures how often users return to an item, on the training split alone::

    sequences   a b c b | d d          targets that precede in their row: b of b c b, d of d       2 of 4
    ratings     (u, a) (u, b) (u, a)   rows whose pair an earlier row has: the second (u, a)       1 of 3

It leaves seen items out where that share is at most ``MOST_REPEATS``, about the loss of a hit rate. The first million
items of sequences are measured; a dataset that was prepared without duplicates has no repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import RowGroup, list_row_groups
from distembed.data.dataset.schema import USER
from distembed.data.table.vocabulary import reserved_ids
from distembed.tasks.config import TaskConfig
from distembed.tasks.next_item_config import NextItemConfig
from distembed.tasks.pair_columns import PairColumns, int64_array
from distembed.tasks.ranking_config import RankingConfig
from distembed.tasks.retrieval_config import RetrievalConfig

SEEN_ITEMS = "seen_items"
"""Key of ``run.json`` under which a run keeps the decision."""
MOST_REPEATS = 0.01
"""Largest share of repeats with which seen items are left out."""
_MOST_ITEMS = 1_000_000
T = TypeVar("T")
_WITHOUT_DUPLICATES = ("first", "last", "error")


def decided_task(
    task: TaskConfig, dataset: str, manifest: Manifest, split: str
) -> tuple[TaskConfig, dict[str, Any] | None]:
    """Returns a task's section with ``exclude_seen`` decided, and the decision in plain values for ``run.json``.

    The decision is None for a task that excludes nothing. Nothing is decided where the training split is not at hand.

    Args:
        task: The section.
        dataset: The dataset's folder.
        manifest: Its manifest.
        split: Name of the training split.

    Raises:
        UserError: The task cannot be learnt from the dataset, or the training split cannot be read.
    """
    if not isinstance(task, RankingConfig | NextItemConfig | RetrievalConfig):
        return task, None
    if task.exclude_seen != "auto":
        return task, {"excluded": task.exclude_seen, "decided_by": "config"}
    task.batch_schema(manifest.schema)
    columns = task.pair_columns(manifest.schema) if isinstance(task, RetrievalConfig) else PairColumns()
    if columns.user is None:  # rows of no known user have no seen items
        return dataclasses.replace(task, exclude_seen=False), {"excluded": False, "decided_by": "config"}
    if manifest.is_without_rows or split not in manifest.splits:
        return task, None
    if manifest.preparation.get("duplicates") in _WITHOUT_DUPLICATES:  # no rows are read: no count of items
        return dataclasses.replace(task, exclude_seen=True), {"excluded": True, "decided_by": "auto", "repeats": 0}
    repeats, items = _count_repeats(dataset, manifest, split, columns)
    excluded = repeats <= MOST_REPEATS * items
    record = {"excluded": excluded, "decided_by": "auto", "repeats": repeats, "items": items}
    return dataclasses.replace(task, exclude_seen=excluded), record


def describe_seen_items(record: Mapping[str, Any]) -> str:
    """Returns the decision that :func:`decided_task` recorded as one line."""
    rule = f"{seen_items_rule(record['excluded'])} (task.exclude_seen={str(record['excluded']).lower()}"
    if "repeats" not in record:
        return f"{rule})"
    if "items" not in record:
        return f"{rule}, by auto: the dataset was prepared without repeats)"
    return f"{rule}, by auto: {record['repeats']:,} of {record['items']:,} training items are repeats)"


def seen_items_rule(excluded: bool) -> str:
    """Returns the rule in words."""
    return "seen items are excluded" if excluded else "seen items are candidates"


def splits_of_seen_items(data: DataConfig, dataset: str, split: str | None, excludes_seen: bool) -> list[str]:
    """Returns the splits whose items are seen when ``split`` is ranked: the ones before it; None ranks after all.

    There are none where seen items are candidates, and where only the dataset's metadata is here, without its rows.
    """
    manifest = Manifest.load(dataset)
    in_order = [name for name in (data.train, data.validation, data.test) if name is not None]
    earlier = in_order[: in_order.index(split)] if split in in_order else in_order
    if not excludes_seen or manifest.is_without_rows:
        return []
    return [name for name in earlier if name in manifest.splits]


def _count_repeats(dataset: str, manifest: Manifest, split: str, columns: PairColumns) -> tuple[int, int]:
    """Returns how many items of a split repeat an earlier item of their owner, and the number of items looked at.

    The owner is the known user of a rating, or the row of a sequence. A sequence's first item, which cannot be a
    target, is not among the items looked at; its reading stops after ``_MOST_ITEMS``.
    """
    item = next(feature for feature in manifest.schema.categorical if feature.name == columns.item)
    reserved = reserved_ids(manifest, columns.item)  # of missing or unknown items, which may differ: no repeats

    def repeats(owners: NDArray[np.int64], items: NDArray[np.int64]) -> int:
        keys = (owners * item.num_embeddings + items)[~np.isin(items, reserved)]
        return len(keys) - len(np.unique(keys))

    if not item.multi_hot:
        pairs = [np.zeros((2, 0), np.int64), *map(np.stack, _read(dataset, manifest, split, columns.read))]
        users, items = np.concatenate(pairs, axis=1)
        # a missing or unknown user is many users
        is_known = ~np.isin(users, reserved_ids(manifest, columns.user or USER))
        users, items = users[is_known], items[is_known]
        return repeats(users, items), len(items)
    num_repeats = num_items = 0
    for table in _read(dataset, manifest, split, lambda group: group.read([columns.item])):
        lists = table.column(columns.item).combine_chunks()
        lengths = int64_array(pc.fill_null(pc.list_value_length(lists), 0))
        num_repeats += repeats(np.repeat(np.arange(len(lengths)), lengths), int64_array(pc.list_flatten(lists)))
        num_items += int(np.maximum(lengths - 1, 0).sum())
        if num_items >= _MOST_ITEMS:
            break
    return num_repeats, num_items


def _read(dataset: str, manifest: Manifest, split: str, read: Callable[[RowGroup], T]) -> Iterator[T]:
    """Yields ``read`` of each row group of a split; skips unreadable row groups, which training refuses or skips."""
    for group in list_row_groups(dataset_folder(dataset), manifest, split):
        with suppress(UserError):
            yield read(group)
