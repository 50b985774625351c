"""The sizes that ``distembed compress-search`` chooses from, for each table of a config, with their training bytes.

A table of n ids is full, or has one of the schemes below with c collisions, from 2 to n, or with b frequent ids:

============================== ===================================
``quotient_remainder`` product ``n/c + c`` rows
``multi_hash`` sum             2 hashes of ``n/c`` rows
``multi_hash`` concat          2 hashes of ``n/c`` rows of D/2 numbers
``remainder``                  ``n/c`` rows; one row for c = n
``truncated``                  ``b + 1`` rows, if ids are numbered by falling frequency
============================== ===================================
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding.build import build_tables
from distembed.embedding.collections import embedding_modules
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import OF_EVERY_TABLE, EmbeddingConfig, TableConfig
from distembed.optim.declared import TableOptimizers
from distembed.optim.table_storage import TableSize
from distembed.serving.convert.models import full_table_names
from distembed.training.build import Blueprint
from distembed.training.config import Config

_SCHEMES: tuple[Mapping[str, Any], ...] = (
    {"partition": "quotient_remainder", "composition": "product"},
    {"partition": "multi_hash", "composition": "sum", "num_partitions": 2},
    {"partition": "multi_hash", "composition": "concat", "num_partitions": 2},
    {"partition": "remainder"},
)
_LESS_FREQUENT = 0.8
"""The factor from a bound of ``truncated`` to the next smaller one."""
_COLLISIONS = (2, 3, 4, 6, 8, 12, 16, 32, *(4**power for power in range(3, 32)))
_ADAGRADS = ("adagrad", "row_wise_adagrad")
_KEPT = OF_EVERY_TABLE - {"partition", "composition", "force", "features"}
"""The settings of the config's default that candidates keep."""


@dataclass(frozen=True)
class SearchedTable:
    """The tables of one setting of a config, which get one scheme.

    Attributes:
        feature: The feature that names the setting.
        full: The model's full tables of this setting, by the names of their weights: more than one where a model has
            several of a feature.
        default: The config's default settings.
        optimizers: The optimizers that train the tables.
        by_frequency: Whether ids are numbered by falling frequency, as ids of a vocabulary are.
    """

    feature: CategoricalFeature
    full: Mapping[str, CompositionalEmbeddingConfig]
    default: TableConfig
    optimizers: TableOptimizers
    by_frequency: bool = False

    def settings(self, **scheme: Any) -> TableConfig:
        """Returns a table's settings: the default's with a scheme, in place of the default's scheme."""
        kept = {name: getattr(self.default, name) for name in _KEPT}
        return TableConfig(**kept, **scheme, force=scheme["partition"] != "naive")

    @property
    def full_settings(self) -> TableConfig:
        return self.settings(partition="naive")

    def tables(self, settings: TableConfig) -> dict[str, CompositionalEmbeddingConfig]:
        """Returns the tables with these settings, by the names of their full weights."""
        (built,) = build_tables([self.feature], EmbeddingConfig(default=settings))
        return {
            name: dataclasses.replace(table, partition=built.partition, composition=built.composition)
            for name, table in self.full.items()
        }

    def num_bytes(self, settings: TableConfig) -> int:
        """Returns the bytes of training with these settings: vectors and optimizer states."""
        return sum(TableSize.of(table, self.optimizers).training for table in self.tables(settings).values())

    def candidates(self) -> list[tuple[TableConfig, int]]:
        """Returns the settings to choose from with their bytes, the full table first.

        Settings of a scheme that take no fewer bytes than its settings before are left out.
        """
        found = [(self.full_settings, self.full_bytes)]
        for sizes in self._schemes() if self.feature.num_embeddings > self.default.threshold else ():
            least = self.full_bytes
            for settings in sizes:
                num_bytes = self.num_bytes(settings)
                if num_bytes < least:
                    found.append((settings, num_bytes))
                    least = num_bytes
        return found

    def _schemes(self) -> Iterator[list[TableConfig]]:
        """Yields the settings of each scheme, from the largest table to the smallest."""
        num_ids, dim = self.feature.num_embeddings, min(table.embedding_dim for table in self.full.values())
        for scheme in _SCHEMES:
            if scheme.get("composition") != "concat" or dim > 1:
                collisions = [*itertools.takewhile(lambda c: c < num_ids, _COLLISIONS), num_ids]
                yield [self.settings(**scheme, collisions=number) for number in collisions]
        if self.by_frequency:
            powers = range(1, 1 + int(math.log(num_ids) / -math.log(_LESS_FREQUENT)))
            bounds = dict.fromkeys(int(num_ids * _LESS_FREQUENT**power) for power in powers)
            yield [self.settings(partition="truncated", bounds=[bound]) for bound in bounds]

    @cached_property
    def full_bytes(self) -> int:
        """The bytes of the full tables."""
        return self.num_bytes(self.full_settings)


@dataclass(frozen=True)
class SearchedTables:
    """The tables of a config that a search chooses settings for.

    Attributes:
        config: The config.
        tables: The tables without settings of their own in ``embedding.tables``.
        kept_bytes: The bytes of the other tables.
    """

    config: Config
    tables: Sequence[SearchedTable]
    kept_bytes: int

    @classmethod
    def of(cls, config: Config) -> SearchedTables:
        """Returns the tables of a config, which is built without weights.

        Raises:
            UserError: The model cannot be built, no table has more ids than ``embedding.default.threshold``, or a table
                is not trained by Adagrad.
        """
        default, own = config.embedding.default, config.embedding.tables
        all_full = dataclasses.replace(
            config,
            embedding=dataclasses.replace(config.embedding, default=dataclasses.replace(default, partition="naive")),
        )
        manifest = Manifest.load(config.data.require_path())
        blueprint = Blueprint.for_ranks(all_full, manifest.schema, Ranks(0, 1, 1, torch.device("cpu")), {})
        features = {feature.name: feature for feature in blueprint.batch_schema.categorical}
        optimizers = config.train.table_optimizers
        groups: dict[str, dict[str, CompositionalEmbeddingConfig]] = {}
        for full_name, (_, table) in full_table_names(embedding_modules(blueprint.build_unsharded())).items():
            groups.setdefault(config.embedding.table_of(features[table.feature_names[0]].table_name), {})[full_name] = (
                table
            )
        numbered = manifest.vocabularies if default.hash_seed is None else {}
        searched = [
            SearchedTable(features[name], full, default, optimizers, name in numbered)
            for name, full in groups.items()
            if name not in own
        ]
        largest = max((table.feature.num_embeddings for table in searched), default=0)
        if largest <= default.threshold:
            raise UserError(
                f"no table can be compressed: embedding.default.threshold is {default.threshold} ids, and the largest "
                f"table without settings of its own in embedding.tables has {largest}; lower the threshold."
            )
        for name, optimizer in ((t.name, optimizers.for_table(t).sparse) for s in searched for t in s.full.values()):
            if optimizer not in _ADAGRADS:
                raise UserError(
                    f"table {name!r} is trained by {optimizer!r}, and the cost of a smaller table is estimated from "
                    "Adagrad's sums of squared gradients; set train.sparse_optimizer.name to "
                    f"{' or '.join(_ADAGRADS)}, and the task to a loss whose gradients are of looked-up rows."
                )
        kept = [table for name in groups.keys() & own.keys() for table in groups[name].values()]
        return cls(config, searched, sum(TableSize.of(table, optimizers).training for table in kept))

    @property
    def full_bytes(self) -> int:
        """The bytes of all tables where each searched one is full."""
        return self.num_bytes(self.full)

    @property
    def full(self) -> list[TableConfig]:
        """The settings of full tables, for each searched one."""
        return [table.full_settings for table in self.tables]

    @property
    def smallest_bytes(self) -> int:
        """The bytes of all tables where each searched one has its smallest size."""
        return self.kept_bytes + sum(min(size for _, size in table.candidates()) for table in self.tables)

    def num_bytes(self, chosen: Sequence[TableConfig]) -> int:
        """Returns the bytes of all tables with settings for each searched one."""
        sizes = (table.num_bytes(settings) for table, settings in zip(self.tables, chosen, strict=True))
        return self.kept_bytes + sum(sizes)

    def config_of(self, chosen: Sequence[TableConfig]) -> Config:
        """Returns the config with settings for each searched table."""
        own = {table.feature.name: settings for table, settings in zip(self.tables, chosen, strict=True)}
        embedding = dataclasses.replace(self.config.embedding, tables=self.config.embedding.tables | own)
        return dataclasses.replace(self.config, embedding=embedding)
