"""The programs of models that recommend items: which comes next in a sequence, and which a user takes.

Both map plain tensors to the best items of each row and their scores. ``item`` is a list of either one's rows: of a
next item the history, the earliest first, of which the network sees the last ones; of a user the items to leave out.
A history's items are not recommended where ``task.exclude_seen`` leaves them out, as in the trainer's ``predict``. An
empty list is a list too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import ITEM, ITEM_TARGET, SPARSE_FEATURES, USER
from distembed.data.reader import Batch
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.modules import embedding_modules
from distembed.embedding.tables import CompositionalTables
from distembed.models import MF, Model
from distembed.models.catalogue import Catalogue
from distembed.models.mf import queries_of_users
from distembed.models.next_items import NextItems, NextItemsWithNumbers
from distembed.models.sequences import SequenceLayout
from distembed.serving.export.batches import plain_inputs
from distembed.serving.export.feature_vectors import PlainFeature, PlainFeatures
from distembed.serving.export.item_choice import ItemChoice
from distembed.serving.export.programs import ProgramInputs
from distembed.serving.export.table_groups import TableGroup, TableStorage, stored_table
from distembed.serving.model_folder.manifest import RecommendedItems
from distembed.tasks.next_item import SEEN
from distembed.tasks.ranking import EXCLUDED

Recommended = tuple[Int64[Tensor, "batch best"], Float[Tensor, "batch best"]]


@dataclass(frozen=True)
class _Vectors:
    """Vectors in the place of a JaggedTensor."""

    vectors: Float[Tensor, "ids dim"]

    def values(self) -> Float[Tensor, "ids dim"]:
        return self.vectors


class NextItemProgram(nn.Module):
    """Maps histories to the best next items, and their scores.

    Args:
        model: The model.
        features: The features that it looks up, items first.
        lookups: The table of each, alone in its group.
        choice: The items to choose from.
        excludes_seen: Whether a history's items are left out.
    """

    def __init__(
        self,
        model: NextItems,
        features: Sequence[PlainFeature],
        lookups: Sequence[TableGroup],
        choice: ItemChoice,
        excludes_seen: bool,
    ) -> None:
        super().__init__()
        self.tokens = model.network.tokens
        self.states: Any = model.network.states
        self.lookups, self.choice = nn.ModuleList(lookups), choice
        self._features, self._excludes_seen = features, excludes_seen

    def forward(self, values: Int64[Tensor, " ids"], lengths: Int64[Tensor, "features batch"]) -> Recommended:
        """Returns the best items of each row."""
        features, most = PlainFeatures(self._features, values, lengths), self.states.max_length
        embedded = {}
        for feature, lookup in zip(self._features, self.lookups, strict=True):
            recent = features.recent(feature.name, most).view(1, -1)
            embedded[feature.name] = _Vectors(lookup(recent, [0])[0])
        vectors = self.tokens(embedded, None)
        queries = self.states.on_slots(vectors, _layout(lengths[0], most))
        owners, ids, is_item = _left_out(features)
        best: Recommended = self.choice(queries, owners, ids, is_item if self._excludes_seen else is_item & False)
        return best


def _layout(lengths: Int64[Tensor, " batch"], most: int) -> SequenceLayout:
    """Returns the layout of rows of equally many slots, with a query at the last token of each."""
    num_rows = lengths.shape[0]
    left = lengths.clamp(max=most)
    ages = (left.unsqueeze(1) - 1 - torch.arange(most)).clamp(min=0).flatten()
    slots = torch.arange(num_rows) * most + left - 1
    queries = torch.where(left > 0, slots, num_rows * most)  # where there is no token
    return SequenceLayout(torch.arange(num_rows * most), ages, ((num_rows, most),), queries)


class RankingProgram(nn.Module):
    """Maps users, and the items that they have, to the best other items and their scores.

    Args:
        users: The table of users, alone in its group.
        choice: The items to choose from.
        biases: Whether the last number of a vector is a bias.
    """

    features = (PlainFeature(USER, is_list=False), PlainFeature(ITEM, is_list=True))

    def __init__(self, users: TableGroup, choice: ItemChoice, biases: bool) -> None:
        super().__init__()
        self.users, self.choice = users, choice
        self._biases = biases

    def forward(self, values: Int64[Tensor, " ids"], lengths: Int64[Tensor, "features batch"]) -> Recommended:
        """Returns the best items of each row."""
        features = PlainFeatures(self.features, values, lengths)
        users = self.users(features.of_single([USER]), [0])[0]
        queries, offsets = queries_of_users(users, self._biases)
        items, scores = self.choice(queries, *_left_out(features))
        return items, scores if offsets is None else scores + offsets.unsqueeze(1)


def _left_out(features: PlainFeatures) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what the rows' items leave out, as :meth:`ItemChoice.forward` takes it."""
    owners, is_item = features.rows_of(ITEM)
    return owners, features.values, is_item


@dataclass(frozen=True)
class RecommendingModel:
    """A trained model that recommends items, and what its program is made of.

    Attributes:
        outputs: Names of what the program returns.
        features: The features that it takes.
        tables: Its tables.
        reserved: Ids that stand for no item.
        num_best: Number of items of each row.
        make_program: Makes the program, with tables as they are stored.
        lists: Returns the features of a batch's rows, of which items are those that the rows may leave out.
        excludes_seen: Whether a row's items are left out.
    """

    outputs = ("items", "scores")
    takes_numbers = False

    features: Sequence[PlainFeature]
    tables: Sequence[CompositionalEmbeddingConfig]
    reserved: Sequence[int]
    num_best: int
    make_program: Callable[[TableStorage], nn.Module]
    lists: Callable[[Batch], Mapping[str, JaggedTensor]]
    excludes_seen: bool

    @classmethod
    def of_next_items(
        cls, model: Model, reserved: Sequence[int], num_best: int, excludes_seen: bool = True
    ) -> RecommendingModel:
        """Returns a model of the next item as its program is made of it.

        Args:
            model: The model with its weights.
            reserved: Ids that stand for no item.
            num_best: Number of items of each row.
            excludes_seen: Whether a history's items are left out.

        Raises:
            UserError: The model has parts that such programs do not have, or there are fewer items than wanted.
        """
        if not isinstance(model, NextItems):
            raise _unknown_model(model, "sasrec and gru")
        if isinstance(model, NextItemsWithNumbers):
            raise UserError(
                f"the model takes numbers beside the items ({', '.join(model.network.tokens.numbers)}), and exported "
                "models take ids alone; train it with model.side_features=false, or without these columns."
            )
        features = [PlainFeature(name, is_list=True) for name in (ITEM, *model.network.tokens.features)]
        stored = _StoredTables(model, model.network.catalogue, num_best)

        def make(storage: TableStorage) -> nn.Module:
            groups = stored.groups(storage)
            lookups = [groups[stored.table_of(each.name)] for each in features]
            return NextItemProgram(model, features, lookups, stored.choice(groups, reserved), excludes_seen)

        return cls(features, stored.tables, reserved, num_best, make, _histories, excludes_seen)

    @classmethod
    def of_rankings(
        cls, model: Model, reserved: Sequence[int], num_best: int, excludes_seen: bool = True
    ) -> RecommendingModel:
        """Returns a model of users and items so; arguments and errors as :meth:`of_next_items`.

        Its program leaves out the items that it is given, which are none where seen items are candidates.
        """
        if not isinstance(model, MF):
            raise _unknown_model(model, "mf")
        stored = _StoredTables(model, model.network.catalogue, num_best)

        def make(storage: TableStorage) -> nn.Module:
            groups = stored.groups(storage)
            choice = stored.choice(groups, reserved)
            return RankingProgram(groups[stored.table_of(USER)], choice, model.biases)

        return cls(RankingProgram.features, stored.tables, reserved, num_best, make, _users, excludes_seen)

    @property
    def recommends(self) -> RecommendedItems:
        """What the manifest says of the outputs."""
        return RecommendedItems(ITEM, self.num_best, self.excludes_seen)

    def inputs(self, batch: Batch) -> ProgramInputs:
        """Returns the inputs of the program for the rows of a batch, as the task prepares one or as it is drawn."""
        found, names = self.lists(batch), [feature.name for feature in self.features]
        values = torch.cat([found[name].values().long() for name in names])
        lengths = torch.cat([found[name].lengths().long() for name in names])
        features = KeyedJaggedTensor(names, values, lengths=lengths)
        return plain_inputs(Batch({SPARSE_FEATURES: features}, 1), self.features, takes_numbers=False)

    def left_out(self, batch: Batch) -> JaggedTensor:
        """Returns the items that are not recommended to each row of a batch."""
        items = self.lists(batch)[ITEM]
        if self.excludes_seen:
            return items
        return JaggedTensor(items.values()[:0], lengths=torch.zeros_like(items.lengths()))

    def whole_program(self, storage: TableStorage) -> nn.Module:
        """Returns the program that has all tables."""
        return self.make_program(storage)


def _unknown_model(model: Model, known: str) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be exported: programs that recommend items are made of {known} alone."
    )


def _histories(batch: Batch) -> Mapping[str, JaggedTensor]:
    """Returns the items before the target of each row that has one, and what stands beside them."""
    ids = batch[SPARSE_FEATURES]
    assert isinstance(ids, KeyedJaggedTensor)
    lists: dict[str, JaggedTensor] = ids.to_dict()
    if SEEN not in batch.fields:  # of a batch that is drawn all items are
        return lists
    seen = batch[SEEN]
    assert isinstance(seen, KeyedJaggedTensor)
    has_target = ids[ITEM_TARGET].lengths() > 0
    lists[ITEM] = seen[ITEM]
    # rows without a target have nothing in any list
    return {name: JaggedTensor(own.values(), lengths=own.lengths()[has_target]) for name, own in lists.items()}


def _users(batch: Batch) -> Mapping[str, JaggedTensor]:
    """Returns the users of rows, and the items that they have; of a batch that is drawn, its items."""
    ids, taken = batch[SPARSE_FEATURES], batch.fields.get(EXCLUDED, batch[SPARSE_FEATURES])
    assert isinstance(ids, KeyedJaggedTensor) and isinstance(taken, KeyedJaggedTensor)
    return {USER: ids[USER], ITEM: taken[ITEM]}


class _StoredTables:
    """The tables of a model, each alone in its group, so that an item table may be gone over too.

    Args:
        model: The model.
        catalogue: The items that it chooses from.
        num_best: How many of them it chooses.

    Raises:
        UserError: There are fewer, or the model has other collections.
    """

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
        """Returns the name of the table in which a feature is looked up."""
        return next(table.name for table in self.tables if feature in table.feature_names)

    def groups(self, storage: TableStorage) -> dict[str, TableGroup]:
        """Returns each table as it is stored."""
        return {
            table.name: TableGroup(
                [stored_table(table, self._modules[table.name].weights(table.name), storage.form(table))],
                storage.precision,
            )
            for table in self.tables
        }

    def choice(self, groups: dict[str, TableGroup], reserved: Sequence[int]) -> ItemChoice:
        """Returns the items to choose from."""
        own = self._catalogue
        return ItemChoice(groups[own.table.name], own.num_items, own.bias, reserved, self._num_best)
