"""The programs of a model of two towers, and the index of its items.

::

    network.pt2             users, and items to leave out -> the best items and their scores
    towers/user.pt2         users -> vectors, divided by the temperature
    towers/item.pt2         items -> vectors
    index/items.parquet     id, raw value and vector of each item of the catalogue
    index/items.faiss       the vectors in a FAISS index, where it was asked for; entry i is row i of items.parquet

The network has the vectors of the catalogue within and searches all of them, exactly, chunk by chunk. With the user's
tower and the index, another system can search in its place. The item's tower gives vectors of new items.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import RunError, UserError
from distembed.composition import Product
from distembed.data.dataset.schema import DENSE_FEATURES, ITEM, SPARSE_FEATURES, CategoricalFeature, Schema
from distembed.data.reader import Batch
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.models.two_tower import Tower, TowerVectors, TwoTower
from distembed.partitions import Naive
from distembed.serving.export.feature_vectors import FeatureVectors, PlainFeature, PlainFeatures, plain_inputs
from distembed.serving.export.programs import ProgramInputs, save_program
from distembed.serving.export.recommenders import ItemChoice, QueriesOf, Recommended, left_out_ids
from distembed.serving.export.table_groups import ExportStorage, StoredTable, TableGroup
from distembed.serving.item_search import ItemSearch, ItemTable
from distembed.serving.model_folder.manifest import ExportedProgram, ItemIndex, RecommendedItems
from distembed.serving.whole_model import WholeModel
from distembed.tasks import RetrievalTask
from distembed.tasks.catalogue.item_vectors import ItemVectors
from distembed.tasks.recommendations import EXCLUDED
from distembed.training.prediction_columns import recommended_values

Faiss = Literal["flat", "hnsw"]
"""Kinds of FAISS indexes: exact inner products, or a graph of near neighbours (HNSW)."""
_HNSW_NEIGHBOURS = 32
INDEX, FAISS_INDEX = "index/items.parquet", "index/items.faiss"


class TowerProgram(nn.Module):
    """Maps the features of users, or of items, to their vectors.

    Args:
        tower: The tower.
        features: Its categorical features.
        vectors: Looks them up.
    """

    def __init__(self, tower: Tower, features: Sequence[PlainFeature], vectors: FeatureVectors) -> None:
        super().__init__()
        self.tower, self.vectors = copy.deepcopy(tower).eval(), vectors
        self._features = features

    def forward(
        self,
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
        dense: Float[Tensor, "batch numbers"] | None = None,
    ) -> Float[Tensor, "batch dim"]:
        """Returns the vector of each row."""
        return self.of(PlainFeatures(self._features, values, lengths), lengths.shape[1], dense)

    def of(self, features: PlainFeatures, num_rows: int, dense: Tensor | None) -> Float[Tensor, "batch dim"]:
        """Returns the vectors of rows with these features."""
        numbers = torch.empty(num_rows, 0) if dense is None else dense
        vectors: Tensor = self.tower(self.vectors(features), numbers, num_rows)
        return vectors


class RetrievalProgram(nn.Module):
    """Maps the features of users, and items to leave out, to the best other items and their scores.

    Items are stored by their places among the ascending ``ids`` of the catalogue, which may be far fewer than ids.
    """

    def __init__(
        self,
        user: TowerProgram,
        features: Sequence[PlainFeature],
        item: str,
        choice: ItemChoice,
        ids: Int64[Tensor, " items"],
    ) -> None:
        super().__init__()
        self.user, self.choice = user, choice
        self.register_buffer("ids", ids)
        self._features, self._item = features, item

    def forward(
        self,
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
        dense: Float[Tensor, "batch numbers"] | None = None,
    ) -> Recommended:
        """Returns the best items of each row."""
        features = PlainFeatures(self._features, values, lengths)
        queries = self.user.of(features, lengths.shape[1], dense)
        owners, left_out, is_item = left_out_ids(features, self._item)
        ids = cast(Tensor, self.ids)
        places = torch.searchsorted(ids, left_out).clamp(max=ids.shape[0] - 1)
        best, scores = self.choice(queries, owners, places, is_item & (ids[places] == left_out))
        return torch.where(best >= 0, ids[best.clamp(min=0)], best), scores


@dataclass(frozen=True)
class TowerSide:
    """A tower with its inputs.

    Attributes:
        file: The file of its program.
        tower: The tower.
        features: Its categorical features.
        tables: The tables of these features, without features of the other tower.
    """

    file: str
    tower: Tower
    features: Sequence[PlainFeature]
    tables: Sequence[CompositionalEmbeddingBagConfig]

    def inputs(self, batch: Batch) -> ProgramInputs:
        """Returns the program's inputs for a batch with all columns of the dataset."""
        fields = {**batch.fields, DENSE_FEATURES: self.numbers(batch)}
        return plain_inputs(Batch(fields, 1), self.features, bool(self.tower.side.dense))

    def numbers(self, batch: Batch) -> Tensor:
        """Returns a batch's dense features of the tower."""
        dense = batch[DENSE_FEATURES]
        assert isinstance(dense, Tensor)
        return dense[:, list(self.tower.side.dense_columns)]


@dataclass(frozen=True)
class TowerModel:
    """A trained model of two towers with the vectors of its catalogue, in the form from which its programs are made.

    Attributes:
        model: The model.
        schema: The columns of the dataset.
        item: The feature of items.
        reserved: The ids of missing and unknown items.
        num_best: Number of items that the network returns for a row.
        excludes_seen: Whether the network leaves out the given items.
        scored: The vectors of the catalogue, as the trained model's task ranks them.
        index: The items of the catalogue.
    """

    outputs = ("items", "scores")

    model: TwoTower
    schema: Schema
    item: str
    reserved: Sequence[int]
    num_best: int
    excludes_seen: bool
    scored: ItemVectors
    index: ItemTable

    @classmethod
    def of(cls, trained: WholeModel, reserved: Sequence[int], num_best: int) -> TowerModel:
        """Computes the vectors of the catalogue.

        Args:
            trained: The model.
            reserved: The ids of missing and unknown items.
            num_best: Number of items that the network returns for a row.

        Raises:
            UserError: The model has no towers, users have no categorical feature, the dataset is gone, or ``num_best``
                exceeds the catalogue.
        """
        model, task = trained.module.model, trained.task
        assert isinstance(task, RetrievalTask)
        if not isinstance(model, TwoTower) or not isinstance(model.embeddings, CompositionalEmbeddingBagCollection):
            raise UserError(
                f"{type(model).__name__} cannot be exported: programs of towers are made of two_tower alone."
            )
        if not model.network.user.side.categorical:
            raise UserError(
                f"users have numbers alone ({', '.join(model.network.user.side.dense)}), and a program of users takes "
                "ids; train with a categorical feature of users, for example an age of kind quantile_bins in the "
                "schema of `distembed prepare table`."
            )
        index = ItemSearch(trained, recommended_values(task.dataset, task).get(ITEM)).items()
        if not 1 <= num_best <= len(index.ids):
            raise UserError(f"--num-best is {num_best}, and it is from 1 to the {len(index.ids):,} items.")
        schema, excludes_seen = trained.blueprint.schema, task.excludes_seen
        return cls(model, schema, task.id_features[ITEM], reserved, num_best, excludes_seen, task.scored_items, index)

    @property
    def takes_numbers(self) -> bool:
        """Whether the network takes numbers of users."""
        return bool(self.numbers)

    @property
    def numbers(self) -> Sequence[str]:
        """The dense features of users, which the network takes."""
        return self.user.tower.side.dense

    @property
    def user(self) -> TowerSide:
        """The tower of users."""
        return self._side("user", self.model.network.user)

    @property
    def item_side(self) -> TowerSide:
        """The tower of items."""
        return self._side("item", self.model.network.item)

    @property
    def features(self) -> list[PlainFeature]:
        """The features of users, and the items to leave out."""
        return [*self.user.features, PlainFeature(self.item, is_list=True)]

    @property
    def num_items(self) -> int:
        """The number of ids of items."""
        return self._item_feature.num_embeddings

    @property
    def recommends(self) -> RecommendedItems:
        """The manifest's description of the outputs."""
        return RecommendedItems(self.item, self.num_best, self.excludes_seen)

    @property
    def tables(self) -> list[CompositionalEmbeddingConfig]:
        """The tables of users' features, and the vectors of items as a table."""
        return [*self.user.tables, self._vector_table]

    @property
    def _item_feature(self) -> CategoricalFeature:
        return next(feature for feature in self.schema.categorical if feature.name == self.item)

    @property
    def _vector_table(self) -> CompositionalEmbeddingConfig:
        return CompositionalEmbeddingConfig(
            name=f"{self.item}_vectors",
            num_embeddings=len(self.index.ids),
            embedding_dim=self.index.vectors.shape[1],
            feature_names=[self.item],
            partition=Naive(len(self.index.ids)),
            composition=Product(),
        )

    def whole_program(self, storage: ExportStorage) -> RetrievalProgram:
        """Returns the program that maps a user's features to the best items and their scores."""
        group = TableGroup([StoredTable(self._vector_table, [torch.from_numpy(self.index.vectors)])], storage)
        choice = ItemChoice(group, len(self.index.ids), None, (), self.num_best)
        ids = torch.from_numpy(self.index.ids)
        return RetrievalProgram(self._program(self.user, storage), self.features, self.item, choice, ids)

    def inputs(self, batch: Batch) -> ProgramInputs:
        """Returns the network's inputs for a batch of queries, or of random rows without items to leave out."""
        ids = batch[SPARSE_FEATURES]
        assert isinstance(ids, KeyedJaggedTensor)
        lists = {**ids.to_dict(), self.item: self.left_out(batch)}
        names = [feature.name for feature in self.features]
        features = KeyedJaggedTensor(
            names,
            torch.cat([lists[name].values().long() for name in names]),
            lengths=torch.cat([lists[name].lengths().long() for name in names]),
        )
        fields = {SPARSE_FEATURES: features, DENSE_FEATURES: self.user.numbers(batch)}
        return plain_inputs(Batch(fields, 1), self.features, self.takes_numbers)

    def left_out(self, batch: Batch) -> JaggedTensor:
        """Returns the items that are not recommended to each row of a batch."""
        if EXCLUDED in batch:
            excluded = batch[EXCLUDED]
            assert isinstance(excluded, KeyedJaggedTensor)
            return excluded[ITEM]
        ids = batch[SPARSE_FEATURES]
        assert isinstance(ids, KeyedJaggedTensor)
        return ids[self.item]

    def trained_queries(self, outputs: TowerVectors) -> QueriesOf:
        """Returns the trained model's queries, and the items to rank for them."""
        return QueriesOf(self.scored, outputs.queries.float(), None)

    def save_tower(self, folder: Path, side: TowerSide, batch: Batch, storage: ExportStorage) -> ExportedProgram:
        """Saves the program of a tower, given a batch of any rows, and returns its description."""
        inputs = side.inputs(batch)
        save_program(self._program(side, storage), inputs, folder / side.file)
        names = [feature.name for feature in side.features]
        return ExportedProgram(
            side.file, list(inputs.tensors), ["vectors"], names, sum(map(storage.bytes, side.tables))
        )

    def added_bytes(self, storage: ExportStorage, faiss: Faiss | None) -> int:
        """Returns the bytes of both towers' tables and of the index, which the folder has beside the network."""
        towers = sum(map(storage.bytes, (*self.user.tables, *self.item_side.tables)))
        return towers + self.index.vectors.nbytes * (1 if faiss is None else 2)

    def save_index(self, folder: Path, faiss: Faiss | None) -> ItemIndex:
        """Writes the index of items, and a FAISS index where it is asked for; returns their description."""
        (folder / INDEX).parent.mkdir()
        pq.write_table(self.index.table(), folder / INDEX)
        if faiss is not None:
            write_faiss(self.index, folder / FAISS_INDEX, faiss)
        faiss_file = None if faiss is None else FAISS_INDEX
        return ItemIndex(INDEX, len(self.index.ids), self.index.vectors.shape[1], faiss_file)

    def _side(self, name: str, tower: Tower) -> TowerSide:
        lists = {feature.name: feature.multi_hot for feature in self.schema.categorical}
        features = [PlainFeature(each, lists[each]) for each in tower.side.categorical]
        tables = []
        for table in self._collection.tables():
            names = [each for each in table.feature_names if each in tower.side.categorical]
            if names:
                tables.append(replace(table, feature_names=names, sse=None))
        return TowerSide(f"towers/{name}.pt2", tower, features, tables)

    @property
    def _collection(self) -> CompositionalEmbeddingBagCollection:
        assert isinstance(self.model.embeddings, CompositionalEmbeddingBagCollection)
        return self.model.embeddings

    def _program(self, side: TowerSide, storage: ExportStorage) -> TowerProgram:
        weights = {table.name: self._collection.weights(table.name) for table in side.tables}
        by_name = {feature.name: feature for feature in side.features}
        vectors = FeatureVectors(side.tables, weights, by_name, storage)
        return TowerProgram(side.tower, side.features, vectors)


def require_faiss() -> Any:
    """Returns the module ``faiss``.

    Raises:
        UserError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            "--faiss writes an index of FAISS, which is not installed: `pip install 'distembed[faiss]'` (faiss-cpu), "
            "or leave --faiss out; index/items.parquet has the vectors without it."
        ) from error
    return faiss


def write_faiss(items: ItemTable, file: Path, kind: Faiss) -> None:
    """Writes the vectors of items as a FAISS index of inner products; entry i is row i of the items."""
    faiss = require_faiss()
    vectors = np.ascontiguousarray(items.vectors, np.float32)
    dim = vectors.shape[1]
    if kind == "flat":
        index = faiss.IndexFlatIP(dim)
    else:
        index = faiss.IndexHNSWFlat(dim, _HNSW_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    faiss.write_index(index, str(file))


def require_same_index(items: ItemTable, folder: Path, index: ItemIndex) -> None:
    """Raises a :class:`RunError` where the files of an index do not hold the items."""
    files = [index.file] if pq.read_table(folder / index.file) != items.table() else []
    if index.faiss is not None:
        stored = require_faiss().read_index(str(folder / index.faiss))
        is_same = stored.ntotal == len(items.ids) and np.array_equal(
            stored.reconstruct_n(0, stored.ntotal), items.vectors
        )
        files += [] if is_same else [index.faiss]
    if files:
        raise RunError(
            f"{files[0]} does not hold the vectors of the catalogue after writing, so that nothing was kept; export to "
            "another disk, or check the model's weights for NaN."
        )
