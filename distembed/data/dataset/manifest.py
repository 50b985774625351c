"""The manifest: one JSON file that says what a dataset folder holds and where it came from.

A dataset is a folder of Parquet files and a ``manifest.json``::

    DATASET/manifest.json            what follows here
    DATASET/train/part-00000.parquet columns: those of the schema, ids in [0, num_embeddings)
    DATASET/validation/  test/       the other splits; any names are possible
    DATASET/vocabulary/C1.parquet    which raw value each id stands for (only with a vocabulary)
    DATASET/rejected.tsv             malformed rows, with file, line and reason (only when there are any)
    DATASET/checksums.bin            checksums of the splits' files, a row group each (pieces.py)

The manifest holds no times of day, so preparing the same input twice gives the same bytes. ``creation.py``
writes one for Parquet files that were made elsewhere.

It carries its own checksum and those of all files but the splits'. Version 1 had none; it is still read. All paths in
it lead inside the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distembed.base.checksums import KEY, FileChecksum, checksum_differs, with_checksum
from distembed.base.errors import UserError
from distembed.base.files import read_folder_json, require_inside, whole_file, write_text
from distembed.data.dataset.mirror import dataset_folder, mirror_of
from distembed.data.dataset.pieces import CHECKSUMS_NAME, REMEDY, Pieces, file_pieces
from distembed.data.dataset.schema import Schema, plain_fields

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2

_WITHOUT_CHECKSUMS = 1
_CHECKSUMS = "checksums"


@dataclass(frozen=True)
class DataFile:
    """One Parquet file."""

    path: str  # relative to the dataset folder
    num_rows: int
    bytes: int


@dataclass(frozen=True)
class Split:
    """One part of a dataset."""

    num_rows: int  # in all files
    label_rate: float | None  # mean of the label; None without rows, and where a label is missing or not finite
    files: tuple[DataFile, ...]  # in the order of their rows
    mean_weight: float | None = None  # mean of the rows' weights; None without rows, and where rows have no weights


@dataclass(frozen=True)
class Vocabulary:
    """How one feature's raw values became ids, counted on the training rows, or for interactions on all rows.

    A value is dropped, and has the out-of-vocabulary id, where training rows hold it fewer than ``min_count`` times, or
    where the vocabulary of another dataset was applied and lacks it. Of lists, values are counted in place of rows.
    """

    file: str  # path of the Parquet file (id, key, count), relative to the dataset folder
    num_ids: int  # distinct values that have an id of their own
    num_dropped: int  # distinct values of the training rows that are dropped
    rows_dropped: int  # training rows that hold one of these
    rows_missing: int  # training rows without a value
    rows_dropped_by_split: Mapping[str, int] | None = None  # of every split, where another vocabulary was applied


@dataclass(frozen=True)
class SourceFile:
    """One raw input file."""

    name: str  # path relative to the folder that the inputs have in common
    bytes: int
    sha256: str
    num_rows: int  # malformed ones included
    num_rejected: int  # malformed rows


@dataclass(frozen=True)
class Rejected:
    """The malformed rows of the input."""

    num_rows: int = 0
    by_reason: Mapping[str, int] = field(default_factory=dict)
    file: str | None = None  # the file that lists them; None where there are none


@dataclass(frozen=True)
class Manifest:
    """The contents of a dataset folder."""

    schema: Schema
    splits: Mapping[str, Split]
    preparation: Mapping[str, Any] = field(default_factory=dict)  # options that the data were prepared with
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)  # by feature; none of hashes and foreign ids
    sources: tuple[SourceFile, ...] = ()
    rejected: Rejected = field(default_factory=Rejected)
    checksums: Mapping[str, FileChecksum] = field(default_factory=dict)  # of the files that belong to no split, by path
    tool_version: str = ""  # of distembed that wrote the manifest
    format_version: int = MANIFEST_VERSION

    @classmethod
    def load(cls, dataset_dir: str | os.PathLike[str]) -> Manifest:
        """Reads ``dataset_dir/manifest.json``, of a folder or a URL.

        Raises:
            UserError: The folder or URL is not a dataset, its format is another version's, or the file is damaged.
        """
        path = dataset_folder(dataset_dir) / MANIFEST_NAME
        return cls.from_json(read_folder_json(path, "dataset", "make one with `distembed prepare`"), path)

    def save(self, dataset_dir: str | os.PathLike[str], pieces: Mapping[str, Pieces] | None = None) -> Manifest:
        """Writes ``manifest.json`` whole or not at all, and ``checksums.bin`` before it.

        Args:
            dataset_dir: Folder with the files that the manifest lists.
            pieces: Pieces of the splits' files by path, where they are known; the others are read.

        Returns:
            The manifest with the checksums of the other files.

        Raises:
            UserError: A file cannot be read.
            RunError: The manifest cannot be written.
        """
        folder, pieces, saved = Path(dataset_dir), pieces or {}, self
        if self.has_checksums:
            try:
                if files := [file.path for file in self.split_files]:
                    found = [pieces[file] if file in pieces else file_pieces(folder / file) for file in files]
                    with whole_file(folder / CHECKSUMS_NAME, make_folder=False) as temporary:
                        with open(temporary, "wb") as file:  # numpy may lose the error of a full disk
                            file.write(np.concatenate(found).tobytes())
                saved = replace(self, checksums={file: FileChecksum.of(folder / file) for file in self.other_files})
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"a file of {folder} cannot be read, which its manifest is to list: {error}") from error
        saved.write(folder)
        return saved

    def write(self, folder: Path) -> None:
        """Writes ``manifest.json`` with the checksums that it has, whole or not at all."""
        write_text(folder / MANIFEST_NAME, json.dumps(self.to_json(), indent=1) + "\n")

    @property
    def has_checksums(self) -> bool:
        """Whether the dataset carries checksums."""
        return self.format_version > _WITHOUT_CHECKSUMS

    @property
    def is_without_rows(self) -> bool:
        """Whether no file has the rows of the splits: the manifest is what a run keeps of its dataset's."""
        return any(split.num_rows for split in self.splits.values()) and not self.split_files

    def without_rows(self) -> Manifest:
        """Returns the same without the splits' files and the malformed rows: what is left says what ids mean."""
        splits = {name: replace(split, files=()) for name, split in self.splits.items()}
        kept = replace(self, splits=splits, rejected=replace(self.rejected, file=None))
        checksums = {file: self.checksums[file] for file in kept.other_files if file in self.checksums}
        return replace(kept, checksums=checksums)

    @property
    def split_files(self) -> list[DataFile]:
        """The files of all splits."""
        return [file for split in self.splits.values() for file in split.files]

    @property
    def other_files(self) -> list[str]:
        """The paths of the files that belong to no split, in the order of the manifest."""
        vocabularies = [vocabulary.file for vocabulary in self.vocabularies.values()]
        rejected = [] if self.rejected.file is None else [self.rejected.file]
        return [*vocabularies, *rejected, *([CHECKSUMS_NAME] if self.split_files and self.has_checksums else [])]

    def require_unchanged(self, dataset_dir: str | os.PathLike[str], file: str) -> Path:
        """Returns the path of a file that belongs to no split, once it is held against its checksum, if it has one.

        A file of a remote dataset is fetched where it is not at hand, or is not as it was written.

        Raises:
            UserError: The file is not as it was written.
            RunError: It cannot be fetched.
        """
        folder = dataset_folder(dataset_dir)
        mirror = mirror_of(folder)
        for again in (False,) if mirror is None else (False, True):
            if mirror is not None:
                mirror.fetch(file, again)
            problem = self.checksums[file].problem(folder / file) if self.has_checksums else None
            if problem is None:
                return folder / file
        raise UserError(f"{problem}; {REMEDY}.")

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as plain JSON values, in a fixed order."""
        value = {
            "format": "distembed dataset",
            "format_version": self.format_version,
            "tool_version": self.tool_version,
            "schema": self.schema.to_json(),
            "splits": {name: plain_fields(split) for name, split in self.splits.items()},
            "preparation": dict(self.preparation),
            "vocabularies": {name: plain_fields(entry) for name, entry in self.vocabularies.items()},
            "sources": [asdict(source) for source in self.sources],
            "rejected": asdict(self.rejected),
        }
        if not self.has_checksums:
            return value
        return with_checksum({**value, _CHECKSUMS: {file: asdict(own) for file, own in self.checksums.items()}})

    @classmethod
    def from_json(cls, value: Any, path: Path) -> Manifest:
        """Builds a manifest from what :meth:`to_json` returned; the file is for errors.

        Raises:
            UserError: The value is no manifest, is another version's, or lacks a part.
        """
        if not isinstance(value, dict) or value.get("format") != "distembed dataset":
            raise UserError(
                f"{path} is not the manifest of a distembed dataset; name a folder made by `distembed prepare`"
            )
        version = value.get("format_version")
        if version not in (MANIFEST_VERSION, _WITHOUT_CHECKSUMS):
            raise UserError(
                f"{path} has format_version {version!r}, written by distembed {value.get('tool_version')!r}; this "
                f"distembed reads {_WITHOUT_CHECKSUMS} and {MANIFEST_VERSION}: prepare the data again"
            )
        is_old = version == _WITHOUT_CHECKSUMS and KEY not in value and _CHECKSUMS not in value
        if not is_old and (version == _WITHOUT_CHECKSUMS or KEY not in value or checksum_differs(value)):
            raise UserError(f"{path} is damaged: its checksum is missing or is not that of its values; {REMEDY}")
        try:
            manifest = cls(
                schema=Schema.from_json(value["schema"]),
                splits={name: _split_from_json(split) for name, split in value["splits"].items()},
                preparation={**value.get("preparation", {})},
                vocabularies={name: Vocabulary(**entry) for name, entry in value.get("vocabularies", {}).items()},
                sources=tuple(SourceFile(**source) for source in value.get("sources", ())),
                rejected=Rejected(**value.get("rejected", {})),
                checksums={file: FileChecksum(**entry) for file, entry in value.get(_CHECKSUMS, {}).items()},
                tool_version=value["tool_version"],
                format_version=version,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {REMEDY}") from error
        for name, split in manifest.splits.items():
            for index, file in enumerate(split.files):
                require_inside(file.path, f"splits.{name}.files[{index}].path", path)
        for name, vocabulary in manifest.vocabularies.items():
            require_inside(vocabulary.file, f"vocabularies.{name}.file", path)
        if manifest.rejected.file is not None:
            require_inside(manifest.rejected.file, "rejected.file", path)
        lacking = [file for file in manifest.other_files if file not in manifest.checksums]
        if manifest.has_checksums and lacking:
            raise UserError(f"{path} is damaged: it has no checksum of {', '.join(lacking)}; {REMEDY}")
        return manifest

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

    It covers the tables' sizes and, where the dataset has them, its vocabularies or its hash, and what was learnt of
    numbers: means, and where bins begin.

    Raises:
        UserError: A vocabulary is not as it was written.
    """
    digest = hashlib.sha256(json.dumps(manifest.schema.to_json()).encode())
    digest.update(repr([manifest.preparation.get(key) for key in ("hash_size", "hash_seed")]).encode())
    columns = manifest.preparation.get("schema", {}).get("categorical", {})
    seeds = {name: column["hash_seed"] for name, column in columns.items() if "hash_seed" in column}
    learnt = manifest.preparation.get("learnt", {})
    if seeds or learnt:  # so that the checksums of other datasets are what they were before there were such columns
        digest.update(json.dumps([seeds, learnt], sort_keys=True).encode())
    for name in sorted(manifest.vocabularies):
        path = manifest.require_unchanged(dataset_dir, manifest.vocabularies[name].file)
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"the vocabulary {path} cannot be read ({error}); {REMEDY}") from error
    return digest.hexdigest()


def _split_from_json(value: Mapping[str, Any]) -> Split:
    files = tuple(DataFile(**file) for file in value["files"])
    for count in (value["num_rows"], *(file.num_rows for file in files), *(file.bytes for file in files)):
        if type(count) is not int or count < 0:
            raise TypeError(f"{count!r} is no number of rows or bytes")
    return Split(value["num_rows"], value["label_rate"], files, value.get("mean_weight"))
