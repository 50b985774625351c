"""The manifest: one JSON file that lists the files of a dataset folder and their origin.

A dataset is a folder of Parquet files and a ``manifest.json``::

    DATASET/manifest.json            this file
    DATASET/train/part-00000.parquet columns of the schema, ids in [0, num_embeddings)
    DATASET/validation/  test/       the other splits; any names are possible
    DATASET/vocabulary/C1.parquet    which raw value each id stands for (only with a vocabulary)
    DATASET/rejected.tsv             malformed rows, with file, line and reason (only when there are any)
    DATASET/checksums.bin            checksums of the splits' files, a piece each

Every byte of a split's file is in one piece, so that a row group can be fetched and checked by itself::

    | PAR1 row group 0 | row group 1 | ... | last row group | footer PAR1 |
      piece 0            piece 1             piece n - 1      piece n

``checksums.bin`` has 24 bytes a piece, in the manifest's order of files: its size (int64, little-endian) and its XXH3.
Trade-off: Parquet's own checksums of pages need no file, but leave out the headers of the pages.

The manifest holds no times of day, so preparing the same input twice gives the same bytes. It carries its own checksum
and the checksums of all files but the splits'. :func:`create_manifest` writes one for files that were made elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.checksums import KEY, FileChecksum, checksum_differs, file_checksum, with_checksum
from distembed.base.errors import UserError
from distembed.base.files import read_folder_json, require_inside, whole_file, write_text
from distembed.base.version import __version__
from distembed.data.dataset.mirror import dataset_folder, mirror_of
from distembed.data.dataset.schema import Label, Schema, plain_fields

CHECKSUMS_NAME = "checksums.bin"
REMEDY = "prepare the data again, or fetch the file again from where a whole copy is"
PIECE = np.dtype([("bytes", "<i8"), ("checksum", "V16")])
Pieces: TypeAlias = NDArray[np.void]  # the pieces of a file, or of several end to end, each of the type ``PIECE``


def file_pieces(path: Path) -> Pieces:
    """Divides a Parquet file into pieces (a row group each, then the footer) and computes their checksums.

    A piece ends where the next begins, so together they cover every byte, the leading ``PAR1`` and gaps included.
    Row groups must be in file order; others raise a UserError.
    """
    metadata = pq.read_metadata(path)
    starts: list[int] = []
    stop = 0
    for index in range(metadata.num_row_groups):
        begin, end = _row_group_bounds(metadata.row_group(index), stop)
        if begin < stop or end < begin:
            raise UserError(f"{path}, row group {index} does not come after the one before it; write the file anew")
        starts.append(begin if starts else 0)
        stop = end
    sizes = np.diff([*starts, stop, path.stat().st_size] if starts else [0, path.stat().st_size]).tolist()
    return read_checksums(path, sizes)


def read_checksums(path: Path, sizes: Sequence[int]) -> Pieces:
    """Computes checksums of consecutive pieces of these sizes, from the start of a file, a few megabytes at a time."""
    with path.open("rb") as file:
        return np.array([(size, bytes.fromhex(file_checksum(file, size))) for size in sizes], PIECE)


def _row_group_bounds(row_group: pq.RowGroupMetaData, previous_stop: int) -> tuple[int, int]:
    """Returns the first byte and last byte + 1 of a row group; the preceding one's stop twice if it has no bytes."""
    starts, stops = [], []
    for column in (row_group.column(index) for index in range(row_group.num_columns)):
        # a column without rows may have a dictionary and no page, which is then said to be at 0
        pages = [offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset]
        if pages and column.total_compressed_size:
            starts.append(min(pages))
            stops.append(min(pages) + column.total_compressed_size)
    return (min(starts), max(stops)) if starts else (previous_stop, previous_stop)


def check_columns(path: str, columns: pa.Schema, schema: Schema) -> None:
    """Raises a UserError, naming ``path``, unless a file has all columns of a schema with types that fit their roles.

    Labels, weights and dense columns are numeric, ids and times integers; multi-hot ids and dense sequences are lists
    of these.
    """
    times = () if schema.time is None else (schema.time,)
    missing = [name for name in (*schema.columns, *times) if name not in columns.names]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)}: it has {', '.join(columns.names)}")
    # each role: column, whether it has lists, the check of its numbers' type, and the rule in words
    roles = [
        (name, False, _is_numeric, "a label, weight or dense column is numeric")
        for name in (*schema.targets, *schema.dense)
    ]
    roles += [(name, False, pa.types.is_integer, "a time is an integer, in seconds since 1970") for name in times]
    roles += [(name, True, _is_numeric, "a dense sequence is a list of numbers") for name in schema.dense_sequences]
    for feature in schema.categorical:
        law = f"multi_hot={feature.multi_hot} needs {'a list of integers' if feature.multi_hot else 'integer'}"
        roles.append((feature.name, feature.multi_hot, pa.types.is_integer, law))
    list_types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    for name, is_list, fits, law in roles:
        kind = columns.field(name).type
        if any(check(kind) for check in list_types) != is_list or not fits(kind.value_type if is_list else kind):
            raise UserError(f"{path}, column {name!r}: its type is {kind}; {law}")


def _is_numeric(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


MANIFEST_NAME = "manifest.json"
REJECTED_NAME = "rejected.tsv"
MANIFEST_VERSION = 2


@dataclass(frozen=True)
class DataFile:
    """Names a Parquet file of a dataset, with its numbers of rows and bytes."""

    path: str  # relative to the dataset folder
    num_rows: int
    bytes: int


@dataclass(frozen=True)
class LabelSummary:
    """One of several labels in a split."""

    num_rows: int  # rows that have the label
    mean: float | None  # of the label in these rows; None without any, and where a label is not finite


@dataclass(frozen=True)
class Split:
    """One part of a dataset."""

    num_rows: int  # in all files
    # Mean of the only label; None without rows, without one label, and where a label is missing or not finite.
    label_rate: float | None
    files: tuple[DataFile, ...]  # in the order of their rows
    mean_weight: float | None = None  # mean of the rows' weights; None without rows, and where rows have no weights
    labels: Mapping[str, LabelSummary] | None = None  # of several labels, by name; None where rows have one or none

    def label_summaries(self, schema: Schema) -> dict[Label, LabelSummary]:
        """Returns the summary of each label of the dataset's ``schema``, none, one or several, in its order."""
        if self.labels is None:
            return {label: LabelSummary(self.num_rows, self.label_rate) for label in schema.all_labels}
        return {label: self.labels[label.name] for label in schema.all_labels}


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

    @classmethod
    def load(cls, dataset_dir: str | os.PathLike[str]) -> Manifest:
        """Reads and checks ``manifest.json`` in a folder, or at a URL, which makes the local mirror folder."""
        path = dataset_folder(dataset_dir) / MANIFEST_NAME
        return cls.from_json(read_folder_json(path, "dataset", "make one with `distembed prepare`"), path)

    def save(self, dataset_dir: str | os.PathLike[str], pieces: Mapping[str, Pieces] | None = None) -> Manifest:
        """Writes ``checksums.bin``, then ``manifest.json``; returns the manifest with checksums of the other files.

        ``pieces`` spares reading the split files it has (by path); pieces of other split files are computed.
        """
        folder, pieces = Path(dataset_dir), pieces or {}
        try:
            if files := [file.path for file in self.split_files]:
                piece_arrays = [pieces[file] if file in pieces else file_pieces(folder / file) for file in files]
                with whole_file(folder / CHECKSUMS_NAME, make_folder=False) as temporary:
                    with open(temporary, "wb") as file:  # numpy may lose the error of a full disk
                        file.write(np.concatenate(piece_arrays).tobytes())
            saved = replace(self, checksums={file: FileChecksum.of(folder / file) for file in self.other_files})
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"a file of {folder} cannot be read, which its manifest is to list: {error}") from error
        saved.write(folder)
        return saved

    def write(self, folder: Path) -> None:
        write_text(folder / MANIFEST_NAME, json.dumps(self.to_json(), indent=1) + "\n")

    @property
    def is_without_rows(self) -> bool:
        """Whether no file has the rows of the splits: the manifest is the copy that a run keeps."""
        return any(split.num_rows for split in self.splits.values()) and not self.split_files

    def without_rows(self) -> Manifest:
        """Returns the manifest without the splits' files and the malformed rows: the vocabularies and the schema."""
        splits = {name: replace(split, files=()) for name, split in self.splits.items()}
        without_files = replace(self, splits=splits, rejected=replace(self.rejected, file=None))
        checksums = {file: self.checksums[file] for file in without_files.other_files if file in self.checksums}
        return replace(without_files, checksums=checksums)

    @property
    def split_files(self) -> list[DataFile]:
        return [file for split in self.splits.values() for file in split.files]

    @property
    def other_files(self) -> list[str]:
        vocabularies = [vocabulary.file for vocabulary in self.vocabularies.values()]
        rejected = [] if self.rejected.file is None else [self.rejected.file]
        return [*vocabularies, *rejected, *([CHECKSUMS_NAME] if self.split_files else [])]

    def require_unchanged(self, dataset_dir: str | os.PathLike[str], file: str) -> Path:
        """Returns the local path of a file outside the splits, after comparing the file with its checksum.

        Fetches a remote dataset's file, a second time if the first is damaged. Raises a UserError if it stays damaged.
        """
        folder = dataset_folder(dataset_dir)
        mirror = mirror_of(folder)
        for again in (False,) if mirror is None else (False, True):
            if mirror is not None:
                mirror.fetch(file, again)
            problem = self.checksums[file].problem(folder / file)
            if problem is None:
                return folder / file
        raise UserError(f"{problem}; {REMEDY}.")

    def to_json(self) -> dict[str, Any]:
        value = {
            "format": "distembed dataset",
            "format_version": MANIFEST_VERSION,
            "tool_version": self.tool_version,
            "schema": self.schema.to_json(),
            "splits": {name: plain_fields(split) for name, split in self.splits.items()},
            "preparation": dict(self.preparation),
            "vocabularies": {name: plain_fields(entry) for name, entry in self.vocabularies.items()},
            "sources": [asdict(source) for source in self.sources],
            "rejected": asdict(self.rejected),
            "checksums": {file: asdict(checksum) for file, checksum in self.checksums.items()},
        }
        return with_checksum(value)

    @classmethod
    def from_json(cls, value: Any, path: Path) -> Manifest:
        """Builds a manifest from the JSON values of :meth:`to_json`; errors name the file ``path``.

        Refuses other format versions, a wrong checksum, missing entries, and files outside of the dataset's folder.
        """
        if not isinstance(value, dict) or value.get("format") != "distembed dataset":
            raise UserError(
                f"{path} is not the manifest of a distembed dataset; name a folder made by `distembed prepare`"
            )
        version = value.get("format_version")
        if version != MANIFEST_VERSION:
            raise UserError(
                f"{path} has format_version {version!r}, written by distembed {value.get('tool_version')!r}; this "
                f"distembed reads {MANIFEST_VERSION}: prepare the data again"
            )
        if KEY not in value or checksum_differs(value):
            raise UserError(f"{path} is damaged: its checksum is missing or is not that of its values; {REMEDY}")
        try:
            manifest = cls(
                schema=Schema.from_json(value["schema"]),
                splits={name: _split_from_json(split) for name, split in value["splits"].items()},
                preparation={**value.get("preparation", {})},
                vocabularies={name: Vocabulary(**entry) for name, entry in value.get("vocabularies", {}).items()},
                sources=tuple(SourceFile(**source) for source in value.get("sources", ())),
                rejected=Rejected(**value.get("rejected", {})),
                checksums={file: FileChecksum(**entry) for file, entry in value.get("checksums", {}).items()},
                tool_version=value["tool_version"],
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
        if lacking := [file for file in manifest.other_files if file not in manifest.checksums]:
            raise UserError(f"{path} is damaged: it has no checksum of {', '.join(lacking)}; {REMEDY}")
        return manifest

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise UserError(f"the dataset has no split {name!r}: it has {', '.join(self.splits) or 'none'}")
        return self.splits[name]


def id_fingerprint(dataset_dir: str | os.PathLike[str], manifest: Manifest) -> str:
    """Returns a checksum of the meaning of all ids: table sizes, vocabularies or hashes, and learnt means and bins."""
    digest = hashlib.sha256(json.dumps(manifest.schema.to_json()).encode())
    digest.update(repr([manifest.preparation.get(key) for key in ("hash_size", "hash_seed")]).encode())
    columns = manifest.preparation.get("schema", {}).get("categorical", {})
    seeds = {name: column["hash_seed"] for name, column in columns.items() if "hash_seed" in column}
    learnt = manifest.preparation.get("learnt", {})
    if seeds or learnt:
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
    labels = value.get("labels")
    summaries = None if labels is None else {name: LabelSummary(**label) for name, label in labels.items()}
    return Split(value["num_rows"], value["label_rate"], files, value.get("mean_weight"), summaries)


def summed_split(
    schema: Schema, files: Sequence[DataFile], sums: Mapping[str, float], counts: Mapping[str, int]
) -> Split:
    """Returns the entry of a split, given the sums of its labels and weights, and in how many rows they are."""
    num_rows = sum(file.num_rows for file in files)

    def mean(name: str | None, count: int) -> float | None:
        # a label may be NaN or infinite, which the reader refuses and JSON does not hold
        return sums[name] / count if name is not None and count and math.isfinite(sums[name]) else None

    labels = {name: LabelSummary(counts[name], mean(name, counts[name])) for name in schema.label_names}
    return Split(
        num_rows,
        mean(schema.label, num_rows),
        tuple(files),
        mean(schema.weight, num_rows),
        labels if schema.labels else None,
    )


CREATED_ELSEWHERE = "create_manifest"  # the ``source`` in the preparation of a manifest whose files were made elsewhere


def create_manifest(
    dataset_dir: str | os.PathLike[str], schema: Schema, splits: Mapping[str, Sequence[str | os.PathLike[str]]]
) -> Manifest:
    """Writes a manifest for Parquet files that were made elsewhere, so that the reader can read them.

    Args:
        dataset_dir: Folder that gets ``manifest.json``.
        schema: Roles of the columns; ids are integers in ``[0, num_embeddings)``.
        splits: Parquet files by the name of their split, inside ``dataset_dir``; relative paths are relative to it.

    Raises:
        UserError: A file is missing, is no Parquet, has other columns, or lies outside the folder.
    """
    folder = Path(dataset_dir)
    described = {name: _describe_split(folder, schema, files) for name, files in splits.items()}
    manifest = Manifest(schema, described, {"source": CREATED_ELSEWHERE}, tool_version=__version__)
    return manifest.save(folder)


def _describe_split(folder: Path, schema: Schema, paths: Sequence[str | os.PathLike[str]]) -> Split:
    """Checks the columns of a split's files and reads labels and weights, for their means; refuses bad weights."""
    files: list[DataFile] = []
    sums: dict[str, list[float]] = {name: [] for name in schema.targets}  # of the files
    counts = dict.fromkeys(schema.targets, 0)
    for path in paths:
        relative = _relative(folder, path)
        file = folder / relative
        if not file.is_file():
            raise UserError(f"{file} does not exist")
        try:
            parquet = pq.ParquetFile(file)
            check_columns(str(file), parquet.schema_arrow, schema)
            for name in schema.targets:
                values = pc.cast(parquet.read(columns=[name]).column(0), pa.float64())
                is_weight = pc.fill_null(pc.and_(pc.is_finite(values), pc.greater_equal(values, 0.0)), False)
                if name == schema.weight and (wrong := pc.index(is_weight, False).as_py()) >= 0:
                    raise UserError(
                        f"{file}, column {name!r}: the weight of row {wrong} is {values[wrong].as_py()}; weights are "
                        "finite and not negative."
                    )
                if schema.labels:  # whose missing values may be NaN too
                    values = pc.filter(values, pc.invert(pc.is_nan(values)))
                counts[name] += len(values) - values.null_count
                sums[name].append(pc.sum(values).as_py() or 0.0)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file} is not a readable Parquet file: {error}") from error
        files.append(DataFile(relative, parquet.metadata.num_rows, file.stat().st_size))
    return summed_split(schema, files, {name: sum(by_file) for name, by_file in sums.items()}, counts)


def _relative(folder: Path, path: str | os.PathLike[str]) -> str:
    """Returns a path relative to the folder; a link in the folder counts as a file in it."""
    absolute = Path(os.path.abspath(folder / path))
    real = absolute.parent.resolve() / absolute.name  # both may be named by other links
    for file, inside in ((absolute, Path(os.path.abspath(folder))), (real, folder.resolve())):
        if file.is_relative_to(inside):
            return file.relative_to(inside).as_posix()
    raise UserError(f"{absolute} lies outside the dataset folder {folder}: move it or link it there")
