"""What a table is: the library's config of one table, and the YAML settings from which a whole model's tables are made.

:class:`CompositionalEmbeddingBagConfig` plays the part of TorchRec's ``EmbeddingBagConfig``. :class:`EmbeddingConfig`
is the ``embedding`` section of a YAML file, with settings for every table and exceptions by name; :func:`build_tables`
applies it to the features of a dataset.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pydantic.dataclasses
from pydantic import ConfigDict, Field, PositiveInt, field_validator
from torchrec.modules.embedding_configs import DataType, PoolingType

from distembed.composition import COMPOSITIONS, Composition
from distembed.data.schema import CategoricalFeature
from distembed.embedding.initialization import SeededInit
from distembed.errors import UserError
from distembed.names import one_of
from distembed.partitions import PARTITIONS, Partition
from distembed.partitions.base import require_positive

_STRICT = ConfigDict(extra="forbid", strict=True)
Pooling = Literal["sum", "mean"]
_BYTES_PER_PARAMETER = {DataType.FP32: 4, DataType.FP16: 2}


@dataclass(frozen=True)
class PartitionTable:
    """One partition's table of a compositional table: ``num_rows`` rows of ``dim`` numbers."""

    name: str
    num_rows: int
    dim: int
    init: SeededInit


@dataclass(frozen=True)
class CompositionalEmbeddingBagConfig:
    """One table: its ids, how they are partitioned, and how the rows' vectors are composed and pooled.

    Args:
        name: unique among the tables of a collection.
        num_embeddings: number of ids; an id lies in ``[0, num_embeddings)``.
        embedding_dim: dimension of the composed vector.
        feature_names: features that look their ids up here.
        partition: an instance for the same ``num_embeddings``, or a name of ``distembed.partitions.PARTITIONS`` that is
            built with its default settings.
        composition: an instance or a name of ``distembed.composition.COMPOSITIONS``.
        pooling: how the composed vectors of a bag become one, ``sum`` or ``mean``; an empty bag gives zeros.
        data_type: of the weights.
        seed: of the weights' initial values, with the table's name and the partition's number.

    Raises:
        UserError: for an unknown name, a size below 1, or a partition made for another number of ids.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    partition: Partition | str = "naive"
    composition: Composition | str = "product"
    pooling: PoolingType | Pooling = "sum"
    data_type: DataType = DataType.FP32
    seed: int = 0

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        require_positive(f"{where}: num_embeddings", self.num_embeddings, "It is the number of distinct ids.")
        require_positive(f"{where}: embedding_dim", self.embedding_dim, "16 is usual for Criteo.")
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise UserError(f"{where}: feature_names is {self.feature_names!r}; give a list of one name or more.")
        self._resolve("feature_names", tuple(self.feature_names))
        if isinstance(self.partition, str):
            scheme = PARTITIONS[one_of(f"{where}: partition", self.partition, PARTITIONS)]
            self._resolve("partition", scheme(num_embeddings=self.num_embeddings))
        if self.scheme.num_embeddings != self.num_embeddings:
            raise UserError(
                f"{where} has num_embeddings={self.num_embeddings}, but its partition was made for "
                f"{self.scheme.num_embeddings} ids; make the partition for the same number."
            )
        if isinstance(self.composition, str):
            self._resolve(
                "composition", COMPOSITIONS[one_of(f"{where}: composition", self.composition, COMPOSITIONS)]()
            )
        pooling = one_of(
            f"{where}: pooling", str(getattr(self.pooling, "value", self.pooling)).lower(), ("sum", "mean")
        )
        self._resolve("pooling", PoolingType(pooling.upper()))
        one_of(f"{where}: data_type", self.data_type, _BYTES_PER_PARAMETER)
        self.combine.partition_dims(self.embedding_dim, len(self.scheme.num_rows))

    def _resolve(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def scheme(self) -> Partition:
        """The partition as an instance."""
        assert isinstance(self.partition, Partition)
        return self.partition

    @property
    def combine(self) -> Composition:
        """The composition as an instance."""
        assert isinstance(self.composition, Composition)
        return self.composition

    @property
    def is_mean(self) -> bool:
        """Whether bags are averaged instead of summed."""
        return self.pooling == PoolingType.MEAN

    def partition_tables(self) -> list[PartitionTable]:
        """The k tables that hold the parameters, named ``<table>__p<j>``.

        They are initialised so that a composed vector has the variance of a full table's U(-1/sqrt(n), 1/sqrt(n)).
        """
        rows = self.scheme.num_rows
        dims = self.combine.partition_dims(self.embedding_dim, len(rows))
        draws = self.combine.initial_weights(1.0 / (3.0 * self.num_embeddings), len(rows))
        names = [f"{self.name}__p{j}" for j in range(len(rows))]
        return [
            PartitionTable(name, num_rows, dim, SeededInit(draw, self.seed, name))
            for name, num_rows, dim, draw in zip(names, rows, dims, draws, strict=True)
        ]

    @property
    def num_parameters(self) -> int:
        """Weights of all partition tables."""
        return sum(table.num_rows * table.dim for table in self.partition_tables())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all partition tables' weights, without optimizer state."""
        return self.num_parameters * _BYTES_PER_PARAMETER[self.data_type]


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class TableConfig:
    """Settings of a table in a YAML file.

    Attributes:
        partition: a name of ``PARTITIONS``; ``naive`` is the full table, ``remainder`` the hashing trick.
        collisions: about how many ids share a row of the first partition; ignored by ``naive``.
        composition: a name of ``COMPOSITIONS``; ignored where there is one partition only.
        embedding_dim: dimension of the composed vector.
        pooling: of multi-hot features, ``sum`` or ``mean``.
        threshold: tables with at most this many ids stay full.
        force: apply the partition even below the threshold and even where it saves no rows.
    """

    partition: str = "naive"
    collisions: PositiveInt = 4
    composition: str = "product"
    embedding_dim: PositiveInt = 16
    pooling: Pooling = "sum"
    threshold: int = Field(default=200, ge=0)
    force: bool = False

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, value: str) -> str:
        return one_of("partition", value, PARTITIONS)

    @field_validator("composition")
    @classmethod
    def _known_composition(cls, value: str) -> str:
        return one_of("composition", value, COMPOSITIONS)


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class TableOverride:
    """Settings of one table that differ from the default's; what is left out (``null``) is the default's."""

    partition: str | None = None
    collisions: PositiveInt | None = None
    composition: str | None = None
    pooling: Pooling | None = None
    threshold: int | None = Field(default=None, ge=0)
    force: bool | None = None

    _known_partition = field_validator("partition")(lambda v: v if v is None else one_of("partition", v, PARTITIONS))
    _known_composition = field_validator("composition")(
        lambda v: v if v is None else one_of("composition", v, COMPOSITIONS)
    )


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class EmbeddingConfig:
    """The ``embedding`` section: ``default`` for every table, ``tables`` for exceptions by the feature's name."""

    default: TableConfig = field(default_factory=TableConfig)
    tables: dict[str, TableOverride] = field(default_factory=dict)

    def of(self, name: str) -> TableConfig:
        """The settings that hold for one table."""
        override = self.tables.get(name)
        if override is None:
            return self.default
        changes = {key: value for key, value in dataclasses.asdict(override).items() if value is not None}
        return dataclasses.replace(self.default, **changes)


def choose_partition(num_embeddings: int, settings: TableConfig) -> Partition:
    """The partition that a table really gets: the full table where it is small or where compression saves no rows."""
    full = PARTITIONS["naive"](num_embeddings)
    if settings.partition == "naive" or (num_embeddings <= settings.threshold and not settings.force):
        return full
    scheme = PARTITIONS[settings.partition](num_embeddings, collisions=settings.collisions)  # type: ignore[call-arg]
    return scheme if settings.force or scheme.total_rows < full.total_rows else full


def build_tables(
    features: Sequence[CategoricalFeature], config: EmbeddingConfig, seed: int = 0
) -> list[CompositionalEmbeddingBagConfig]:
    """One table a feature, named like it.

    Raises:
        UserError: where ``config.tables`` names a feature that is not there.
    """
    names = [feature.name for feature in features]
    for name in config.tables:
        one_of("embedding.tables", name, names)
    return [_build_table(feature, config.of(feature.name), seed) for feature in features]


def _build_table(feature: CategoricalFeature, settings: TableConfig, seed: int) -> CompositionalEmbeddingBagConfig:
    return CompositionalEmbeddingBagConfig(
        name=feature.name,
        num_embeddings=feature.num_embeddings,
        embedding_dim=settings.embedding_dim,
        feature_names=[feature.name],
        partition=choose_partition(feature.num_embeddings, settings),
        composition=settings.composition,
        pooling=settings.pooling,
        seed=seed,
    )
