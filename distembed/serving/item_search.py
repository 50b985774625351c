"""Vectors of users and items of a loaded model of two towers, and the best items of users by exact search."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from distembed.base.errors import UserError
from distembed.data.reader import Batch
from distembed.data.table.vocabulary import take_values
from distembed.models.two_tower import TowerVectors
from distembed.serving.whole_model import WholeModel
from distembed.tasks import RetrievalTask
from distembed.tasks.catalogue import CatalogueRanking
from distembed.tasks.catalogue.item_vectors import ItemVectors
from distembed.tasks.recommendations import rank_queries
from distembed.training.inference import EVALUATION_BATCH_SIZE


@dataclass(frozen=True, eq=False)
class ItemTable:
    """All items of a catalogue.

    Attributes:
        ids: The id of each item, ascending.
        values: The raw value of each item; its id where the dataset has no vocabulary of items.
        vectors: The vector of each item; its inner product with a user's vector is the score.
    """

    ids: npt.NDArray[np.int64]
    values: pa.Array
    vectors: npt.NDArray[np.float32]

    def table(self) -> pa.Table:
        """Returns the columns ``id``, ``item`` and ``vector``, a list of fixed size."""
        flat = pa.array(self.vectors.reshape(-1), pa.float32())
        vectors = pa.FixedSizeListArray.from_arrays(flat, self.vectors.shape[1])
        return pa.table({"id": self.ids, "item": self.values, "vector": vectors})


class ItemSearch:
    """Computes vectors, and searches the items of the catalogue for users; any number of threads may use it.

    Args:
        model: A model of two towers.
        item_values: The raw value of each id of an item; None where the dataset has no vocabulary of items.

    Raises:
        UserError: The model is another one.
    """

    def __init__(self, model: WholeModel, item_values: pa.Array | None) -> None:
        if not isinstance(model.task, RetrievalTask):
            raise UserError(
                f"the run's task is {model.blueprint.config.task.name!r}, whose users and items have no vectors of "
                "their own; train a model of task.name=retrieval, or use predict()."
            )
        self._model, self._task, self._values = model, model.task, item_values
        self._lock, self._is_ready = threading.Lock(), False

    def items(self) -> ItemTable:
        """Returns the vectors of all items, which are computed at the first call."""
        scored = self.scored().all()
        ids: npt.NDArray[np.int64] = scored.ids.cpu().numpy()
        values = pa.array(ids) if self._values is None else take_values(self._values, ids)
        return ItemTable(ids, values, scored.vectors.cpu().numpy())

    def user_vectors(self, batches: Iterable[Batch]) -> npt.NDArray[np.float32]:
        """Returns the vector of each row's user [rows, dim], divided by the temperature; takes batches of raw rows."""
        config: Any = self._model.blueprint.config.model
        vectors = [self._queries(self._task.prediction_batch(batch)) for batch in batches]
        joined = torch.cat([torch.empty(0, config.output_dim), *(each.queries.float().cpu() for each in vectors)])
        array: npt.NDArray[np.float32] = joined.numpy()
        return array

    def recommend(self, batches: Iterable[Batch], k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Returns the ids of the k best items of each row's user [rows, k], and their scores; -1 where there are fewer.

        Items that the user has are left out where ``task.exclude_seen`` says so.
        """
        if not 1 <= k <= len(self._task.catalogue):
            raise UserError(f"k is {k}; it is from 1 to {len(self._task.catalogue):,}, the number of items.")
        ranking = CatalogueRanking(self.scored(), num_best=k)
        best, scores = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)]
        for batch in batches:
            prepared = self._task.prediction_batch(batch).to(self._model.blueprint.device)
            ranked = rank_queries(ranking, self._queries(prepared).queries, prepared)
            best.append(ranked.best.cpu().numpy())
            scores.append(ranked.best_scores.cpu().numpy())
        return np.concatenate(best), np.concatenate(scores)

    def table(self, best: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> pa.Table:
        """Returns the arrays of :meth:`recommend` as columns of lists: ``items``, raw values, and ``scores``."""
        is_item = best >= 0
        offsets = pa.array(np.concatenate([[0], np.cumsum(is_item.sum(1))]).astype(np.int32))
        ids = best[is_item]
        values = pa.array(ids) if self._values is None else take_values(self._values, ids)
        columns = {"items": values, "scores": pa.array(scores[is_item])}
        return pa.table({name: pa.ListArray.from_arrays(offsets, flat) for name, flat in columns.items()})

    def _queries(self, batch: Batch) -> TowerVectors:
        vectors: TowerVectors = self._model.model_outputs(batch)
        return vectors

    def scored(self) -> ItemVectors:
        """Returns the items with their vectors; the first thread computes them."""
        with self._lock:
            if not self._is_ready:
                self._model.show_catalogue(EVALUATION_BATCH_SIZE)
                self._is_ready = True
        return self._task.scored_items
