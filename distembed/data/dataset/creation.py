"""A manifest for Parquet files that were made elsewhere, so that the reader can read them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distembed.base.errors import UserError
from distembed.base.version import __version__
from distembed.data.dataset.columns import check_columns
from distembed.data.dataset.manifest import DataFile, Manifest, Split
from distembed.data.dataset.schema import Schema

CREATED_ELSEWHERE = "create_manifest"
"""The ``source`` in the preparation of a manifest whose files were made elsewhere."""


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
    manifest = Manifest(schema, described, {"source": CREATED_ELSEWHERE}, tool_version=__version__)
    return manifest.save(folder)


def _describe_split(folder: Path, schema: Schema, paths: Sequence[str | os.PathLike[str]]) -> Split:
    files: list[DataFile] = []
    means: dict[str | None, float | None] = {}
    numbers: dict[str, list[float]] = {name: [] for name in (schema.label, schema.weight) if name is not None}
    for path in paths:
        relative = _relative(folder, path)
        file = folder / relative
        if not file.is_file():
            raise UserError(f"{file} does not exist")
        try:
            parquet = pq.ParquetFile(file)
            check_columns(str(file), parquet.schema_arrow, schema)
            for name, sums in numbers.items():
                values = pc.cast(parquet.read(columns=[name]).column(0), pa.float64())
                if name == schema.weight:
                    _check_weights(file, name, values)
                sums.append(pc.sum(values).as_py() or 0.0)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file} is not a readable Parquet file: {error}") from error
        files.append(DataFile(relative, parquet.metadata.num_rows, file.stat().st_size))
    num_rows = sum(file.num_rows for file in files)
    for name, sums in numbers.items():
        # a label may be NaN or infinite, which the reader refuses and JSON does not hold
        means[name] = sum(sums) / num_rows if num_rows and math.isfinite(sum(sums)) else None
    return Split(num_rows, means.get(schema.label), tuple(files), means.get(schema.weight))


def _relative(folder: Path, path: str | os.PathLike[str]) -> str:
    """Returns a path relative to the folder; a link in the folder counts as what lies there."""
    absolute = Path(os.path.abspath(folder / path))
    real = absolute.parent.resolve() / absolute.name  # both may be named by other links
    for file, inside in ((absolute, Path(os.path.abspath(folder))), (real, folder.resolve())):
        if file.is_relative_to(inside):
            return file.relative_to(inside).as_posix()
    raise UserError(f"{absolute} lies outside the dataset folder {folder}: move it or link it there")


def _check_weights(path: Path, name: str, weights: pa.ChunkedArray) -> None:
    """Refuses weights that are missing, negative or not finite."""
    is_weight = pc.and_(pc.is_finite(weights), pc.greater_equal(weights, 0.0))
    wrong = pc.index(pc.fill_null(is_weight, False), False).as_py()
    if wrong >= 0:
        raise UserError(
            f"{path}, column {name!r}: the weight of row {wrong} is {weights[wrong].as_py()}; weights are finite and "
            "not negative."
        )
