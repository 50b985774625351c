"""The partitions of a collection, in quantised collections of TorchRec.

A partition is a plain table to TorchRec, looked up without pooling. TorchRec's quantised collection of sequences takes
tables of one dimension only, so that there is one collection for each dimension. TorchRec's sharders find these
collections as children, and divide them by table and row, and on CUDA by column, as they do stock sequences.

Trade-off: a divided collection sends the vectors of every partition, which are composed where they arrive. Composing
them first would send one vector for an id or, for bags, one for a bag.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver
from torchrec.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig, QuantConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.quant.embedding_modules import (
    MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT,
    MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    MODULE_ATTR_REGISTER_TBES_BOOL,
    MODULE_ATTR_ROW_ALIGNMENT_INT,
)
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable
from distembed.embedding.tables import CompositionalTables

_SETTINGS = (
    MODULE_ATTR_REGISTER_TBES_BOOL,
    MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    MODULE_ATTR_ROW_ALIGNMENT_INT,
)
"""Attributes that TorchRec's ``quant_prep_...`` functions set on a collection before it is quantised."""

_COLUMNS_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
"""How many columns share a byte, for dtypes of less than 8 bits."""


def lookup_key(part: PartitionTable, feature_name: str) -> str:
    """Returns the key of a feature's rows in one partition."""
    return f"{part.name}:{feature_name}"


def dim_name(dim: int) -> str:
    """Returns the name of the collection with the partitions of a dimension."""
    return f"dim_{dim}"


def quantized_lookups(module: CompositionalTables[Any]) -> nn.ModuleDict:
    """Returns the partitions of a collection that hold vectors, quantised as its ``qconfig`` says, by dimension.

    Raises:
        UserError: ``qconfig`` gives a dtype that does not divide a table's columns, or TorchRec's ``set_pruning_data``
            asked for fewer rows of a table.
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
    for dim, parts in parts_by_dim.items():
        stock = EmbeddingCollection([_config(table, part) for table, part in parts], device=torch.device("meta"))
        _take_weights(stock, weights)
        for setting in _SETTINGS:
            if hasattr(module, setting):
                setattr(stock, setting, getattr(module, setting))
        stock.qconfig = qconfig
        lookups[dim_name(dim)] = QuantEmbeddingCollection.from_float(stock)
    return lookups


def quantized_bytes(lookups: nn.Module) -> int:
    """Returns the bytes of the rows in a quantised collection of TorchRec, or in its sharded form, with padding."""
    if isinstance(lookups, ShardedQuantEmbeddingCollection):
        tables = list(lookups.tbes_configs())
    else:
        assert isinstance(lookups, QuantEmbeddingCollection)
        tables = lookups._emb_modules
    return sum(
        weight.nbytes for table in tables for weight, _ in table.split_embedding_weights(split_scale_shifts=False)
    )


def _config(table: CompositionalEmbeddingConfig, part: PartitionTable) -> EmbeddingConfig:
    """Returns TorchRec's config of a partition, which reads rows in place of ids."""
    return EmbeddingConfig(
        name=part.name,
        num_embeddings=part.num_rows,
        embedding_dim=part.dim,
        feature_names=[lookup_key(part, name) for name in table.feature_names],
        data_type=DataType.FP32,
    )


def _take_weights(stock: EmbeddingCollection, weights: Mapping[str, Tensor]) -> None:
    """Puts the weights of partitions into a collection, without a copy where TorchRec quantises their dtype."""
    for name, embedding in stock.embeddings.items():
        weight = weights[name].detach()
        weight = weight.float() if weight.dtype == torch.bfloat16 else weight
        embedding.weight = nn.Parameter(weight, requires_grad=False)


def _qconfig_by_partition(module: CompositionalTables[Any]) -> QuantConfig:
    """Returns the ``qconfig`` of a collection with the dtype of each table for its partitions, and float32 outputs."""
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
    asked = getattr(module, MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, {})
    for table in module.tables():
        if table.name in asked:
            raise UserError(
                f"set_pruning_data asks for {asked[table.name]} rows of table {table.name!r}, but ids share the rows "
                "of a compositional table, so that none of them can go; leave the table out."
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
