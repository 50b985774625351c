"""Criteo's click logs, as published, to a Parquet dataset that the reader reads.

Three passes, each with bounded memory:

1. ``read``: the text is parsed once (``ingest.py``), each block spooled as codes into its own list of distinct keys;
2. ``vocabulary``: feature by feature, distinct keys are counted over the training rows and get ids (``vocabulary.py``);
3. ``write``: codes are exchanged for ids and written as Parquet (``write.py``).

The dataset appears under its name when it is complete, and not before (``staging.py``). Its bytes depend on the rows
and the options alone: not on the number of threads, the memory, or how the rows are compressed.

Trade-off: the spool takes about 0.7 of the text's size on the output's disk while it runs.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from distembed import __version__
from distembed.data.dataset.manifest import DataFile, Manifest, Split, Vocabulary
from distembed.data.dataset.schema import CRITEO_CATEGORICAL, criteo_schema
from distembed.data.prepare.ingest import Ingested, Ingestion
from distembed.data.prepare.raw import list_sources
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
from distembed.data.prepare.write import FilePlan, FileWriter, plan_files
from distembed.errors import RunError, UserError

LEAST_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class ProgressUpdate:
    """How far a preparation is.

    Attributes:
        stage: ``read``, ``vocabulary`` or ``write``.
        bytes_done: of this stage's bytes.
        bytes_total: what ``bytes_done`` will be when the stage is over.
        rows_done: well-formed rows that this stage has dealt with.
    """

    stage: str
    bytes_done: int
    bytes_total: int
    rows_done: int


@dataclass(frozen=True)
class _Options:
    """What the dataset's bytes depend on besides the input; kept in the manifest."""

    min_count: int
    hash_size: int | None
    hash_seed: int
    split: str
    max_rejected: float

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise UserError(f"min_count is {self.min_count}: it must be 1 or more; 1 keeps every value")
        if self.hash_size is not None and not 2 <= self.hash_size < 2**63:
            raise UserError(f"hash_size is {self.hash_size}: it must be at least 2, since id 0 is for missing values")
        if not 0 <= self.hash_seed < 2**64:
            raise UserError(f"hash_seed is {self.hash_seed}: it must be in [0, 2**64)")
        if not 0 <= self.max_rejected <= 1:
            raise UserError(f"max_rejected is {self.max_rejected}: it is a share of the rows, between 0 and 1")


@dataclass(frozen=True)
class _Budget:
    """How the memory limit is shared out. The figures are upper bounds, measured on Criteo rows."""

    threads: int
    memory_bytes: int

    @property
    def block_bytes(self) -> int:
        """Text of a block: one a thread, one being read, one waiting; parsing takes up to 8 times its size."""
        return min(16 << 20, max(1 << 20, self.memory_bytes // (8 * (self.threads + 2))))

    @property
    def vocabulary_entries(self) -> int:
        """Distinct keys in memory for each thread: sorting and merging one takes up to 80 bytes."""
        return max(1 << 16, self.memory_bytes // (160 * self.threads))

    @property
    def writers(self) -> int:
        """Files written at a time: two row groups and the buffers of Parquet take up to 128 MiB each."""
        return max(1, min(self.threads, self.memory_bytes // (128 << 20)))


def prepare_criteo(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    min_count: int = 2,
    hash_size: int | None = None,
    hash_seed: int = 0,
    split: str = "0.8,0.1,0.1",
    max_rejected: float = 0.01,
    memory_limit_bytes: int = 2 << 30,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Callable[[ProgressUpdate], None] | None = None,
) -> Manifest:
    """Prepare Criteo rows.

    Args:
        inputs: files or folders, plain or gzip, in time order; a folder is its files in natural order.
        output: the dataset folder to make.
        min_count: values seen fewer times in the training rows share the out-of-vocabulary id.
        hash_size: hash ids into tables of this size instead of building a vocabulary.
        hash_seed: of the hash.
        split: shares of the rows for train, validation and test in time order; or ``days``: every file is a day (one
            file is cut into seven), the last day is halved into validation and test, the others train.
        max_rejected: the largest share of malformed rows that is put up with; they are listed in ``rejected.tsv``.
        memory_limit_bytes: working memory, above what the interpreter itself takes (about 150 MB).
        overwrite: replace a dataset at ``output``.
        threads: that work; by default the processors that this process may use.
        progress: called now and then, in the caller's thread.

    Returns:
        The manifest that was written.

    Raises:
        UserError: wrong options or input. Nothing was written.
        RunError: the disk is full. Nothing was left behind.
    """
    options = _Options(min_count, hash_size, hash_seed, split, max_rejected)
    rule = SplitRule.parse(split)
    budget = _budget(threads, memory_limit_bytes)
    sources = list_sources(inputs)
    _check_apart(sources, Path(output))
    report = progress or (lambda update: None)
    with _full_disk_explained(sources, Path(output)), staged_folder(Path(output), overwrite=overwrite) as folder:
        spool = folder / ".spool"
        spool.mkdir()
        ingested = _read(sources, folder, spool, options, budget, report)
        bounds = rule.bounds(ingested.source_rows)
        if not bounds[1]:
            raise UserError(f"the training part has no rows: the input has only {ingested.num_rows}; give more rows")
        features = _map_features(ingested, folder, spool, bounds[1], options, budget, report)
        schema = criteo_schema([feature.num_embeddings for feature in features])
        writer = FileWriter(folder, schema, ingested.blocks, [feature.lookup for feature in features])
        manifest = Manifest(
            schema=schema,
            splits=_write(writer, bounds, budget, report),
            preparation={"source": "criteo", **_described(options)},
            vocabularies={f.name: f.vocabulary for f in features if f.vocabulary is not None},
            sources=tuple(ingested.sources),
            rejected=ingested.rejected,
            tool_version=__version__,
        )
        manifest.save(folder)
        shutil.rmtree(spool)
    return manifest


def _described(options: _Options) -> dict[str, Any]:
    ids = {"min_count": options.min_count} if options.hash_size is None else {}
    unused = {"min_count"} if options.hash_size is not None else {"hash_size", "hash_seed"}
    return ids | {name: value for name, value in asdict(options).items() if name not in unused}


def _budget(threads: int | None, memory_limit_bytes: int) -> _Budget:
    if threads is not None and threads < 1:
        raise UserError(f"threads is {threads}: it must be 1 or more")
    if memory_limit_bytes < LEAST_MEMORY_BYTES:
        raise UserError(f"memory_limit_bytes is {memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} (64 MiB)")
    return _Budget(threads or len(os.sched_getaffinity(0)), memory_limit_bytes)


def _check_apart(sources: Sequence[Path], output: Path) -> None:
    for source in sources:
        if source.resolve().is_relative_to(output.resolve()):
            raise UserError(f"the input {source} lies inside the output {output}: name another output")


def _read(
    sources: Sequence[Path],
    folder: Path,
    spool: Path,
    options: _Options,
    budget: _Budget,
    report: Callable[[ProgressUpdate], None],
) -> Ingested:
    total = sum(source.stat().st_size for source in sources)
    return Ingestion(
        sources,
        folder,
        spool,
        block_bytes=budget.block_bytes,
        threads=budget.threads,
        max_rejected=options.max_rejected,
        report=lambda bytes_done, rows: report(ProgressUpdate("read", bytes_done, total, rows)),
    ).run()


@dataclass(frozen=True)
class _Feature:
    """One categorical feature, once its ids are known."""

    name: str
    num_embeddings: int
    lookup: LookupTables
    vocabulary: Vocabulary | None


def _map_features(
    ingested: Ingested,
    folder: Path,
    spool: Path,
    train_rows: int,
    options: _Options,
    budget: _Budget,
    report: Callable[[ProgressUpdate], None],
) -> list[_Feature]:
    if options.hash_size is None:
        (folder / "vocabulary").mkdir()

    def map_feature(index: int) -> _Feature:
        name = CRITEO_CATEGORICAL[index]
        scratch = spool / name
        scratch.mkdir()
        id_map, vocabulary = _id_map(ingested, index, name, folder, scratch, train_rows, options, budget)
        lookup = write_lookup_tables(ingested.blocks, index, id_map, spool / f"{name}.lookup")
        num_embeddings = id_map.num_embeddings
        del id_map
        shutil.rmtree(scratch)
        return _Feature(name, num_embeddings, lookup, vocabulary)

    spool_bytes = sum(block.num_bytes for block in ingested.blocks)
    features: dict[int, _Feature] = {}
    with _pool(budget.threads) as pool:
        futures = {pool.submit(map_feature, index): index for index in _largest_first(ingested)}
        for future in as_completed(futures):
            features[futures[future]] = future.result()
            share = len(features) / len(futures)
            report(ProgressUpdate("vocabulary", int(spool_bytes * share), spool_bytes, int(ingested.num_rows * share)))
    return [features[index] for index in range(len(CRITEO_CATEGORICAL))]


def _largest_first(ingested: Ingested) -> list[int]:
    """Features by their distinct keys, so that the threads end at about the same time."""
    keys = [sum(block.num_keys[index] for block in ingested.blocks) for index in range(len(CRITEO_CATEGORICAL))]
    return sorted(range(len(keys)), key=lambda index: -keys[index])


def _id_map(
    ingested: Ingested,
    index: int,
    name: str,
    folder: Path,
    scratch: Path,
    train_rows: int,
    options: _Options,
    budget: _Budget,
) -> tuple[IdMap, Vocabulary | None]:
    if options.hash_size is not None:
        return HashMap(options.hash_size, options.hash_seed), None
    file = f"vocabulary/{name}.parquet"
    id_map, counts = build_vocabulary(
        ingested.blocks, index, train_rows, options.min_count, folder / file, scratch, budget.vocabulary_entries
    )
    return id_map, _vocabulary(file, counts)


def _vocabulary(file: str, counts: FeatureCounts) -> Vocabulary:
    return Vocabulary(file, counts.num_ids, counts.num_dropped, counts.rows_dropped, counts.rows_missing)


def _write(
    writer: FileWriter, bounds: Sequence[int], budget: _Budget, report: Callable[[ProgressUpdate], None]
) -> dict[str, Split]:
    plans = [
        plan
        for name, start, stop in zip(SPLIT_NAMES, bounds[:-1], bounds[1:], strict=True)
        for plan in plan_files(name, start, stop)
    ]
    for name in SPLIT_NAMES:
        (writer.folder / name).mkdir()
    written: dict[FilePlan, tuple[DataFile, int]] = {}
    row_bytes = sum(block.num_bytes for block in writer.blocks) // bounds[-1]
    with _pool(budget.writers) as pool:
        futures: dict[Future[tuple[DataFile, int]], FilePlan] = {
            pool.submit(writer.write, plan): plan for plan in sorted(plans, key=lambda plan: plan.start - plan.stop)
        }
        for future in as_completed(futures):
            written[futures[future]] = future.result()
            rows = sum(file.num_rows for file, _ in written.values())
            report(ProgressUpdate("write", rows * row_bytes, bounds[-1] * row_bytes, rows))
    return {name: _split([written[plan] for plan in plans if plan.split == name]) for name in SPLIT_NAMES}


def _split(files: Sequence[tuple[DataFile, int]]) -> Split:
    num_rows = sum(file.num_rows for file, _ in files)
    positives = sum(count for _, count in files)
    return Split(num_rows, positives / num_rows if num_rows else None, tuple(file for file, _ in files))


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that, when one fails, start nothing more."""
    pool = ThreadPoolExecutor(threads, "distembed-prepare")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _full_disk_explained(sources: Sequence[Path], output: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and "No space left" not in str(error):
            raise
        folder = Path(os.path.realpath(output)).parent
        raise RunError(
            f"the disk of {folder} is full: {shutil.disk_usage(folder).free >> 20} MiB are free, about "
            f"{_needed_bytes(sources) >> 20} MiB are needed while preparing (a third of it for the dataset). "
            "Nothing was left behind; free some space or name an output elsewhere"
        ) from error


def _needed_bytes(sources: Sequence[Path]) -> int:
    """Spool and dataset together are about as large as the text; gzip makes Criteo's text about 3 times smaller."""
    return sum(source.stat().st_size * (3 if source.suffix == ".gz" else 1) for source in sources)
