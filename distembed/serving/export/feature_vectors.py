"""Ids of a batch as plain tensors, the inputs of programs, and the vectors of its features.

The ids of a batch are two tensors, feature after feature and of each row after row::

    features    C1 (one a row)    C2 (one a row)    genres (a list)
    values      17   4   17       3   9   5         8 1 | | 2            int64 [ids]
    lengths      1   1    1       1   1   1         2     0   1          int64 [features, batch]

Lists of numbers are one tensor in the same order: with one column beside genres it has 3 numbers here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.data.dataset.schema import DENSE_FEATURES, DENSE_SEQUENCES, SPARSE_FEATURES
from distembed.data.reader import Batch
from distembed.embedding import CompositionalEmbeddingBagConfig, CompositionalEmbeddingCollection
from distembed.embedding.bag import pool
from distembed.serving.export.programs import ANY, BATCH, ProgramInputs
from distembed.serving.export.table_groups import ExportStorage, StoredTable, TableGroup, stored_table
from distembed.serving.model_folder.manifest import ExportedFeature, ExportedSequence


@dataclass(frozen=True)
class PlainFeature:
    """A categorical feature of a batch; a row has one id of it or, of a list, any number."""

    name: str
    is_list: bool


@dataclass(frozen=True)
class PlainSequence:
    """A column of lists of numbers of a batch, one for each id of the feature ``beside``."""

    name: str
    beside: str


Feature = PlainFeature | ExportedFeature
Sequences = Sequence[PlainSequence] | Sequence[ExportedSequence]


def plain_inputs(
    batch: Batch, features: Sequence[Feature], takes_numbers: bool, sequences: Sequences = ()
) -> ProgramInputs:
    """Returns the ids of some features of a batch, and its numbers if asked for, with the sizes that vary in calls."""
    # B rows: with one id a row there are len(features) * B ids, which torch.export knows to be tied to B
    has_lists = any(feature.is_list for feature in features)
    num_ids = ANY if has_lists else BATCH if len(features) == 1 else len(features) * BATCH
    dynamic = {"values": {0: num_ids}, "lengths": {1: BATCH}}
    dynamic |= {"dense": {0: BATCH}} if takes_numbers else {}
    dynamic |= {"sequences": {0: ANY}} if sequences else {}
    names = [feature.name for feature in features]
    beside = [names.index(sequence.beside) for sequence in sequences]
    return ProgramInputs(plain_tensors(batch, features, takes_numbers, sequences), dynamic, beside)


def plain_tensors(
    batch: Batch, features: Sequence[Feature], takes_numbers: bool, sequences: Sequences = ()
) -> dict[str, Tensor]:
    """Returns the tensors of :func:`plain_inputs` without the varying sizes, in a hundredth of the time."""
    ids = batch[SPARSE_FEATURES]
    assert isinstance(ids, KeyedJaggedTensor)
    names = [feature.name for feature in features]
    if ids.keys() == names:
        values, lengths = ids.values(), ids.lengths().view(len(names), -1)
    else:
        jagged = [ids[name] for name in names]
        values = torch.cat([ids_.values() for ids_ in jagged])
        lengths = torch.stack([ids_.lengths() for ids_ in jagged])
    tensors: dict[str, Tensor] = {"values": values.long(), "lengths": lengths.long()}
    if takes_numbers:
        numbers = batch[DENSE_FEATURES]
        assert isinstance(numbers, Tensor)
        tensors["dense"] = numbers
    if sequences:
        lists = batch[DENSE_SEQUENCES]
        assert isinstance(lists, KeyedJaggedTensor)
        tensors["sequences"] = torch.cat([lists[sequence.name].values() for sequence in sequences])
    return tensors


@dataclass(frozen=True, eq=False)
class Jagged:
    """The ids of one feature, or their vectors, row after row, in place of a JaggedTensor."""

    entries: Int64[Tensor, " ids"] | Float[Tensor, "ids dim"]
    row_lengths: Int64[Tensor, " batch"]

    def values(self) -> Tensor:
        return self.entries

    def lengths(self) -> Int64[Tensor, " batch"]:
        return self.row_lengths


class PlainFeatures:
    """The ids of a batch in place of a KeyedJaggedTensor, for programs of plain tensors.

    A feature with one id a row is found by the place of its first id, so that no shape depends on the numbers in
    ``lengths``. The shape of a list does. Refuses lengths other than 1 of these features, and lengths that do not add
    up to the ids.
    """

    def __init__(
        self,
        features: Sequence[PlainFeature],
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
    ) -> None:
        self._indices = {feature.name: index for index, feature in enumerate(features)}
        self._features, self.values, self.lengths = features, values, lengths
        self._places: dict[str, Int64[Tensor, " ids"]] = {}
        self._has_lists = any(feature.is_list for feature in features)
        single = [index for index, feature in enumerate(features) if not feature.is_list]
        torch._assert_async((lengths[single] == 1).all(), "a feature with one id a row has rows with another number")
        if self._has_lists:
            counts = lengths.sum(1)
            torch._assert_async(counts.sum() == values.shape[0], "lengths say another number of ids than values has")
            self._starts = counts.cumsum(0) - counts

    def single_ids(self, names: Sequence[str]) -> Int64[Tensor, "features batch"]:
        """Returns the ids of features with one id a row, a line for each of ``names``."""
        indices = [self._indices[name] for name in names]
        if not self._has_lists:
            # one id of each feature and row: the ids are a matrix already
            ids = self.values.view(len(self._features), self.lengths.shape[1])
            return ids if indices == list(range(len(self._features))) else ids[indices]
        rows = torch.arange(self.lengths.shape[1])
        return self.values[self._starts[indices].unsqueeze(1) + rows]

    def list_ids(self, name: str) -> Jagged:
        """Returns the ids of a list."""
        index = self._indices[name]
        return Jagged(self.values[self._starts[index] + self.places(name)], self.lengths[index])

    def places(self, name: str) -> Int64[Tensor, " ids"]:
        """Returns 0, 1, ... for the ids of a list; one tensor, so that a program knows the numbers of ids as equal."""
        if name not in self._places:
            num_ids: Any = self.lengths[self._indices[name]].sum().item()
            torch._check(num_ids >= 0)
            self._places[name] = torch.arange(num_ids)
        return self._places[name]

    def recent(self, name: str, most: int) -> Int64[Tensor, "batch most"]:
        """Returns the last ``most`` ids of each row of a list; a shorter row repeats its last id.

        ::

            a b c d e     ->  c d e
            a b           ->  a b b          a row without ids gets any id       most 3
        """
        return _padded(self.values)[self._starts[self._indices[name]] + self.recent_places(name, most)]

    def recent_places(self, name: str, most: int) -> Int64[Tensor, "batch most"]:
        """Returns the place, among all ids of a list, of each id of :meth:`recent`.

        It is the number of ids, one after the last place, for rows without ids at the end.
        """
        lengths = self.lengths[self._indices[name]]
        kept_lengths = lengths.clamp(max=most)
        first_places = lengths.cumsum(0) - kept_lengths
        offsets = torch.minimum(torch.arange(most), (kept_lengths - 1).clamp(min=0).unsqueeze(1))
        return first_places.unsqueeze(1) + offsets

    def row_lengths(self, name: str) -> Int64[Tensor, " batch"]:
        """Returns the number of ids of each row of a feature."""
        return self.lengths[self._indices[name]]

    def rows_of(self, name: str) -> tuple[Int64[Tensor, " ids"], Bool[Tensor, " ids"]]:
        """Returns, for each id in ``values``, its row and whether it belongs to the feature ``name``."""
        num_rows = self.lengths.shape[1]
        lines = torch.arange(self.lengths.numel())
        owners = lines.repeat_interleave(self.lengths.flatten(), output_size=self.values.shape[0])
        return owners % num_rows, owners // num_rows == self._indices[name]

    def __getitem__(self, name: str) -> Jagged:
        """Returns the ids of a feature."""
        if self._features[self._indices[name]].is_list:
            return self.list_ids(name)
        return Jagged(self.single_ids([name])[0], self.lengths[self._indices[name]])


class PlainSequences:
    """The lists of numbers of a batch in place of a KeyedJaggedTensor: a column after the other, each row after row.

    Refuses numbers that are not as many as the ids beside them.
    """

    def __init__(
        self, sequences: Sequence[PlainSequence], features: PlainFeatures, numbers: Float[Tensor, " numbers"]
    ) -> None:
        self._features, self._numbers = features, numbers
        self._beside = {sequence.name: sequence.beside for sequence in sequences}
        counts = torch.stack([features.row_lengths(sequence.beside).sum() for sequence in sequences])
        torch._assert_async(counts.sum() == numbers.shape[0], "sequences have not a number for each id beside them")
        self._starts = dict(zip(self._beside, (counts.cumsum(0) - counts).unbind(0), strict=True))

    def __getitem__(self, name: str) -> Jagged:
        """Returns the numbers of a column."""
        beside = self._beside[name]
        numbers = self._numbers[self._starts[name] + self._features.places(beside)]
        return Jagged(numbers, self._features.row_lengths(beside))

    def recent(self, name: str, most: int) -> Float[Tensor, "batch most"]:
        """Returns the numbers of the ids that :meth:`PlainFeatures.recent` returns of the list beside."""
        return _padded(self._numbers)[self._starts[name] + self._features.recent_places(self._beside[name], most)]


def _padded(values: Tensor) -> Tensor:
    """Returns values with a 0 at the end, which is read for empty rows at the end."""
    return torch.cat([values, torch.zeros(1, dtype=values.dtype)])


class FeatureVectors(nn.Module):
    """Takes the place of an embedding collection of bags: tables of one kind are stored and looked up as one group.

    Args:
        tables: The tables, in the order of the outputs.
        weights: The weights of each table's partitions, by its name.
        features: The features of the tables by name; which of them are lists decides how they are read.
        storage: How tables are stored.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingBagConfig],
        weights: Mapping[str, Sequence[Tensor]],
        features: Mapping[str, PlainFeature],
        storage: ExportStorage,
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
        self.groups = nn.ModuleList(TableGroup([stored for _, stored in group], storage) for group in groups.values())
        # of each group the features with one id a row, and the lists, each with the number of its table in the group
        self._single: list[list[tuple[str, int]]] = []
        self._lists: list[list[tuple[str, int, Any]]] = []
        for group in groups.values():
            tables_of_group = [table for table, _ in group]
            read = [(name, number) for number, table in enumerate(tables_of_group) for name in table.feature_names]
            lists = [(name, number) for name, number in read if features[name].is_list]
            self._single.append([feature_and_table for feature_and_table in read if feature_and_table not in lists])
            self._lists.append([(name, number, tables_of_group[number].pooling) for name, number in lists])

    def forward(self, features: PlainFeatures) -> KeyedTensor:
        """Returns the vectors of all features, pooled."""
        return KeyedTensor(self.keys, self.dims, self.vectors(features))

    def vectors(self, features: PlainFeatures) -> Float[Tensor, "batch columns"]:
        """Returns the pooled vectors of all features side by side, in the order of the output's keys."""
        by_feature: dict[str, Tensor] = {}
        for group, single, lists in zip(self.groups, self._single, self._lists, strict=True):
            if single:
                names = [name for name, _ in single]
                looked_up = group(features.single_ids(names), [number for _, number in single], names)
                by_feature.update(zip(names, looked_up.unbind(0), strict=True))
            for name, number, pooling in lists:
                ids = features.list_ids(name)
                by_feature[name] = pool(group(ids.values().unsqueeze(0), [number], [name])[0], ids.lengths(), pooling)
        return torch.cat([by_feature[name] for name in self._order], dim=1)


class IdVectors(nn.Module):
    """Takes the place of an embedding collection of sequences: each id has a vector, which is not pooled."""

    def __init__(self, collection: CompositionalEmbeddingCollection, storage: ExportStorage) -> None:
        super().__init__()
        tables = collection.tables()
        self._features = [(name, number) for number, table in enumerate(tables) for name in table.feature_names]
        self.groups = nn.ModuleList(
            TableGroup([stored_table(table, collection.weights(table.name), storage.form(table))], storage)
            for table in tables
        )

    def forward(self, features: PlainFeatures) -> dict[str, Jagged]:
        """Returns the vectors of the ids of each feature."""
        found = {}
        for name, number in self._features:
            ids = features[name]
            vectors = self.groups[number](ids.values().unsqueeze(0), [0], [name])[0]
            found[name] = Jagged(vectors, ids.lengths())
        return found
