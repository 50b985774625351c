"""Ids of a batch as plain tensors -> the vectors of its features, as an embedding collection gives them.

The ids of a batch are two tensors, feature after feature and of each row after row::

    features    C1 (one a row)    C2 (one a row)    genres (a list)
    values      17   4   17       3   9   5         8 1 | | 2            int64 [ids]
    lengths      1   1    1       1   1   1         2     0   1          int64 [features, batch]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.bag import pool
from distembed.serving.export.table_groups import StoredTable, TableGroup, TableStorage, stored_table


@dataclass(frozen=True)
class PlainFeature:
    """A categorical feature of a batch; a row has one id of it, or any number where it is a list."""

    name: str
    is_list: bool


@dataclass(frozen=True, eq=False)
class FeatureIds:
    """The ids of one feature, row after row, in the place of a JaggedTensor."""

    ids: Int64[Tensor, " ids"]
    lengths: Int64[Tensor, " batch"]

    def values(self) -> Int64[Tensor, " ids"]:
        """Returns the ids."""
        return self.ids


class PlainFeatures:
    """The ids of a batch in the place of a KeyedJaggedTensor, for programs of plain tensors.

    The places of a feature with one id a row follow from the place of its first id, so that no shape depends on the
    numbers in ``lengths``. A list has as many ids as ``lengths`` says.
    """

    def __init__(
        self,
        features: Sequence[PlainFeature],
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
    ) -> None:
        self._places = {feature.name: place for place, feature in enumerate(features)}
        self._features, self.values, self.lengths = features, values, lengths
        self._has_lists = any(feature.is_list for feature in features)
        single = [place for place, feature in enumerate(features) if not feature.is_list]
        torch._assert_async((lengths[single] == 1).all(), "a feature with one id a row has rows with another number")
        if self._has_lists:
            counts = lengths.sum(1)
            torch._assert_async(counts.sum() == values.shape[0], "lengths say another number of ids than values has")
            self._starts = counts.cumsum(0) - counts

    def of_single(self, names: Sequence[str]) -> Int64[Tensor, "features batch"]:
        """Returns the ids of features with one id a row."""
        places = [self._places[name] for name in names]
        if not self._has_lists:
            ids = self.values.view(len(self._features), self.lengths.shape[1])
            return ids if places == list(range(len(self._features))) else ids[places]
        rows = torch.arange(self.lengths.shape[1])
        return self.values[self._starts[places].unsqueeze(1) + rows]

    def of_list(self, name: str) -> FeatureIds:
        """Returns the ids of a list."""
        place = self._places[name]
        lengths = self.lengths[place]
        num_ids: Any = lengths.sum().item()
        torch._check(num_ids >= 0)
        return FeatureIds(self.values[self._starts[place] + torch.arange(num_ids)], lengths)

    def recent(self, name: str, most: int) -> Int64[Tensor, "batch most"]:
        """Returns the last ``most`` ids of each row of a list; a shorter row repeats its last id.

        ::

            a b c d e     ->  c d e
            a b           ->  a b b          a row without ids has any id        most 3
        """
        place = self._places[name]
        lengths = self.lengths[place]
        left = lengths.clamp(max=most)
        firsts = self._starts[place] + lengths.cumsum(0) - left
        numbers = torch.minimum(torch.arange(most), (left - 1).clamp(min=0).unsqueeze(1))
        padded = torch.cat([self.values, torch.zeros(1, dtype=torch.int64)])
        return padded[firsts.unsqueeze(1) + numbers]

    def rows_of(self, name: str) -> tuple[Int64[Tensor, " ids"], Bool[Tensor, " ids"]]:
        """Returns the row of every id of all features, and whether it is an id of the feature ``name``."""
        num_rows = self.lengths.shape[1]
        lines = torch.arange(self.lengths.numel())
        owners = lines.repeat_interleave(self.lengths.flatten(), output_size=self.values.shape[0])
        return owners % num_rows, owners // num_rows == self._places[name]

    def __getitem__(self, name: str) -> FeatureIds:
        """Returns the ids of a feature."""
        if self._features[self._places[name]].is_list:
            return self.of_list(name)
        return FeatureIds(self.of_single([name])[0], self.lengths[self._places[name]])


class FeatureVectors(nn.Module):
    """Takes the place of an embedding collection of bags, with tables as they are stored.

    Args:
        tables: The tables of the collection.
        weights: The weights of each table's partitions, by the table's name.
        features: The features of a batch, by name.
        storage: How the tables are stored.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingBagConfig],
        weights: Mapping[str, Sequence[Tensor]],
        features: Mapping[str, PlainFeature],
        storage: TableStorage,
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.keys = [key for table in tables for name in table.feature_names for key in table.vector_names(name)]
        self.dims = [
            table.embedding_dim for table in tables for _ in range(table.num_vectors * len(table.feature_names))
        ]
        self._order = [name for table in tables for name in table.feature_names]
        groups: dict[Any, list[tuple[CompositionalEmbeddingBagConfig, StoredTable]]] = {}
        for table in tables:
            stored = stored_table(table, weights[table.name], storage.form(table))
            groups.setdefault(stored.kind, []).append((table, stored))
        self.groups = nn.ModuleList(
            TableGroup([stored for _, stored in own], storage.precision) for own in groups.values()
        )
        self._lookups = [_lookups([table for table, _ in own], features) for own in groups.values()]

    def forward(self, features: PlainFeatures) -> KeyedTensor:
        """Returns the vectors of all features, pooled."""
        return KeyedTensor(self.keys, self.dims, self.vectors(features))

    def vectors(self, features: PlainFeatures) -> Float[Tensor, "batch columns"]:
        """Returns the pooled vectors of all features side by side, in the order of the output's keys."""
        by_feature: dict[str, Tensor] = {}
        for group, lookups in zip(self.groups, self._lookups, strict=True):
            if lookups.single:
                found = group(features.of_single(lookups.single), lookups.single_tables)
                by_feature.update(zip(lookups.single, found.unbind(0), strict=True))
            for name, table, pooling in lookups.lists:
                own = features.of_list(name)
                vectors = group(own.ids.unsqueeze(0), [table])[0]
                by_feature[name] = pool(vectors, own.lengths, pooling)
        return torch.cat([by_feature[name] for name in self._order], dim=1)


@dataclass(frozen=True)
class _Lookups:
    """The lookups of a group of tables; tables have their numbers within the group."""

    single: list[str]  # names of the features with one id a row
    single_tables: list[int]  # the table of each
    lists: list[tuple[str, int, Any]]  # name, table and pooling of each list


def _lookups(tables: Sequence[CompositionalEmbeddingBagConfig], features: Mapping[str, PlainFeature]) -> _Lookups:
    found = _Lookups([], [], [])
    for number, table in enumerate(tables):
        for name in table.feature_names:
            if features[name].is_list:
                found.lists.append((name, number, table.pooling))
            else:
                found.single.append(name)
                found.single_tables.append(number)
    return found
