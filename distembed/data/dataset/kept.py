"""Earlier datasets: the copy that a run keeps of its dataset, and whether the ids of another dataset extend it.

A run keeps the manifest without the rows, and the vocabularies, which give the value of each id::

    RUN/dataset/manifest.json            schema, preparation, vocabularies, and the number of rows of each split
    RUN/dataset/vocabulary/C1.parquet    a hard link, a copy, or above a gigabyte a symbolic link

``distembed prepare --vocabulary EARLIER --grow`` adds new values after the end of an earlier vocabulary::

    earlier    2 u   3 a   4 k
    now        2 u   3 a   4 k   5 b   6 z
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distembed.base.errors import RunError, UserError
from distembed.base.files import free_space, full_disk_explained
from distembed.base.validation import shown
from distembed.data.dataset.manifest import MANIFEST_NAME, REMEDY, Manifest

KEPT_FOLDER = "dataset"  # name of the folder within a run's
MOST_COPIED_BYTES = 1 << 30  # size of all vocabularies together from which on they are not copied


def kept_dataset(run: str | os.PathLike[str]) -> Path | None:
    """Returns the folder in which a run keeps its dataset's manifest; None where it has none, as of early versions."""
    folder = Path(run) / KEPT_FOLDER
    return folder if (folder / MANIFEST_NAME).is_file() else None


def keep_dataset(run: Path, dataset: str, manifest: Manifest, links: bool = True) -> None:
    """Copies the manifest and the vocabularies of a dataset into a run's folder, unless equal ones are there.

    Vocabularies of over MOST_COPIED_BYTES together become symbolic links, unless ``links`` is False. A folder that
    holds a whole dataset, with rows, is not overwritten.
    """
    folder, to_keep = run / KEPT_FOLDER, manifest.without_rows()
    with suppress(UserError):
        existing = Manifest.load(folder)
        if not existing.is_without_rows or existing == to_keep:  # a dataset with rows is left as it is
            return
    with full_disk_explained(lambda error: f"{folder} could not be written ({error}); {free_space(run)} are left"):
        folder.mkdir(exist_ok=True)
        files = to_keep.other_files
        try:
            links = links and sum((Path(dataset) / file).stat().st_size for file in files) > MOST_COPIED_BYTES
            for file in files:
                _place(Path(dataset) / file, folder / file, links)
        except FileNotFoundError as error:
            raise UserError(f"a vocabulary of the dataset {dataset} is missing ({error}); prepare it again.") from error
        except shutil.Error as error:
            raise RunError(f"a vocabulary of {dataset} could not be copied to {folder}: {error}") from error
        to_keep.write(folder)  # last, since a folder with a manifest counts as complete


def _place(source: Path, target: Path, links: bool) -> None:
    """Puts a vocabulary into a run's folder: as a symbolic link if ``links``, else as a hard link or a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if links:
        target.symlink_to(source.absolute())
        return
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


_SAME_COLUMNS = ("dense", "dense_sequences", "beside", "missing_dense", "label_kind")
_SAME_PREPARATION = ("hash_size", "hash_seed", "learnt")
"""Parts of ``preparation`` that are equal in datasets with equal ids; ``learnt`` has the parameters of transforms."""


def require_grown_from(
    earlier_dir: str | os.PathLike[str], earlier: Manifest, dataset_dir: str | os.PathLike[str], manifest: Manifest
) -> None:
    """Raises a UserError unless a dataset has an earlier one's columns and keeps all its ids; new ids may follow."""
    for difference in _differences(earlier_dir, earlier, dataset_dir, manifest):
        raise UserError(
            f"the ids of {dataset_dir} do not extend the earlier dataset's ids: {difference}. Prepare it with "
            "`--vocabulary` and the earlier dataset or run, and with `--grow` if new values are to have ids."
        )


def has_same_ids(
    earlier_dir: str | os.PathLike[str], earlier: Manifest, dataset_dir: str | os.PathLike[str], manifest: Manifest
) -> bool:
    """Returns whether two datasets give the same ids to the same values; their lists may differ in length."""
    old_sizes = [feature.num_embeddings for feature in earlier.schema.categorical]
    new_sizes = [feature.num_embeddings for feature in manifest.schema.categorical]
    return old_sizes == new_sizes and not any(_differences(earlier_dir, earlier, dataset_dir, manifest))


def _differences(
    earlier_dir: str | os.PathLike[str], earlier: Manifest, dataset_dir: str | os.PathLike[str], manifest: Manifest
) -> Iterator[str]:
    """Yields each reason why the ids of a dataset do not extend an earlier dataset's: columns, hashes, vocabularies.

    Stops after a reason that makes further comparison meaningless. Reads only vocabularies with unequal checksums.
    """
    old, new = earlier.schema, manifest.schema
    names, new_names = old.categorical_names, new.categorical_names
    if names != new_names:
        yield f"the features were {', '.join(names)}, now {', '.join(new_names)}"
        return
    options = [(field, getattr(old, field), getattr(new, field)) for field in _SAME_COLUMNS]
    options += [(field, earlier.preparation.get(field), manifest.preparation.get(field)) for field in _SAME_PREPARATION]
    options += [
        (f"the hash of {name!r}", _hash_in_schema(earlier, name), _hash_in_schema(manifest, name)) for name in names
    ]
    yield from (f"{option} was {shown(was)} and is {shown(now)}" for option, was, now in options if was != now)
    for before, after in zip(old.categorical, new.categorical, strict=True):
        if (before.table, before.multi_hot) != (after.table, after.multi_hot):
            yield f"the feature {before.name!r} was {before} and is {after}"
        if after.num_embeddings < before.num_embeddings:
            yield f"the feature {before.name!r} had {before.num_embeddings} ids and has {after.num_embeddings}"
    if differing := sorted(earlier.vocabularies.keys() ^ manifest.vocabularies.keys()):
        yield f"only one of the two has a vocabulary of {', '.join(differing)}"
        return
    for name in earlier.vocabularies:
        file, new_file = earlier.vocabularies[name].file, manifest.vocabularies[name].file
        if file not in earlier.checksums or earlier.checksums[file] != manifest.checksums.get(new_file):
            old_keys = _read(earlier.require_unchanged(earlier_dir, file))
            yield from _other_ids(name, old_keys, _read(manifest.require_unchanged(dataset_dir, new_file)))


def _hash_in_schema(manifest: Manifest, feature: str) -> dict[str, Any]:
    """Returns the seed of a feature that is hashed by a table's schema; an empty dictionary for other features."""
    schema = manifest.preparation.get("schema") or {}
    column = schema.get("categorical", {}).get(feature, {})
    is_hashed = feature not in manifest.vocabularies and (column.get("hash_size") or schema.get("hash_size"))
    return {"hash_seed": column.get("hash_seed", 0)} if is_hashed else {}


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, columns=["id", "key"])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"the vocabulary {path} cannot be read ({error}); {REMEDY}") from error


def _other_ids(name: str, old: pa.Table, new: pa.Table) -> Iterator[str]:
    """Yields the first difference unless the earlier vocabulary ``old`` is a prefix of ``new``."""
    if old.schema != new.schema:
        yield f"the vocabulary of {name!r} had keys of type {old['key'].type} and has {new['key'].type}"
    elif len(new) < len(old):
        yield f"the vocabulary of {name!r} had {len(old)} values and has {len(new)}"
    else:
        new = new.slice(0, len(old))
        differs = pc.or_(pc.not_equal(old["id"], new["id"]), pc.not_equal(old["key"], new["key"]))
        if (row := pc.index(differs, True).as_py()) >= 0:
            before, now = (table["key"][row].as_py() for table in (old, new))
            yield f"id {old['id'][row].as_py()} of {name!r} stood for {before!r} and stands for {now!r}"
