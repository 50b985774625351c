"""The columns of a dataset: what is learnt of each over the training rows, and what files and schema have of it."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import BlockLayout, NumberColumn
from distembed.data.prepare.feature_ids import (
    FeatureValues,
    LookupTables,
    VocabularyRoom,
    build_vocabulary,
    hash_map,
)
from distembed.data.prepare.learnt_numbers import bin_ids, learn_numbers, num_bins, number_change
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.output_columns import IdOutput, ListOutput, NumberOutput, OutputColumn
from distembed.data.prepare.row_splits import RowSplits
from distembed.data.prepare.spool import SpooledBlock, key_columns
from distembed.data.prepare.vocabulary import IdMap
from distembed.data.prepare.work import Work

# not even one that another column's number makes
_PLAIN_NAME = re.compile(r"(?!column-[0-9]+$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", re.ASCII | re.IGNORECASE)

ColumnsLearnt = dict[str, dict[str, Any]]
"""By column: ``num_embeddings``, ``mean_ids``, ``vocabulary`` and ``learnt``, each None where it has none."""


@dataclass(frozen=True)
class DatasetColumns:
    """The dataset's columns: what is learnt of each, and what the files and the schema have of it.

    Attributes:
        layout: The columns of the blocks.
        base: Dataset whose ids are applied, if there is one.
        limits: Memory and threads to use.
        folder: Dataset folder that is being written.
        work: The stages' tasks and results.
        blocks: All blocks.
        splits: Which rows train.
    """

    layout: BlockLayout
    base: Base | None
    limits: ResourceLimits
    folder: Path
    work: Work
    blocks: Sequence[SpooledBlock]
    splits: RowSplits

    def learn(self, beside: Mapping[str, Callable[[], Any]]) -> tuple[ColumnsLearnt, list[Any]]:
        """Gives ids to the values of every feature and learns transforms, several columns at a time.

        Args:
            beside: What else is done in the meantime, by the name of its task, which is no ``column ...``.

        Returns:
            What is learnt of each column, and the results of what else was done.
        """
        tasks: dict[str, Callable[[Path], dict[str, Any]]] = {}
        for name, (place, column) in key_columns(self.layout).items():
            values = FeatureValues(self.blocks, self.splits, place, column)
            tasks[name] = functools.partial(self._map_feature, values)
        for place, number in enumerate(self.layout.numbers):
            if number.transform != "none":
                tasks[number.name] = functools.partial(self._learn_numbers, place, number)
        names = self._largest_first(list(tasks))
        places = {f"column {name}": index for index, name in enumerate(names)}
        spool_bytes = sum(block.num_bytes for block in self.blocks)
        num_rows = sum(self.splits.num_rows)

        def do(task: str) -> Any:
            if task in beside:
                return beside[task]()
            index = places[task]
            scratch = emptied_folder(self.work.folder / f"column-{index:06d}")
            result = tasks[names[index]](scratch)
            shutil.rmtree(scratch)
            self.work.advance(task, *(_share(total, index, len(names)) for total in (spool_bytes, num_rows)))
            return result

        threads = self.limits.num_threads
        results = self.work.run_stage("vocabulary", [*beside, *places], do, threads=threads, total_bytes=spool_bytes)
        return {name: results[f"column {name}"] for name in tasks}, [results[task] for task in beside]

    def _largest_first(self, names: Sequence[str]) -> list[str]:
        """Returns the columns, those with the most keys first, so that all threads end at about the same time."""
        places = {name: place for name, (place, _) in key_columns(self.layout).items()}
        keys = {
            name: sum(block.shape.num_keys[places[name]] for block in self.blocks) if name in places else 0
            for name in names
        }
        return sorted(names, key=lambda name: -keys[name])

    def _map_feature(self, values: FeatureValues, scratch: Path) -> dict[str, Any]:
        """Gives ids to the values of a feature, and writes the ids of all blocks' codes."""
        column, base = values.column, self.base
        id_map: IdMap | None = hash_map(column)
        vocabulary = None
        if id_map is None:
            (self.folder / "vocabulary").mkdir(exist_ok=True)
            file = f"vocabulary/{_file_name(column.name, values.place)}.parquet"
            room = VocabularyRoom(self.folder, file, scratch, self.limits.vocabulary_keys)
            applied = None if base is None else base.vocabulary(column.name)
            id_map, vocabulary = build_vocabulary(values, room, applied)
        lookup = self._lookup(column.name, id_map.num_embeddings)
        lookup.write(self.blocks, values.place, id_map)
        if vocabulary is not None and base is not None:
            vocabulary = replace(vocabulary, rows_dropped_by_split=values.out_of_vocabulary(lookup))
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
        if self.base is not None:
            learnt = self.base.learnt(column.name)
        else:
            max_keys = self.limits.vocabulary_keys
            learnt = learn_numbers(self.blocks, self.splits, place, column, scratch, max_keys)
        num_embeddings = num_bins(learnt) if column.role == "bins" else None
        return {"num_embeddings": num_embeddings, "mean_ids": None, "vocabulary": None, "learnt": learnt}

    def _lookup(self, name: str, num_embeddings: int) -> LookupTables:
        place, _ = key_columns(self.layout)[name]
        return LookupTables.at(self.work.folder / f"lookup-{place}", num_embeddings, self.blocks, place)

    def schema(self, learnt: ColumnsLearnt) -> Schema:
        """Returns the dataset's schema."""
        named = {column.role: column for column in self.layout.numbers if column.role in ("label", "weight", "time")}
        dense = [column for column in self.layout.numbers if column.role == "dense"]
        label = named.get("label")
        return Schema(
            label=None if label is None else label.name,
            dense=tuple(column.name for column in dense),
            categorical=tuple(self._feature(name, learnt[name]) for name in self.layout.features),
            label_kind="binary" if label is None or label.dtype == np.int8 else "number",
            missing_dense=any(column.keeps_missing for column in dense),
            weight=named["weight"].name if "weight" in named else None,
            time=named["time"].name if "time" in named else None,
        )

    def _feature(self, name: str, learnt: dict[str, Any]) -> CategoricalFeature:
        found = key_columns(self.layout).get(name)
        if found is None or not found[1].is_list:
            return CategoricalFeature(name, learnt["num_embeddings"])
        most = found[1].max_length
        return CategoricalFeature(name, learnt["num_embeddings"], True, learnt["mean_ids"], max_ids_per_row=most)

    def outputs(self, learnt: ColumnsLearnt) -> list[OutputColumn]:
        """Returns the columns of the files: label, weight, time, dense numbers, and the categorical features."""
        keeps_missing = any(column.keeps_missing for column in self.layout.numbers)
        outputs: list[OutputColumn] = []
        for role in ("label", "weight", "time", "dense"):
            for place, column in enumerate(self.layout.numbers):
                if column.role == role:
                    found = learnt.get(column.name)
                    change = number_change(column, None if found is None else found["learnt"])
                    missing = keeps_missing and role == "dense"
                    outputs.append(NumberOutput(column.name, column.dtype, place, change, missing))
        places = key_columns(self.layout)
        bins = {column.name: place for place, column in enumerate(self.layout.numbers) if column.role == "bins"}
        for name in self.layout.features:
            if name in bins:
                change = functools.partial(bin_ids, learnt=learnt[name]["learnt"])
                outputs.append(NumberOutput(name, np.dtype(np.int32), bins[name], change))
                continue
            place, key_column = places[name]
            kind = ListOutput if key_column.is_list else IdOutput
            outputs.append(kind(name, place, self._lookup(name, learnt[name]["num_embeddings"])))
        return outputs

    def recorded(self, learnt: ColumnsLearnt) -> dict[str, Any]:
        """Returns what the manifest says of what was learnt, and of what was applied."""
        order = [*(column.name for column in self.layout.numbers)]
        numbers = {name: learnt[name]["learnt"] for name in order if name in learnt}
        recorded: dict[str, Any] = {"learnt": numbers} if numbers else {}
        return recorded | ({} if self.base is None else {"base": self.base.to_json()})


def _file_name(name: str, place: int) -> str:
    """Returns a column's name where every file system takes it as a file's, else its number."""
    return name if _PLAIN_NAME.fullmatch(name) else f"column-{place}"


def _share(total: int, index: int, count: int) -> int:
    """Returns what the ``index``-th of ``count`` tasks has of a total, nearly equal numbers that add up to it."""
    return total * (index + 1) // count - total * index // count


def emptied_folder(folder: Path) -> Path:
    """Returns the folder, new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
