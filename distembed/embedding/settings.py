"""The ``embedding`` section of a YAML file, and the tables that are built from it for a dataset's features."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import Field, PositiveInt, field_validator, model_validator

from distembed.composition import ACTIVATIONS, COMPOSITIONS
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding.config import CompositionalEmbeddingBagConfig, IdPolicy, Pooling
from distembed.errors import UserError
from distembed.names import STRICT, complete_tables, one_of, over_default
from distembed.partitions import PARTITIONS, Explicit, KeyedHash, Naive, Partition
from distembed.sse import SSE

_AtLeastTwo = Annotated[int, Field(ge=2)]
_ALTERNATIVES = (("collisions", "num_buckets"), ("num_partitions", "moduli"))
_DEFAULT_COLLISIONS = 4
_Sizes = Annotated[list[PositiveInt], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableConfig:
    """The settings of a table in a YAML file; each scheme and composition reads those that concern it.

    Attributes:
        partition: A name of ``PARTITIONS``; ``naive`` is the full table, ``remainder`` the hashing trick.
        collisions: How many ids share a row of the first partition, for ``remainder`` and ``quotient_remainder``; 4
            unless it or ``num_buckets`` is given.
        num_buckets: The rows of the first partition of the same two schemes, in place of ``collisions``.
        num_partitions: The number of partitions, for ``mixed_radix`` and ``chinese_remainder``, whose moduli are then
            computed.
        moduli: The moduli themselves, for the same two schemes, in place of ``num_partitions``.
        assignments: The Parquet file of ``explicit``, with a row for each id; a relative path starts at the working
            directory.
        columns: The columns of that file, each of which is a partition.
        allow_collisions: Whether ``explicit`` accepts ids with the same rows.
        composition: A name of ``COMPOSITIONS``; ignored where there is one partition only.
        dims: The dimension of each partition's vectors, for ``concat``; equal shares unless given.
        hidden: The hidden sizes of each function, for ``path_mlp``.
        activation: The activation between the layers of a function, for ``path_mlp``.
        embedding_dim: The dimension of the composed vector; it is the same in all tables.
        pooling: The pooling of multi-hot features: ``sum``, ``mean`` or ``max``.
        threshold: The largest number of ids of a table that stays full.
        force: Whether the scheme is applied even below the threshold and even where it saves no parameters.
        id_policy: How to treat ids outside of the table: ``error``, ``clip_to_oov`` or ``modulo``.
        hash_seed: The seed of a hash that is applied to every id first; without it ids are not hashed.
    """

    partition: str = "naive"
    collisions: PositiveInt | None = None
    num_buckets: PositiveInt | None = None
    num_partitions: _AtLeastTwo | None = None
    moduli: _Sizes | None = None
    assignments: str | None = None
    columns: Annotated[list[str], Field(min_length=1)] | None = None
    allow_collisions: bool = False
    composition: str = "product"
    dims: _Sizes | None = None
    hidden: _Sizes = field(default_factory=lambda: [64])
    activation: str = "relu"
    embedding_dim: PositiveInt = 16
    pooling: Pooling = "sum"
    threshold: int = Field(default=200, ge=0)
    force: bool = False
    id_policy: IdPolicy = "error"
    hash_seed: int | None = Field(default=None, ge=0, le=2**63 - 1)

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, value: str) -> str:
        return one_of("partition", value, PARTITIONS)

    @field_validator("composition")
    @classmethod
    def _known_composition(cls, value: str) -> str:
        return one_of("composition", value, COMPOSITIONS)

    @field_validator("activation")
    @classmethod
    def _known_activation(cls, value: str) -> str:
        return one_of("activation", value, ACTIVATIONS)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class EmbeddingConfig:
    """The ``embedding`` section: ``default`` for every table, ``tables`` for exceptions by the feature's name.

    In a file an exception has only the settings that differ from ``default``.
    """

    default: TableConfig = field(default_factory=TableConfig)
    tables: dict[str, TableConfig] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _complete_exceptions(cls, values: Any) -> Any:
        return complete_tables(values, _complete)

    @model_validator(mode="after")
    def _same_dim(self) -> "EmbeddingConfig":
        for name, table in self.tables.items():
            if table.embedding_dim != self.default.embedding_dim:
                raise ValueError(
                    f"embedding_dim of table {name!r} is {table.embedding_dim} and that of the default "
                    f"{self.default.embedding_dim}; a model's tables have the same"
                )
        return self

    def for_table(self, name: str) -> TableConfig:
        """Returns the settings of one table."""
        return self.tables.get(name, self.default)


def _complete(default: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default's settings with a table's own in their place; one of two alternatives replaces the other."""
    replaced = {other for pair in _ALTERNATIVES for name, other in (pair, pair[::-1]) if name in table}
    inherited = {key: value for key, value in default.items() if key not in replaced}
    return over_default(inherited, table)


def build_tables(
    features: Sequence[CategoricalFeature],
    config: EmbeddingConfig,
    seed: int = 0,
    sse: Mapping[str, SSE] | None = None,
) -> list[CompositionalEmbeddingBagConfig]:
    """Returns one table for each feature, with the feature's name.

    Args:
        features: The dataset's features.
        config: The ``embedding`` section.
        seed: The seed of the initial values and of ``sse``.
        sse: The rules by which ids are replaced in training, by the table's name; other tables' ids are not replaced.

    Raises:
        UserError: ``config.tables`` names a feature that does not exist, or a scheme's settings are not valid.
    """
    names = [feature.name for feature in features]
    for name in config.tables:
        one_of("embedding.tables", name, names)
    rules = sse or {}
    return [
        dataclasses.replace(_build_table(feature, config.for_table(feature.name), seed), sse=rules.get(feature.name))
        for feature in features
    ]


def assignment_checksums(config: EmbeddingConfig) -> dict[str, str]:
    """Returns the SHA-256 of every Parquet file that an explicit scheme reads, by its path.

    The files are as much part of a model as its config.

    Raises:
        UserError: A file cannot be read.
    """
    settings = [config.default, *config.tables.values()]
    paths = sorted({s.assignments for s in settings if s.partition == "explicit" and s.assignments is not None})
    checksums = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                checksums[path] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"embedding: the assignments {path} cannot be read: {error}") from error
    return checksums


def reason_to_stay_full(feature: CategoricalFeature, settings: TableConfig) -> str | None:
    """Returns why a feature's table stays full although a scheme is set, or None where the scheme is applied."""
    if settings.force or settings.partition == "naive":
        return None
    if feature.num_embeddings <= settings.threshold:
        return f"no more than {settings.threshold} ids"
    compressed = _table(feature, settings, _make_partition(feature, settings), seed=0)
    if compressed.num_parameters >= feature.num_embeddings * settings.embedding_dim:
        return f"{settings.partition} with {settings.composition} would save no parameters"
    return None


def _build_table(feature: CategoricalFeature, settings: TableConfig, seed: int) -> CompositionalEmbeddingBagConfig:
    """Returns a feature's table, which is full where there is a reason for it to stay so."""
    if reason_to_stay_full(feature, settings) is None:
        return _table(feature, settings, _make_partition(feature, settings), seed)
    return _table(feature, settings, Naive(feature.num_embeddings), seed)


def _table(
    feature: CategoricalFeature, settings: TableConfig, partition: Partition, seed: int
) -> CompositionalEmbeddingBagConfig:
    """Returns a feature's table with a given partition."""
    composition = COMPOSITIONS["product" if partition.name == "naive" else settings.composition]
    chosen = {name: getattr(settings, name) for name in composition.settings}
    return CompositionalEmbeddingBagConfig(
        name=feature.name,
        num_embeddings=feature.num_embeddings,
        embedding_dim=settings.embedding_dim,
        feature_names=[feature.name],
        partition=partition,
        composition=composition(**chosen),
        pooling=settings.pooling,
        seed=seed,
        id_policy=settings.id_policy,
        pre_hash=None if settings.hash_seed is None else KeyedHash(settings.hash_seed),
    )


def _make_partition(feature: CategoricalFeature, settings: TableConfig) -> Partition:
    """Returns the partition of a feature's table.

    Raises:
        UserError: The scheme's settings are not valid; the error names the table.
    """
    scheme = PARTITIONS[settings.partition]
    try:
        if scheme is Explicit:
            return _read_explicit(feature.num_embeddings, settings)
        chosen = {name: getattr(settings, name) for name in scheme.settings}
        if "collisions" in chosen and settings.collisions is None and settings.num_buckets is None:
            chosen["collisions"] = _DEFAULT_COLLISIONS
        return scheme(feature.num_embeddings, **{name: value for name, value in chosen.items() if value is not None})
    except UserError as error:
        raise UserError(f"embedding, table {feature.name!r}: {error}") from None


def _read_explicit(num_embeddings: int, settings: TableConfig) -> Explicit:
    """Returns the explicit partitions of a table's file, or raises a :class:`UserError` where none is set."""
    if settings.assignments is None or settings.columns is None:
        raise UserError("partition explicit needs assignments, a Parquet file, and columns, its columns.")
    path = Path(settings.assignments)
    modified_ns = path.stat().st_mtime_ns if path.exists() else 0
    return _explicit(num_embeddings, path, tuple(settings.columns), settings.allow_collisions, modified_ns)


@lru_cache(maxsize=64)
def _explicit(
    num_embeddings: int, path: Path, columns: tuple[str, ...], allow_collisions: bool, modified_ns: int
) -> Explicit:
    """Reads and checks a file once for each time of its modification, not whenever a table is described or built."""
    return Explicit.from_parquet(num_embeddings, path, columns, allow_collisions)
