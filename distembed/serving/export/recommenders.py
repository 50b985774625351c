"""The programs of models that recommend items: the next item of a sequence, and the items that a user takes.

Both map plain tensors to the best items of each row and their scores. ``item`` is a list in both. For the next item it
is the history, the earliest item first; the network sees its last items, and ``task.exclude_seen`` leaves the history
out of the answer, as in the trainer's ``predict``. Lists of numbers beside the items, such as their times, are inputs
too where the network reads them. For a user the list is the items to leave out. A list may be empty.

Each call scores all items of the catalogue. Their vectors are composed chunk by chunk from the stored table, so that
memory holds neither all vectors nor all scores::

    items    | chunk | chunk | chunk |      vectors of a chunk, scores [batch, chunk], the best k of it; then dropped
    best     |   k  ->   k  ->   k   |

Trade-off: a catalogue of a million items of 64 numbers takes 256 MB as vectors and 64 MB as partitions of 4 collisions.
Composing it reads and writes the 256 MB in each call, which is most of the time of a call of few rows. With enough
memory use ``--materialise always``: vectors are then read in place. A tied model has one copy of the vectors in either
form.

The best items are chosen by products in float32. Their scores are then computed in float64 and rounded, as in the
trainer (:mod:`distembed.tasks.catalogue.ranking`); float64 for all items would take twice the time. An item whose score
differs from the last chosen one only by rounding may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_SEQUENCES, ITEM, ITEM_TARGET, SPARSE_FEATURES, USER
from distembed.data.reader import Batch
from distembed.embedding.collections import embedding_modules
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.models import MF, Model
from distembed.models.mf import queries_of_users
from distembed.models.next_items import NextItems
from distembed.models.queries import Catalogue, Queries
from distembed.models.sequences import SequenceLayout
from distembed.serving.export.feature_vectors import (
    Jagged,
    PlainFeature,
    PlainFeatures,
    PlainSequence,
    PlainSequences,
    plain_inputs,
)
from distembed.serving.export.programs import ProgramInputs
from distembed.serving.export.table_groups import ExportStorage, TableGroup, stored_table
from distembed.serving.model_folder.manifest import RecommendedItems
from distembed.tasks.catalogue.ranking import RankedCatalogue, best_keys, ids_of, keys_of, scores_of
from distembed.tasks.next_item import SEEN
from distembed.tasks.recommendations import EXCLUDED

Recommended = tuple[Int64[Tensor, "batch best"], Float[Tensor, "batch best"]]


_LEAST_CHUNK, _MOST_CHUNKS = 1 << 16, 64
"""Least items in a chunk, and most chunks; each chunk makes a program longer, so large catalogues get larger chunks."""


class ItemChoice(nn.Module):
    """Maps queries to their best items and their scores ``h . u_i + b_i``; equal scores are ordered by id.

    ``items`` is the table of items, alone in its group; ``reserved`` are the ids of missing and unknown items, never
    chosen.
    """

    def __init__(
        self, items: TableGroup, num_items: int, bias: Tensor | None, reserved: Sequence[int], num_best: int
    ) -> None:
        super().__init__()
        self.items = items
        item_bias = torch.zeros(num_items) if bias is None else bias.detach().clone().float()
        item_bias[list(reserved)] = -torch.inf  # a score of -inf is never chosen
        self.register_buffer("bias", item_bias)
        self.register_buffer("zero", torch.zeros(1, 1, dtype=torch.int64))
        self._num_items, self._num_best = num_items, num_best
        self._chunk = max(_LEAST_CHUNK, -(-num_items // _MOST_CHUNKS))

    def forward(
        self,
        queries: Float[Tensor, "batch dim"],
        owners: Int64[Tensor, " ids"],
        left_out: Int64[Tensor, " ids"],
        is_item: Bool[Tensor, " ids"],
    ) -> tuple[Int64[Tensor, "batch best"], Float[Tensor, "batch best"]]:
        """Returns the best items of each query and their scores, padded by -1 and -inf.

        Args:
            queries: A vector for each row, multiplied with the vectors of all items.
            owners: The row of each id in ``left_out``.
            left_out: Ids that are not recommended to their row.
            is_item: Whether an id in ``left_out`` is an item; the rest is ignored.
        """
        chunks = [
            self._best_between(first, min(first + self._chunk, self._num_items), queries, (owners, left_out, is_item))
            for first in range(0, self._num_items, self._chunk)
        ]
        keys = best_keys(torch.cat(chunks, dim=1), self._num_best)
        return ids_of(keys), scores_of(keys)

    def _best_between(
        self, first: int, stop: int, queries: Tensor, left_out: tuple[Tensor, Tensor, Tensor]
    ) -> Int64[Tensor, "batch most"]:
        """Returns the best items from ``first`` to ``stop`` - 1 as keys: one integer that orders by score, then by id.

        ``left_out`` are the last three arguments of :meth:`forward`.
        """
        bias = cast(Tensor, self.bias)[first:stop]
        vectors = self._vectors(first, stop)
        scores = torch.addmm(bias, queries, vectors.T)
        owners, ids, is_item = left_out
        # ids of other chunks, and ids that are no items, add 0 to some score instead of being dropped, which would give
        # the program a shape that depends on the ids
        columns_left_out = ids - first
        is_here = is_item & (columns_left_out >= 0) & (columns_left_out < stop - first)
        minus = torch.where(is_here, -torch.inf, 0.0)
        scores = scores.index_put((owners, columns_left_out.clamp(0, stop - first - 1)), minus, accumulate=True)
        rounded, columns = scores.topk(min(self._num_best, stop - first))
        exact = (queries.double().unsqueeze(1) * vectors[columns].double()).sum(2) + bias[columns].double()
        return keys_of(torch.where(rounded > -torch.inf, exact.float(), -torch.inf), columns + first)

    def _vectors(self, first: int, stop: int) -> Float[Tensor, "ids dim"]:
        """Returns the vectors of the items from ``first`` to ``stop`` - 1."""
        if self.items.is_full:
            return self.items.vectors_between(first, stop)
        # torch 2.13's compiler leaves stacked rows unwritten if they depend on no tensor
        ids = torch.arange(first, stop) + cast(Tensor, self.zero)
        return self.items.vectors(ids, [0])[0]


class NextItemProgram(nn.Module):
    """Maps histories to the best next items and their scores.

    ``lookups`` has the group of each feature's table, in the order of ``features``; the first feature is ``item``.
    ``sequences`` are the lists of numbers beside the items that the model reads.
    """

    def __init__(
        self,
        model: NextItems,
        features: Sequence[PlainFeature],
        sequences: Sequence[PlainSequence],
        lookups: Sequence[TableGroup],
        choice: ItemChoice,
        excludes_seen: bool,
    ) -> None:
        super().__init__()
        self.tokens = model.network.tokens
        self.states: Any = model.network.states
        self.lookups, self.choice = nn.ModuleList(lookups), choice
        self._features, self._sequences, self._times = features, sequences, model.network.times
        self._excludes_seen = excludes_seen

    def forward(
        self,
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
        sequences: Float[Tensor, " numbers"] | None = None,
    ) -> Recommended:
        """Returns the best items of each row."""
        features, most = PlainFeatures(self._features, values, lengths), self.states.max_length
        embedded = {}
        for feature, lookup in zip(self._features, self.lookups, strict=True):
            recent = features.recent(feature.name, most).view(1, -1)
            embedded[feature.name] = Jagged(lookup(recent, [0])[0], lengths[0])
        numbers = {}
        if sequences is not None:
            lists = PlainSequences(self._sequences, features, sequences)
            numbers = {sequence.name: lists.recent(sequence.name, most).flatten() for sequence in self._sequences}
        vectors, layout = self.tokens(embedded, numbers), _layout(lengths[0], most)
        times = () if self._times is None else (numbers[self._times],)
        queries = self.states.on_slots(vectors, layout, *times)
        owners, ids, is_item = left_out_ids(features)
        best: Recommended = self.choice(queries, owners, ids, is_item if self._excludes_seen else is_item & False)
        return best


def _layout(lengths: Int64[Tensor, " batch"], most: int) -> SequenceLayout:
    """Returns the layout of rows of ``most`` slots each, tokens first, with a query at the last token of each row.

    A row without tokens gets the query slot ``num_rows * most``, one after the last, from which zeros are read.
    """
    num_rows = lengths.shape[0]
    left = lengths.clamp(max=most)
    ages = (left.unsqueeze(1) - 1 - torch.arange(most)).clamp(min=0).flatten()
    slots = torch.arange(num_rows) * most + left - 1
    queries = torch.where(left > 0, slots, num_rows * most)
    return SequenceLayout(torch.arange(num_rows * most), ages, ((num_rows, most),), queries)


class RankingProgram(nn.Module):
    """Maps users, and items to leave out, to the best other items and their scores.

    With ``biases`` the last number of a user's vector is the user's bias, which is added to all scores of the row.
    """

    features = (PlainFeature(USER, is_list=False), PlainFeature(ITEM, is_list=True))

    def __init__(self, users: TableGroup, choice: ItemChoice, biases: bool) -> None:
        super().__init__()
        self.users, self.choice = users, choice
        self._biases = biases

    def forward(self, values: Int64[Tensor, " ids"], lengths: Int64[Tensor, "features batch"]) -> Recommended:
        """Returns the best items of each row."""
        features = PlainFeatures(self.features, values, lengths)
        users = self.users(features.single_ids([USER]), [0])[0]
        queries, offsets = queries_of_users(users, self._biases)
        items, scores = self.choice(queries, *left_out_ids(features))
        return items, scores if offsets is None else scores + offsets.unsqueeze(1)


def left_out_ids(features: PlainFeatures, item: str = ITEM) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``owners``, ``left_out`` and ``is_item`` of :meth:`ItemChoice.forward`: all ids, and which are items."""
    owners, is_item = features.rows_of(item)
    return owners, features.values, is_item


@dataclass(frozen=True)
class QueriesOf:
    """Queries of a trained model, the items to rank for them, and a number that is added to all scores of a query."""

    catalogue: RankedCatalogue
    vectors: Float[Tensor, "queries dim"]
    offsets: Float[Tensor, " queries"] | None


@dataclass(frozen=True)
class RecommendingModel:
    """A trained model that recommends items, in the form from which its program is made.

    ``whole_program`` makes the program, with tables stored as its argument says. ``lists`` maps a batch to each
    feature's ids; the ids of ``item`` are left out of the recommendations if ``excludes_seen`` is set. ``reserved`` are
    the ids of missing and unknown items, and ``sequences`` the lists of numbers beside items that the program takes.
    """

    outputs = ("items", "scores")
    takes_numbers = False

    features: Sequence[PlainFeature]
    tables: Sequence[CompositionalEmbeddingConfig]
    reserved: Sequence[int]
    num_best: int
    whole_program: Callable[[ExportStorage], nn.Module]
    lists: Callable[[Batch], Mapping[str, JaggedTensor]]
    excludes_seen: bool
    sequences: Sequence[PlainSequence] = ()

    @classmethod
    def for_next_items(
        cls, model: Model, reserved: Sequence[int], num_best: int, excludes_seen: bool = True
    ) -> RecommendingModel:
        """Returns a model of the next item in this form.

        Raises a :class:`UserError` for another model than sasrec, gru or hstu, and where ``num_best`` exceeds the
        catalogue.
        """
        if not isinstance(model, NextItems):
            raise _unknown_model(model, "sasrec, gru and hstu")
        features = [PlainFeature(name, is_list=True) for name in (ITEM, *model.network.tokens.features)]
        sequences = [PlainSequence(name, ITEM) for name in model.network.numbers]
        stored = _StoredTables(model, model.network.catalogue, num_best)

        def make(storage: ExportStorage) -> nn.Module:
            groups = stored.groups(storage)
            lookups = [groups[stored.table_of(feature.name)] for feature in features]
            return NextItemProgram(model, features, sequences, lookups, stored.choice(groups, reserved), excludes_seen)

        return cls(features, stored.tables, reserved, num_best, make, _histories, excludes_seen, sequences)

    @classmethod
    def for_rankings(
        cls, model: Model, reserved: Sequence[int], num_best: int, excludes_seen: bool = True
    ) -> RecommendingModel:
        """Returns a model of users and items in this form; refuses models other than mf, and a wrong ``num_best``."""
        if not isinstance(model, MF):
            raise _unknown_model(model, "mf")
        stored = _StoredTables(model, model.network.catalogue, num_best)

        def make(storage: ExportStorage) -> nn.Module:
            groups = stored.groups(storage)
            choice = stored.choice(groups, reserved)
            return RankingProgram(groups[stored.table_of(USER)], choice, model.biases)

        return cls(RankingProgram.features, stored.tables, reserved, num_best, make, _users, excludes_seen)

    @property
    def numbers(self) -> Sequence[str]:
        """The dense features that the program takes: none."""
        return ()

    @property
    def num_items(self) -> int:
        """The number of ids of items."""
        return max(table.num_embeddings for table in self.tables if ITEM in table.feature_names)

    def trained_queries(self, outputs: Queries) -> QueriesOf:
        """Returns the trained model's queries, and the items to rank for them."""
        return QueriesOf(outputs.catalogue, outputs.vectors.float(), outputs.offsets)

    @property
    def recommends(self) -> RecommendedItems:
        """The manifest's description of the outputs."""
        return RecommendedItems(ITEM, self.num_best, self.excludes_seen)

    def inputs(self, batch: Batch) -> ProgramInputs:
        """Returns the program's inputs for the rows of a batch that a task prepared or :func:`made_up_batch` drew."""
        lists, names = self.lists(batch), [feature.name for feature in self.features]
        values = torch.cat([lists[name].values().long() for name in names])
        lengths = torch.cat([lists[name].lengths().long() for name in names])
        fields: dict[str, Tensor | KeyedJaggedTensor] = {
            SPARSE_FEATURES: KeyedJaggedTensor(names, values, lengths=lengths)
        }
        if self.sequences:
            numbers = _numbers(batch, [sequence.name for sequence in self.sequences], lists[ITEM].lengths().long())
            fields[DENSE_SEQUENCES] = numbers
        return plain_inputs(Batch(fields, 1), self.features, takes_numbers=False, sequences=self.sequences)

    def left_out(self, batch: Batch) -> JaggedTensor:
        """Returns the items that are not recommended to each row of a batch; none unless ``excludes_seen`` is set."""
        items = self.lists(batch)[ITEM]
        if self.excludes_seen:
            return items
        return JaggedTensor(items.values()[:0], lengths=torch.zeros_like(items.lengths()))


def _unknown_model(model: Model, supported: str) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be exported: programs that recommend items are made of {supported} alone."
    )


def _histories(batch: Batch) -> Mapping[str, JaggedTensor]:
    """Returns the history of each row that has a target, and its values of the other features.

    A prepared batch has the items before the target in the field ``seen``. A drawn batch lacks the field; all of its
    rows and items are returned.
    """
    ids = batch[SPARSE_FEATURES]
    assert isinstance(ids, KeyedJaggedTensor)
    lists: dict[str, JaggedTensor] = ids.to_dict()
    if SEEN not in batch.fields:
        return lists
    seen = batch[SEEN]
    assert isinstance(seen, KeyedJaggedTensor)
    has_target = ids[ITEM_TARGET].lengths() > 0
    lists[ITEM] = seen[ITEM]
    # the lists of rows without a target are empty
    return {name: JaggedTensor(jagged.values(), lengths=jagged.lengths()[has_target]) for name, jagged in lists.items()}


def _numbers(batch: Batch, names: Sequence[str], lengths: Int64[Tensor, " rows"]) -> KeyedJaggedTensor:
    """Returns lists of numbers as long as the histories of :func:`_histories`, whose numbers of items are ``lengths``.

    A prepared batch has the numbers of the items that the network sees, the last ones. Earlier items get the first of
    these numbers, so that times stay in order.
    """
    given, ids = batch[DENSE_SEQUENCES], batch[SPARSE_FEATURES]
    assert isinstance(given, KeyedJaggedTensor) and isinstance(ids, KeyedJaggedTensor)
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    from_end = lengths.cumsum(0)[rows] - torch.arange(len(rows))  # 1 for the last item of a row
    values = []
    for name in names:
        own_lengths = given[name].lengths().long()
        own_lengths = own_lengths[ids[ITEM_TARGET].lengths() > 0] if SEEN in batch.fields else own_lengths
        places = own_lengths.cumsum(0)[rows] - torch.minimum(from_end, own_lengths[rows])
        values.append(given[name].values()[places])
    return KeyedJaggedTensor(list(names), torch.cat(values), lengths=lengths.repeat(len(names)))


def _users(batch: Batch) -> Mapping[str, JaggedTensor]:
    """Returns the user of each row and the items to leave out; a drawn batch has its own items in place of these."""
    ids, excluded = batch[SPARSE_FEATURES], batch.fields.get(EXCLUDED, batch[SPARSE_FEATURES])
    assert isinstance(ids, KeyedJaggedTensor) and isinstance(excluded, KeyedJaggedTensor)
    return {USER: ids[USER], ITEM: excluded[ITEM]}


class _StoredTables:
    """The tables of a model, each alone in its group, so that all items can be read in the order of their ids."""

    def __init__(self, model: Model, catalogue: Catalogue, num_best: int) -> None:
        if not 1 <= num_best <= catalogue.num_items:
            raise UserError(f"--num-best is {num_best}, and it is from 1 to the {catalogue.num_items:,} ids of items.")
        self._catalogue, self._num_best = catalogue, num_best
        self._modules: dict[str, CompositionalTables[Any]] = {}
        self.tables: list[CompositionalEmbeddingConfig] = []
        for path, module in embedding_modules(model).items():
            if not isinstance(module, CompositionalTables):
                raise UserError(
                    f"{path} of the model is a {type(module).__name__}; models that recommend items are exported with "
                    "distembed's collections alone."
                )
            self.tables += module.tables()
            self._modules |= {table.name: module for table in module.tables()}

    def table_of(self, feature: str) -> str:
        """Returns the name of a feature's table."""
        return next(table.name for table in self.tables if feature in table.feature_names)

    def groups(self, storage: ExportStorage) -> dict[str, TableGroup]:
        """Returns a group for each table, by its name, that holds the table alone in its stored form."""
        return {
            table.name: TableGroup(
                [stored_table(table, self._modules[table.name].weights(table.name), storage.form(table))],
                storage,
            )
            for table in self.tables
        }

    def choice(self, groups: dict[str, TableGroup], reserved: Sequence[int]) -> ItemChoice:
        """Returns the choice among all items of the catalogue."""
        catalogue = self._catalogue
        return ItemChoice(groups[catalogue.table.name], catalogue.num_items, catalogue.bias, reserved, self._num_best)
