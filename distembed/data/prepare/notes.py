"""What a user should know of a prepared dataset: which rows were left out, and what a model cannot learn from.

Nothing here is an error: such data can be prepared and read. But a model of them may be worth less than it seems.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from distembed.base.units import enumerate_names
from distembed.data.dataset.manifest import Manifest, Split
from distembed.data.dataset.schema import ITEM, USER
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.remote import join_url


def describe_dataset(manifest: Manifest, dataset_dir: str | os.PathLike[str]) -> Iterator[str]:
    """Yields lines of text that say what a prepared dataset holds, and which rows were left out and why.

    Args:
        manifest: The dataset's manifest.
        dataset_dir: Where it is, a folder or a URL.
    """
    for name, split in manifest.splits.items():
        yield f"{name}: {split.num_rows:,} rows{_label_text(manifest, split)}"
    if USER in manifest.vocabularies and ITEM in manifest.vocabularies:
        users, items = (manifest.vocabularies[name].num_ids for name in (USER, ITEM))
        yield f"{users:,} users, {items:,} items"
    if "base" in manifest.preparation:
        yield _applied_text(manifest)
    left_out = manifest.preparation.get("left_out", {})
    if left_out:
        yield f"left out: {', '.join(f'{count:,} {_LEFT_OUT[reason]}' for reason, count in left_out.items())}"
    total = sum(source.num_rows for source in manifest.sources)
    rejected = manifest.rejected
    if not rejected.num_rows or rejected.file is None:
        yield f"none of {total:,} rows were rejected"
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.by_reason.items())
    yield (
        f"{rejected.num_rows:,} of {total:,} rows were rejected, being malformed ({reasons}): "
        f"they are listed in {join_url(str(dataset_dir), rejected.file)}"
    )


_LEFT_OUT = {
    "below_rating": "with a lower rating",
    "duplicates": "of a user with the same item",
    "outside_core": "of users and items with too few",
}
"""What is said of interactions that a dataset leaves out, by the reason."""


def _applied_text(manifest: Manifest) -> str:
    """Returns what became of the values that the vocabulary of another dataset lacks."""
    base, entries = manifest.preparation["base"], manifest.vocabularies
    new = sum(entry.num_ids - base["num_ids"][name] for name, entry in entries.items())
    counts = {
        name: sum((entry.rows_dropped_by_split or {}).get(name, 0) for entry in entries.values())
        for name in manifest.splits
    }
    grown = f"{new:,} values have new ids behind the known ones, and " if base["grow"] else ""
    times = ", ".join(f"{count:,} times in {name}" for name, count in counts.items())
    return f"{grown}values are out of the vocabulary that was applied {times}"


def _label_text(manifest: Manifest, split: Split) -> str:
    if manifest.schema.label is None:
        return ""
    mean = "none" if split.label_rate is None else f"{split.label_rate:.4f}"
    unweighted = "" if manifest.schema.weight is None else "unweighted "
    return f", {unweighted}{'label rate' if manifest.schema.label_kind == 'binary' else 'mean label'} {mean}"


def dataset_warnings(manifest: Manifest) -> Iterator[str]:
    """Yields what a user hardly wants: one label only, splits without rows, vocabularies that hold nothing."""
    rates = {name: split.label_rate for name, split in manifest.splits.items()}
    if manifest.schema.label_kind == "binary":
        one_label = {name: int(rate) for name, rate in rates.items() if rate in (0, 1)}
        labels = set(one_label.values())
        if len(labels) == 1 and len(one_label) == sum(rate is not None for rate in rates.values()):
            yield f"every label is {labels.pop()}: a model learns nothing but this"
        else:
            yield from (
                f"every label of {name} is {label}: its AUC is not defined" for name, label in one_label.items()
            )
    if empty := [name for name, split in manifest.splits.items() if not split.num_rows]:
        yield f"no rows are in {enumerate_names(empty)}: give more rows, or another --split"
    nothing = {name: entry for name, entry in manifest.vocabularies.items() if not entry.num_ids}
    if missing := [name for name, entry in nothing.items() if not entry.num_dropped]:
        yield f"vocabularies without ids, since no training row has a value: {enumerate_names(missing)}"
    if rare := [name for name in nothing if name not in missing]:
        least = manifest.preparation.get("min_count", "min_count")  # of tables, each column has its own
        yield (
            f"vocabularies without ids, since every value was seen fewer than {least} times in training: "
            f"{enumerate_names(rare)}; lower --min-count, or give more rows"
        )


def notes_on_rows(blocks: Sequence[SpooledBlock]) -> Iterator[str]:
    """Yields a sentence on hashed columns without values, of which the manifest does not tell.

    Args:
        blocks: All rows; there are some.
    """
    hashed = [place for place, column in enumerate(blocks[0].layout.ids) if column.hash_size is not None]
    empty = [place for place in hashed if all(block.num_keys(place) == 1 for block in blocks)]
    if empty:
        names = [blocks[0].layout.ids[place].name for place in empty]
        yield f"columns without any value: {enumerate_names(names)}"
