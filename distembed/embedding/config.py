"""The configs of compositional tables, which modules, sharders and the planner read.

:class:`CompositionalEmbeddingBagConfig` takes the place of TorchRec's ``EmbeddingBagConfig`` and
:class:`CompositionalEmbeddingConfig` that of its ``EmbeddingConfig``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import one_of
from distembed.base.validation import MAX_TABLE_BYTES
from distembed.composition import COMPOSITIONS, Composition
from distembed.embedding.initialization import SeededInit
from distembed.embedding.managed_sizes import ManagedSizes
from distembed.embedding.settings import ID_POLICIES, KERNELS, POOLINGS, IdPolicy, LookupKernel, ManagedConfig, Pooling
from distembed.partitions import PARTITIONS, KeyedHash, Partition, Truncated
from distembed.partitions.base import require_positive
from distembed.sse import SSE, IdStream

if TYPE_CHECKING:
    from distembed.embedding.managed import ManagedIds
    from distembed.sse import FeaturePerturbation

DataType = Literal["FP32", "FP16", "BF16"]
IdDtype = Literal["int64", "int32"]
_BYTES_PER_PARAMETER: dict[DataType, int] = {"FP32": 4, "FP16": 2, "BF16": 2}
_BITS_OF_ID: dict[IdDtype, int] = {"int64": 63, "int32": 31}
_BYTES_PER_FUNCTION_PARAMETER = 4
_NOT_MANAGED = ("truncated", "explicit", "clustered")
"""Partition schemes that need ids of a fixed meaning, or numbered by frequency."""


@dataclass(frozen=True)
class PartitionTable:
    """The parameters of one partition of a table."""

    name: str  # ``<table>__p<j>``, where j is the partition's number
    number: int  # the number j
    num_rows: int  # the number of rows
    dim: int  # how many numbers make a row
    init: SeededInit  # fills the weight with its initial values
    is_function: bool  # whether a row is the packed weights of a function (path-based compositions) instead of a vector
    bytes_per_number: int  # 4 for functions, else by the table's data type

    @property
    def num_parameters(self) -> int:
        """How many numbers all rows have."""
        return self.num_rows * self.dim

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows' numbers, without optimizer state."""
        return self.num_parameters * self.bytes_per_number


@dataclass(frozen=True)
class FeatureIds:
    """The ids of a feature, as they lie in its table: id x of the feature is id ``first + x`` of the table."""

    first: int  # the table's id of the feature's id 0
    num_ids: int  # the feature's ids lie in [0, num_ids)
    oov_id: int  # the feature's id of unknown values


@dataclass(frozen=True)
class CompositionalEmbeddingConfig:
    """One table: its ids, how they are partitioned, and how the rows' vectors are composed.

    Args:
        name: The table's name, unique among the tables of a collection.
        num_embeddings: The number of ids; an id lies in ``[0, num_embeddings)``.
        embedding_dim: The dimension of the composed vector.
        feature_names: The features that look their ids up in this table.
        partition: An instance for the same ``num_embeddings``, or a name of ``distembed.partitions.PARTITIONS`` that is
            built with its default settings.
        composition: An instance, or a name of ``distembed.composition.COMPOSITIONS``.
        data_type: The type of the vectors, ``FP32``, ``FP16`` or ``BF16``, or TorchRec's ``DataType``; functions are
            FP32, and vectors are composed in float32. FBGEMM has no BF16 on the CPU: sharded tables of it are
            data-parallel there.
        seed: The seed of ``sse`` and, with the table's name and the partition's number, of the initial values.
        id_policy: How to treat an id outside of ``[0, num_embeddings)``: ``error`` raises an error, ``clip_to_oov``
            replaces it by ``oov_id``, ``modulo`` by its remainder modulo ``num_embeddings``, which is not negative.
        oov_id: The id of unknown values. Unless given it is 1, as in the datasets of ``distembed prepare``, and 0 in a
            table of one id.
        pre_hash: A hash that is applied to every id first, so that ids may be any int64.
        sse: The rule that replaces ids in training, for all features, or a mapping from features to rules; without it
            no ids are replaced.
        id_dtype: The dtype, ``int64`` or ``int32`` or torch's, in which ids are sent to the ranks that look them up;
            batches may have another. With int32, which halves their bytes, a table has up to 2^31 ids; a collection
            sends int64 if any of its tables does.
        dense_gradient: Whether a step gives gradients to all rows, and not only to looked-up rows, as a softmax over
            all ids does. FBGEMM updates looked-up rows only, so the vectors get TorchRec's ``dense`` kernel and are
            trained by the dense optimizer, with its weight decay.
        all_scored: Whether a step scores all of the table's vectors, as a ranking of items does; the sharding types
            ``table_row_wise`` and ``grid_shard`` are then refused.
        first_ids: The table's id of each feature's id 0, in a unified table (Coleman et al., "Unified Embedding",
            NeurIPS 2023): id x of feature f is looked up as ``first_ids[f] + x``, so that equal ids of two features
            differ. A feature's ids end where the next feature's ids begin, or at ``num_embeddings``. Features of one
            vocabulary have one first id. ``id_policy``, ``oov_id``, ``pre_hash`` and ``sse`` apply to a feature's own
            ids. Unless given, all features have the same ids.
        kernel: How sharded tables are looked up: ``fused`` maps, looks up, composes and pools in one pass and updates
            rows in another, ``fbgemm`` calls one FBGEMM lookup for each partition, and ``auto`` takes the way that was
            measured to be faster on the kind of device, if it supports the table. Results differ only by the order of
            floating-point sums.
        ids: How raw ids are given ``num_embeddings`` slots in training (:mod:`distembed.embedding.managed`); the scheme
            then divides slots. Copies of this config share the slots.

    Raises:
        UserError: A name, dtype or id is not allowed, a size is below 1 or too large for any machine, or the partition
            or ``sse`` was made for another number of ids or other features.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    partition: Partition | str = "naive"
    composition: Composition | str = "product"
    data_type: DataType = "FP32"
    seed: int = 0
    id_policy: IdPolicy = "error"
    oov_id: int | None = None
    pre_hash: KeyedHash | None = None
    sse: SSE | Mapping[str, SSE] | None = field(default=None, hash=False)
    id_dtype: IdDtype = "int64"
    dense_gradient: bool = False
    all_scored: bool = False
    kernel: LookupKernel = "auto"
    first_ids: Mapping[str, int] | None = field(default=None, hash=False)
    ids: "ManagedConfig | ManagedIds | None" = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise UserError(f"a table's name is {self.name!r}; give a string of at least one character, without '.'.")
        where = f"table {self.name!r}"
        for size, remedy in (
            ("num_embeddings", "It is the number of distinct ids."),
            ("embedding_dim", "16 is usual for Criteo."),
        ):
            self._resolve(size, require_positive(f"{where}: {size}", getattr(self, size), remedy))
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise UserError(f"{where}: feature_names is {self.feature_names!r}; give a list of one name or more.")
        self._resolve("feature_names", tuple(self.feature_names))
        if isinstance(self.partition, str):
            scheme = PARTITIONS[one_of(f"{where}: partition", self.partition, PARTITIONS)]
            self._resolve("partition", scheme(num_embeddings=self.num_embeddings).for_table(self.name))
        _require_instance(f"{where}: partition", self.partition, Partition)
        if self.scheme.num_embeddings != self.num_embeddings:
            raise UserError(
                f"{where} has num_embeddings={self.num_embeddings}, but its partition was made for "
                f"{self.scheme.num_embeddings} ids; make the partition for the same number."
            )
        if isinstance(self.scheme, Truncated) and (self.pre_hash is not None or self.first_ids is not None):
            field = "first_ids" if self.pre_hash is None else "pre_hash"
            raise UserError(
                f"{where}: partition is truncated and {field} is given, so that ids are not numbered by falling "
                "frequency; use QuotientRemainder or MultiHash."
            )
        if isinstance(self.composition, str):
            combine = COMPOSITIONS[one_of(f"{where}: composition", self.composition, COMPOSITIONS)]
            self._resolve("composition", combine())
        _require_instance(f"{where}: composition", self.composition, Composition)
        data_type = getattr(self.data_type, "value", self.data_type)
        self._resolve("data_type", one_of(f"{where}: data_type", data_type, _BYTES_PER_PARAMETER))
        one_of(f"{where}: id_policy", self.id_policy, ID_POLICIES)
        one_of(f"{where}: kernel", self.kernel, KERNELS)
        if self.oov_id is None:
            self._resolve("oov_id", min(1, self.num_embeddings - 1))
        elif type(self.oov_id) is not int or not 0 <= self.oov_id < self.num_embeddings:
            raise UserError(f"{where}: oov_id is {self.oov_id!r}; it must lie in [0, {self.num_embeddings}).")
        id_dtype = str(self.id_dtype).removeprefix("torch.")
        self._resolve("id_dtype", one_of(f"{where}: id_dtype", id_dtype, _BITS_OF_ID))
        if self.num_embeddings > 2 ** _BITS_OF_ID[self.id_dtype]:
            raise UserError(
                f"{where}: id_dtype is {self.id_dtype}, which does not hold ids up to {self.num_embeddings - 1}; use "
                "int64."
            )
        if self.first_ids is not None:
            self._require_first_ids(self.first_ids, where)
            self._resolve("first_ids", dict(self.first_ids))
        if isinstance(self.ids, ManagedConfig):
            self._require_manageable(self.ids, where)
            from distembed.embedding.managed import ManagedIds

            self._resolve("ids", ManagedIds(ManagedSizes(self.name, self.ids)))
        for feature, rule in self._given_rules():
            if feature not in self.feature_names or not isinstance(rule, SSE):
                raise UserError(
                    f"{where}: sse is {self.sse!r}; give an instance, such as SSE(p0=0.01), or one for each feature "
                    f"that has a rule ({', '.join(self.feature_names)})."
                )
            rule.require_valid_for(self.ids_of(feature).num_ids, f"{where}: sse")
        try:
            dims = self.combine.partition_dims(self.embedding_dim, len(self.scheme.num_rows))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        for num_rows, dim in zip(self.scheme.num_rows, dims, strict=True):
            if num_rows * dim * _BYTES_PER_FUNCTION_PARAMETER > MAX_TABLE_BYTES:
                raise UserError(
                    f"{where} would have {num_rows:,} rows of {dim:,} numbers, for num_embeddings="
                    f"{self.num_embeddings}: more than any machines hold. Lower embedding_dim, or compress it further "
                    "(collisions, num_partitions), or hash its ids into fewer."
                )
        if self.scheme.assignment_bytes > MAX_TABLE_BYTES:
            raise UserError(
                f"{where} would store rows of num_embeddings={self.num_embeddings:,} ids in "
                f"{self.scheme.assignment_bytes:,} bytes: more than any machines hold. Hash its ids into fewer."
            )

    def _require_first_ids(self, first_ids: object, where: str) -> None:
        """Raises a :class:`UserError` unless every feature has a first id, of a feature with room for ``oov_id``."""
        remedy = "give the table's id of each feature's id 0, such as {'a': 0, 'b': 1000} for 1000 ids of 'a'."
        if not isinstance(first_ids, Mapping) or any(type(first) is not int for first in first_ids.values()):
            raise UserError(f"{where}: first_ids is {first_ids!r}; {remedy}")
        for feature in self.feature_names:
            if feature not in first_ids:
                raise UserError(
                    f"{where}: first_ids lacks feature {feature!r}, and has {', '.join(first_ids) or 'none'}; {remedy}"
                )
        if min(first_ids.values()) != 0 or max(first_ids.values()) >= self.num_embeddings:
            raise UserError(
                f"{where}: first_ids is {dict(first_ids)!r}; the least is 0, and all lie below num_embeddings="
                f"{self.num_embeddings}, the number of ids of all features: raise it, or {remedy}"
            )
        assert self.oov_id is not None
        for feature in first_ids:
            own = self.ids_of(feature)
            if own.oov_id < self.oov_id and self.oov_id > 1:
                raise UserError(
                    f"{where}: oov_id is {self.oov_id}, and feature {feature!r} has {own.num_ids} ids; the id of "
                    "unknown values lies among the ids of every feature: lower it, or correct first_ids."
                )

    def _require_manageable(self, ids: ManagedConfig, where: str) -> None:
        """Raises a :class:`UserError` for settings that do not go with managed ids."""
        if ids.size != self.num_embeddings:
            raise UserError(
                f"{where}: ids.size is {ids.size}, and num_embeddings={self.num_embeddings}; make them equal."
            )
        given = {
            "pre_hash": self.pre_hash is not None,
            "first_ids": self.first_ids is not None,
            "sse": bool(self._given_rules()),
            "dense_gradient": self.dense_gradient,
            "all_scored": self.all_scored,
            f"id_policy {self.id_policy}": self.id_policy != "error",
            f"partition {self.scheme.name}": self.scheme.name in _NOT_MANAGED,
        }
        for setting in (name for name, is_given in given.items() if is_given):
            raise UserError(
                f"{where} has managed ids and {setting}, which do not go together; leave one of the two out. A softmax "
                "or ranking over all ids, and replaced ids (sse), need ids of a fixed meaning."
            )

    @property
    def managed(self) -> "ManagedIds | None":
        """The slots of raw ids; None for ids that are numbers of the table."""
        assert not isinstance(self.ids, ManagedConfig)
        return self.ids

    @property
    def state_bytes(self) -> int:
        """The bytes besides the weights that serving keeps: stored rows of ids, and raw ids of slots.

        Training keeps more for managed ids (:attr:`ManagedSizes.memory_bytes`).
        """
        return self.scheme.assignment_bytes + (0 if self.managed is None else self.managed.sizes.serving_bytes)

    def ids_of(self, feature: str | None = None) -> FeatureIds:
        """Returns the ids of a feature; all ids of the table for None, and where features have no ids of their own."""
        assert self.oov_id is not None
        if feature is None or self.first_ids is None:
            return FeatureIds(0, self.num_embeddings, self.oov_id)
        first = self.first_ids[feature]
        stop = min([self.num_embeddings, *(other for other in self.first_ids.values() if other > first)])
        return FeatureIds(first, stop - first, min(self.oov_id, stop - first - 1))

    @property
    def vocabularies(self) -> dict[str, str | None]:
        """The names of the table's vocabularies, each with a feature that has it: of the table itself, or of features.

        A unified table has a vocabulary for each first id, named as the first feature with it. The ids of any other
        table are of one vocabulary, named as the table, and of no feature.
        """
        if self.first_ids is None:
            return {self.name: None}
        by_first = {self.first_ids[feature]: feature for feature in reversed(self.feature_names)}
        return {by_first[first]: by_first[first] for first in sorted(by_first)}

    def _given_rules(self) -> list[tuple[str, object]]:
        """Returns each feature with the rule given for it, not yet checked; a single rule is for every feature."""
        if self.sse is None:
            return []
        if isinstance(self.sse, Mapping):
            return list(self.sse.items())
        return [(feature, self.sse) for feature in self.feature_names]

    @property
    def rules(self) -> dict[str, SSE]:
        """The rule that replaces a feature's ids in training, by feature; features without a rule are left out."""
        return {feature: rule for feature, rule in self._given_rules() if isinstance(rule, SSE)}

    def _resolve(self, name: str, value: object) -> None:
        """Sets a field of this frozen class to its resolved value."""
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
    def dtype(self) -> "torch.dtype":
        """The dtype of the vectors in the weights."""
        return {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[self.data_type]

    @property
    def bytes_per_number(self) -> int:
        """The bytes of a number of the vectors in the weights."""
        return _BYTES_PER_PARAMETER[self.data_type]

    @property
    def num_vectors(self) -> int:
        """How many vectors of ``embedding_dim`` an id gives: 1, or with feature generation one for each partition."""
        return self.combine.num_vectors(len(self.scheme.num_rows))

    def vector_names(self, feature_name: str) -> list[str]:
        """Returns a feature's output keys: its name, or ``<feature>__p<j>`` where each partition gives a vector."""
        if self.num_vectors == 1:
            return [feature_name]
        return [f"{feature_name}__p{j}" for j in range(self.num_vectors)]

    def partition_tables(self) -> list[PartitionTable]:
        """Returns the parameters of the k partitions, named ``<table>__p<j>``.

        They are initialised so that a composed vector has the variance of a full table's U(-1/sqrt(n), 1/sqrt(n)).
        """
        return list(self._partition_tables)

    def lookup_tables(self) -> list[PartitionTable]:
        """Returns the partitions whose rows are vectors."""
        return [part for part in self._partition_tables if not part.is_function]

    def function_tables(self) -> list[PartitionTable]:
        """Returns the partitions whose rows are functions."""
        return [part for part in self._partition_tables if part.is_function]

    @cached_property
    def _partition_tables(self) -> tuple[PartitionTable, ...]:
        # cached: planning asks for them a hundred times
        # a full table's U(-1/sqrt(n), 1/sqrt(n)) has variance 1 / (3 n): the target for the composed vector
        rows = self.scheme.num_rows
        dims = self.combine.partition_dims(self.embedding_dim, len(rows))
        draws = self.combine.initial_weights(1.0 / (3.0 * self.num_embeddings), len(rows), self.embedding_dim)
        num_lookups = self.combine.num_lookup_partitions(len(rows))
        names = [f"{self.name}__p{j}" for j in range(len(rows))]
        return tuple(
            PartitionTable(
                names[j],
                j,
                rows[j],
                dims[j],
                SeededInit(draws[j], self.seed, names[j], rows[j], dims[j]),
                j >= num_lookups,
                _BYTES_PER_FUNCTION_PARAMETER if j >= num_lookups else self.bytes_per_number,
            )
            for j in range(len(rows))
        )

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all partitions."""
        return sum(part.num_parameters for part in self.partition_tables())

    @property
    def memory_bytes(self) -> int:
        """The bytes of all parameters, stored rows of ids and identities, which serving keeps, without states."""
        return sum(part.num_bytes for part in self.partition_tables()) + self.state_bytes

    @property
    def full_bytes(self) -> int:
        """The bytes of the vectors of the full fp32 table of these ids."""
        return self.num_embeddings * self.embedding_dim * _BYTES_PER_PARAMETER["FP32"]


@dataclass(frozen=True)
class CompositionalEmbeddingBagConfig(CompositionalEmbeddingConfig):
    """A table whose vectors are pooled over the ids of a bag; it has its base's arguments, and one more.

    Args:
        pooling: How the composed vectors of a bag become one: ``sum``, ``mean`` or ``max``, elementwise, or TorchRec's
            ``PoolingType``. An empty bag gives zeros.
    """

    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = str(getattr(self.pooling, "value", self.pooling)).lower()
        self._resolve("pooling", one_of(f"table {self.name!r}: pooling", pooling, POOLINGS))


def _require_instance(field: str, value: object, kind: type) -> None:
    """Raises a :class:`UserError` unless a value is of a class."""
    if not isinstance(value, kind):
        raise UserError(f"{field} is {value!r}; give a name, or an instance such as Product() or Naive(1000).")


def vector_names(tables: Sequence[CompositionalEmbeddingConfig]) -> list[str]:
    """Returns the output keys of all features, in the tables' order."""
    return [name for table in tables for feature in table.feature_names for name in table.vector_names(feature)]


def perturbation(tables: Sequence[CompositionalEmbeddingConfig], rank: int | None = None) -> "FeaturePerturbation":
    """Returns the module that replaces ids in training, for the features with a rule; ``rank`` as there."""
    from distembed.sse import FeaturePerturbation

    streams = [
        IdStream(table.name, feature, own.num_ids, rule, table.seed, own.first)
        for table in tables
        for feature, rule in table.rules.items()
        for own in [table.ids_of(feature)]
    ]
    return FeaturePerturbation(streams, rank)


def common_id_dtype(tables: Iterable[CompositionalEmbeddingConfig]) -> "torch.dtype":
    """Returns the dtype in which the ids of a collection of these tables travel: the widest ``id_dtype``."""
    return torch.int32 if all(table.id_dtype == "int32" for table in tables) else torch.int64


def meaning_of_weights(table: CompositionalEmbeddingConfig) -> str:
    """Returns a line that is equal for two tables if they give equal vectors for equal weights."""
    values = table.combine.setting_values().items()
    settings = {name: getattr(value, "__qualname__", value) for name, value in values}
    parts = [table.scheme.name, table.scheme.description, f"{table.combine.name} {settings}"]
    parts += [f"pooling {table.pooling}"] if isinstance(table, CompositionalEmbeddingBagConfig) else []
    parts += [f"ids hashed with seed {table.pre_hash.seed}"] if table.pre_hash is not None else []
    firsts = sorted((first, feature) for feature, first in (table.first_ids or {}).items())
    parts += [table.managed.sizes.description] if table.managed is not None else []
    parts += [f"ids of {feature} from {first}" for first, feature in firsts]
    return "; ".join(parts)
