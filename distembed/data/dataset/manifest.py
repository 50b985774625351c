"""The manifest: one JSON file that says what a dataset folder holds and where it came from.

A dataset is a folder of Parquet files and a ``manifest.json``::

    DATASET/manifest.json            what follows here
    DATASET/train/part-00000.parquet columns: label, dense, ids in [0, num_embeddings)
    DATASET/validation/  test/       the other splits; any names are possible
    DATASET/vocabulary/C1.parquet    which raw value each id stands for (only with a vocabulary)
    DATASET/rejected.tsv             malformed rows, with file, line and reason (only when there are any)

The manifest holds no times of day, so preparing the same input twice gives the same bytes. :func:`create_manifest`
writes one for Parquet files that were made elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distembed import __version__
from distembed.data.dataset.columns import check_columns
from distembed.data.dataset.schema import Schema
from distembed.errors import UserError
from distembed.files import read_folder_json, write_text

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class DataFile:
    """One Parquet file.

    Attributes:
        path: Path relative to the dataset folder.
        num_rows: Number of rows.
        bytes: Size of the file.
    """

    path: str
    num_rows: int
    bytes: int


@dataclass(frozen=True)
class Split:
    """One part of a dataset.

    Attributes:
        num_rows: Number of rows in all files.
        label_rate: Mean of the label; None without rows.
        files: Parquet files, in the order of their rows.
    """

    num_rows: int
    label_rate: float | None
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class Vocabulary:
    """How one feature's raw values became ids, counted on the training rows.

    Attributes:
        file: Path of the Parquet file (id, key, count), relative to the dataset folder.
        num_ids: Number of distinct values that have an id of their own.
        num_dropped: Number of distinct values seen fewer than ``min_count`` times, which share the out-of-vocabulary
            id.
        rows_dropped: Number of training rows that hold one of these.
        rows_missing: Number of training rows without a value.
    """

    file: str
    num_ids: int
    num_dropped: int
    rows_dropped: int
    rows_missing: int


@dataclass(frozen=True)
class SourceFile:
    """One raw input file.

    Attributes:
        name: Path relative to the folder that the inputs have in common.
        bytes: Size of the file.
        sha256: Checksum of the file.
        num_rows: Number of rows, malformed ones included.
        num_rejected: Number of malformed rows.
    """

    name: str
    bytes: int
    sha256: str
    num_rows: int
    num_rejected: int


@dataclass(frozen=True)
class Rejected:
    """The malformed rows of the input.

    Attributes:
        num_rows: Number of malformed rows.
        by_reason: Number of malformed rows by reason.
        file: File that lists them; None where there are none.
    """

    num_rows: int = 0
    by_reason: Mapping[str, int] = field(default_factory=dict)
    file: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a dataset folder holds.

    Attributes:
        schema: Columns of the files.
        splits: Parts of the dataset by name.
        preparation: Options that the data were prepared with.
        vocabularies: How raw values became ids, by feature; empty where ids are hashed or were made elsewhere.
        sources: Raw input files.
        rejected: Malformed rows of the input.
        tool_version: Version of distembed that wrote the manifest.
        format_version: Version of the manifest's format.
    """

    schema: Schema
    splits: Mapping[str, Split]
    preparation: Mapping[str, Any] = field(default_factory=dict)
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    sources: tuple[SourceFile, ...] = ()
    rejected: Rejected = field(default_factory=Rejected)
    tool_version: str = ""
    format_version: int = MANIFEST_VERSION

    @classmethod
    def load(cls, dataset_dir: str | os.PathLike[str]) -> Manifest:
        """Reads ``dataset_dir/manifest.json``.

        Raises:
            UserError: The folder is not a dataset, its format is another version's, or the file is damaged.
        """
        path = Path(dataset_dir) / MANIFEST_NAME
        return cls.from_json(read_folder_json(path, "dataset", "make one with `distembed prepare`"), path)

    def save(self, dataset_dir: str | os.PathLike[str]) -> Path:
        """Writes ``manifest.json`` whole or not at all, and returns its path.

        Raises:
            RunError: The file cannot be written.
        """
        path = Path(dataset_dir) / MANIFEST_NAME
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")
        return path

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as plain JSON values, in a fixed order."""
        return {
            "format": "distembed dataset",
            "format_version": self.format_version,
            "tool_version": self.tool_version,
            "schema": self.schema.to_json(),
            "splits": {name: dataclasses.asdict(split) for name, split in self.splits.items()},
            "preparation": dict(self.preparation),
            "vocabularies": {name: dataclasses.asdict(entry) for name, entry in self.vocabularies.items()},
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "rejected": {**dataclasses.asdict(self.rejected), "by_reason": dict(self.rejected.by_reason)},
        }

    @classmethod
    def from_json(cls, value: Any, path: Path) -> Manifest:
        """Builds a manifest from parsed JSON.

        Args:
            value: What :meth:`to_json` returned.
            path: Path of the file, for errors.

        Raises:
            UserError: The value is no manifest, is another version's, or lacks a part.
        """
        if not isinstance(value, dict) or value.get("format") != "distembed dataset":
            raise UserError(
                f"{path} is not the manifest of a distembed dataset; name a folder made by `distembed prepare`"
            )
        if value.get("format_version") != MANIFEST_VERSION:
            raise UserError(
                f"{path} has format_version {value.get('format_version')!r}, written by distembed "
                f"{value.get('tool_version')!r}; this distembed reads {MANIFEST_VERSION}: prepare the data again"
            )
        try:
            return cls(
                schema=Schema.from_json(value["schema"]),
                splits={name: _split_from_json(split) for name, split in value["splits"].items()},
                preparation=value.get("preparation", {}),
                vocabularies={name: Vocabulary(**entry) for name, entry in value.get("vocabularies", {}).items()},
                sources=tuple(SourceFile(**source) for source in value.get("sources", ())),
                rejected=Rejected(**value.get("rejected", {})),
                tool_version=value["tool_version"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); prepare the data again") from error

    def split(self, name: str) -> Split:
        """Returns the split of this name.

        Raises:
            UserError: There is none; the error lists the names that there are.
        """
        if name not in self.splits:
            raise UserError(f"the dataset has no split {name!r}: it has {', '.join(self.splits) or 'none'}")
        return self.splits[name]


def id_fingerprint(dataset_dir: str | os.PathLike[str], manifest: Manifest) -> str:
    """Returns a checksum of what each id stands for: equal for datasets that a model can be moved between.

    It covers the tables' sizes and, where the dataset has them, its vocabularies or its hash.
    """
    digest = hashlib.sha256(json.dumps(manifest.schema.to_json()).encode())
    digest.update(repr([manifest.preparation.get(key) for key in ("hash_size", "hash_seed")]).encode())
    for name in sorted(manifest.vocabularies):
        with open(Path(dataset_dir) / manifest.vocabularies[name].file, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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
    manifest.save(folder)
    return manifest


def _describe_split(folder: Path, schema: Schema, paths: Sequence[str | os.PathLike[str]]) -> Split:
    files, label_sum = [], 0.0
    for path in paths:
        absolute = (folder / path).resolve()
        if not absolute.is_relative_to(folder.resolve()):
            raise UserError(f"{absolute} lies outside the dataset folder {folder}: move it or link it there")
        if not absolute.is_file():
            raise UserError(f"{absolute} does not exist")
        labels = _read_label(absolute, schema)
        label_sum += pc.sum(pc.cast(labels, pa.float64())).as_py() or 0.0
        relative = absolute.relative_to(folder.resolve()).as_posix()
        files.append(DataFile(relative, len(labels), absolute.stat().st_size))
    num_rows = sum(file.num_rows for file in files)
    return Split(num_rows, label_sum / num_rows if num_rows else None, tuple(files))


def _read_label(path: Path, schema: Schema) -> pa.ChunkedArray:
    try:
        file = pq.ParquetFile(path)
        check_columns(path, file.schema_arrow, schema)
        return file.read(columns=[schema.label]).column(0)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error


def _split_from_json(value: Mapping[str, Any]) -> Split:
    return Split(value["num_rows"], value["label_rate"], tuple(DataFile(**file) for file in value["files"]))
