"""Checks of a run's splits, labels and metrics before it starts, which would else fail hours later."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import CREATED_ELSEWHERE, Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups, require_whole_splits
from distembed.data.dataset.schema import ITEM
from distembed.data.table.vocabulary import reserved_ids
from distembed.tasks import TaskConfig
from distembed.tasks.config import LabelTaskConfig
from distembed.tasks.next_item_config import NextItemConfig
from distembed.training.config import Config

_LOOKED_AT = 8
"""Number of row groups of a split whose labels are looked at before anything is built."""


def require_trainable(config: Config, dataset: str, resume: bool = False) -> None:
    """Makes sure that a config can be trained on its splits; a resumed run is not refused for its metrics.

    Raises:
        UserError: A split is missing or not whole, a label is not valid for the task, or evaluations
            are to be compared by a metric that the dataset does not define.
    """
    splits = config.data.splits()
    require_splits(dataset, splits)
    require_labels(config.task, dataset, [name for name in splits.values() if name is not None])
    if config.train.compares_evaluations and not resume:
        _require_comparable(config, Manifest.load(dataset))


def require_splits(dataset: str, splits: Mapping[str, str | None]) -> None:
    """Makes sure that splits, by the setting or option that names them, are there with whole files.

    Raises:
        UserError: A split is missing, or one of its files is missing, cut short or damaged.
    """
    known = Manifest.load(dataset).splits
    for setting, name in splits.items():
        if name is not None and name not in known:
            optional = ", or to null for none" if setting in ("data.validation", "data.test") else ""
            raise UserError(
                f"{setting} is {name!r}, but the dataset {dataset} has no split of that name; it has "
                f"{', '.join(known) or 'none'}. Set it to one of them{optional}."
            )
    require_whole_splits(dataset, dict.fromkeys(name for name in splits.values() if name is not None))


def require_labels(task: TaskConfig, dataset: str, splits: Sequence[str]) -> None:
    """Makes sure that the labels of splits are valid for a task, by a look at some row groups.

    Labels that ``distembed prepare`` has made 0 and 1 are not looked at. The task checks all labels once more as they
    are read.

    Raises:
        UserError: A label is not valid for the task.
    """
    manifest = Manifest.load(dataset)
    label, is_binary = manifest.schema.label, manifest.schema.label_kind == "binary"
    is_known = is_binary and manifest.preparation.get("source") != CREATED_ELSEWHERE
    if label is None or is_known or not isinstance(task, LabelTaskConfig):
        return
    for name in dict.fromkeys(splits):
        groups = list_row_groups(dataset_folder(dataset), manifest, name)
        for group in groups[:: max(1, len(groups) // _LOOKED_AT)]:
            try:
                labels = pc.cast(group.read([label]).column(0), pa.float64()).to_numpy()
            except (UserError, RunError):
                continue  # the reader says so, or takes other rows
            task.check_labels(labels.astype(np.float32), f"the column {label!r} of {group}")


def _require_comparable(config: Config, manifest: Manifest) -> None:
    """Refuses a comparison of evaluations by a metric that the dataset does not define."""
    name, task = config.data.validation, config.task
    if isinstance(task, NextItemConfig) and task.headline_is_sampled:
        _require_enough_items(task, manifest)
    assert name is not None
    split = manifest.splits[name]
    if split.num_rows == 0:
        found = "has no rows"
    elif split.mean_weight == 0:
        found = "has only rows of weight 0"
    elif isinstance(task, LabelTaskConfig) and task.needs_both_labels and split.label_rate in (0.0, 1.0):
        found = f"has only rows whose label is {split.label_rate:g}"
    else:
        return
    raise UserError(
        f"train.keep_best and train.stop_after_evaluations compare evaluations by the task's headline metric, which is "
        f"not defined where data.validation is {name!r}: it {found}. Leave both out, or name a split that defines it."
    )


def _require_enough_items(task: NextItemConfig, manifest: Manifest) -> None:
    """Refuses a headline metric that ranks each target among more items than there are beside it."""
    items = next((feature for feature in manifest.schema.categorical if feature.name == ITEM), None)
    if items is None:
        return  # the task refuses the dataset
    most = max(items.num_embeddings - len(reserved_ids(manifest, ITEM)) - 1, 0)
    if task.sampled_candidates > most:
        raise UserError(
            f"train.keep_best and train.stop_after_evaluations compare evaluations by task.headline={task.headline!r}, "
            f"which ranks each target among task.sampled_candidates={task.sampled_candidates} other items, but this "
            f"dataset has {most} other items. Lower task.sampled_candidates to at most {most}, or set task.headline to "
            f"a metric among all items, such as 'ndcg@{task.cutoffs[-1]}'."
        )
