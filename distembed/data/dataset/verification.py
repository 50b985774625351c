"""Whether a dataset is whole: before a run reads it, and byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from distembed.base.checksums import Verification
from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.pieces import CHECKSUMS_NAME, REMEDY
from distembed.data.dataset.row_groups import (
    RowGroup,
    SplitFile,
    list_row_groups,
    read_pieces,
    split_files,
    wrong_num_rows,
)
from distembed.data.dataset.schema import Schema


def require_whole(dataset_dir: str | os.PathLike[str], split_names: Iterable[str]) -> None:
    """Makes sure that splits are there, with the sizes, footers and numbers of rows that the manifest says.

    It reads the ends of files only, so that it can be called before the first step for all splits of a run.

    Args:
        dataset_dir: Folder with ``manifest.json``, or its URL.
        split_names: Names of the splits that are going to be read.

    Raises:
        UserError: The dataset has no such split, or a file is missing, cut short, damaged at its end or has other rows.
    """
    folder = dataset_folder(dataset_dir)
    manifest = Manifest.load(folder)
    for name in split_names:
        list_row_groups(folder, manifest, name)


def missing_checksums_note(dataset_dir: str | os.PathLike[str]) -> str | None:
    """Returns a sentence for the user where a dataset was made before there were checksums; None for others.

    Raises:
        UserError: The folder is no dataset.
    """
    if Manifest.load(dataset_dir).has_checksums:
        return None
    return (
        f"the dataset {dataset_dir} carries no checksums, since an older version made it: damage may pass unseen. "
        "A dataset prepared again has them, for new runs: a run that is resumed needs this one."
    )


def verify_dataset(dataset_dir: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Verification:
    """Holds every byte of every file of a dataset against its checksums; the memory does not grow with the dataset.

    Of a dataset without checksums, sizes and numbers of rows are compared, and every row group is decoded.

    Args:
        dataset_dir: Folder with ``manifest.json``, or its URL.
        progress: Function that is called now and then with the number of bytes read so far.

    Returns:
        All problems, not only the first.

    Raises:
        UserError: The folder is no dataset, or its manifest cannot be used, so that nothing can be held against it.
    """
    folder = dataset_folder(dataset_dir)
    manifest = Manifest.load(folder)
    found = Verification(has_checksums=manifest.has_checksums)
    report = progress or (lambda num_bytes: None)
    found.add((), folder / MANIFEST_NAME)
    for other in manifest.other_files:
        found.add(_until_error(_other_file_problems(folder, manifest, other), folder / other), folder / other)
        report(found.num_bytes)
    try:
        pieces = read_pieces(folder, manifest)
    except UserError as error:
        pieces = {}
        if not any(CHECKSUMS_NAME in problem for problem in found.problems):
            found.problems.append(str(error))
    for name in manifest.splits:
        if problem := wrong_num_rows(folder, manifest, name):
            found.problems.append(problem)
        try:
            files = split_files(folder, manifest, name, pieces)
        except UserError as error:
            found.problems.append(str(error))
            continue
        for file in files:
            found.add(_until_error(_file_problems(file, manifest.schema), file), file.path)
            found.num_bytes += 0 if file.mirror is None else file.listed.bytes
            report(found.num_bytes)
    return found


def _until_error(problems: Iterable[str], file: object) -> list[str]:
    """Returns the problems of a file up to an error, which is the last."""
    found: list[str] = []
    try:
        found.extend(problems)
    except (UserError, RunError) as error:
        found.append(str(error))
    except (pa.ArrowException, OSError) as error:
        found.append(f"{file} cannot be read ({error}); {REMEDY}.")
    return found


def _other_file_problems(folder: Path, manifest: Manifest, file: str) -> Iterator[str]:
    """Yields the problems of a file that belongs to no split."""
    path = manifest.require_unchanged(folder, file)
    if not path.is_file():
        yield f"{path} is missing: the manifest lists it; {REMEDY}."
        return
    for name, vocabulary in manifest.vocabularies.items():
        num_ids = vocabulary.num_ids
        if vocabulary.file == file and (num_rows := pq.read_metadata(path).num_rows) != num_ids:
            yield f"{path} has {num_rows:,} ids of feature {name!r}, the manifest says {num_ids:,}; {REMEDY}."


def _file_problems(file: SplitFile, schema: Schema) -> Iterator[str]:
    """Yields the problems of a file of a split, after reading the whole file."""
    damaged = file.damaged_pieces() if file.pieces is not None and file.has_listed_size else []
    yield from damaged
    if damaged:
        return
    metadata = file.checked_metadata(schema)
    if file.pieces is None:
        for index in range(metadata.num_row_groups):
            try:
                RowGroup(file, index, 0).read(metadata.schema.to_arrow_schema().names)
            except UserError as error:
                yield str(error)
