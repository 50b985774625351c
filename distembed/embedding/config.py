"""What a table is.

:class:`CompositionalEmbeddingBagConfig` plays the part of TorchRec's ``EmbeddingBagConfig`` and
:class:`CompositionalEmbeddingConfig` that of its ``EmbeddingConfig``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchrec.modules.embedding_configs import DataType

from distembed.composition import COMPOSITIONS, Composition
from distembed.embedding.initialization import SeededInit
from distembed.errors import UserError
from distembed.names import one_of
from distembed.partitions import PARTITIONS, KeyedHash, Partition
from distembed.partitions.base import require_positive
from distembed.sse import SSE, FeaturePerturbation, IdStream

IdPolicy = Literal["error", "clip_to_oov", "modulo"]
ID_POLICIES: tuple[IdPolicy, ...] = ("error", "clip_to_oov", "modulo")
Pooling = Literal["sum", "mean", "max"]
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "max")
_BYTES_PER_PARAMETER = {DataType.FP32: 4, DataType.FP16: 2}
_BYTES_PER_FUNCTION_PARAMETER = 4


@dataclass(frozen=True)
class PartitionTable:
    """The parameters of one partition of a table: ``num_rows`` rows of ``dim`` numbers.

    A row is a vector, or, where ``is_function``, the packed weights of a function (path-based compositions).
    """

    name: str
    num_rows: int
    dim: int
    init: SeededInit
    is_function: bool

    @property
    def num_parameters(self) -> int:
        """Numbers of all rows."""
        return self.num_rows * self.dim


@dataclass(frozen=True)
class CompositionalEmbeddingConfig:
    """One table: its ids, how they are partitioned, and how the rows' vectors are composed.

    Args:
        name: unique among the tables of a collection.
        num_embeddings: number of ids; an id lies in ``[0, num_embeddings)``.
        embedding_dim: dimension of the composed vector.
        feature_names: features that look their ids up here.
        partition: an instance for the same ``num_embeddings``, or a name of ``distembed.partitions.PARTITIONS`` that is
            built with its default settings.
        composition: an instance or a name of ``distembed.composition.COMPOSITIONS``.
        data_type: of the vectors; functions are FP32.
        seed: of the initial values, with the table's name and the partition's number, and of ``sse``.
        id_policy: what becomes of an id outside of ``[0, num_embeddings)``: ``error``; ``clip_to_oov``, it is taken for
            ``oov_id``; ``modulo``, its remainder modulo ``num_embeddings``, which is not negative.
        oov_id: the id of unknown values; unless given 1, as ``distembed prepare`` has it (0 in a table of one id).
        pre_hash: applied to every id first; then ids may be any int64.
        sse: how ids are replaced in training, by random numbers of ``seed``; none are unless given.

    Raises:
        UserError: for an unknown name, a size below 1, or a partition or an ``sse`` made for another number of ids.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    partition: Partition | str = "naive"
    composition: Composition | str = "product"
    data_type: DataType = DataType.FP32
    seed: int = 0
    id_policy: IdPolicy = "error"
    oov_id: int | None = None
    pre_hash: KeyedHash | None = None
    sse: SSE | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise UserError(f"a table's name is {self.name!r}; give a string of at least one character, without '.'.")
        where = f"table {self.name!r}"
        for field, remedy in (
            ("num_embeddings", "It is the number of distinct ids."),
            ("embedding_dim", "16 is usual for Criteo."),
        ):
            self._resolve(field, require_positive(f"{where}: {field}", getattr(self, field), remedy))
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise UserError(f"{where}: feature_names is {self.feature_names!r}; give a list of one name or more.")
        self._resolve("feature_names", tuple(self.feature_names))
        if isinstance(self.partition, str):
            scheme = PARTITIONS[one_of(f"{where}: partition", self.partition, PARTITIONS)]
            self._resolve("partition", scheme(num_embeddings=self.num_embeddings))
        _require_instance(f"{where}: partition", self.partition, Partition)
        if self.scheme.num_embeddings != self.num_embeddings:
            raise UserError(
                f"{where} has num_embeddings={self.num_embeddings}, but its partition was made for "
                f"{self.scheme.num_embeddings} ids; make the partition for the same number."
            )
        if isinstance(self.composition, str):
            combine = COMPOSITIONS[one_of(f"{where}: composition", self.composition, COMPOSITIONS)]
            self._resolve("composition", combine())
        _require_instance(f"{where}: composition", self.composition, Composition)
        one_of(f"{where}: data_type", self.data_type, _BYTES_PER_PARAMETER)
        one_of(f"{where}: id_policy", self.id_policy, ID_POLICIES)
        if self.oov_id is None:
            self._resolve("oov_id", min(1, self.num_embeddings - 1))
        elif type(self.oov_id) is not int or not 0 <= self.oov_id < self.num_embeddings:
            raise UserError(f"{where}: oov_id is {self.oov_id!r}; it must lie in [0, {self.num_embeddings}).")
        if self.sse is not None:
            if not isinstance(self.sse, SSE):
                raise UserError(f"{where}: sse is {self.sse!r}; give an instance, such as SSE(p0=0.01).")
            self.sse.require_fit(self.num_embeddings, f"{where}: sse")
        try:
            self.combine.partition_dims(self.embedding_dim, len(self.scheme.num_rows))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

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
    def num_vectors(self) -> int:
        """Vectors of ``embedding_dim`` that an id gives: 1, or one a partition with feature generation."""
        return self.combine.num_vectors(len(self.scheme.num_rows))

    def vector_names(self, feature_name: str) -> list[str]:
        """Output keys of a feature: its name, or ``<feature>__p<j>`` where each partition gives a vector."""
        if self.num_vectors == 1:
            return [feature_name]
        return [f"{feature_name}__p{j}" for j in range(self.num_vectors)]

    def partition_tables(self) -> list[PartitionTable]:
        """The parameters of the k partitions, named ``<table>__p<j>``.

        They are initialised so that a composed vector has the variance of a full table's U(-1/sqrt(n), 1/sqrt(n)).
        """
        rows = self.scheme.num_rows
        dims = self.combine.partition_dims(self.embedding_dim, len(rows))
        draws = self.combine.initial_weights(1.0 / (3.0 * self.num_embeddings), len(rows), self.embedding_dim)
        num_looked_up = self.combine.num_looked_up(len(rows))
        names = [f"{self.name}__p{j}" for j in range(len(rows))]
        return [
            PartitionTable(
                names[j],
                rows[j],
                dims[j],
                SeededInit(draws[j], self.seed, names[j], rows[j], dims[j]),
                j >= num_looked_up,
            )
            for j in range(len(rows))
        ]

    def lookup_tables(self) -> list[PartitionTable]:
        """The partitions whose rows are vectors."""
        return [part for part in self.partition_tables() if not part.is_function]

    def function_tables(self) -> list[PartitionTable]:
        """The partitions whose rows are functions."""
        return [part for part in self.partition_tables() if part.is_function]

    @property
    def num_parameters(self) -> int:
        """Parameters of all partitions."""
        return sum(part.num_parameters for part in self.partition_tables())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all parameters, without optimizer state."""
        in_vectors = sum(part.num_parameters for part in self.lookup_tables())
        in_functions = self.num_parameters - in_vectors
        return in_vectors * _BYTES_PER_PARAMETER[self.data_type] + in_functions * _BYTES_PER_FUNCTION_PARAMETER


@dataclass(frozen=True)
class CompositionalEmbeddingBagConfig(CompositionalEmbeddingConfig):
    """A table whose vectors are pooled over the ids of a bag; arguments as its base's, and one more.

    Args:
        pooling: how the composed vectors of a bag become one: ``sum``, ``mean`` or ``max``, a number at a time.
            TorchRec's ``PoolingType`` is taken too. An empty bag gives zeros.
    """

    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = str(getattr(self.pooling, "value", self.pooling)).lower()
        self._resolve("pooling", one_of(f"table {self.name!r}: pooling", pooling, POOLINGS))


def _require_instance(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise UserError(f"{field} is {value!r}; give a name, or an instance such as Product() or Naive(1000).")


def vector_names(tables: Sequence[CompositionalEmbeddingConfig]) -> list[str]:
    """Output keys of all features, in the tables' order."""
    return [name for table in tables for feature in table.feature_names for name in table.vector_names(feature)]


def perturbation(tables: Sequence[CompositionalEmbeddingConfig], rank: int | None = None) -> FeaturePerturbation:
    """What replaces the ids of these tables' features in training.

    Args:
        tables: those without an ``sse`` are left alone.
        rank: of this process; the one in the default process group unless given.
    """
    streams = [
        IdStream(table.name, feature, table.num_embeddings, table.sse, table.seed)
        for table in tables
        if table.sse is not None
        for feature in table.feature_names
    ]
    return FeaturePerturbation(streams, rank)


def meaning_of_weights(table: CompositionalEmbeddingConfig) -> str:
    """One line that is the same for tables that do the same with the same weights."""
    values = {name: getattr(table.combine, name) for name in table.combine.settings}
    settings = {name: getattr(value, "__qualname__", value) for name, value in values.items()}
    parts = [table.scheme.name, table.scheme.description, f"{table.combine.name} {settings}"]
    parts += [f"pooling {table.pooling}"] if isinstance(table, CompositionalEmbeddingBagConfig) else []
    parts += [f"ids hashed with seed {table.pre_hash.seed}"] if table.pre_hash is not None else []
    return "; ".join(parts)
