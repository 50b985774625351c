"""Whether a dataset is whole: before a run reads it, and byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from distembed.checksums import Verification
from distembed.data.dataset.manifest import DataFile, Manifest
from distembed.errors import UserError


def require_whole(dataset_dir: str | os.PathLike[str], split_names: Iterable[str]) -> None:
    """Makes sure that splits are there, with the sizes and the numbers of rows that the manifest says.

    It reads the ends of files only, so that it can be called before the first step for all splits of a run.

    Args:
        dataset_dir: Folder with ``manifest.json``.
        split_names: Names of the splits that are going to be read.

    Raises:
        UserError: The dataset has no such split, or a file is missing, cut short or has other rows.
    """
    folder = Path(dataset_dir)
    manifest = Manifest.load(folder)
    for name in split_names:
        for file in manifest.split(name).files:
            if problem := _file_problem(folder, file):
                raise UserError(problem)


def verify_dataset(dataset_dir: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Verification:
    """Holds every byte of every file of a dataset against its checksums; the memory does not grow with the dataset.

    Args:
        dataset_dir: Folder with ``manifest.json``.
        progress: Function that is called now and then with the number of bytes read so far.

    Returns:
        All problems, not only the first.

    Raises:
        UserError: The folder is no dataset.
    """
    folder = Path(dataset_dir)
    manifest = Manifest.load(folder)
    found = Verification(has_checksums=False)
    for split in manifest.splits.values():
        for file in split.files:
            if problem := _file_problem(folder, file):
                found.problems.append(problem)
            found.num_files += 1
            found.num_bytes += file.bytes
            if progress is not None:
                progress(found.num_bytes)
    return found


def _file_problem(folder: Path, file: DataFile) -> str | None:
    """Returns what is wrong with a split's file as its size and its footer have it; None where nothing is."""
    path = folder / file.path
    if not path.is_file():
        return f"{path} is missing: the manifest lists it; prepare the data again"
    if path.stat().st_size != file.bytes:
        return f"{path} has {path.stat().st_size} bytes, the manifest says {file.bytes}: prepare the data again"
    try:
        num_rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        return f"{path} is not a readable Parquet file: {error}; prepare the data again"
    if num_rows != file.num_rows:
        return f"{path} has {num_rows} rows, the manifest says {file.num_rows}: prepare the data again"
    return None
