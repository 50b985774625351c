"""The ``embedding`` section of a config, read and checked without torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

import pydantic.dataclasses
from pydantic import Field, PositiveInt, field_validator, model_validator

from distembed.bounds import Width, Widths
from distembed.composition import ACTIVATIONS, COMPOSITIONS
from distembed.embedding.exchange import OutputDtype
from distembed.errors import UserError
from distembed.names import STRICT, complete_tables, one_of, over_default
from distembed.partitions import PARTITIONS

IdPolicy = Literal["error", "clip_to_oov", "modulo"]
ID_POLICIES: tuple[IdPolicy, ...] = ("error", "clip_to_oov", "modulo")
Pooling = Literal["sum", "mean", "max"]
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "max")
LookupKernel = Literal["auto", "fused", "fbgemm"]
KERNELS: tuple[LookupKernel, ...] = ("auto", "fused", "fbgemm")
_AtLeastTwo = Annotated[int, Field(ge=2)]
_ALTERNATIVES = (("collisions", "num_buckets"), ("num_partitions", "moduli"))
_Moduli = Annotated[list[PositiveInt], Field(min_length=1)]


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
        data_type: What the numbers of the vectors are: ``fp32``, ``fp16`` or ``bf16``. Vectors are composed, and
            optimizers have their states, in float32.
    """

    partition: str = "naive"
    collisions: PositiveInt | None = None
    num_buckets: PositiveInt | None = None
    num_partitions: _AtLeastTwo | None = None
    moduli: _Moduli | None = None
    assignments: str | None = None
    columns: Annotated[list[str], Field(min_length=1)] | None = None
    allow_collisions: bool = False
    composition: str = "product"
    dims: Widths | None = None
    hidden: Widths = field(default_factory=lambda: [64])
    activation: str = "relu"
    embedding_dim: Width = 16
    pooling: Pooling = "sum"
    threshold: int = Field(default=200, ge=0)
    force: bool = False
    id_policy: IdPolicy = "error"
    hash_seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    data_type: Literal["fp32", "fp16", "bf16"] = "fp32"

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
    """The ``embedding`` section.

    Attributes:
        default: The settings of every table.
        tables: Exceptions by the feature's name; in a file an exception has only what differs from ``default``.
        output_dtype: What the ranks that look composed vectors up round them to, before they are sent, and in which
            their gradients are sent: ``fp32``, ``fp16`` or ``bf16``. Networks get float32; vectors of data-parallel
            tables are not rounded.
        kernel: How tables are looked up: ``fused``, in one pass; ``fbgemm``, by one of FBGEMM's lookups for each
            partition; or ``auto``, by what has been measured to be faster on the kind of device. A table that cannot be
            looked up in one pass is refused with ``fused``, and looked up by FBGEMM with ``auto``.
    """

    default: TableConfig = field(default_factory=TableConfig)
    tables: dict[str, TableConfig] = field(default_factory=dict)
    output_dtype: OutputDtype = "fp32"
    kernel: LookupKernel = "auto"

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
