"""A manifest for Parquet files that were made elsewhere, so that the reader can read them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distembed import __version__
from distembed.data.dataset.columns import check_columns
from distembed.data.dataset.manifest import DataFile, Manifest, Split
from distembed.data.dataset.schema import Schema
from distembed.errors import UserError


def create_manifest(
    dataset_dir: str | os.PathLike[str],
    schema: Schema,
    splits: Mapping[str, Sequence[str | os.PathLike[str]]],
) -> Manifest:
    """Writes a manifest for Parquet files that were made elsewhere, so that the reader can read them.

    Args:
        dataset_dir: Folder that gets ``manifest.json``.
        schema: What the columns are; ids are integers in ``[0, num_embeddings)``.
        splits: Parquet files by the name of their split, inside ``dataset_dir``; relative paths are relative to it.

    Raises:
        UserError: A file is missing, is no Parquet, has other columns, or lies outside the folder.
    """
    folder = Path(dataset_dir)
    described = {name: _describe_split(folder, schema, files) for name, files in splits.items()}
    manifest = Manifest(schema, described, {"source": "create_manifest"}, tool_version=__version__)
    return manifest.save(folder)


def _describe_split(folder: Path, schema: Schema, paths: Sequence[str | os.PathLike[str]]) -> Split:
    files, label_sum = [], 0.0
    for path in paths:
        relative = _relative(folder, path)
        file = folder / relative
        if not file.is_file():
            raise UserError(f"{file} does not exist")
        num_rows, file_sum = _count_rows(file, schema)
        label_sum += file_sum
        files.append(DataFile(relative, num_rows, file.stat().st_size))
    num_rows = sum(file.num_rows for file in files)
    return Split(num_rows, label_sum / num_rows if num_rows and schema.label is not None else None, tuple(files))


def _relative(folder: Path, path: str | os.PathLike[str]) -> str:
    """Returns a path relative to the folder; a link in the folder counts as what lies there.

    Raises:
        UserError: It lies outside.
    """
    absolute = Path(os.path.abspath(folder / path))
    if absolute.is_relative_to(os.path.abspath(folder)):
        return absolute.relative_to(os.path.abspath(folder)).as_posix()
    real = absolute.parent.resolve() / absolute.name  # both may be named by other links
    if real.is_relative_to(folder.resolve()):
        return real.relative_to(folder.resolve()).as_posix()
    raise UserError(f"{absolute} lies outside the dataset folder {folder}: move it or link it there")


def _count_rows(path: Path, schema: Schema) -> tuple[int, float]:
    """Returns the number of rows of a file and the sum of their labels, 0 where they have none."""
    try:
        file = pq.ParquetFile(path)
        check_columns(path, file.schema_arrow, schema)
        if schema.label is None:
            return file.metadata.num_rows, 0.0
        labels = file.read(columns=[schema.label]).column(0)
        return len(labels), pc.sum(pc.cast(labels, pa.float64())).as_py() or 0.0
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error
