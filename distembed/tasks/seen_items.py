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
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.table.vocabulary import reserved_ids
from distembed.tasks.config import TaskConfig
from distembed.tasks.next_item_config import NextItemConfig
from distembed.tasks.ranking_config import RankingConfig

SEEN_ITEMS = "seen_items"
"""Key of ``run.json`` under which a run keeps the decision."""
MOST_REPEATS = 0.01
"""Largest share of repeats with which seen items are left out."""
_MOST_ITEMS = 1_000_000
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
    if not isinstance(task, RankingConfig | NextItemConfig):
        return task, None
    if task.exclude_seen != "auto":
        return task, {"excluded": task.exclude_seen, "decided_by": "config"}
    task.batch_schema(manifest.schema)
    if manifest.is_without_rows or split not in manifest.splits:
        return task, None
    if manifest.preparation.get("duplicates") in _WITHOUT_DUPLICATES:  # no rows are read: no count of items
        return dataclasses.replace(task, exclude_seen=True), {"excluded": True, "decided_by": "auto", "repeats": 0}
    repeats, items = _count_repeats(dataset, manifest, split)
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


def _count_repeats(dataset: str, manifest: Manifest, split: str) -> tuple[int, int]:
    """Returns how many items of a split repeat an earlier item of their owner, and the number of items looked at.

    The owner is the user of a rating, or the row of a sequence. A sequence's first item, which cannot be a target, is
    not among the items looked at; its reading stops after ``_MOST_ITEMS``.
    """
    item = next(feature for feature in manifest.schema.categorical if feature.name == ITEM)
    reserved = reserved_ids(manifest, ITEM)  # of missing or unknown items, which may differ: no repeats

    def repeats(owners: NDArray[np.int64], items: NDArray[np.int64]) -> int:
        keys = (owners * item.num_embeddings + items)[~np.isin(items, reserved)]
        return len(keys) - len(np.unique(keys))

    if not item.multi_hot:
        user_item_blocks = [np.zeros((2, 0), np.int64)]
        user_item_blocks += [
            np.stack([*map(_int64, id_columns)]) for id_columns in _columns(dataset, manifest, split, [USER, ITEM])
        ]
        users, items = np.concatenate(user_item_blocks, axis=1)
        return repeats(users, items), len(items)
    num_repeats = num_items = 0
    for (lists,) in _columns(dataset, manifest, split, [ITEM]):
        lengths = _int64(pc.fill_null(pc.list_value_length(lists), 0))
        num_repeats += repeats(np.repeat(np.arange(len(lengths)), lengths), _int64(pc.list_flatten(lists)))
        num_items += int(np.maximum(lengths - 1, 0).sum())
        if num_items >= _MOST_ITEMS:
            break
    return num_repeats, num_items


def _columns(dataset: str, manifest: Manifest, split: str, names: list[str]) -> Iterator[list[pa.Array]]:
    """Yields columns of each row group of a split; skips unreadable row groups, which training refuses or skips."""
    for group in list_row_groups(dataset_folder(dataset), manifest, split):
        try:
            table = group.read(names)
        except UserError:
            continue
        yield [table.column(name).combine_chunks() for name in names]


def _int64(values: pa.Array) -> NDArray[np.int64]:
    return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)
