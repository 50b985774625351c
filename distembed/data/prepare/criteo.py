"""Criteo's click logs, as published, to a Parquet dataset that the reader reads.

Three passes, each with bounded memory:

1. ``read``: the text is parsed once (``ingest.py``), and each block is spooled as codes into its own list of keys;
2. ``vocabulary``: feature by feature, distinct keys are counted over the training rows and get ids (``vocabulary.py``);
3. ``write``: codes are exchanged for ids and written as Parquet (``write_parquet.py``).

The dataset appears under its name when it is complete, and not before (``staging.py``). Its bytes depend on the rows
and the options alone: not on the number of threads, the memory, or how the rows are compressed.

Trade-off: the spool takes about 0.7 of the text's size on the output's disk while it runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from distembed import __version__
from distembed.data.dataset.manifest import Manifest, Vocabulary
from distembed.data.dataset.schema import CRITEO_CATEGORICAL, criteo_schema
from distembed.data.prepare.ingest import Ingested, Ingestion
from distembed.data.prepare.inputs import require_outside
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.notes import notes_on_rows
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ProgressUpdate, ignore
from distembed.data.prepare.source_files import list_sources
from distembed.data.prepare.space import disk_is_full, require_space
from distembed.data.prepare.split import SPLIT_NAMES, SplitRule
from distembed.data.prepare.staging import staged_folder
from distembed.data.prepare.vocabulary import (
    FeatureCounts,
    HashMap,
    IdMap,
    LookupTables,
    build_vocabulary,
    write_lookup_tables,
)
from distembed.data.prepare.write_parquet import FilePlan, FileWriter, WrittenFile, plan_files, written_split
from distembed.errors import UserError
from distembed.files import full_disk_explained
from distembed.names import one_of

MAX_COUNT = 2**63 - 1
MAX_HASH_SIZE = 2**62
"""Sums of two ids, as partitions of tables make them, then stay within 64 bits."""


@dataclass(frozen=True)
class CriteoOptions:
    """What a dataset's bytes depend on besides the input; the manifest records it.

    Attributes:
        min_count: Values seen fewer times in the training rows share the out-of-vocabulary id; 1 or more.
        hash_size: Size of the tables that ids are hashed into, 2 to 2^62; None builds a vocabulary instead.
        hash_seed: Seed of the hash, below 2^64.
        split: Shares of the rows for training, validation and test in time order; or ``days``: every file is a day
            (one file is cut into seven), the last day is halved into validation and test, the others train.
        max_rejected: Largest share of malformed rows that is no error; they are listed in ``rejected.tsv``.
        missing: What becomes of missing integers: ``zero``, so that they are as zeros, or ``keep``: they are null.

    Raises:
        UserError: An option is out of its range.
    """

    min_count: int = 2
    hash_size: int | None = None
    hash_seed: int = 0
    split: str = "0.8,0.1,0.1"
    max_rejected: float = 0.01
    missing: str = "zero"

    def __post_init__(self) -> None:
        if not 1 <= self.min_count <= MAX_COUNT:
            raise UserError(
                f"min_count (--min-count) is {self.min_count}: it must be in 1 to {MAX_COUNT}; 1 keeps every value"
            )
        if self.hash_size is not None and not 2 <= self.hash_size <= MAX_HASH_SIZE:
            raise UserError(
                f"hash_size (--hash-size) is {self.hash_size}: it must be in 2 to {MAX_HASH_SIZE}, since id 0 is for "
                "missing values and ids have 64 bits; give the number of rows that each table shall have"
            )
        if not 0 <= self.hash_seed < 2**64:
            raise UserError(f"hash_seed (--hash-seed) is {self.hash_seed}: it must be in 0 to {2**64 - 1}")
        if not 0 <= self.max_rejected <= 1:
            raise UserError(
                f"max_rejected (--max-rejected) is {self.max_rejected}: it is a share of the rows, between 0 and 1"
            )
        one_of("missing (--missing)", self.missing, ("zero", "keep"))
        SplitRule.parse(self.split)

    def to_json(self) -> dict[str, Any]:
        """Returns the options that matter for this kind of ids, in the manifest's order."""
        ids = {"min_count": self.min_count} if self.hash_size is None else {}
        unused = {"min_count"} if self.hash_size is not None else {"hash_size", "hash_seed"}
        # so that the manifests of datasets with zeros are what they were before there was a choice
        unused |= {"missing"} if self.missing == "zero" else set()
        return ids | {name: value for name, value in asdict(self).items() if name not in unused}


def prepare_criteo(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: CriteoOptions | None = None,
    limits: ResourceLimits | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Manifest:
    """Prepares Criteo rows.

    Args:
        inputs: Files, folders or pipes, plain or gzip, in time order; a folder is its files in natural order, and
            ``-`` is standard input.
        output: Dataset folder to make.
        options: What the dataset's bytes depend on; a vocabulary and shares 0.8, 0.1, 0.1 unless given.
        limits: Memory and threads to use; 2 GiB and every processor unless given.
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then, in the caller's thread.
        note: Function that is told in a sentence what should be known of the input: a header that was left out, files
            of a folder that were not read, rows that are all alike. What the manifest tells is said by
            :func:`~distembed.data.prepare.notes.dataset_warnings`.

    Returns:
        The manifest that was written.

    Raises:
        UserError: The input cannot be read, or is not one of Criteo rows. Nothing was written.
        RunError: The disk is full, or will not have room. Nothing was left behind.
    """
    options, limits = options or CriteoOptions(), limits or ResourceLimits()
    sources = list_sources(inputs, note)
    require_outside(sources, Path(output))
    with (
        full_disk_explained(
            lambda error: disk_is_full(error, sources, Path(output)), (OSError, pa.ArrowException), max_file_size=True
        ),
        staged_folder(Path(output), overwrite=overwrite) as folder,
    ):
        require_space(sources, Path(output), limits, note)
        passes = _Passes(folder, folder / ".spool", options, limits, progress, note)
        passes.spool.mkdir()
        ingested = passes.read(sources)
        bounds = SplitRule.parse(options.split).bounds(ingested.source_rows)
        if not bounds[1]:
            raise UserError(f"the training part has no rows: the input has only {ingested.num_rows}; give more rows")
        for found in notes_on_rows(ingested.blocks, options.hash_size is not None):
            note(found)
        features = passes.map_features(ingested, bounds[1])
        sizes = [feature.num_embeddings for feature in features]
        schema = criteo_schema(sizes, missing_dense=options.missing == "keep")
        writer = FileWriter(folder, schema, ingested.blocks, [feature.lookup for feature in features])
        written = passes.write(writer, bounds)
        manifest = Manifest(
            schema=schema,
            splits={name: written_split(files) for name, files in written.items()},
            preparation={"source": "criteo", **options.to_json()},
            vocabularies={f.name: f.vocabulary for f in features if f.vocabulary is not None},
            sources=tuple(ingested.sources),
            rejected=ingested.rejected,
            tool_version=__version__,
        )
        manifest = manifest.save(folder, {one.file.path: one.pieces for files in written.values() for one in files})
        shutil.rmtree(passes.spool)
    return manifest


@dataclass(frozen=True)
class _Feature:
    """One categorical feature, once its ids are known."""

    name: str
    num_embeddings: int
    lookup: LookupTables
    vocabulary: Vocabulary | None


@dataclass(frozen=True)
class _Passes:
    """The three passes of one preparation, from text to Parquet.

    Attributes:
        folder: Dataset folder that is being written.
        spool: Folder inside it for what is needed only meanwhile.
        options: What the dataset's bytes depend on.
        limits: Memory and threads to use.
        report: Function that is called with the progress.
        note: Function that is told what was found in the input besides rows.
    """

    folder: Path
    spool: Path
    options: CriteoOptions
    limits: ResourceLimits
    report: ProgressCallback
    note: NoteCallback

    def read(self, sources: Sequence[Path]) -> Ingested:
        """Parses the text and spools it."""
        return Ingestion(
            sources,
            self.folder,
            self.spool,
            self.limits,
            max_rejected=self.options.max_rejected,
            report=self.report,
            note=self.note,
        ).run()

    def map_features(self, ingested: Ingested, train_rows: int) -> list[_Feature]:
        """Gives ids to the keys of every feature, several features at a time.

        Args:
            ingested: What the first pass found.
            train_rows: Number of rows that a vocabulary is counted over; they come first.
        """
        if self.options.hash_size is None:
            (self.folder / "vocabulary").mkdir()
        spool_bytes = sum(block.num_bytes for block in ingested.blocks)
        features: dict[int, _Feature] = {}
        with _pool(self.limits.num_threads) as pool:
            futures = {
                pool.submit(self._map_feature, ingested, train_rows, index): index for index in _largest_first(ingested)
            }
            for future in as_completed(futures):
                features[futures[future]] = future.result()
                share = len(features) / len(futures)
                rows = int(ingested.num_rows * share)
                self.report(ProgressUpdate("vocabulary", int(spool_bytes * share), spool_bytes, rows))
        return [features[index] for index in range(len(CRITEO_CATEGORICAL))]

    def _map_feature(self, ingested: Ingested, train_rows: int, index: int) -> _Feature:
        name = CRITEO_CATEGORICAL[index]
        scratch = self.spool / name
        scratch.mkdir()
        id_map, vocabulary = self._id_map(ingested, train_rows, index, scratch)
        lookup = write_lookup_tables(ingested.blocks, index, id_map, self.spool / f"{name}.lookup")
        num_embeddings = id_map.num_embeddings
        del id_map  # its arrays are mapped from the folder that goes
        shutil.rmtree(scratch)
        return _Feature(name, num_embeddings, lookup, vocabulary)

    def _id_map(
        self, ingested: Ingested, train_rows: int, index: int, scratch: Path
    ) -> tuple[IdMap, Vocabulary | None]:
        if self.options.hash_size is not None:
            return HashMap(self.options.hash_size, self.options.hash_seed), None
        file = f"vocabulary/{CRITEO_CATEGORICAL[index]}.parquet"
        id_map, counts = build_vocabulary(
            ingested.blocks,
            index,
            train_rows,
            self.options.min_count,
            self.folder / file,
            scratch,
            self.limits.vocabulary_keys,
        )
        return id_map, _vocabulary(file, counts)

    def write(self, writer: FileWriter, bounds: Sequence[int]) -> dict[str, list[WrittenFile]]:
        """Writes the files of all splits, several at a time.

        Args:
            writer: Writes one file.
            bounds: Rows where each split begins, and where the last one ends.
        """
        plans = [
            plan
            for name, start, stop in zip(SPLIT_NAMES, bounds[:-1], bounds[1:], strict=True)
            for plan in plan_files(name, start, stop)
        ]
        for name in SPLIT_NAMES:
            (self.folder / name).mkdir()
        written: dict[FilePlan, WrittenFile] = {}
        row_bytes = sum(block.num_bytes for block in writer.blocks) // bounds[-1]
        with _pool(self.limits.num_writers) as pool:
            futures: dict[Future[WrittenFile], FilePlan] = {
                pool.submit(writer.write, plan): plan for plan in sorted(plans, key=lambda plan: plan.start - plan.stop)
            }
            for future in as_completed(futures):
                written[futures[future]] = future.result()
                rows = sum(one.file.num_rows for one in written.values())
                self.report(ProgressUpdate("write", rows * row_bytes, bounds[-1] * row_bytes, rows))
        return {name: [written[plan] for plan in plans if plan.split == name] for name in SPLIT_NAMES}


def _largest_first(ingested: Ingested) -> list[int]:
    """Returns the features' numbers, those with the most keys first, so that all threads end at about the same time."""
    keys = [sum(block.num_keys[index] for block in ingested.blocks) for index in range(len(CRITEO_CATEGORICAL))]
    return sorted(range(len(keys)), key=lambda index: -keys[index])


def _vocabulary(file: str, counts: FeatureCounts) -> Vocabulary:
    return Vocabulary(file, counts.num_ids, counts.num_dropped, counts.rows_dropped, counts.rows_missing)


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Gives threads of which, when one fails, none starts anything more."""
    pool = ThreadPoolExecutor(threads, "distembed-prepare")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
