"""The quantised collections: raw ids to rows of partitions, and rows to composed vectors in float32.

::

    quantize_inference_model(model, quantization_mapping=QUANTIZATION_MAPPING)
    quantize_embeddings(
        model, torch.qint8, inplace=True,
        additional_qconfig_spec_keys=list(MODULE_MAPPING), additional_mapping=MODULE_MAPPING,
    )

A partition is a plain table to TorchRec, looked up without pooling. TorchRec's quantised collection of sequences takes
tables of one dimension only, so there is one collection for each dimension. TorchRec's sharders find these collections
as children, and divide them by table and row, and on CUDA by column, as stock sequences.

Trade-off: a divided collection sends the vectors of every partition, which are composed on arrival. Composing them
first would send one vector for an id or, for bags, one for a bag.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver
from torchrec.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from torchrec.inference.modules import DEFAULT_QUANT_MAPPING
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, QuantConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.quant.embedding_modules import (
    MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT,
    MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    MODULE_ATTR_REGISTER_TBES_BOOL,
    MODULE_ATTR_ROW_ALIGNMENT_INT,
)
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.bag import pool
from distembed.embedding.batches import jagged_vectors
from distembed.embedding.config import PartitionTable
from distembed.embedding.ids import IdMapper
from distembed.embedding.partition_state import HasPartitionState
from distembed.embedding.tables import CompositionalTables, EmbeddedFeature, refuse_torchscript

TableT = TypeVar("TableT", bound=CompositionalEmbeddingConfig)

_SETTINGS = (
    MODULE_ATTR_REGISTER_TBES_BOOL,
    MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    MODULE_ATTR_ROW_ALIGNMENT_INT,
)
"""Attributes that TorchRec's ``quant_prep_...`` functions set on a collection before it is quantised."""

_COLUMNS_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
"""Columns in a byte, for dtypes of less than 8 bits."""


class QuantizedTables(HasPartitionState, nn.Module, Generic[TableT]):
    """Base of the quantised collections, made from a float collection, whose ``qconfig`` gives the dtypes.

    Attributes:
        lookups: The quantised partitions, in a collection of TorchRec for each dimension.
        functions: The functions of path-based tables by name, in float32.
    """

    def __init__(self, module: CompositionalTables[TableT]) -> None:
        super().__init__()
        self._tables = module.tables()
        self._map_ids = IdMapper(self._tables)
        self._output_dtype: torch.dtype = cast(Any, module.qconfig).activation().dtype
        self.lookups = _quantized_lookups(module)
        self.functions = nn.ParameterDict(
            {
                name: nn.Parameter(function.detach().clone(), requires_grad=False)
                for name, function in module.functions.items()
            }
        )

    @classmethod
    def from_float(cls, module: Any) -> "QuantizedTables[TableT]":
        """Returns a float collection quantised as its ``qconfig`` says; ``torch.ao.quantization`` calls it."""
        return cls(module)

    def embed(self, features: KeyedJaggedTensor, is_weighted: bool = False) -> Iterator[EmbeddedFeature[TableT]]:
        """Yields every feature of every table, looked up and composed in float32 but not pooled, in the tables' order.

        Raises:
            UserError: The batch lacks a feature, an id lies outside of its table, features have batch sizes of their
                own, the batch has no weights although ``is_weighted`` is set, or torch.fx traces the module.
        """
        if isinstance(features, torch.fx.Proxy):
            raise UserError(
                f"torch.fx does not trace a {type(self).__name__}; use torch.export of the float model, as "
                "`distembed export` does."
            )
        batch = maybe_td_to_kjt(features)
        _require_whole(batch, is_weighted)
        counts, names = batch.length_per_key(), batch.keys()
        ids, mapped = batch.values().split(counts), self._map_ids(batch).values().long().split(counts)
        lengths = batch.lengths().view(len(counts), batch.stride()).unbind()
        weights = batch.weights().split(counts) if is_weighted else [None] * len(counts)
        key_indices = {name: index for index, name in enumerate(names)}
        rows = {
            name: table.scheme.rows(mapped[_require_key(name, table, key_indices)])
            for table in self._tables
            for name in table.feature_names
        }
        vectors = self._look_up(rows, {name: lengths[key_indices[name]] for name in rows})
        for table in self._tables:
            for name in table.feature_names:
                looked_up = [vectors[_lookup_key(part, name)] for part in table.lookup_tables()]
                composed, place = self._compose(table, looked_up, rows[name]), key_indices[name]
                yield EmbeddedFeature(table, name, composed, ids[place], lengths[place], weights[place])

    def _look_up(
        self, rows: Mapping[str, Int64[Tensor, "k ids"]], lengths: Mapping[str, Int[Tensor, " batch"]]
    ) -> dict[str, Float[Tensor, "ids dim"]]:
        """Looks up every feature's rows in each partition that holds vectors; returns the vectors by lookup key.

        ``rows`` and ``lengths`` are by feature; row j of ``rows`` is for partition j.
        """
        # a feature is one key for each of its table's partitions, and each dimension has its own stock collection
        batches: dict[str, list[tuple[str, Tensor, Tensor]]] = {name: [] for name in self.lookups}
        for table in self._tables:
            for name in table.feature_names:
                for j, part in enumerate(table.lookup_tables()):
                    batches[_dim_name(part.dim)].append((_lookup_key(part, name), rows[name][j], lengths[name]))
        vectors: dict[str, Tensor] = {}
        for name, batch in batches.items():
            keys, own_rows, own_lengths = map(list, zip(*batch, strict=True))
            outputs = self.lookups[name](KeyedJaggedTensor(keys, torch.cat(own_rows), lengths=torch.cat(own_lengths)))
            vectors |= {key: outputs[key].values() for key in keys}
        return vectors

    def _compose(
        self, table: TableT, vectors: list[Float[Tensor, "ids dim"]], rows: Int64[Tensor, "k ids"]
    ) -> Float[Tensor, "ids width"]:
        functions = [self.functions[part.name] for part in table.function_tables()]
        if not functions:
            return table.combine.compose(vectors)
        # the vectors of the ids serve as tables whose row i belongs to the i-th id; functions are chosen by real rows
        order = torch.arange(rows.shape[1], device=rows.device).expand(len(vectors), -1)
        return table.combine.embed([*vectors, *functions], torch.cat([order, rows[len(vectors) :]]))

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``, which calls this method first."""
        refuse_torchscript(self)

    def tables(self) -> list[TableT]:
        """Returns the compositional tables, in order."""
        return list(self._tables)

    def output_dtype(self) -> torch.dtype:
        """Returns the dtype of the outputs; vectors are composed and pooled in float32 in any case."""
        return self._output_dtype

    def memory_bytes(self) -> int:
        """Returns the bytes of quantised rows with FBGEMM's padding, functions of paths, and stored assignments."""
        others = sum(function.nbytes for function in self.functions.values())
        others += sum(table.scheme.assignment_bytes for table in self._tables)
        return others + sum(_quantized_bytes(lookups) for lookups in self.lookups.values())

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return next(iter(self.buffers())).device


def _require_whole(batch: KeyedJaggedTensor, is_weighted: bool) -> None:
    if batch.variable_stride_per_key():
        raise UserError(
            "the batch has a size for each feature, which TorchRec's quantised lookups do not take; give every feature "
            "a bag for each row."
        )
    if is_weighted and batch.weights_or_none() is None:
        raise UserError(
            "The collection has is_weighted=True, but the KeyedJaggedTensor has no weights; make it with weights=, or "
            "the collection without is_weighted."
        )


def _require_key(name: str, table: CompositionalEmbeddingConfig, key_indices: Mapping[str, int]) -> int:
    if name not in key_indices:
        raise UserError(f"feature {name!r} of table {table.name!r} is not among {list(key_indices)}.")
    return key_indices[name]


def _lookup_key(part: PartitionTable, feature_name: str) -> str:
    """Returns the feature name under which a feature's rows of one partition are given to the stock collection."""
    return f"{part.name}:{feature_name}"


def _dim_name(dim: int) -> str:
    """Returns the name in ``lookups`` of the stock collection of partitions with ``dim`` columns."""
    return f"dim_{dim}"


def _quantized_lookups(module: CompositionalTables[Any]) -> nn.ModuleDict:
    """Returns a quantised stock collection for each dimension, of the partitions that hold vectors.

    Refuses pruned tables, and dtypes that would share a byte between rows.
    """
    _require_unpruned(module)
    weights = {
        part.name: weight
        for table in module.tables()
        for part, weight in zip(table.partition_tables(), module.weights(table.name), strict=True)
    }
    parts_by_dim: dict[int, list[tuple[CompositionalEmbeddingConfig, PartitionTable]]] = {}
    for table in module.tables():
        for part in table.lookup_tables():
            parts_by_dim.setdefault(part.dim, []).append((table, part))
    qconfig = _qconfig_by_partition(module)
    _require_whole_bytes(qconfig, [part for parts in parts_by_dim.values() for _, part in parts])
    lookups = nn.ModuleDict()
    for dim, dim_parts in parts_by_dim.items():
        configs = [
            EmbeddingConfig(
                name=part.name,
                num_embeddings=part.num_rows,
                embedding_dim=part.dim,
                feature_names=[_lookup_key(part, name) for name in table.feature_names],  # rows in place of ids
                data_type=DataType.FP32,
            )
            for table, part in dim_parts
        ]
        stock = EmbeddingCollection(configs, device=torch.device("meta"))
        for name, embedding in stock.embeddings.items():
            weight = weights[name].detach()  # without a copy of dtypes that TorchRec quantises
            weight = weight.float() if weight.dtype == torch.bfloat16 else weight
            embedding.weight = nn.Parameter(weight, requires_grad=False)
        for setting in _SETTINGS:
            if hasattr(module, setting):
                setattr(stock, setting, getattr(module, setting))
        stock.qconfig = qconfig
        lookups[_dim_name(dim)] = QuantEmbeddingCollection.from_float(stock)
    return lookups


def _quantized_bytes(lookups: nn.Module) -> int:
    """Returns the bytes of the rows in a quantised collection of TorchRec, or in its sharded form, with padding."""
    if isinstance(lookups, ShardedQuantEmbeddingCollection):
        tables = list(lookups.tbes_configs())
    else:
        assert isinstance(lookups, QuantEmbeddingCollection)
        tables = lookups._emb_modules
    return sum(
        weight.nbytes for table in tables for weight, _ in table.split_embedding_weights(split_scale_shifts=False)
    )


def _qconfig_by_partition(module: CompositionalTables[Any]) -> QuantConfig:
    """Returns the ``qconfig`` of stock collections: a dtype for each partition, and float32 outputs to compose."""
    qconfig: Any = module.qconfig
    dtypes = getattr(qconfig, "per_table_weight_dtype", None) or {}
    by_partition = {
        part.name: dtypes[table.name]
        for table in module.tables()
        if table.name in dtypes
        for part in table.lookup_tables()
    }
    return QuantConfig(PlaceholderObserver.with_args(dtype=torch.float32), qconfig.weight, by_partition)


def _require_unpruned(module: CompositionalTables[Any]) -> None:
    pruned_rows = getattr(module, MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, {})
    for table in module.tables():
        if table.name in pruned_rows:
            raise UserError(
                f"set_pruning_data asks for {pruned_rows[table.name]} rows of table {table.name!r}, but ids share the "
                "rows of a compositional table, so that none of them can go; leave the table out."
            )


def _require_whole_bytes(qconfig: QuantConfig, parts: Sequence[PartitionTable]) -> None:
    by_partition = qconfig.per_table_weight_dtype or {}
    for part in parts:
        dtype = by_partition.get(part.name, qconfig.weight().dtype)
        columns = _COLUMNS_PER_BYTE.get(dtype, 1)
        if part.dim % columns:
            raise UserError(
                f"partition {part.name!r} has {part.dim} columns, and {columns} of {dtype} share a byte; give its "
                "table torch.qint8 in per_table_weight_dtype, or a dimension that this number divides."
            )


class QuantizedCompositionalEmbeddingBagCollection(
    QuantizedTables[CompositionalEmbeddingBagConfig], EmbeddingBagCollectionInterface
):
    """Takes the place of a :class:`CompositionalEmbeddingBagCollection` for inference; keys and shapes are the same."""

    def __init__(self, module: CompositionalEmbeddingBagCollection) -> None:
        super().__init__(module)
        self._is_weighted = module.is_weighted()
        self._configs = module.embedding_bag_configs()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks ids up, composes and pools; errors as of :meth:`embed`."""
        keys: list[str] = []
        dims: list[int] = []
        pooled = []
        for feature in self.embed(features, self._is_weighted):
            names = feature.table.vector_names(feature.name)
            keys += names
            dims += [feature.table.embedding_dim] * len(names)
            pooled.append(pool(feature.vectors, feature.lengths, feature.table.pooling, feature.weights))
        return KeyedTensor(keys, dims, torch.cat(pooled, dim=1).to(self._output_dtype))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns TorchRec's config of every table, in which its models find features and dimensions."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns whether per-sample weights are applied."""
        return self._is_weighted


class QuantizedCompositionalEmbeddingCollection(
    QuantizedTables[CompositionalEmbeddingConfig], EmbeddingCollectionInterface
):
    """Takes the place of a :class:`CompositionalEmbeddingCollection` for inference; keys and shapes are the same."""

    def __init__(self, module: CompositionalEmbeddingCollection) -> None:
        super().__init__(module)
        self._need_indices = module.need_indices()
        self._configs = module.embedding_configs()
        self._names = module.embedding_names_by_table()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and composes; each output has its feature's lengths; errors as of :meth:`embed`."""
        outputs: dict[str, JaggedTensor] = {}
        for feature in self.embed(features):
            keys = feature.table.vector_names(feature.name)
            ids = feature.ids if self._need_indices else None
            vectors = feature.vectors.to(self._output_dtype)
            outputs |= jagged_vectors(keys, self.embedding_dim(), vectors, feature.lengths, ids, None)
        return outputs

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns TorchRec's config of every table, in which its models find features and dimensions."""
        return self._configs

    def embedding_dim(self) -> int:
        """Returns the dimension of a vector."""
        return self._tables[0].embedding_dim

    def need_indices(self) -> bool:
        """Returns whether the outputs carry their ids."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the keys of the output for each table."""
        return self._names


MODULE_MAPPING: dict[type[nn.Module], type[nn.Module]] = {
    CompositionalEmbeddingBagCollection: QuantizedCompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection: QuantizedCompositionalEmbeddingCollection,
}
"""The quantised class of each compositional collection, for ``quantize_embeddings``."""

QUANTIZATION_MAPPING: dict[str, type[nn.Module]] = DEFAULT_QUANT_MAPPING | {
    torch.typename(float_class): quantized_class for float_class, quantized_class in MODULE_MAPPING.items()
}
"""The quantised class of each collection, TorchRec's own too, by type name, for ``quantize_inference_model``."""
