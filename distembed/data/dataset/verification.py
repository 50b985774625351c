"""Whether a dataset is whole: before a run reads it, and byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from distembed.checksums import Verification
from distembed.data.dataset.manifest import MANIFEST_NAME, DataFile, Manifest, Split
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.pieces import CHECKSUMS_NAME, REMEDY, Pieces, PiecewiseFile
from distembed.data.dataset.row_groups import checked_metadata, list_row_groups, piecewise_files, read_pieces
from distembed.errors import RunError, UserError


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
        found.add(_other_file_problems(folder, manifest, other), folder / other)
        report(found.num_bytes)
    try:
        pieces = read_pieces(folder, manifest)
    except UserError as error:
        pieces = {}
        if not any(CHECKSUMS_NAME in problem for problem in found.problems):
            found.problems.append(str(error))
    for name, split in manifest.splits.items():
        found.problems.extend([] if manifest.is_without_rows else _split_problems(folder, name, split))
        for piecewise, file in zip(_files(folder, split, pieces, found), split.files, strict=False):
            found.add(_file_problems(piecewise, file, manifest), piecewise.path)
            found.num_bytes += 0 if piecewise.remote is None else file.bytes
            report(found.num_bytes)
    return found


def _files(folder: Path, split: Split, pieces: Mapping[str, Pieces], found: Verification) -> list[PiecewiseFile]:
    """Returns the files of a split; none, and a problem, where they cannot be checked."""
    try:
        return piecewise_files(folder, split.files, pieces)
    except UserError as error:
        found.problems.append(str(error))
        return []


def _other_file_problems(folder: Path, manifest: Manifest, file: str) -> list[str]:
    """Returns what is wrong with a file that belongs to no split."""
    try:
        path = manifest.require_unchanged(folder, file)
        if not path.is_file():
            return [f"{path} is missing: the manifest lists it; {REMEDY}."]
        for name, vocabulary in manifest.vocabularies.items():
            num_rows = pq.read_metadata(path).num_rows if vocabulary.file == file else vocabulary.num_ids
            if num_rows != vocabulary.num_ids:
                said = f"the manifest says {vocabulary.num_ids:,}"
                return [f"{path} has {num_rows:,} ids of feature {name!r}, {said}; {REMEDY}."]
    except UserError as error:
        return [str(error)]
    except (pa.ArrowException, OSError) as error:
        return [f"the vocabulary {folder / file} cannot be read ({error}); {REMEDY}."]
    return []


def _split_problems(folder: Path, name: str, split: Split) -> list[str]:
    num_rows = sum(file.num_rows for file in split.files)
    if num_rows == split.num_rows:
        return []
    return [f"split {name!r} of {folder} has {split.num_rows:,} rows by the manifest, its files have {num_rows:,}."]


def _file_problems(piecewise: PiecewiseFile, file: DataFile, manifest: Manifest) -> list[str]:
    """Returns what is wrong with a file of a split, after all of it was read."""
    problems = []
    try:
        if piecewise.pieces is not None:
            problems = _piece_problems(piecewise)
        if not problems:
            metadata = checked_metadata(piecewise, file, manifest.schema)
            if piecewise.pieces is None:
                problems = _undecodable(piecewise, metadata)
    except UserError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{piecewise} cannot be read ({error}); {REMEDY}.")
    except RunError as error:
        problems.append(str(error))
    return problems


def _piece_problems(piecewise: PiecewiseFile) -> list[str]:
    """Returns which pieces of a file are damaged; nothing where the file has another size, which is said elsewhere."""
    path, pieces = piecewise.path, piecewise.pieces
    assert pieces is not None
    if piecewise.remote is None and (not path.is_file() or path.stat().st_size != pieces["bytes"].sum()):
        return []
    return list(piecewise.damaged_pieces())


def _undecodable(piecewise: PiecewiseFile, metadata: pq.FileMetaData) -> list[str]:
    """Returns which row groups of a file without checksums cannot be decoded."""
    problems = []
    columns = metadata.schema.to_arrow_schema().names
    for index in range(metadata.num_row_groups):
        try:
            piecewise.row_group(index, columns)
        except UserError as error:
            problems.append(str(error))
    return problems
