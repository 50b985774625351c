"""The columns of a dataset: what is learnt of each over the training rows, and what files and schema have of it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import BlockLayout
from distembed.data.prepare.count import Database
from distembed.data.prepare.feature_ids import FeatureValues, LookupTables, VocabularyRoom, build_vocabulary
from distembed.data.prepare.learnt_numbers import bin_ids, learn_numbers, num_bins, number_change
from distembed.data.prepare.output_columns import IdOutput, NumberOutput, OutputColumn
from distembed.data.prepare.row_splits import RowSplits
from distembed.data.prepare.spool import SpooledBlock
from distembed.data.prepare.vocabulary import HashMap, IdMap

# not even one that another column's number makes
_PLAIN_NAME = re.compile(r"(?!column-[0-9]+$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", re.ASCII | re.IGNORECASE)

_GROUP_KEYS = 1 << 20
"""Most keys of columns that are counted in one database: opening and closing one takes 0.1 s."""

ColumnsLearnt = dict[str, dict[str, Any]]
"""By column: ``num_embeddings``, ``mean_ids``, ``vocabulary`` and ``learnt``, each None where it has none."""


@dataclass(frozen=True)
class DatasetColumns:
    """The dataset's columns: the vocabularies and transforms learnt, and the files' and schema's columns."""

    layout: BlockLayout  # the columns of the blocks
    base: Base | None  # dataset whose ids are applied, if there is one
    memory_bytes: int  # memory that counting one column may take
    folder: Path  # dataset folder that is being written
    work: Path  # folder for ids of blocks and for counting
    blocks: Sequence[SpooledBlock]  # all blocks
    splits: RowSplits  # which rows train

    @property
    def learnt_columns(self) -> list[str]:
        """The columns that learn ids or transforms: features with keys, and transformed numbers."""
        return [*self.layout.feature_keys, *self._learnt_numbers]

    @property
    def _learnt_numbers(self) -> dict[str, int]:
        """The place of each column of numbers whose transform is learnt."""
        return {each.name: place for place, each in enumerate(self.layout.numbers) if each.transform != "none"}

    def groups(self) -> list[list[str]]:
        """Returns the columns that learn something of their own, in groups for one database each, the largest first."""
        keys = dict.fromkeys(self._learnt_numbers, 0)
        for name, (place, column) in self.layout.feature_keys.items():
            owner = column.vocabulary or name
            keys[owner] = keys.get(owner, 0) + sum(block.num_keys(place) for block in self.blocks)
        groups: list[list[str]] = []
        room = 0
        for name in sorted(keys, key=lambda name: -keys[name]):
            if not groups or keys[name] > room:
                groups.append([])
                room = _GROUP_KEYS
            groups[-1].append(name)
            room -= keys[name]
        return groups

    def learn(self, names: Sequence[str]) -> ColumnsLearnt:
        """Gives ids to the values of features, and learns the transforms of columns of numbers.

        Groups of columns may be learnt side by side.
        """
        scratch = Path(tempfile.mkdtemp(prefix="learning-", dir=self.work))
        with Database(scratch / "counting", self.memory_bytes) as database:
            learnt: ColumnsLearnt = {}
            for name in names:
                if name in self._learnt_numbers:
                    learnt[name] = self._learn_numbers(self._learnt_numbers[name], database)
                else:
                    learnt |= self._map_features(name, database, Path(tempfile.mkdtemp(dir=scratch)))
        shutil.rmtree(scratch)
        return learnt

    def _map_features(self, name: str, database: Database, scratch: Path) -> ColumnsLearnt:
        """Gives ids to the values of a feature and of those that share its vocabulary, and writes all blocks' ids."""
        features = [
            FeatureValues(self.blocks, self.splits, place, column)
            for place, column in self.layout.feature_keys.values()
            if name in (column.name, column.vocabulary)
        ]
        features.sort(key=lambda values: values.column.name != name)
        owner, base, entries = features[0], self.base, dict[str, Vocabulary]()
        id_map: IdMap
        if owner.column.hash_size is not None:
            id_map = HashMap(owner.column.hash_size, owner.column.hash_seed)
        else:
            (self.folder / "vocabulary").mkdir(exist_ok=True)
            file = f"vocabulary/{_file_name(name, owner.place)}.parquet"
            room = VocabularyRoom(self.folder, file, scratch, database)
            id_map, entries = build_vocabulary(features, room, None if base is None else base.vocabulary(name))
        return {
            values.column.name: self._mapped(values, id_map, entries.get(values.column.name)) for values in features
        }

    def _mapped(self, values: FeatureValues, id_map: IdMap, vocabulary: Vocabulary | None) -> dict[str, Any]:
        """Writes the ids of a feature's codes in all blocks, and returns what is learnt of it."""
        column, base = values.column, self.base
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

    def _learn_numbers(self, place: int, database: Database) -> dict[str, Any]:
        """Learns the transform of a column of numbers."""
        column = self.layout.numbers[place]
        if self.base is not None:
            learnt = self.base.learnt(column.name)
        else:
            learnt = learn_numbers(self.splits, place, column, database)
        num_embeddings = num_bins(learnt) if column.role == "bins" else None
        return {"num_embeddings": num_embeddings, "mean_ids": None, "vocabulary": None, "learnt": learnt}

    def _lookup(self, name: str, num_embeddings: int) -> LookupTables:
        place, _ = self.layout.feature_keys[name]
        return LookupTables.at(self.work / f"lookup-{place}", num_embeddings, self.blocks, place)

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
        found = self.layout.feature_keys.get(name)
        if found is None:
            return CategoricalFeature(name, learnt["num_embeddings"])
        column = found[1]
        mean_ids = learnt["mean_ids"] if column.is_list else 1.0
        return CategoricalFeature(
            name,
            learnt["num_embeddings"],
            column.is_list,
            mean_ids,
            table=column.vocabulary,
            max_ids_per_row=column.max_length,
        )

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
        places = self.layout.feature_keys
        bins = {column.name: place for place, column in enumerate(self.layout.numbers) if column.role == "bins"}
        for name in self.layout.features:
            if name in bins:
                change = partial(bin_ids, learnt=learnt[name]["learnt"])
                outputs.append(NumberOutput(name, np.dtype(np.int32), bins[name], change))
                continue
            place, key_column = places[name]
            lookup = self._lookup(name, learnt[name]["num_embeddings"])
            outputs.append(IdOutput(name, place, lookup, key_column.is_list))
        return outputs

    def recorded(self, learnt: ColumnsLearnt) -> dict[str, Any]:
        """Returns what the manifest says of what was learnt, and of what was applied."""
        order = [*(column.name for column in self.layout.numbers)]
        numbers = {name: learnt[name]["learnt"] for name in order if name in learnt}
        recorded: dict[str, Any] = {"learnt": numbers} if numbers else {}
        return recorded | ({} if self.base is None else {"base": self.base.recorded})


def _file_name(name: str, place: int) -> str:
    """Returns a column's name where every file system takes it as a file's, else its number."""
    return name if _PLAIN_NAME.fullmatch(name) else f"column-{place}"
