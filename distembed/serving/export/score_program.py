"""The programs of models that give a number for each row, or one for each label: clicks, ratings and several labels.

A program is a copy of the run's own model, with stored tables in place of its embedding collections, and the task's
score at the end. It computes in float32, even if the run was trained in bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_FEATURES, DENSE_SEQUENCES, SPARSE_FEATURES, Schema
from distembed.data.reader import Batch
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.collections import embedding_modules
from distembed.models import Model
from distembed.serving.export.feature_vectors import (
    FeatureVectors,
    IdVectors,
    PlainFeature,
    PlainFeatures,
    PlainSequence,
    PlainSequences,
    plain_inputs,
)
from distembed.serving.export.programs import ProgramInputs
from distembed.serving.export.table_groups import ExportStorage
from distembed.tasks import Task

Collection = CompositionalEmbeddingBagCollection | CompositionalEmbeddingCollection
_FIELDS = {DENSE_FEATURES, DENSE_SEQUENCES, SPARSE_FEATURES}


class ScoreProgram(nn.Module):
    """Maps ids and numbers of rows to scores [batch], several for several labels.

    ``model`` has :class:`FeatureVectors` and :class:`IdVectors` in place of its collections, which take
    :class:`PlainFeatures` in place of a KeyedJaggedTensor. The task turns the model's output into the score, for
    example a probability.
    """

    def __init__(
        self, model: Model, task: Task, features: Sequence[PlainFeature], sequences: Sequence[PlainSequence] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self._task, self._features, self._sequences = task, features, sequences

    def forward(
        self,
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
        dense: Float[Tensor, "batch numbers"] | None = None,
        sequences: Float[Tensor, " numbers"] | None = None,
    ) -> Float[Tensor, " batch"] | tuple[Float[Tensor, " batch"], ...]:
        """Returns the score of each row, or a tensor for each of the task's ``scores``."""
        features = PlainFeatures(self._features, values, lengths)
        fields: dict[str, Any] = {SPARSE_FEATURES: features}
        fields[DENSE_FEATURES] = torch.empty(lengths.shape[1], 0) if dense is None else dense
        if sequences is not None:
            fields[DENSE_SEQUENCES] = PlainSequences(self._sequences, features, sequences)
        return _program_outputs(self._task, self.model(*[fields[name] for name in self.model.batch_fields]))


class VectorScoreProgram(nn.Module):
    """Maps vectors that shards looked up, and numbers, to scores, like :class:`ScoreProgram`.

    ``model`` has :class:`GivenVectors` in place of its collection.
    """

    def __init__(self, model: Model, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(
        self, vectors: Float[Tensor, "batch columns"], dense: Float[Tensor, "batch numbers"] | None = None
    ) -> Float[Tensor, " batch"] | tuple[Float[Tensor, " batch"], ...]:
        """Returns the score of each row, or a tensor for each of the task's ``scores``."""
        numbers = torch.empty(vectors.shape[0], 0) if dense is None else dense
        fields = {SPARSE_FEATURES: vectors, DENSE_FEATURES: numbers}
        return _program_outputs(self._task, self.model(*[fields[name] for name in self.model.batch_fields]))


def _program_outputs(task: Task, outputs: Any) -> Tensor | tuple[Tensor, ...]:
    """Returns a model's scores as a program returns them: a tensor [batch], or one for each of several scores."""
    scores = task.score(outputs)
    columns = (scores,) if scores.dim() == 1 else scores.unbind(1)
    return columns[0] if len(columns) == 1 else tuple(columns)


class GivenVectors(nn.Module):
    """Takes the place of an embedding collection; its input are the vectors of all shards, side by side in order."""

    def __init__(self, shards: Sequence[FeatureVectors]) -> None:
        super().__init__()
        self._keys = [key for shard in shards for key in shard.keys]
        self._dims = [dim for shard in shards for dim in shard.dims]

    def forward(self, vectors: Float[Tensor, "batch columns"]) -> KeyedTensor:
        """Returns the vectors of all shards by their keys."""
        return KeyedTensor(self._keys, self._dims, vectors)


class ShardProgram(nn.Module):
    """Maps the ids of a shard's features, in the order of ``lengths``, to their vectors [batch, columns]."""

    def __init__(self, features: Sequence[PlainFeature], vectors: FeatureVectors) -> None:
        super().__init__()
        self.vectors = vectors
        self.features = features

    def forward(
        self, values: Int64[Tensor, " ids"], lengths: Int64[Tensor, "features batch"]
    ) -> Float[Tensor, "batch columns"]:
        """Returns the vectors of each row's features, side by side."""
        return self.vectors.vectors(PlainFeatures(self.features, values, lengths))


@dataclass(frozen=True)
class ScoredModel:
    """A trained model that gives a number for each row, in the form from which its programs are made.

    ``features`` are the features of its embedding collections, in the dataset's order, and ``numbers`` the dense
    features that the program takes.
    """

    recommends: ClassVar[None] = None

    model: Model
    task: Task
    collections: Mapping[str, Collection]
    features: Sequence[PlainFeature]
    takes_numbers: bool
    sequences: Sequence[PlainSequence] = ()
    numbers: Sequence[str] = ()

    @classmethod
    def of(cls, model: Model, task: Task, schema: Schema) -> ScoredModel:
        """Finds the collections of a model and the features that they read, in the order of ``schema``.

        Refuses a model that takes batch fields other than ids and numbers, or has an embedding collection of TorchRec's
        own.
        """
        other_fields = [name for name in model.batch_fields if name not in _FIELDS]
        if other_fields:
            raise UserError(
                f"{type(model).__name__} takes {', '.join(other_fields)} of a batch, and exported models take "
                f"{', '.join(sorted(_FIELDS))} alone."
            )
        collections: dict[str, Collection] = {}
        for path, module in embedding_modules(model).items():
            if not isinstance(module, Collection):
                raise UserError(
                    f"{path} of the model is a {type(module).__name__}; models that give a number for each row are "
                    "exported with CompositionalEmbeddingBagCollection and CompositionalEmbeddingCollection alone."
                )
            collections[path] = module
        read = {name for module in collections.values() for table in module.tables() for name in table.feature_names}
        features = [PlainFeature(ids.name, ids.multi_hot) for ids in schema.categorical if ids.name in read]
        lists_read = model.lists_read(schema)
        sequences = [
            PlainSequence(name, schema.lists_beside(name)[0]) for name in schema.dense_sequences if name in lists_read
        ]
        for name in {sequence.beside for sequence in sequences} - read:
            raise UserError(
                f"{type(model).__name__} takes numbers beside {name!r}, which it does not look up; exported models "
                "know how many numbers a row has from its ids."
            )
        # the program's inputs have an order: before sequences there are numbers, of no column where there are none
        takes_numbers = DENSE_FEATURES in model.batch_fields and bool(schema.dense or sequences)
        return cls(model, task, collections, features, takes_numbers, sequences, schema.dense if takes_numbers else ())

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the program's outputs."""
        return self.task.scores

    @property
    def tables(self) -> list[CompositionalEmbeddingConfig]:
        """The tables of all collections."""
        return [table for module in self.collections.values() for table in module.tables()]

    def inputs(self, batch: Batch) -> ProgramInputs:
        """Returns the inputs of the whole program for the rows of a batch."""
        return plain_inputs(batch, self.features, self.takes_numbers, self.sequences)

    def whole_program(self, storage: ExportStorage) -> ScoreProgram:
        """Returns the program that has all tables."""
        stored: dict[str, nn.Module] = {
            path: IdVectors(module, storage)
            if isinstance(module, CompositionalEmbeddingCollection)
            else self._vectors(module, [table.name for table in module.tables()], storage)
            for path, module in self.collections.items()
        }
        return ScoreProgram(self._with_collections(stored), self.task, self.features, self.sequences)

    def sharded_programs(
        self, shards: Sequence[Sequence[str]], storage: ExportStorage
    ) -> tuple[VectorScoreProgram, list[ShardProgram]]:
        """Returns the program of the network, and a program for each shard.

        ``shards`` are the names of the tables of each shard; the network takes the vectors of shards in this order. A
        model of several embedding collections is a :class:`UserError`.
        """
        ((path, module),) = list(self.collections.items())[:1]
        if len(self.collections) != 1 or not isinstance(module, CompositionalEmbeddingBagCollection):
            raise UserError(
                f"the model has the embedding collections {', '.join(self.collections)}, and the tables of one "
                "collection of bags can be divided into shards; export it without --server-memory."
            )
        vectors = [self._vectors(module, names, storage) for names in shards]
        programs = []
        for shard_vectors in vectors:
            read = {name for table in shard_vectors.tables for name in table.feature_names}
            programs.append(ShardProgram([feature for feature in self.features if feature.name in read], shard_vectors))
        return VectorScoreProgram(self._with_collections({path: GivenVectors(vectors)}), self.task), programs

    def _vectors(
        self, module: CompositionalEmbeddingBagCollection, names: Sequence[str], storage: ExportStorage
    ) -> FeatureVectors:
        tables = [table for table in module.tables() if table.name in names]
        weights = {table.name: module.weights(table.name) for table in tables}
        return FeatureVectors(tables, weights, {feature.name: feature for feature in self.features}, storage)

    def _with_collections(self, modules: Mapping[str, nn.Module]) -> Model:
        """Returns a copy of the model with these modules in place of its collections, by their paths."""
        # deepcopy returns memo[id(object)] where there is one, so that collections are replaced and never copied
        copy_memo: dict[int, Any] = {id(module): modules[path] for path, module in self.collections.items()}
        return copy.deepcopy(self.model, copy_memo).eval()
