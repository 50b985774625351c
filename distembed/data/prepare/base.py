"""The dataset whose ids and learnt transforms are applied to other rows, and grown where that is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest, id_fingerprint
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.remote import is_url
from distembed.data.table.blocks import BlockLayout, KeyColumn
from distembed.data.table.encoder import num_bins
from distembed.data.table.schema import CRITEO, TABLE, TableSchema

_MOST_SAID = 5


@dataclass(frozen=True)
class Base:
    """A dataset whose vocabularies and learnt transforms are read, and no rows."""

    named: str  # by its folder or URL, or a run's folder
    folder: Path  # its own, the one in which a run keeps its vocabularies, or the one where a URL is fetched to
    manifest: Manifest
    grows: bool  # whether values that it lacks get ids

    @classmethod
    def load(cls, path: str | os.PathLike[str], grows: bool) -> Base:
        folder = dataset_folder(path) if is_url(path) else _local_folder(Path(path))
        return cls(str(path), folder, Manifest.load(folder), grows)

    def require_fits(self, layout: BlockLayout) -> None:
        """Makes sure that it has ids of the same kind for the same features."""
        names = self.manifest.schema.categorical_names
        if names != layout.features:
            raise UserError(
                f"the dataset {self.named} (--vocabulary) has the categorical features {enumerate_names(names)}, and "
                f"the rows have {enumerate_names(layout.features)}: name a dataset of such rows"
            )
        for _, column in layout.feature_keys.values():
            self._require_same_kind(column)
        for number in layout.numbers:
            wanted = "edges" if number.transform == "quantile_bins" else "mean"
            if number.transform != "none" and wanted not in self.learnt(number.name):
                raise UserError(
                    f"the dataset {self.named} (--vocabulary) learnt something else of the column {number.name!r} "
                    f"than {number.transform} takes: give the schema with which it was prepared"
                )

    def require_same_values(self, schema: TableSchema) -> None:
        """Makes sure that columns become the values that they became in it; a base without a schema is not compared."""
        if self.manifest.preparation.get("source") not in (TABLE, CRITEO):
            return
        if differing := sorted(_differences(schema, TableSchema.of_manifest(self.manifest))):
            raise UserError(
                f"columns become other values than in the dataset {self.named} (--vocabulary), whose ids and means are "
                f"of its own: {enumerate_names(differing, _MOST_SAID)}. Give the schema and the options with which it "
                "was prepared, such as --missing"
            )

    def _require_same_kind(self, column: KeyColumn) -> None:
        name, feature = column.name, self.feature(column.name)
        has_vocabulary = name in self.manifest.vocabularies
        hashed = None if has_vocabulary else (feature.num_embeddings, self._hash_seed(name))
        own = None if column.hash_size is None else (column.hash_size, column.hash_seed)
        same_rows = "name a dataset of such rows"
        same_schema = "give the `vocabulary` of the schema of that dataset"
        same_hash = (
            "give the hash size (--hash-size) and seed (--hash-seed) with which it was prepared, or none where it was "
            "prepared without"
        )
        for before, now, remedy in (
            (_values_text(feature.multi_hot), _values_text(column.is_list), same_rows),
            (f"the ids of {feature.table or name!r}", f"the ids of {column.vocabulary or name!r}", same_schema),
            (_ids_text(hashed), _ids_text(own), same_hash),
        ):
            if before != now:
                raise UserError(
                    f"the column {name!r} of the dataset {self.named} (--vocabulary) has {before}, and its values are "
                    f"to have {now}: {remedy}"
                )

    def _hash_seed(self, name: str) -> int:
        """Returns the seed of a hashed feature: that of the table's schema, or that of all features."""
        preparation = self.manifest.preparation
        columns: Mapping[str, Any] = preparation.get("schema", {}).get("categorical", {})
        return int(columns[name].get("hash_seed", 0) if name in columns else preparation.get("hash_seed", 0))

    def feature(self, name: str) -> CategoricalFeature:
        return next(feature for feature in self.manifest.schema.categorical if feature.name == name)

    def vocabulary(self, name: str) -> Path:
        return self.manifest.require_unchanged(self.folder, self.manifest.vocabularies[name].file)

    def learnt(self, name: str) -> dict[str, Any]:
        learnt: dict[str, Any] | None = self.manifest.preparation.get("learnt", {}).get(name)
        if learnt is None:
            raise UserError(
                f"the dataset {self.named} (--vocabulary) learnt nothing of the column {name!r}, which is to be "
                "standardised or cut into bins: give the schema with which it was prepared"
            )
        if "edges" in learnt:
            assert num_bins(learnt) == self.feature(name).num_embeddings, "a manifest's checksum holds its numbers"
        return learnt

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """Its entry in the manifest of a dataset with its ids, for which all vocabularies are read."""
        num_ids = {name: vocabulary.num_ids for name, vocabulary in self.manifest.vocabularies.items()}
        return {"id_fingerprint": id_fingerprint(self.folder, self.manifest), "grow": self.grows, "num_ids": num_ids}


def _values_text(is_list: bool) -> str:
    return "lists" if is_list else "one value a row"


def _ids_text(hashed: tuple[int, int] | None) -> str:
    return "a vocabulary" if hashed is None else f"hashes: {hashed[0]} ids with the seed {hashed[1]}"


def _differences(schema: TableSchema, known: TableSchema) -> Iterator[str]:
    compared = {"dense": ("transform", "missing"), "categorical": ("kind",)}
    for section, settings in compared.items():
        columns, before = getattr(schema, section), getattr(known, section)
        for name, setting in product(columns.keys() & before.keys(), settings):
            own, its = getattr(columns[name], setting), getattr(before[name], setting)
            if own != its:
                yield f"{section}.{name}.{setting} is {own!r} and was {its!r}"
    for name in schema.categorical.keys() & known.categorical.keys():
        crosses = [each.categorical[name].cross for each in (schema, known)]
        if crosses.count(None) == 1:
            own, its = ("a column" if cross is None else f"a cross of {' and '.join(cross)}" for cross in crosses)
            yield f"categorical.{name} is {own} and was {its}"


def _local_folder(path: Path) -> Path:
    if (path / MANIFEST_NAME).is_file():
        return path
    kept = kept_dataset(path)
    if kept is None:
        raise UserError(
            f"{path} (--vocabulary) is neither a dataset (it has no {MANIFEST_NAME}) nor a run (no dataset/"
            f"{MANIFEST_NAME}): name the folder of one"
        )
    return kept
