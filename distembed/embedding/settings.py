"""The ``embedding`` section of a config and the precision of exchanged vectors, read and checked without torch.

Two settings round the vectors that ranks exchange. ``embedding.output_dtype`` has lookups give vectors of half
precision, which are sent as they are, and so are their gradients. ``train.quantized_comms`` leaves lookups in float32
and has TorchRec's codecs round the sent numbers, each way by itself. The codecs take float32, so only one of the two
may be set.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, cast

import pydantic.dataclasses
from pydantic import Field, TypeAdapter, field_validator, model_validator

from distembed.base.errors import UserError
from distembed.base.names import STRICT, ByValues, complete_tables, one_of, over_default, require_mapping
from distembed.base.validation import Width
from distembed.composition import COMPOSITIONS
from distembed.composition.concat import ConcatSettings
from distembed.composition.path import PathMLPSettings
from distembed.composition.tensor_train import TensorTrainSettings
from distembed.partitions import PARTITIONS
from distembed.partitions.explicit import ExplicitSettings
from distembed.partitions.multi_hash import MultiHashSettings
from distembed.partitions.settings import SchemeSettings, setting_names
from distembed.partitions.truncated import TruncatedSettings

IdPolicy = Literal["error", "clip_to_oov", "modulo"]
ID_POLICIES: tuple[IdPolicy, ...] = ("error", "clip_to_oov", "modulo")
Pooling = Literal["sum", "mean", "max"]
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "max")
LookupKernel = Literal["auto", "fused", "fbgemm"]
KERNELS: tuple[LookupKernel, ...] = ("auto", "fused", "fbgemm")
OutputDtype = Literal["fp32", "fp16", "bf16"]
CommPrecision = Literal["fp32", "fp16", "bf16", "int8"]
INT8_NUMBERS = 32
"""Numbers that FBGEMM rounds to int8 together: each rank gets a multiple of it."""
_INT8_BYTES = INT8_NUMBERS + 8  # with their scale and their bias, in float32
_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class _PartitionName:
    """The name of a table's partition scheme, which precedes the settings of schemes."""

    partition: str = "naive"

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, value: str) -> str:
        return one_of("partition", value, PARTITIONS)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class _CompositionName:
    """The name of a table's composition, which precedes the settings of compositions."""

    composition: str = "product"

    @field_validator("composition")
    @classmethod
    def _known_composition(cls, value: str) -> str:
        return one_of("composition", value, COMPOSITIONS)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class AdmissionConfig:
    """When a managed id gets a slot.

    Attributes:
        min_count: The occurrences between two evictions that an id needs.
        candidates: The most ids that are counted until then, in all; None for a quarter of ``size``.
    """

    min_count: int = Field(default=1, ge=1, le=2**31 - 1)
    candidates: int | None = Field(default=None, ge=1, le=2**31 - 1)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class EvictionConfig:
    """When and by which score the slots of managed ids go to other ids.

    Attributes:
        policy: The score of an id: ``lfu`` its occurrences, ``lru`` the step of the last one, ``distance_lfu``
            the occurrences divided by 1 + the steps since the last one.
        every: The number of steps between two evictions.
        reset: Whether rows of an evicted id that no other slot shares start again, from initial values and states.
        half_life_steps: The number of steps after which occurrences count half; they are halved with the next eviction.
            None to count all of them.
    """

    policy: Literal["lfu", "lru", "distance_lfu"] = "lfu"
    every: int = Field(default=1000, ge=1)
    reset: bool = True
    half_life_steps: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _counts_are_scores(self) -> "EvictionConfig":
        if self.half_life_steps is not None and self.policy == "lru":
            raise ValueError(
                f"half_life_steps is {self.half_life_steps}, and the policy 'lru' scores no occurrences; leave it "
                "out, or choose lfu or distance_lfu"
            )
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ManagedConfig:
    """The setting ``ids`` of a table: raw ids are given slots in training, and the partition divides slots.

    Attributes:
        kind: Always ``managed``.
        size: The number of the table's ids: slots, 0 for missing values and 1 for unknown ones.
        admission: When an id gets a slot.
        eviction: When an id loses it.
    """

    size: int = Field(ge=3, le=2**31 - 1)
    kind: Literal["managed"] = "managed"
    admission: AdmissionConfig = AdmissionConfig()
    eviction: EvictionConfig = EvictionConfig()


# a dataclass has the fields of its last base first: this is the order in which configs are written
@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableConfig(
    PathMLPSettings,
    TensorTrainSettings,
    ConcatSettings,
    _CompositionName,
    TruncatedSettings,
    ExplicitSettings,
    MultiHashSettings,
    _PartitionName,
):
    """The settings of a table in a YAML file; schemes and compositions own theirs, and ignore the settings of others.

    A table that uses a scheme or composition of one's own is of a subclass that has its settings too.

    Attributes:
        features: The features that share a unified table, each with ids of its own; None for the table of a feature.
        partition: A name of ``PARTITIONS``; ``naive`` is the full table, ``remainder`` the hashing trick.
        composition: A name of ``COMPOSITIONS``; ignored where there is one partition only.
        embedding_dim: The dimension of the composed vector; it is the same in all tables.
        pooling: The pooling of multi-hot features: ``sum``, ``mean`` or ``max``.
        threshold: The largest number of ids of a table that stays full.
        force: Whether the scheme is applied even below the threshold and even where it saves no parameters.
        id_policy: How to treat ids outside of the table: ``error``, ``clip_to_oov`` or ``modulo``.
        hash_seed: The seed of a hash that is applied to every id first; without it ids are not hashed.
        data_type: Type of the numbers of the vectors: ``fp32``, ``fp16`` or ``bf16``. Vectors are composed, and
            optimizers have their states, in float32.
        ids: How raw ids get slots of the table in training; None for ids that are numbers of the table.
    """

    embedding_dim: Width = 16
    pooling: Pooling = "sum"
    threshold: int = Field(default=200, ge=0)
    force: bool = False
    id_policy: IdPolicy = "error"
    hash_seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    data_type: Literal["fp32", "fp16", "bf16"] = "fp32"
    features: list[str] | None = None
    ids: ManagedConfig | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the settings by their values, as a subclass has no name that it could be imported by."""
        return _BY_SCHEME.validate, (dataclasses.asdict(self),)


class _ByScheme(ByValues):
    """Marks the settings of a table, which are a :class:`TableConfig` with the settings of schemes of one's own."""

    def class_of(self, section: Any) -> type[TableConfig]:
        """Returns the class with the settings of every scheme: a table may have them, though it uses none."""
        return _table_class((), tuple(kind for _, _, kind in _added_settings()))

    def validate(self, section: Any) -> TableConfig:
        """Returns the settings of a table, of a class with the settings of the schemes that it uses or has keys of."""
        values = dataclasses.asdict(section) if isinstance(section, TableConfig) else section
        require_mapping(values)
        kind = _table_class(*_own_settings(values))
        if type(section) is kind:
            return section
        return TypeAdapter(kind).validate_json(json.dumps(values, default=str))


_BY_SCHEME = _ByScheme()
TableSection = Annotated[TableConfig, _BY_SCHEME]
"""The settings of a table within the ``embedding`` section of a config."""


def _added_settings() -> Iterator[tuple[str, str, type[SchemeSettings]]]:
    """Yields key, name and settings class of each plugin's scheme or composition that adds settings to a table's."""
    for key, names in (("partition", PARTITIONS), ("composition", COMPOSITIONS)):
        for name in names.added:
            kind = names[name].settings
            if not issubclass(TableConfig, kind):
                yield key, name, kind


def _own_settings(values: Mapping[str, Any]) -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Returns the settings classes of schemes of one's own that a table uses, and others that it has keys of."""
    used, others = [], []
    for key, name, kind in _added_settings():
        if values.get(key) == name:
            used.append(kind)
        elif not values.keys().isdisjoint(setting_names(kind)):
            others.append(kind)
    return tuple(dict.fromkeys(used)), tuple(kind for kind in dict.fromkeys(others) if kind not in used)


@cache
def _table_class(used: tuple[type, ...], others: tuple[type, ...]) -> type[TableConfig]:
    """Returns :class:`TableConfig` with further settings; of two fields of one name, that of a used scheme counts."""
    for kind in (*used, *others):
        if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise UserError(f"{kind.__qualname__}, the settings of a scheme, is no frozen dataclass; make it one.")
        for setting in dataclasses.fields(kind):
            if setting.name in OF_EVERY_TABLE:
                raise UserError(f"{kind.__qualname__}.{setting.name} is a setting that every table has; rename it.")
            if setting.default is dataclasses.MISSING and setting.default_factory is dataclasses.MISSING:
                raise UserError(
                    f"{kind.__qualname__}.{setting.name} has no default, and tables may leave it out; add one."
                )
    if not used and not others:
        return TableConfig
    kind = type("TableConfig", (*used, TableConfig, *others), {"__module__": __name__})
    return cast(type[TableConfig], pydantic.dataclasses.dataclass(frozen=True, config=STRICT)(kind))


_OF_SCHEMES = {
    name for kind in TableConfig.__bases__ if issubclass(kind, SchemeSettings) for name in setting_names(kind)
}
OF_EVERY_TABLE = frozenset(setting_names(TableConfig)) - _OF_SCHEMES
"""The settings that belong to no scheme and no composition."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class EmbeddingConfig:
    """Holds the section ``embedding`` of a config: the settings of every table, and exceptions by feature."""

    default: TableSection = field(default_factory=TableConfig)  # the settings of every table
    # exceptions by the feature's name, and unified tables by names of their own; in a file each has only the keys that
    # differ from ``default``
    tables: dict[str, TableSection] = field(default_factory=dict)
    # Dtype to which ranks round composed vectors after their lookup, and in which vectors and gradients are sent:
    # ``fp32``, ``fp16`` or ``bf16``. Networks get float32; vectors of data-parallel tables are not rounded.
    output_dtype: OutputDtype = "fp32"
    # How tables are looked up: ``fused``, in one pass; ``fbgemm``, by one of FBGEMM's lookups for each partition;
    # or ``auto``, by the one that was measured to be faster on the device and with the optimizer. A table that cannot
    # be looked up in one pass is refused with ``fused``, and looked up by FBGEMM with ``auto``.
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
                    f"{self.default.embedding_dim}; all tables of a model have one embedding_dim"
                )
        return self

    @model_validator(mode="after")
    def _one_table_each(self) -> "EmbeddingConfig":
        if self.default.features is not None:
            raise ValueError(
                f"default.features is {', '.join(self.default.features)}; features of a unified table are set in "
                "tables, under a name for the table, such as tables.unified.features"
            )
        for name, table in self.tables.items():
            if table.features == []:
                raise ValueError(f"tables.{name}.features is empty; name the features of the unified table")
        places = [
            (feature, f"tables.{name}.features")
            for name, table in self.tables.items()
            for feature in table.features or ()
        ]
        places += [(name, f"tables.{name}") for name, table in self.tables.items() if table.features is None]
        seen: dict[str, str] = {}
        for feature, place in places:
            if seen.get(feature) == place:
                raise ValueError(f"feature {feature!r} is in {place} twice; list it once")
            if feature in seen:
                raise ValueError(
                    f"feature {feature!r} is in {seen[feature]} and in {place}; a feature has one table: take it out "
                    "of one of the two"
                )
            seen[feature] = place
        return self

    def for_table(self, name: str) -> TableConfig:
        """Returns the settings of one table."""
        return self.tables.get(name, self.default)

    def table_of(self, feature: str) -> str:
        """Returns the name of the table of a feature: a unified table, or else the feature's own."""
        return next((name for name, table in self.tables.items() if feature in (table.features or ())), feature)


def _complete(default: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default's settings, overridden by a table's.

    Settings classes declare pairs of ``alternatives`` (``collisions``, ``num_buckets``): a table that sets one of a
    pair does not inherit the other.
    """
    used, others = _own_settings({**default, **table})
    bases = {base for kind in (TableConfig, *used, *others) for base in kind.__mro__}
    pairs = [pair for base in bases for pair in vars(base).get("alternatives", ())]
    replaced = {alternative for pair in pairs for name, alternative in (pair, pair[::-1]) if name in table}
    inherited = {key: value for key, value in default.items() if key not in replaced}
    return over_default(inherited, table)


def assignment_checksums(config: EmbeddingConfig) -> dict[str, str]:
    """Returns the SHA-256 of every Parquet file that an explicit scheme reads, by its path.

    The files are as much part of a model as its config.
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


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class QuantizedCommsConfig:
    """The precisions in which TorchRec's codecs send vectors (its ``QCommsConfig``); ``fp32`` leaves them.

    Precisions are ``fp32``, ``fp16``, ``bf16`` and ``int8``; the last has a scale for each 32 numbers and goes with
    tables that are not summed up over ranks (``table_wise``, ``column_wise``, ``data_parallel``).
    """

    forward_precision: CommPrecision = "fp32"  # precision of the vectors
    backward_precision: CommPrecision = "fp32"  # precision of their gradients

    @property
    def is_used(self) -> bool:
        """Whether anything is rounded."""
        return (self.forward_precision, self.backward_precision) != ("fp32", "fp32")


@dataclass(frozen=True)
class VectorExchange:
    """How composed vectors and their gradients are sent between ranks."""

    output_dtype: OutputDtype = "fp32"  # dtype to which lookups round composed vectors
    comms: QuantizedCommsConfig = QuantizedCommsConfig()  # precisions in which codecs send them

    @property
    def output_itemsize(self) -> int:
        """Bytes of a number of the vectors that lookups give, and of the gradients that come back to them."""
        return _ITEMSIZE[self.output_dtype]

    @property
    def has_int8(self) -> bool:
        """Whether numbers are sent in int8, in either direction."""
        return "int8" in (self.comms.forward_precision, self.comms.backward_precision)

    def vector_bytes(self, num_numbers: float) -> float:
        """Returns the bytes sent for ``num_numbers`` elements of vectors, in the forward pass."""
        return self._sent_bytes(num_numbers, self.comms.forward_precision)

    def gradient_bytes(self, num_numbers: float) -> float:
        """Returns the bytes sent for ``num_numbers`` elements of gradients, in the backward pass."""
        return self._sent_bytes(num_numbers, self.comms.backward_precision)

    def _sent_bytes(self, num_numbers: float, precision: CommPrecision) -> float:
        if not self.comms.is_used:
            return num_numbers * self.output_itemsize
        if precision == "int8":
            return num_numbers * _INT8_BYTES / INT8_NUMBERS
        return num_numbers * _ITEMSIZE[precision]

    def as_json(self) -> dict[str, str]:
        """Returns the settings in plain values."""
        return {
            "output_dtype": self.output_dtype,
            "forward_precision": self.comms.forward_precision,
            "backward_precision": self.comms.backward_precision,
        }
