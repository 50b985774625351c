"""The sharders: show the planner the units to place, and build the sharded module from its plan."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import (
    CommOp,
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.distributed.utils import emb_opt_type_to_optimizer_class
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from distembed.base.errors import UserError
from distembed.embedding.collections import CompositionalEmbeddingBagCollection, CompositionalEmbeddingCollection
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import CommPrecision, OutputDtype, QuantizedCommsConfig, VectorExchange
from distembed.embedding.tables import CompositionalTables
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection
from distembed.sharding.collection import ShardedCompositionalEmbeddingCollection
from distembed.sharding.placement import SHARDING_TYPES, can_be_placed
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES
from distembed.sharding.units import unit_parameters

Module = TypeVar("Module", bound=CompositionalTables[Any])


class _CompositionalSharder(BaseEmbeddingSharder[Module]):
    """Base of the sharders: the planner places each compositional table as one unit.

    Args:
        fused_params: FBGEMM's settings of all tables.
        qcomm_codecs_registry: Codecs that quantise communicated vectors.
        host_memory: Whether the planner may put tables into host memory, read through a cache on the device or
            directly (kernels ``fused_uvm_caching`` and ``fused_uvm``, CUDA only).
        widens_outputs: Whether outputs that ``output_dtype`` has rounded are converted to float32.
    """

    _module_type: type[Any]
    _sharded_module_type: type[Any]
    _sharding_types: Sequence[str] = SHARDING_TYPES
    table: CompositionalEmbeddingConfig | None = None  # the table that a planner asks about

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        host_memory: bool = False,
        widens_outputs: bool = False,
    ) -> None:
        # ids are checked before they are mapped, and rows lie in their tables by construction
        super().__init__({"bounds_check_mode": BoundsCheckMode.NONE, **(fused_params or {})}, qcomm_codecs_registry)
        self._host_memory, self._widens_outputs = host_memory, widens_outputs

    def shard(
        self,
        module: Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Makes the sharded module; all ranks call it together."""
        sharded = self._sharded_module_type(
            module, params, env, self.fused_params, device, self.qcomm_codecs_registry, module_fqn
        )
        # a feature processor computes the weights later; TorchRec shows only by the calling module that there is one
        caller = sys._getframe(1).f_globals.get("__name__")
        sharded.weights_come_later = caller == "torchrec.distributed.fp_embeddingbag"
        sharded.widens_outputs = self._widens_outputs
        return sharded

    @property
    def module_type(self) -> type[Any]:
        return self._module_type

    @property
    def sharded_module_type(self) -> type[Any]:
        return self._sharded_module_type

    def shardable_parameters(self, module: Module) -> dict[str, nn.Parameter]:
        """Returns a meta parameter of each unit's shape, by table; refuses TorchRec's sharder of managed collision."""
        if sys._getframe(1).f_globals.get("__name__") == "torchrec.distributed.mc_embedding_modules":
            name = type(self).__name__.removeprefix("Compositional")
            raise UserError(
                f"TorchRec's ManagedCollision{name} takes no compositional tables, whose rows do not lie with their "
                f"slots; use CompositionalManagedCollision{name}() of distembed.sharding in its place."
            )
        units = unit_parameters(module)
        optimizer_class = emb_opt_type_to_optimizer_class((self.fused_params or {}).get("optimizer"))
        for unit in units.values() if optimizer_class is not None else ():
            # the planner counts optimizer states by this attribute; a sharded module makes new units without it
            if unit.requires_grad and not hasattr(unit, "_optimizer_classes"):
                unit._optimizer_classes = [optimizer_class]  # type: ignore[attr-defined]
        return _Units(self, units, {table.name: table for table in module.tables()})

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types of the table that a planner asks about (`_Units`), or of all tables."""
        return [name for name in self._sharding_types if self.table is None or can_be_placed(self.table, name)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels of a sharding type: fused ones, but dense where weights are replicated."""
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        kernels = [EmbeddingComputeKernel.FUSED.value]
        if self._host_memory and compute_device_type == "cuda":
            kernels += [EmbeddingComputeKernel.FUSED_UVM_CACHING.value, EmbeddingComputeKernel.FUSED_UVM.value]
        return kernels


class _Units(dict[str, nn.Parameter]):
    """Parameters by table, whose :meth:`items` sets ``sharder.table`` to the current table of a loop.

    TorchRec's planner loops over them and asks the sharder for sharding types, without naming the table.
    """

    def __init__(
        self,
        sharder: _CompositionalSharder[Any],
        units: Mapping[str, nn.Parameter],
        tables: Mapping[str, CompositionalEmbeddingConfig],
    ) -> None:
        super().__init__(units)
        self._sharder, self._tables = sharder, tables

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        """Yields the name of each table and its parameter."""
        try:
            for name, unit in super().items():
                self._sharder.table = self._tables[name]
                yield name, unit
        finally:
            self._sharder.table = None


class CompositionalEmbeddingBagCollectionSharder(_CompositionalSharder[CompositionalEmbeddingBagCollection]):
    """Shards :class:`CompositionalEmbeddingBagCollection`; arguments as its base's."""

    _module_type = CompositionalEmbeddingBagCollection
    _sharded_module_type = ShardedCompositionalEmbeddingBagCollection


class CompositionalEmbeddingCollectionSharder(_CompositionalSharder[CompositionalEmbeddingCollection]):
    """Shards :class:`CompositionalEmbeddingCollection`; arguments as its base's."""

    _sharding_types = SEQUENCE_SHARDING_TYPES
    _module_type = CompositionalEmbeddingCollection
    _sharded_module_type = ShardedCompositionalEmbeddingCollection


def default_sharders(host_memory: bool = False, exchange: VectorExchange | None = None) -> list[ModuleSharder[Any]]:
    """Returns the sharders of every collection that a model may have, ours and TorchRec's.

    Args:
        host_memory: Whether compositional tables may be put into host memory; caches are then kept as TorchRec's
            prefetching pipeline needs them.
        exchange: How composed vectors are sent; as float32 unless given. Its ``output_dtype`` does not apply to
            TorchRec's own collections, whose outputs would not be float32 again.
    """
    exchange = exchange or VectorExchange()
    # rows are fetched for a batch before the backward pass of the one before it, whose rows must stay in the cache
    cache_settings = {"prefetch_pipeline": True} if host_memory else {}
    compositional: dict[str, Any] = {
        "fused_params": {**output_settings(exchange), **cache_settings},
        "qcomm_codecs_registry": codecs_registry(exchange.comms),
        "host_memory": host_memory,
        "widens_outputs": True,
    }
    stock: dict[str, Any] = {"qcomm_codecs_registry": codecs_registry(exchange.comms)}
    return [
        CompositionalEmbeddingBagCollectionSharder(**compositional),
        CompositionalEmbeddingCollectionSharder(**compositional),
        EmbeddingBagCollectionSharder(cache_settings or None, **stock),
        EmbeddingCollectionSharder(dict(cache_settings) or None, **stock),
    ]


_OUTPUT_DTYPES: dict[torch.dtype, OutputDtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_COMM_DTYPES: dict[torch.dtype, CommPrecision] = {**_OUTPUT_DTYPES, torch.uint8: "int8"}
_COMM_OPS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)


def codecs_registry(comms: QuantizedCommsConfig) -> dict[str, QuantizedCommCodecs] | None:
    """Returns TorchRec's codecs of every exchange of vectors; None where nothing is rounded.

    TorchRec's own ``get_qcomm_codecs_registry`` turns bf16 into fp16 on CPUs, although gloo sends and adds up bf16.
    """
    if not comms.is_used:
        return None
    config = QCommsConfig(CommType(comms.forward_precision), CommType(comms.backward_precision))
    return {operation.name: get_qcomm_codecs(config) for operation in _COMM_OPS}


def output_settings(exchange: VectorExchange) -> dict[str, Any]:
    """Returns the ``fused_params`` entry that makes lookups round composed vectors to the exchange's dtype."""
    return {} if exchange.output_dtype == "fp32" else {"output_dtype": DataType(exchange.output_dtype.upper())}


def exchange_of(sharder: ModuleSharder[Any]) -> VectorExchange:
    """Returns how modules of this sharder exchange vectors; unknown dtypes and codecs count as float32."""
    output: Any = (getattr(sharder, "fused_params", None) or {}).get("output_dtype")
    codecs = next(iter((sharder.qcomm_codecs_registry or {}).values()), None)
    forward, backward = (getattr(codecs, direction, None) for direction in ("forward", "backward"))
    comms = QuantizedCommsConfig(_precision(forward), _precision(backward))
    return VectorExchange("fp32" if output is None else _OUTPUT_DTYPES.get(_torch_dtype(output), "fp32"), comms)


def common_exchange(sharders: Iterable[ModuleSharder[Any]]) -> VectorExchange:
    """Returns the exchange that plans assume for a whole model: the first sharder's that rounds anything."""
    exchanges = [exchange_of(sharder) for sharder in sharders]
    return next((exchange for exchange in exchanges if exchange != VectorExchange()), VectorExchange())


def _precision(codec: Any) -> CommPrecision:
    return _COMM_DTYPES.get(getattr(codec, "quantized_dtype", None), "fp32")  # type: ignore[arg-type]


def _torch_dtype(data_type: Any) -> torch.dtype:
    """Returns torch's dtype of TorchRec's ``DataType`` or of FBGEMM's ``SparseType``."""
    return data_type_to_dtype(data_type) if isinstance(data_type, DataType) else data_type.as_dtype()
