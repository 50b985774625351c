"""Rows of any kind to a Parquet dataset that the reader reads.

Three passes, each with bounded memory, and each a stage of tasks that threads or a cluster run (``work.py``):

1. ``read``: the text is parsed once, a part of an input a task (``ingest.py``), and each block is spooled as numbers,
   and as codes into its own lists of keys;
2. ``vocabulary``: feature by feature, distinct keys are counted over the training rows and get ids
   (``feature_ids.py``), and what transforms of numbers learn is learnt (``learnt_numbers.py``); meanwhile the checksums
   of inputs that were cut into parts are taken;
3. ``write``: codes are exchanged for ids and written as Parquet, file by file (``write_parquet.py``).

Between the first two, the command itself finds the times at which splits begin and counts the rows of each split. After
the third, it writes the manifest.

The dataset appears under its name when it is complete, and not before (``staging.py``). Its bytes depend on the rows
and the options alone: not on the engine and its threads, the memory, or how the rows are compressed.

Trade-off: the spool takes about 0.4 of the size of Criteo's text on the output's disk while it runs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distembed import __version__
from distembed.data.dataset.manifest import DataFile, Manifest, Vocabulary
from distembed.data.dataset.pieces import PIECE
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import Part, RowSource
from distembed.data.prepare.count import Database
from distembed.data.prepare.dataset_columns import ColumnsLearnt, DatasetColumns
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.ingest import Ingested, PartFound, PartReader
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.notes import notes_on_rows
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.row_splits import (
    RowSplits,
    SplitColumn,
    count_rows,
    row_rule,
    split_times,
    time_column,
)
from distembed.data.prepare.split import SplitRule
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.prepare.staging import require_outside
from distembed.data.prepare.work import Advance, Work, resumable_work, work_purpose
from distembed.data.prepare.write_parquet import FilePlan, FileWriter, WrittenFile, plan_files, written_split
from distembed.errors import UserError
from distembed.files import replaced_file

_UNPACKED_RATIO = 8
"""Bytes of rows in a byte of a compressed input, at most, where it is asked whether the input is small."""
PART_BYTES = 1 << 29
"""Bytes of a plain input that are read as one part: what a kill costs, and what one worker reads at a time."""


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
    """Prepares rows of any kind.

    Args:
        source: The inputs, and how their rows are parsed.
        output: Dataset folder to make, or URL of one; then ``limits.work`` is where the work is done.
        options: What the dataset's bytes depend on; shares 0.8, 0.1, 0.1 unless given.
        limits: Memory and threads to use; 2 GiB and every processor unless given.
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then, in the caller's thread.
        note: Function that is told in a sentence what should be known of the input.

    Returns:
        The manifest that was written.

    Raises:
        UserError: The input cannot be read, or is not one of such rows. Nothing was written.
        RunError: The disk is full. Nothing was left behind.
    """
    options, limits = options or PrepareOptions(), limits or ResourceLimits()
    destination = Destination.of(output, limits.work, overwrite)
    require_outside([each.place for each in source.inputs], output)
    row_rule(SplitRule.parse(options.split), source.layout, [0], ())  # refuses a rule whose columns rows do not have
    base = None if options.vocabulary is None else Base.load(options.vocabulary, options.grow)
    if base is not None:
        base.require_fits(source.layout)
    purpose = work_purpose(source, options, limits, PART_BYTES, base)
    with resumable_work(destination, purpose, limits, report=progress, note=note) as (folder, work):
        return Preparation(source, options, limits, folder, destination, base).run(work, note)


@dataclass(frozen=True)
class Preparation:
    """One preparation.

    Attributes:
        source: The inputs, and how their rows are parsed.
        options: What the dataset's bytes depend on.
        limits: Memory and threads to use.
        folder: Dataset folder that is being written.
        destination: Where its files go.
        base: Dataset whose ids are applied, if there is one.
    """

    source: RowSource
    options: PrepareOptions
    limits: ResourceLimits
    folder: Path
    destination: Destination
    base: Base | None

    @property
    def rule(self) -> SplitRule:
        """How rows are divided."""
        return SplitRule.parse(self.options.split)

    def run(self, work: Work, note: NoteCallback) -> Manifest:
        """Does all stages, and returns the manifest that was written.

        Args:
            work: The stages' tasks and results.
            note: Function that is told what was found in the inputs besides rows.
        """
        parts = self.source.parts(PART_BYTES)
        ingested = self._read(work, parts)
        rejected = ingested.rejected(self.folder, self.options.max_rejected)
        for found in ingested.notes():
            note(found)
        blocks = ingested.blocks()
        splits = self._splits(work, ingested, blocks)
        for found in notes_on_rows(blocks):
            note(found)
        memory_bytes = self.limits.counting_bytes
        columns = DatasetColumns(self.source.layout, self.base, memory_bytes, self.folder, work.folder, blocks, splits)
        learnt, checksums = self._learn(work, columns, [part.source for part in parts if not part.is_whole])
        schema = columns.schema(learnt)
        outputs = columns.outputs(learnt)
        writer = FileWriter(self.folder, self.destination, outputs, schema.label, schema.weight, blocks, splits)
        files = self._write(work, writer)
        manifest = Manifest(
            schema=schema,
            splits={name: written_split(of_split) for name, of_split in files.items()},
            preparation={**self.options.recorded, **columns.recorded(learnt)},
            vocabularies={
                name: Vocabulary(**each["vocabulary"]) for name, each in learnt.items() if each["vocabulary"]
            },
            sources=tuple(ingested.source_files(checksums)),
            rejected=rejected,
            tool_version=__version__,
        )
        self._finish(manifest, files)
        return Manifest.load(self.folder)

    def _read(self, work: Work, parts: Sequence[Part]) -> Ingested:
        """Reads all parts into the spool."""
        spool, by_column = work.folder / "blocks", SplitColumn.of(self.source.layout, self.rule)
        _remove_abandoned(work.folder, spool)
        at_once = self._parts_at_once(parts)
        threads = 1 if at_once > 1 else self.limits.num_threads
        reader = PartReader(self.source, spool, self.options.max_rejected, by_column, self.limits.block_bytes, threads)
        sizes = [each.num_bytes for each in self.source.inputs]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        do = partial(_read_part, reader, parts)
        results = work.run_stage("read", list(map(str, range(len(parts)))), do, threads=at_once, total_bytes=total)
        return Ingested(self.source, parts, [PartFound.from_json(each) for each in results.values()], spool)

    def _parts_at_once(self, parts: Sequence[Part]) -> int:
        """Returns how many parts are read at a time: several where each is a block or two, which threads cannot share.

        Two blocks of each are then in memory at a time.
        """
        inputs = self.source.inputs
        whole = [inputs[part.source] for part in parts if part.is_whole]
        sizes = [(each.num_bytes or 0) * (_UNPACKED_RATIO if each.is_compressed else 1) for each in whole]
        is_known = len(whole) == len(parts) and all(each.num_bytes is not None for each in whole)
        if not is_known or max(sizes, default=0) > 2 * self.limits.block_bytes:
            return 1
        return max(1, min(len(parts), self.limits.num_threads // 2 + 1))

    def _splits(self, work: Work, ingested: Ingested, blocks: Sequence[SpooledBlock]) -> RowSplits:
        """Returns which rows are in which split.

        Raises:
            UserError: No row trains.
        """
        rule = self.rule
        times: tuple[int, ...] = ()
        if rule.needs_time:
            column = time_column(self.source.layout, rule)
            with Database(work.folder / "times", self.limits.counting_bytes) as database:
                times = split_times(blocks, column, rule, database)
        by_row = row_rule(rule, self.source.layout, ingested.source_rows(), times)
        splits = RowSplits(rule.names, by_row, count_rows(by_row, len(rule.names), blocks))
        if rule.trains and not splits.num_rows[0]:
            total = sum(block.num_rows for block in blocks)
            raise UserError(
                f"the training part has no rows: the input has only {total}, of which --split {self.options.split} "
                "leaves none; give more rows, or another split"
            )
        return splits

    def _learn(
        self, work: Work, columns: DatasetColumns, cut_sources: Sequence[int]
    ) -> tuple[ColumnsLearnt, dict[int, str]]:
        """Returns what is learnt of each column, and the checksums of inputs that were cut into parts."""
        groups = {f"columns {number}": group for number, group in enumerate(columns.groups())}
        inputs = {f"input {number}": number for number in sorted(set(cut_sources))}
        total_bytes = sum(block.num_bytes for block in columns.blocks)
        steps = np.arange(len(groups) + 1)
        num_bytes, num_rows = (
            np.diff(total * steps // max(1, len(groups))).tolist()
            for total in (total_bytes, sum(columns.splits.num_rows))
        )
        done = dict(zip(groups, zip(num_bytes, num_rows, strict=True), strict=True))
        do = partial(_learn, self.source, columns, inputs, groups, done)
        at_once = self.limits.num_counters
        results = work.run_stage("vocabulary", [*inputs, *groups], do, threads=at_once, total_bytes=total_bytes)
        found = {name: learnt for task in groups for name, learnt in results[task].items()}
        learnt = {name: found[name] for name in columns.learnt_columns}
        return learnt, {number: results[task] for task, number in inputs.items()}

    def _write(self, work: Work, writer: FileWriter) -> dict[str, list[WrittenFile]]:
        """Writes the files of all splits, several at a time."""
        plans: dict[str, FilePlan] = {}
        for name, num_rows in zip(writer.splits.names, writer.splits.num_rows, strict=True):
            plans |= {plan.path: plan for plan in plan_files(name, 0, num_rows, writer.group_rows)}
            for folder in (self.folder, work.folder / "pieces"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        row_bytes = sum(block.num_bytes for block in writer.blocks) // sum(writer.splits.num_rows)
        self.destination.remove_manifest()
        do = partial(_write_file, writer, work.folder / "pieces", plans, row_bytes)
        largest_first = sorted(plans, key=lambda path: plans[path].start - plans[path].stop)
        total = sum(writer.splits.num_rows) * row_bytes
        results = work.run_stage("write", largest_first, do, threads=self.limits.num_writers, total_bytes=total)
        files: dict[str, list[WrittenFile]] = {name: [] for name in writer.splits.names}
        for path, plan in plans.items():
            result, found = results[path], np.fromfile(work.folder / "pieces" / path, PIECE)
            file = DataFile(**result["file"])
            files[plan.split].append(WrittenFile(file, result["label_sum"], found, result["weight_sum"]))
        return files

    def _finish(self, manifest: Manifest, files: dict[str, list[WrittenFile]]) -> None:
        """Writes checksums and the manifest."""
        written = {one.file.path: one.pieces for split in files.values() for one in split}
        manifest.save(self.folder, written)
        self.destination.finish(self.folder, list(written))


def _remove_abandoned(folder: Path, spool: Path) -> None:
    """Removes the folders of tasks that were killed before their result was written."""
    results = (json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("results/read/*.json"))
    finished = {each["result"]["folder"] for each in results}
    for path in (*spool.glob("part-*"), *folder.glob("learning-*")):
        if path.name not in finished:
            shutil.rmtree(path, ignore_errors=True)


def _read_part(reader: PartReader, parts: Sequence[Part], task: str, advance: Advance) -> Any:
    return reader.read(int(task), parts[int(task)], advance).to_json()


def _learn(
    source: RowSource,
    columns: DatasetColumns,
    inputs: Mapping[str, int],
    groups: Mapping[str, Sequence[str]],
    done: Mapping[str, tuple[int, int]],
    task: str,
    advance: Advance,
) -> Any:
    if task in inputs:
        return source.checksum(inputs[task])
    learnt = columns.learn(groups[task])
    advance(*done[task])
    return learnt


def _write_file(
    writer: FileWriter,
    pieces: Path,
    plans: Mapping[str, FilePlan],
    row_bytes: int,
    task: str,
    advance: Advance,
) -> Any:
    written = writer.write(plans[task])
    with replaced_file(pieces / task) as path:
        written.pieces.tofile(path)
    advance(written.file.num_rows * row_bytes, written.file.num_rows)
    return {"file": asdict(written.file), "label_sum": written.label_sum, "weight_sum": written.weight_sum}
