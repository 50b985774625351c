"""The inputs of a model: a dataset's dense features, and embedding collections over its categorical ones."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.schema import Schema
from distembed.embedding import (
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingConfig,
    EmbeddingConfig,
    build_tables,
    vector_names,
)
from distembed.sse import SSE

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelInputs:
    """A dataset's features, and a table for each categorical feature.

    A model makes any number of collections of these tables, each over the features that it names. Weights are on the
    meta device, where they take no memory, until ``DistributedModelParallel`` makes them where they are placed.

    Attributes:
        schema: The columns of the dataset.
        tables: The tables by name: of each categorical feature, with the feature's name, and unified tables.
        embedding_dim: Dimension D of a composed vector, the same for all tables.
    """

    schema: Schema
    tables: Mapping[str, CompositionalEmbeddingBagConfig]
    embedding_dim: int

    @classmethod
    def from_config(
        cls,
        schema: Schema,
        embedding: EmbeddingConfig,
        seed: int = 0,
        sse: Mapping[str, SSE] | None = None,
        dense_tables: Collection[str] = (),
        scored_tables: Collection[str] = (),
    ) -> "ModelInputs":
        """Returns the inputs of a model on a dataset.

        Args:
            schema: The columns of the dataset.
            embedding: The ``embedding`` section of a config.
            seed: Seed of the initial values and of the draws of ``sse``.
            sse: The rule by which ids are replaced in training, by feature.
            dense_tables: Names of the tables that have gradients in all rows.
            scored_tables: Names of the tables all of whose vectors are scored.

        Raises:
            UserError: The section names an unknown feature, or a table's settings do not fit.
        """
        for name in (*dense_tables, *scored_tables):
            _require_own_table(name, embedding.table_of(name))
        tables = [
            replace(table, dense_gradient=table.name in dense_tables, all_scored=table.name in scored_tables)
            for table in build_tables(schema.categorical, embedding, seed, sse)
        ]
        return cls(schema, {table.name: table for table in tables}, embedding.default.embedding_dim)

    @property
    def num_dense(self) -> int:
        return len(self.schema.dense)

    @property
    def num_labels(self) -> int:
        return len(self.schema.all_labels)

    @property
    def num_vectors(self) -> int:
        """The number of vectors that the tables of all features give a row."""
        return len(vector_names(list(self.tables.values())))

    def table(self, feature: str) -> CompositionalEmbeddingBagConfig:
        """Returns the table of a feature's own ids; a UserError refuses an unknown feature, or a unified table."""
        for table in self.tables.values():
            if feature in (table.first_ids or ()):
                _require_own_table(feature, table.name)
        return self.tables[one_of("feature of an embedding collection", feature, self.tables)]

    def pooled_embeddings(
        self, features: Sequence[str] | None = None, suffix: str = ""
    ) -> "tuple[nn.Module, list[str]]":
        """Returns a collection that maps ids to one vector a row and feature, and the keys of its KeyedTensor.

        Args:
            features: Names of categorical features; all unless given.
            suffix: Added to the tables' names, where several collections have tables of the same features.
        """
        tables = self._choose_tables(features, suffix)
        return self._make_pooled(tables), vector_names(tables)

    def sequence_embeddings(
        self,
        features: Sequence[str] | None = None,
        suffix: str = "",
        looked_up: Mapping[str, Sequence[str]] | None = None,
    ) -> "tuple[nn.Module, list[str]]":
        """Returns a collection that maps each id to a vector, in a dictionary of JaggedTensors, and the keys.

        Args:
            features: Names of the features that have the tables; all unless given.
            suffix: Added to the tables' names, where several collections have tables of the same features.
            looked_up: For a feature's table, the names of the batch's features that are looked up in it, in place of
                the table's own ``feature_names``. Its SSE rules for other features are dropped.
        """
        names = [field.name for field in fields(CompositionalEmbeddingConfig)]
        chosen = self._choose_tables(features, suffix)
        for feature, looked_up_features in (looked_up or {}).items():
            index = [table.name for table in chosen].index(feature + suffix)
            rules = {name: rule for name, rule in chosen[index].rules.items() if name in looked_up_features}
            chosen[index] = replace(chosen[index], feature_names=looked_up_features, sse=rules or None)
        tables = [CompositionalEmbeddingConfig(**{name: getattr(table, name) for name in names}) for table in chosen]
        return self._make_sequences(tables), vector_names(tables)

    def _make_pooled(self, tables: Sequence[CompositionalEmbeddingBagConfig]) -> "nn.Module":
        from distembed.embedding import CompositionalEmbeddingBagCollection

        return CompositionalEmbeddingBagCollection(tables, device="meta")

    def _make_sequences(self, tables: Sequence[CompositionalEmbeddingConfig]) -> "nn.Module":
        from distembed.embedding import CompositionalEmbeddingCollection

        return CompositionalEmbeddingCollection(tables, device="meta")

    def _choose_tables(self, features: Sequence[str] | None, suffix: str) -> list[CompositionalEmbeddingBagConfig]:
        """Returns the tables of the features; with a suffix, tables of longer names with partitions of their own."""
        tables = list(self.tables.values()) if features is None else [self.table(name) for name in features]
        if not suffix:
            return tables
        return [
            replace(
                own,
                name=own.name + suffix,
                partition=own.scheme.unshared(),
                ids=None if own.managed is None else own.managed.sizes.config,
            )
            for own in tables
        ]


def _require_own_table(feature: str, table: str) -> None:
    """Raises a :class:`UserError` if the table of a feature is a unified one."""
    if table != feature:
        raise UserError(
            f"embedding.tables.{table}.features has {feature!r}, which the model or task looks up in a table of its "
            "own: take it out of the unified table."
        )
