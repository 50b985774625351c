"""Rows of any kind to a Parquet dataset that the reader reads.

Three passes, each with bounded memory, and each a stage of tasks that any number of processes share (``work.py``):

1. ``read``: the text is parsed once, a part of an input a task (``ingest.py``), and each block is spooled as numbers,
   and as codes into its own lists of keys;
2. ``vocabulary``: feature by feature, distinct keys are counted over the training rows and get ids
   (``feature_ids.py``), and what transforms of numbers learn is learnt (``learnt_numbers.py``);
3. ``write``: codes are exchanged for ids and written as Parquet, file by file (``write_parquet.py``).

Between them are small stages: ``checksum`` takes the checksums of inputs that were cut into parts, ``times`` finds the
times at which splits begin, and ``finish`` writes the manifest.

The dataset appears under its name when it is complete, and not before (``staging.py``). Its bytes depend on the rows
and the options alone: not on the number of processes and threads, the memory, or how the rows are compressed.

Trade-off: the spool takes about 0.7 of the text's size on the output's disk while it runs.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distembed import __version__
from distembed.data.dataset.manifest import DataFile, Manifest, Vocabulary
from distembed.data.dataset.pieces import PIECE
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import NumberColumn, Part, RowSource
from distembed.data.prepare.feature_ids import (
    FeatureValues,
    LookupTables,
    VocabularyRoom,
    build_vocabulary,
    hash_map,
)
from distembed.data.prepare.ingest import Ingested, PartFound, PartReader
from distembed.data.prepare.learnt_numbers import bin_ids, learn_numbers, num_bins, number_change
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.notes import notes_on_rows
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.output_columns import IdOutput, ListOutput, NumberOutput, OutputColumn
from distembed.data.prepare.processes import Worker, run_in_processes
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.purpose import work_purpose
from distembed.data.prepare.resumable import resumable_work
from distembed.data.prepare.row_splits import RowSplits, SplitColumn, row_rule, split_times, time_column
from distembed.data.prepare.space import disk_is_full, require_space
from distembed.data.prepare.split import SplitRule
from distembed.data.prepare.spool import SpooledBlock, key_columns
from distembed.data.prepare.vocabulary import IdMap
from distembed.data.prepare.work import Work
from distembed.data.prepare.write_parquet import FilePlan, FileWriter, WrittenFile, plan_files, written_split
from distembed.errors import UserError
from distembed.files import full_disk_explained

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", re.ASCII)

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
        output: Dataset folder to make.
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
    program = functools.partial(_prepare, source, Path(output), options, limits, overwrite)
    return run_in_processes(program, limits.processes, limits.node, limits.num_nodes, progress, note)


def _prepare(
    source: RowSource,
    output: Path,
    options: PrepareOptions,
    limits: ResourceLimits,
    overwrite: bool,
    worker: Worker,
    progress: ProgressCallback,
    note: NoteCallback,
) -> Manifest:
    """Prepares as one process of several."""
    SplitColumn.of(source.layout, SplitRule.parse(options.split))
    base = None if options.vocabulary is None else Base.load(options.vocabulary, options.grow)
    if base is not None:
        base.require_fits(source.layout)
    purpose = work_purpose(source, options, limits, PART_BYTES, base)
    with (
        full_disk_explained(
            lambda error: disk_is_full(error, source, output), (OSError, pa.ArrowException), max_file_size=True
        ),
        resumable_work(output, purpose, worker, overwrite=overwrite, report=progress, note=note) as (folder, work),
    ):
        if worker.is_first:
            require_space(source, output, limits, note, begun=work.folder.parent)
        return Preparation(source, options, limits, folder, base).run(work, note)


@dataclass(frozen=True)
class Preparation:
    """One preparation; every process that takes part runs it.

    Attributes:
        source: The inputs, and how their rows are parsed.
        options: What the dataset's bytes depend on.
        limits: Memory and threads to use.
        folder: Dataset folder that is being written.
        base: Dataset whose ids are applied, if there is one.
    """

    source: RowSource
    options: PrepareOptions
    limits: ResourceLimits
    folder: Path
    base: Base | None

    def run(self, work: Work, note: NoteCallback) -> Manifest:
        """Does all stages, and returns the manifest that was written.

        Args:
            work: The stages' tasks and results.
            note: Function that is told what was found in the inputs besides rows.
        """
        parts = self.source.parts(PART_BYTES)
        ingested = self._read(work, parts)
        checksums = self._checksums(work, parts)
        rejected = ingested.rejected(self.folder, self.options.max_rejected, listed=False)
        for found in ingested.notes():
            note(found)
        blocks = ingested.blocks()
        splits = self._splits(work, ingested, blocks)
        for found in notes_on_rows(blocks):
            note(found)
        columns = _Columns(self, blocks, splits, work)
        learnt = columns.learn()
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
            sources=tuple(ingested.source_files(checksums)),
            rejected=rejected,
            tool_version=__version__,
        )
        work.run_stage("finish", ["manifest"], lambda _: self._finish(manifest, ingested, files))
        return Manifest.load(self.folder)

    def _read(self, work: Work, parts: Sequence[Part]) -> Ingested:
        """Reads all parts into the spool."""
        spool = work.folder / "blocks"
        by_column = SplitColumn.of(self.source.layout, SplitRule.parse(self.options.split))
        threads, block_bytes = self.limits.num_threads, self.limits.block_bytes
        reader = PartReader(self.source, spool, self.options.max_rejected, by_column, block_bytes, threads)
        numbers = {f"part-{number}": number for number in range(len(parts))}

        def do(task: str) -> Any:
            advance = functools.partial(work.advance, task)
            return reader.read(numbers[task], parts[numbers[task]], advance).to_json()

        sizes = [each.num_bytes for each in self.source.inputs]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        results = work.run_stage("read", list(numbers), do, total_bytes=total)
        return Ingested(self.source, parts, [PartFound.from_json(each) for each in results.values()], spool)

    def _checksums(self, work: Work, parts: Sequence[Part]) -> list[str | None]:
        """Returns the checksum of each input that was cut into several parts."""
        cut = {f"input-{part.source}": part.source for part in parts if not part.is_whole}
        checksums: list[str | None] = [None] * len(self.source.inputs)
        if cut:
            results = work.run_stage("checksum", list(cut), lambda task: self.source.checksum(cut[task]))
            for task, checksum in results.items():
                checksums[cut[task]] = checksum
        return checksums

    def _splits(self, work: Work, ingested: Ingested, blocks: Sequence[SpooledBlock]) -> RowSplits:
        """Returns which rows are in which split.

        Raises:
            UserError: No row trains.
        """
        rule, times = SplitRule.parse(self.options.split), []
        if rule.needs_time:
            column = time_column(self.source.layout, rule)

            def do(_: str) -> Any:
                return split_times(blocks, column, rule, _emptied(work.folder / "times"), self.limits.vocabulary_keys)

            times = work.run_stage("times", ["times"], do)["times"]
        splits = RowSplits.count(rule.names, row_rule(rule, self.source.layout, ingested.source_rows(), times), blocks)
        if not splits.num_rows[0]:
            total = sum(block.num_rows for block in blocks)
            raise UserError(f"the training part has no rows: the input has only {total}; give more rows")
        return splits

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
            work.advance(task, written.file.num_rows * row_bytes, written.file.num_rows)
            return {"file": asdict(written.file), "label_sum": written.label_sum, "weight_sum": written.weight_sum}

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
        manifest.save(self.folder, {one.file.path: one.pieces for split in files.values() for one in split})


def _emptied(folder: Path) -> Path:
    """Returns the folder, new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


_Learnt = dict[str, dict[str, Any]]
"""By column: ``num_embeddings``, ``mean_ids``, ``vocabulary`` and ``learnt``, each None where it has none."""


@dataclass(frozen=True)
class _Columns:
    """The dataset's columns: what is learnt of each, and what the files and the schema have of it.

    Attributes:
        preparation: The preparation.
        blocks: All blocks.
        splits: Which rows train.
        work: The stages' tasks and results.
    """

    preparation: Preparation
    blocks: Sequence[SpooledBlock]
    splits: RowSplits
    work: Work

    def learn(self) -> _Learnt:
        """Gives ids to the values of every feature and learns transforms, several columns at a time."""
        layout = self.preparation.source.layout
        tasks: dict[str, Callable[[Path], dict[str, Any]]] = {}
        for name, (place, column) in key_columns(layout).items():
            values = FeatureValues(self.blocks, self.splits, place, column)
            tasks[name] = functools.partial(self._map_feature, values)
        for place, number in enumerate(layout.numbers):
            if number.transform != "none":
                tasks[number.name] = functools.partial(self._learn_numbers, place, number)
        names = self._largest_first(list(tasks))
        folders = {name: self.work.folder / f"column-{index:06d}" for index, name in enumerate(names)}
        spool_bytes = sum(block.num_bytes for block in self.blocks)
        num_rows = sum(self.splits.num_rows)

        def do(task: str) -> Any:
            index = names.index(task)
            result = tasks[task](_emptied(folders[task]))
            shutil.rmtree(folders[task])
            self.work.advance(task, *(_share(total, index, len(names)) for total in (spool_bytes, num_rows)))
            return result

        threads = self.preparation.limits.num_threads
        results = self.work.run_stage("vocabulary", names, do, threads=threads, total_bytes=spool_bytes)
        return {name: results[name] for name in tasks}

    def _largest_first(self, names: Sequence[str]) -> list[str]:
        """Returns the columns, those with the most keys first, so that all threads end at about the same time."""
        places = {name: place for name, (place, _) in key_columns(self.preparation.source.layout).items()}
        keys = {
            name: sum(block.shape.num_keys[places[name]] for block in self.blocks) if name in places else 0
            for name in names
        }
        return sorted(names, key=lambda name: -keys[name])

    def _map_feature(self, values: FeatureValues, scratch: Path) -> dict[str, Any]:
        """Gives ids to the values of a feature, and writes the ids of all blocks' codes."""
        column, base = values.column, self.preparation.base
        id_map: IdMap | None = hash_map(column)
        vocabulary = None
        if id_map is None:
            (self.preparation.folder / "vocabulary").mkdir(exist_ok=True)
            file = f"vocabulary/{_file_name(column.name, values.place)}.parquet"
            room = VocabularyRoom(self.preparation.folder, file, scratch, self.preparation.limits.vocabulary_keys)
            applied = None if base is None else base.vocabulary(column.name)
            id_map, vocabulary = build_vocabulary(values, room, applied)
        self._lookup(column.name, id_map.num_embeddings).write(self.blocks, values.place, id_map)
        mean_ids = None
        if column.is_list:
            keeps_mean = base is not None and not base.grows
            mean_ids = (
                base.feature(column.name).mean_ids_per_row if base and keeps_mean else values.mean_values_per_row()
            )
        return {
            "num_embeddings": id_map.num_embeddings,
            "mean_ids": mean_ids,
            "vocabulary": None if vocabulary is None else asdict(vocabulary),
            "learnt": None,
        }

    def _learn_numbers(self, place: int, column: NumberColumn, scratch: Path) -> dict[str, Any]:
        """Learns the transform of a column of numbers."""
        base = self.preparation.base
        if base is not None:
            learnt = base.learnt(column.name)
        else:
            max_keys = self.preparation.limits.vocabulary_keys
            learnt = learn_numbers(self.blocks, self.splits, place, column, scratch, max_keys)
        num_embeddings = num_bins(learnt) if column.role == "bins" else None
        return {"num_embeddings": num_embeddings, "mean_ids": None, "vocabulary": None, "learnt": learnt}

    def _lookup(self, name: str, num_embeddings: int) -> LookupTables:
        place, _ = key_columns(self.preparation.source.layout)[name]
        return LookupTables.at(self.work.folder / f"lookup-{place}", num_embeddings, self.blocks, place)

    def schema(self, learnt: _Learnt) -> Schema:
        """Returns the dataset's schema."""
        layout = self.preparation.source.layout
        named = {column.role: column for column in layout.numbers if column.role in ("label", "weight", "time")}
        dense = [column for column in layout.numbers if column.role == "dense"]
        label = named.get("label")
        return Schema(
            label=None if label is None else label.name,
            dense=tuple(column.name for column in dense),
            categorical=tuple(self._feature(name, learnt[name]) for name in layout.features),
            label_kind="binary" if label is None or label.dtype == np.int8 else "number",
            missing_dense=any(column.keeps_missing for column in dense),
            weight=named["weight"].name if "weight" in named else None,
            time=named["time"].name if "time" in named else None,
        )

    def _feature(self, name: str, learnt: dict[str, Any]) -> CategoricalFeature:
        found = key_columns(self.preparation.source.layout).get(name)
        if found is None or not found[1].is_list:
            return CategoricalFeature(name, learnt["num_embeddings"])
        most = found[1].max_length
        return CategoricalFeature(name, learnt["num_embeddings"], True, learnt["mean_ids"], max_ids_per_row=most)

    def outputs(self, learnt: _Learnt) -> list[OutputColumn]:
        """Returns the columns of the files: label, weight, time, dense numbers, and the categorical features."""
        layout = self.preparation.source.layout
        keeps_missing = any(column.keeps_missing for column in layout.numbers)
        outputs: list[OutputColumn] = []
        for role in ("label", "weight", "time", "dense"):
            for place, column in enumerate(layout.numbers):
                if column.role == role:
                    found = learnt.get(column.name)
                    change = number_change(column, None if found is None else found["learnt"])
                    missing = keeps_missing and role == "dense"
                    outputs.append(NumberOutput(column.name, column.dtype, place, change, missing))
        places = key_columns(layout)
        bins = {column.name: place for place, column in enumerate(layout.numbers) if column.role == "bins"}
        for name in layout.features:
            if name in bins:
                change = functools.partial(bin_ids, learnt=learnt[name]["learnt"])
                outputs.append(NumberOutput(name, np.dtype(np.int32), bins[name], change))
                continue
            place, key_column = places[name]
            kind = ListOutput if key_column.is_list else IdOutput
            outputs.append(kind(name, place, self._lookup(name, learnt[name]["num_embeddings"])))
        return outputs

    def recorded(self, learnt: _Learnt) -> dict[str, Any]:
        """Returns what the manifest says of what was learnt, and of what was applied."""
        base = self.preparation.base
        order = [*(column.name for column in self.preparation.source.layout.numbers)]
        numbers = {name: learnt[name]["learnt"] for name in order if name in learnt}
        recorded: dict[str, Any] = {"learnt": numbers} if numbers else {}
        return recorded | ({} if base is None else {"base": base.to_json()})


def _file_name(name: str, place: int) -> str:
    """Returns a column's name where every file system takes it as a file's, else its number."""
    return name if _PLAIN_NAME.fullmatch(name) else f"column-{place}"


def _share(total: int, index: int, count: int) -> int:
    """Returns what the ``index``-th of ``count`` tasks has of a total, nearly equal numbers that add up to it."""
    return total * (index + 1) // count - total * index // count
