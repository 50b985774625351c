"""Rows of any kind to a Parquet dataset that the reader reads, and lines of text on the result.

Three passes, each in bounded memory, and each a stage of tasks that threads or a cluster run (``work.py``)::

    read         a part of an input a task: text is parsed once, and each block is spooled as numbers, and as codes
                 into its own list of keys (ingest.py)
    vocabulary   a group of columns a task: keys of training rows are counted and get ids, and transforms of numbers
                 are learnt (dataset_columns.py, feature_ids.py); or the checksum of an input in several parts
    write        a file a task: codes become ids and are written as Parquet (write_parquet.py)

Between the first two, this process finds where the splits begin and counts their rows. The dataset appears when it is
complete (``staging.py``). Its bytes depend on the rows and the options alone: not on the engine, the memory, or how the
rows are compressed. Trade-off: the spool takes about 0.4 of the size of Criteo's text on the output's disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.base.version import __version__
from distembed.data.dataset.manifest import PIECE, DataFile, Manifest, Split, Vocabulary
from distembed.data.dataset.schema import ITEM, USER, Label, Schema
from distembed.data.prepare.dataset_columns import ColumnsLearnt, DatasetColumns
from distembed.data.prepare.feature_ids import Base
from distembed.data.prepare.ingest import Ingested, InputPart, PartFound, PartReader, RawInput, RowSource
from distembed.data.prepare.options import NoteCallback, PrepareOptions, ProgressCallback, ResourceLimits, ignore
from distembed.data.prepare.spool import RowSplits, row_splits, split_column
from distembed.data.prepare.staging import Destination, require_outside
from distembed.data.prepare.work import Advance, Work, resumable_work
from distembed.data.prepare.write_parquet import (
    FilePlan,
    FileWriter,
    WrittenFile,
    plan_files,
    rows_per_group,
    written_split,
)
from distembed.data.remote import join_url


def describe_dataset(manifest: Manifest, dataset_dir: str | os.PathLike[str]) -> Iterator[str]:
    """Yields lines of text on a prepared dataset: rows of each split, and rows that were left out."""
    for name, split in manifest.splits.items():
        yield ", ".join([f"{name}: {split.num_rows:,} rows", *_label_texts(manifest.schema, split)])
    if USER in manifest.vocabularies and ITEM in manifest.vocabularies:
        users, items = (manifest.vocabularies[name].num_ids for name in (USER, ITEM))
        yield f"{users:,} users, {items:,} items"
    if "base" in manifest.preparation:
        yield _applied_text(manifest)
    left_out = manifest.preparation.get("left_out", {})
    if left_out:
        yield f"left out: {', '.join(f'{count:,} {_LEFT_OUT[reason]}' for reason, count in left_out.items())}"
    total = sum(source.num_rows for source in manifest.sources)
    rejected = manifest.rejected
    if not rejected.num_rows or rejected.file is None:
        yield f"none of {total:,} rows were rejected"
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.by_reason.items())
    yield (
        f"{rejected.num_rows:,} of {total:,} rows were rejected, being malformed ({reasons}): "
        f"they are listed in {join_url(str(dataset_dir), rejected.file)}"
    )


def _label_texts(schema: Schema, split: Split) -> Iterator[str]:
    """Yields the mean of each label of a split, and in how many rows one of several labels is missing."""
    unweighted = "" if schema.weight is None else "unweighted "
    for label, summary in split.label_summaries(schema).items():
        mean = "none" if summary.mean is None else f"{summary.mean:.4f}"
        kind = "label rate" if label.kind == "binary" else "mean label"
        missing = split.num_rows - summary.num_rows
        which = f" of {label.name}" if schema.labels else ""
        yield f"{unweighted}{kind}{which} {mean}{f' ({missing:,} missing)' if missing else ''}"


_LEFT_OUT = {
    "below_rating": "with a lower rating",
    "duplicates": "of a user with the same item",
    "outside_core": "of users and items with too few",
}
"""Texts for interactions that a dataset leaves out, by the reason."""


def _applied_text(manifest: Manifest) -> str:
    base, entries = manifest.preparation["base"], manifest.vocabularies
    new = sum(entry.num_ids - base["num_ids"][name] for name, entry in entries.items())
    counts = {
        name: sum((entry.rows_dropped_by_split or {}).get(name, 0) for entry in entries.values())
        for name in manifest.splits
    }
    grown = f"{new:,} values have new ids behind the known ones, and " if base["grow"] else ""
    times = ", ".join(f"{count:,} times in {name}" for name, count in counts.items())
    return f"{grown}values are out of the vocabulary that was applied {times}"


def dataset_warnings(manifest: Manifest) -> Iterator[str]:
    """Yields warnings: one label only, splits without rows, vocabularies without ids."""
    for label in manifest.schema.all_labels:
        yield from _label_warnings(manifest, label)
    if empty := [name for name, split in manifest.splits.items() if not split.num_rows]:
        yield f"no rows are in {enumerate_names(empty)}: give more rows, or another --split"
    nothing = {name: entry for name, entry in manifest.vocabularies.items() if not entry.num_ids}
    if missing := [name for name, entry in nothing.items() if not entry.num_dropped]:
        yield f"vocabularies without ids, since no training row has a value: {enumerate_names(missing)}"
    if rare := [name for name in nothing if name not in missing]:
        least = manifest.preparation.get("min_count", "min_count")  # of tables, each column has its own
        yield (
            f"vocabularies without ids, since every value was seen fewer than {least} times in training: "
            f"{enumerate_names(rare)}; lower --min-count, or give more rows"
        )


def _label_warnings(manifest: Manifest, label: Label) -> Iterator[str]:
    """Yields warnings on a label with one value only, or that no row has."""
    summaries = {name: split.label_summaries(manifest.schema)[label] for name, split in manifest.splits.items()}
    known = {name: summary.mean for name, summary in summaries.items() if summary.mean is not None}
    which = f"label {label.name!r}" if manifest.schema.labels else "label"
    if manifest.schema.labels and not known:
        yield f"no row has the {which}: a model learns nothing of it"
    if label.kind != "binary":
        return
    one_value = {name: int(mean) for name, mean in known.items() if mean in (0, 1)}
    values = set(one_value.values())
    if len(values) == 1 and len(one_value) == len(known):
        yield f"every {which} is {values.pop()}: a model learns nothing but this"
    else:
        yield from (f"every {which} of {name} is {value}: its AUC is not defined" for name, value in one_value.items())


_UNPACKED_RATIO = 8  # most bytes of rows in a byte of a compressed input, to estimate whether it is small
PART_BYTES = 1 << 29  # bytes of a plain input that are read as one part, by one worker; a kill costs at most one part


def prepare_rows(
    source: RowSource,
    output: str | os.PathLike[str],
    options: PrepareOptions | None = None,
    limits: ResourceLimits | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Manifest:
    """Prepares rows of any kind, and returns the manifest that was written.

    Args:
        source: The inputs, and how their rows are parsed.
        output: Dataset folder to make, or URL of one; then ``limits.work`` is where the work is done.
        options: Options that the dataset's bytes depend on.
        limits: Memory and threads to use.
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then, in the caller's thread.
        note: Function that is told notes on the input, a sentence each.
    """
    options, limits = options or PrepareOptions(), limits or ResourceLimits()
    destination = Destination.of(output, limits.work, overwrite)
    require_outside([raw_input.place for raw_input in source.inputs], output)
    split_column(options.rule, source.layout)  # refuses a rule whose columns rows do not have
    base = None if options.vocabulary is None else Base.load(options.vocabulary, options.grow)
    if base is not None:
        base.require_fits(source.layout)
    purpose = _purpose(source, options, limits, base)
    with resumable_work(destination, purpose, limits, report=progress, note=note) as (folder, work):
        return _Preparation(source, options, limits, folder, destination, base, work).run(note)


def _purpose(
    source: RowSource, options: PrepareOptions, limits: ResourceLimits, base: Base | None
) -> dict[str, Any] | None:
    """Returns the values that results of tasks depend on: a command resumes another of equal purpose.

    Returns None if an input is a pipe, which cannot be read again; refuses pipes on a cluster.
    """
    pipes = [raw_input for raw_input in source.inputs if raw_input.num_bytes is None]
    if pipes and limits.is_cluster:
        raise UserError(
            f"engine (--engine) is {limits.engine}, and {pipes[0].place} has no known size, as pipes have none: its "
            "workers cannot read it; use --engine threads, or name a file"
        )
    if pipes:
        return None
    return {
        "version": __version__,
        "inputs": [asdict(raw) | {"version": _input_version(raw)} for raw in source.inputs],
        "layout": repr(source.layout),
        "options": repr(options),
        "base": None if base is None else base.recorded,
        "block_bytes": _block_bytes(source, limits),
        "part_bytes": PART_BYTES,
    }


def _block_bytes(source: RowSource, limits: ResourceLimits) -> int:
    return limits.block_bytes(any(column.is_list for column in source.layout.ids))


def _input_version(described: RawInput) -> str:
    """Returns a text that changes when an input does."""
    try:
        return described.version or str(os.stat(described.place).st_mtime_ns)
    except OSError:
        return ""  # a server that does not say


@dataclass(frozen=True)
class _Preparation:
    """Prepares one dataset: counts values, assigns ids, and writes the files."""

    source: RowSource
    options: PrepareOptions
    limits: ResourceLimits
    folder: Path  # of the dataset that is being written
    destination: Destination
    base: Base | None  # dataset whose ids are applied
    work: Work

    def run(self, note: NoteCallback) -> Manifest:
        parts = self.source.parts(PART_BYTES)
        ingested = self._read(parts)
        rejected = ingested.rejected(self.folder, self.options.max_rejected)
        for sentence in ingested.notes():
            note(sentence)
        splits = self._splits(ingested)
        memory_bytes, layout = self.limits.counting_bytes, self.source.layout
        columns = DatasetColumns(layout, self.base, memory_bytes, self.folder, self.work.folder, splits)
        learnt, checksums = self._learn(columns, sorted({part.source for part in parts if not part.is_whole}))
        schema, group_rows = columns.schema(learnt), rows_per_group(columns.mean_values())
        files = self._write(
            FileWriter(self.folder, self.destination, schema, columns.outputs(learnt), splits, group_rows)
        )
        entries = {name: column["vocabulary"] for name, column in learnt.items() if column["vocabulary"]}
        manifest = Manifest(
            schema=schema,
            splits={name: written_split(split_files, schema) for name, split_files in files.items()},
            preparation={**self.options.recorded, **columns.recorded(learnt)},
            vocabularies={name: Vocabulary(**entry) for name, entry in entries.items()},
            sources=tuple(ingested.source_files(checksums)),
            rejected=rejected,
            tool_version=__version__,
        )
        pieces_by_file = {file.file.path: file.pieces for split in files.values() for file in split}
        manifest.save(self.folder, pieces_by_file)
        self.destination.finish(self.folder, list(pieces_by_file))
        return Manifest.load(self.folder)

    def _read(self, parts: Sequence[InputPart]) -> Ingested:
        spool = self.work.folder / "blocks"
        _remove_abandoned(self.work.folder, spool)
        block_bytes = _block_bytes(self.source, self.limits)
        at_once = self._parts_at_once(parts, block_bytes)
        threads = 1 if at_once > 1 else self.limits.num_threads
        reader = PartReader(self.source, spool, self.options.max_rejected, self.options.rule, block_bytes, threads)
        sizes = [raw_input.num_bytes for raw_input in self.source.inputs]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        results = self.work.run_stage("read", list(enumerate(parts)), reader.read, threads=at_once, total_bytes=total)
        by_input: list[list[PartFound]] = [[] for _ in self.source.inputs]
        for part, result in zip(parts, results, strict=True):
            by_input[part.source].append(PartFound(**result))
        return Ingested(self.source, spool, by_input)

    def _parts_at_once(self, parts: Sequence[InputPart], block_bytes: int) -> int:
        """Returns how many parts are read at a time: several only where each is a block or two."""
        for part in parts:
            raw_input = self.source.inputs[part.source]
            ratio = _UNPACKED_RATIO if raw_input.is_compressed else 1
            if not part.is_whole or raw_input.num_bytes is None or raw_input.num_bytes * ratio > 2 * block_bytes:
                return 1
        return max(1, min(len(parts), self.limits.num_threads // 2 + 1))

    def _splits(self, ingested: Ingested) -> RowSplits:
        rule, source_rows = self.options.rule, ingested.source_rows
        folder, memory_bytes = self.work.folder / "times", self.limits.counting_bytes
        splits = row_splits(rule, ingested.blocks(), source_rows, folder, memory_bytes)
        if not splits.num_rows[0] and rule.trains:  # counted here, before workers take the splits
            raise UserError(
                f"the training part has no rows: the input has only {sum(source_rows)}, of which --split "
                f"{self.options.split} leaves none; give more rows, or another split"
            )
        return splits

    def _learn(self, columns: DatasetColumns, cut_sources: Sequence[int]) -> tuple[ColumnsLearnt, dict[int, str]]:
        """Learns all columns, and hashes ``cut_sources``, the inputs in several parts: no part reads all bytes."""
        groups = columns.groups()
        total_bytes = sum(block.num_bytes for block in columns.splits.blocks)
        do = partial(_learn_task, self.source, columns, groups, total_bytes)
        tasks = [("input", number) for number in cut_sources] + [("columns", number) for number in range(len(groups))]
        threads = self.limits.num_counters
        results = self.work.run_stage("vocabulary", tasks, do, threads=threads, total_bytes=total_bytes)
        learnt = {name: column for group in results[len(cut_sources) :] for name, column in group.items()}
        return columns.in_order(learnt), dict(zip(cut_sources, results, strict=False))

    def _write(self, writer: FileWriter) -> dict[str, list[WrittenFile]]:
        """Writes all files, the largest first, and returns them by split in the order of their rows."""
        names, counts = writer.splits.rule.names, writer.splits.num_rows
        for name in names:
            (self.folder / name).mkdir(exist_ok=True)
        plans = [
            plan
            for name, num_rows in zip(names, counts, strict=True)
            for plan in plan_files(name, num_rows, writer.group_rows)
        ]
        plans.sort(key=lambda plan: plan.start - plan.stop)  # the largest first
        row_bytes = sum(block.num_bytes for block in writer.splits.blocks) // sum(counts)
        self.destination.remove_manifest()
        do, total = partial(_write_file, writer, row_bytes), sum(counts) * row_bytes
        results = self.work.run_stage("write", plans, do, threads=self.limits.num_writers, total_bytes=total)
        files: dict[str, list[WrittenFile]] = {name: [] for name in names}
        for plan, result in sorted(zip(plans, results, strict=True), key=lambda planned: planned[0].start):
            pieces = np.frombuffer(bytes.fromhex(result["pieces"]), PIECE)
            files[plan.split].append(WrittenFile(**{**result, "file": DataFile(**result["file"]), "pieces": pieces}))
        return files


def _remove_abandoned(folder: Path, spool: Path) -> None:
    """Removes the folders of interrupted tasks: no file of results in ``folder`` names them."""
    results = (json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("results/read/*.json"))
    finished = {task_result["result"]["folder"] for task_result in results}
    for path in (*spool.glob("part-*"), *folder.glob("learning-*")):
        if path.name not in finished:
            shutil.rmtree(path, ignore_errors=True)


def _learn_task(
    source: RowSource,
    columns: DatasetColumns,
    groups: Sequence[Sequence[str]],
    total_bytes: int,
    task: tuple[str, int],
    advance: Advance,
) -> Any:
    """Returns an input's checksum, or a group's ColumnsLearnt; each of n groups reports 1/n of the stage's work."""
    kind, number = task
    if kind == "input":
        return source.checksum(number)
    learnt = columns.learn(groups[number])
    totals = total_bytes, sum(columns.splits.num_rows)
    advance(*(total * (number + 1) // len(groups) - total * number // len(groups) for total in totals))
    return learnt


def _write_file(writer: FileWriter, row_bytes: int, plan: FilePlan, advance: Advance) -> dict[str, Any]:
    written_file = writer.write(plan)
    advance(written_file.file.num_rows * row_bytes, written_file.file.num_rows)
    return {**vars(written_file), "pieces": written_file.pieces.tobytes().hex()}
