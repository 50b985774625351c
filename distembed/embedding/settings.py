"""The ``embedding`` section of a YAML file, and the tables that it makes of a dataset's features."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from distembed.composition import ACTIVATIONS, COMPOSITIONS
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding.config import CompositionalEmbeddingBagConfig, IdPolicy, Pooling
from distembed.errors import UserError
from distembed.names import complete_tables, one_of, over_default
from distembed.partitions import PARTITIONS, Explicit, KeyedHash, Naive, Partition
from distembed.sse import SSE

_STRICT = ConfigDict(extra="forbid", strict=True)
_AtLeastTwo = Annotated[int, Field(ge=2)]
_ALTERNATIVES = (("collisions", "num_buckets"), ("num_partitions", "moduli"))
_DEFAULT_COLLISIONS = 4
_Sizes = Annotated[list[PositiveInt], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class TableConfig:
    """Settings of a table in a YAML file; each scheme and composition reads those that concern it.

    Attributes:
        partition: a name of ``PARTITIONS``; ``naive`` is the full table, ``remainder`` the hashing trick.
        collisions: how many ids share a row of the first partition, for ``remainder`` and ``quotient_remainder``; 4
            unless it or ``num_buckets`` is given.
        num_buckets: rows of the first partition of the same two, in place of ``collisions``.
        num_partitions: k, for ``mixed_radix`` and ``chinese_remainder``, whose moduli are then found.
        moduli: the moduli themselves, for the same two, in place of ``num_partitions``.
        assignments: Parquet file of ``explicit``, with a row an id; a relative path starts at the working directory.
        columns: its columns, each of which makes a partition.
        allow_collisions: whether ``explicit`` may leave ids with the same rows.
        composition: a name of ``COMPOSITIONS``; ignored where there is one partition only.
        dims: dimension of each partition's vectors, for ``concat``; equal shares unless given.
        hidden: hidden sizes of each function, for ``path_mlp``.
        activation: between its layers.
        embedding_dim: dimension of the composed vector; the same in all tables.
        pooling: of multi-hot features: ``sum``, ``mean`` or ``max``.
        threshold: tables with at most this many ids stay full.
        force: apply the scheme even below the threshold and even where it saves no parameters.
        id_policy: of ids outside of the table: ``error``, ``clip_to_oov`` or ``modulo``.
        hash_seed: seed of a hash that is applied to every id first; none unless given.
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


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class EmbeddingConfig:
    """The ``embedding`` section: ``default`` for every table, ``tables`` for exceptions by the feature's name.

    In a file an exception gives only what differs from ``default``.
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

    def of(self, name: str) -> TableConfig:
        """The settings that hold for one table."""
        return self.tables.get(name, self.default)


def _complete(default: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table's own settings over the default's; naming one of two alternatives takes the other one away."""
    replaced = {other for pair in _ALTERNATIVES for name, other in (pair, pair[::-1]) if name in table}
    inherited = {key: value for key, value in default.items() if key not in replaced}
    return over_default(inherited, table)


def build_tables(
    features: Sequence[CategoricalFeature],
    config: EmbeddingConfig,
    seed: int = 0,
    sse: Mapping[str, SSE] | None = None,
) -> list[CompositionalEmbeddingBagConfig]:
    """One table a feature, named like it.

    Args:
        features: of the dataset.
        config: how tables are made.
        seed: of the initial values, and of what ``sse`` draws.
        sse: by table, how ids are replaced in training; those of other tables are not.

    Raises:
        UserError: where ``config.tables`` names a feature that is not there, or a scheme cannot be made as it is set.
    """
    names = [feature.name for feature in features]
    for name in config.tables:
        one_of("embedding.tables", name, names)
    rules = sse or {}
    return [
        dataclasses.replace(_build_table(feature, config.of(feature.name), seed), sse=rules.get(feature.name))
        for feature in features
    ]


def assignment_checksums(config: EmbeddingConfig) -> dict[str, str]:
    """SHA-256 of every Parquet file that an explicit scheme reads, by path: as much part of a model as its config.

    Raises:
        UserError: where a file cannot be read.
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
    """Why a feature's table is kept full although a scheme is set, or None where the scheme is applied."""
    if settings.force or settings.partition == "naive":
        return None
    if feature.num_embeddings <= settings.threshold:
        return f"no more than {settings.threshold} ids"
    compressed = _table(feature, settings, _make_partition(feature, settings), seed=0)
    if compressed.num_parameters >= feature.num_embeddings * settings.embedding_dim:
        return f"{settings.partition} with {settings.composition} would save no parameters"
    return None


def _build_table(feature: CategoricalFeature, settings: TableConfig, seed: int) -> CompositionalEmbeddingBagConfig:
    if reason_to_stay_full(feature, settings) is None:
        return _table(feature, settings, _make_partition(feature, settings), seed)
    return _table(feature, settings, Naive(feature.num_embeddings), seed)


def _table(
    feature: CategoricalFeature, settings: TableConfig, partition: Partition, seed: int
) -> CompositionalEmbeddingBagConfig:
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
    if settings.assignments is None or settings.columns is None:
        raise UserError("partition explicit needs assignments, a Parquet file, and columns, its columns.")
    path = Path(settings.assignments)
    written = path.stat().st_mtime_ns if path.exists() else 0
    return _explicit(num_embeddings, path, tuple(settings.columns), settings.allow_collisions, written)


@lru_cache(maxsize=64)
def _explicit(
    num_embeddings: int, path: Path, columns: tuple[str, ...], allow_collisions: bool, written: int
) -> Explicit:
    """Reads and checks a file once, not every time a table is described or built; ``written`` tells a new one."""
    return Explicit.from_parquet(num_embeddings, path, columns, allow_collisions)
