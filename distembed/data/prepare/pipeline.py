"""Rows of any kind to a Parquet dataset that the reader reads.

Three passes, each with bounded memory, and each a stage of tasks that any number of processes share (``work.py``):

1. ``read``: the text is parsed once, a part of an input a task (``ingest.py``), and each block is spooled as numbers,
   and as codes into its own lists of keys;
2. ``vocabulary``: feature by feature, distinct keys are counted over the training rows and get ids
   (``feature_ids.py``), and what transforms of numbers learn is learnt (``learnt_numbers.py``); meanwhile the checksums
   of inputs that were cut into parts are taken;
3. ``write``: codes are exchanged for ids and written as Parquet, file by file (``write_parquet.py``).

Between them are small stages: ``times`` finds the times at which splits begin, ``splits`` counts the rows of each where
a column says which they are in, and ``finish`` writes the manifest.

The dataset appears under its name when it is complete, and not before (``staging.py``). Its bytes depend on the rows
and the options alone: not on the number of processes and threads, the memory, or how the rows are compressed.

Trade-off: the spool takes about 0.7 of the text's size on the output's disk while it runs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed import __version__
from distembed.data.dataset.manifest import DataFile, Manifest, Vocabulary
from distembed.data.dataset.pieces import PIECE
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import Part, RowSource
from distembed.data.prepare.dataset_columns import DatasetColumns, emptied_folder
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.ingest import Ingested, PartFound, PartReader
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.notes import notes_on_rows
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.processes import Worker, run_in_processes
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.purpose import explained_output, work_purpose
from distembed.data.prepare.resumable import resumable_work
from distembed.data.prepare.row_splits import (
    ByPlace,
    RowRule,
    RowSplits,
    SplitColumn,
    count_rows,
    require_split_columns,
    row_rule,
    split_times,
    time_column,
)
from distembed.data.prepare.space import disk_is_full, require_space
from distembed.data.prepare.split import SplitRule
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.prepare.work import Work
from distembed.data.prepare.write_parquet import FilePlan, FileWriter, WrittenFile, plan_files, written_split
from distembed.errors import UserError
from distembed.files import full_disk_explained

_UNPACKED_RATIO = 8
"""Bytes of rows in a byte of a compressed input, at most, where it is asked whether the input is small."""
_COUNTED_BLOCKS = 64
"""Blocks whose rows are counted by one task."""

PART_BYTES = 1 << 29
"""Bytes of a plain input that are read as one part: what a kill costs, and what one process reads at a time."""


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
        RunError: The disk is full, or will not have room. Nothing was left behind.
    """
    options, limits = options or PrepareOptions(), limits or ResourceLimits()
    destination = Destination.of(output, limits.work, overwrite)
    program = functools.partial(_prepare, source, destination, options, limits)
    return run_in_processes(program, limits.processes, limits.node, limits.num_nodes, progress, note)


def _prepare(
    source: RowSource,
    destination: Destination,
    options: PrepareOptions,
    limits: ResourceLimits,
    worker: Worker,
    progress: ProgressCallback,
    note: NoteCallback,
) -> Manifest:
    """Prepares as one process of several."""
    require_split_columns(source.layout, SplitRule.parse(options.split))
    base = None if options.vocabulary is None else Base.load(options.vocabulary, options.grow)
    if base is not None:
        base.require_fits(source.layout)
    purpose = work_purpose(source, options, limits, PART_BYTES, base)
    with (
        explained_output(destination, source, options, base),
        full_disk_explained(
            lambda error: disk_is_full(error, source, destination.path),
            (OSError, pa.ArrowException),
            max_file_size=True,
        ),
        resumable_work(destination, purpose, worker, report=progress, note=note) as (folder, work),
    ):
        if worker.is_first:
            require_space(source, destination.path, limits, note, begun=work.folder.parent)
        return Preparation(source, options, limits, folder, destination, base).run(work, note)


@dataclass(frozen=True)
class Preparation:
    """One preparation; every process that takes part runs it.

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

    def run(self, work: Work, note: NoteCallback) -> Manifest:
        """Does all stages, and returns the manifest that was written.

        Args:
            work: The stages' tasks and results.
            note: Function that is told what was found in the inputs besides rows.
        """
        parts = self.source.parts(PART_BYTES)
        ingested = self._read(work, parts)
        rejected = ingested.rejected(self.folder, self.options.max_rejected, listed=False)
        for found in ingested.notes():
            note(found)
        blocks = ingested.blocks()
        splits = self._splits(work, ingested, blocks)
        for found in notes_on_rows(blocks):
            note(found)
        columns = DatasetColumns(self.source.layout, self.base, self.limits, self.folder, work, blocks, splits)
        cut = sorted({part.source for part in parts if not part.is_whole})
        beside = {f"input {number}": functools.partial(self.source.checksum, number) for number in cut}
        learnt, checksums = columns.learn(beside)
        schema = columns.schema(learnt)
        files = self._write(
            work, FileWriter(self.folder, columns.outputs(learnt), schema.label, schema.weight, blocks, splits)
        )
        manifest = Manifest(
            schema=schema,
            splits={name: written_split(of_split) for name, of_split in files.items()},
            preparation={**self.options.recorded, **columns.recorded(learnt)},
            vocabularies={
                name: Vocabulary(**each["vocabulary"]) for name, each in learnt.items() if each["vocabulary"]
            },
            sources=tuple(ingested.source_files(dict(zip(cut, checksums, strict=True)))),
            rejected=rejected,
            tool_version=__version__,
        )
        work.run_stage("finish", ["manifest"], lambda _: self._finish(manifest, ingested, files))
        return Manifest.load(self.folder)

    def _read(self, work: Work, parts: Sequence[Part]) -> Ingested:
        """Reads all parts into the spool."""
        spool = work.folder / "blocks"
        by_column = SplitColumn.of(self.source.layout, SplitRule.parse(self.options.split))
        at_once = self._parts_at_once(parts)
        threads = 1 if at_once > 1 else self.limits.num_threads
        reader = PartReader(self.source, spool, self.options.max_rejected, by_column, self.limits.block_bytes, threads)
        numbers = {f"part-{number}": number for number in range(len(parts))}

        def do(task: str) -> Any:
            advance = functools.partial(work.advance, task)
            return reader.read(numbers[task], parts[numbers[task]], advance).to_json()

        sizes = [each.num_bytes for each in self.source.inputs]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        results = work.run_stage("read", list(numbers), do, threads=at_once, total_bytes=total)
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
        rule, times = SplitRule.parse(self.options.split), []
        if rule.needs_time:
            column = time_column(self.source.layout, rule)

            def do(_: str) -> Any:
                return split_times(
                    blocks, column, rule, emptied_folder(work.folder / "times"), self.limits.vocabulary_keys
                )

            times = work.run_stage("times", ["times"], do)["times"]
        by_row = row_rule(rule, self.source.layout, ingested.source_rows(), times)
        splits = RowSplits(rule.names, by_row, self._count_rows(work, by_row, len(rule.names), blocks))
        if rule.trains and not splits.num_rows[0]:
            total = sum(block.num_rows for block in blocks)
            raise UserError(
                f"the training part has no rows: the input has only {total}, of which --split {self.options.split} "
                "leaves none; give more rows, or another split"
            )
        return splits

    def _count_rows(
        self, work: Work, rule: RowRule, num_splits: int, blocks: Sequence[SpooledBlock]
    ) -> NDArray[np.int64]:
        """Returns the number of rows of each block in each split; what has to be read for it is shared by processes."""
        if isinstance(rule, ByPlace):
            return count_rows(rule, num_splits, blocks)
        chunks = {f"blocks-{start}": start for start in range(0, len(blocks), _COUNTED_BLOCKS)}

        def do(task: str) -> Any:
            start = chunks[task]
            return count_rows(rule, num_splits, blocks[start : start + _COUNTED_BLOCKS]).tolist()

        counts = work.run_stage("splits", list(chunks), do, threads=self.limits.num_threads)
        return np.array([each for counted in counts.values() for each in counted], np.int64).reshape(-1, num_splits)

    def _write(self, work: Work, writer: FileWriter) -> dict[str, list[WrittenFile]]:
        """Writes the files of all splits, several at a time."""
        plans: dict[str, FilePlan] = {}
        for name, num_rows in zip(writer.splits.names, writer.splits.num_rows, strict=True):
            plans |= {plan.path: plan for plan in plan_files(name, 0, num_rows, writer.group_rows)}
        pieces = work.folder / "pieces"
        total_rows = sum(writer.splits.num_rows)
        row_bytes = sum(block.num_bytes for block in writer.blocks) // total_rows

        def do(task: str) -> Any:
            for folder in (self.folder, pieces):
                (folder / plans[task].split).mkdir(parents=True, exist_ok=True)
            written = writer.write(plans[task])
            written.pieces.tofile(pieces / task)
            self.destination.move(self.folder, task)
            work.advance(task, written.file.num_rows * row_bytes, written.file.num_rows)
            return {"file": asdict(written.file), "label_sum": written.label_sum, "weight_sum": written.weight_sum}

        if self.destination.is_remote:
            work.run_stage("replace", ["manifest"], lambda _: self.destination.remove_manifest())
        largest_first = sorted(plans, key=lambda path: plans[path].start - plans[path].stop)
        results = work.run_stage(
            "write", largest_first, do, threads=self.limits.num_writers, total_bytes=total_rows * row_bytes
        )
        files: dict[str, list[WrittenFile]] = {name: [] for name in writer.splits.names}
        for path, plan in plans.items():
            result = results[path]
            found = np.fromfile(pieces / path, PIECE)
            file = DataFile(**result["file"])
            files[plan.split].append(WrittenFile(file, result["label_sum"], found, result["weight_sum"]))
        return files

    def _finish(self, manifest: Manifest, ingested: Ingested, files: dict[str, list[WrittenFile]]) -> None:
        """Writes what lists all that was written: the malformed rows, checksums and the manifest."""
        for name in files:
            (self.folder / name).mkdir(exist_ok=True)  # also of a split without rows
        ingested.rejected(self.folder, self.options.max_rejected, listed=True)
        written = {one.file.path: one.pieces for split in files.values() for one in split}
        manifest.save(self.folder, written)
        self.destination.finish(self.folder, list(written))
