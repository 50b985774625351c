"""The settings of exchanges between ranks as TorchRec's sharders take them, and read off sharders again."""

from collections.abc import Iterable
from typing import Any

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp, ModuleSharder, QuantizedCommCodecs
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from distembed.embedding.exchange import CommPrecision, OutputDtype, QuantizedCommsConfig, VectorExchange

_OUTPUT_DTYPES: dict[torch.dtype, OutputDtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_COMM_DTYPES: dict[torch.dtype, CommPrecision] = {**_OUTPUT_DTYPES, torch.uint8: "int8"}
_COMM_OPS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)


def codecs_registry(comms: QuantizedCommsConfig) -> dict[str, QuantizedCommCodecs] | None:
    """Returns TorchRec's codecs of every exchange of vectors; None where nothing is rounded.

    TorchRec's own ``get_qcomm_codecs_registry`` makes fp16 of bf16 on CPUs, where gloo sends and adds up bf16 too.
    """
    if not comms.is_used:
        return None
    config = QCommsConfig(CommType(comms.forward_precision), CommType(comms.backward_precision))
    return {operation.name: get_qcomm_codecs(config) for operation in _COMM_OPS}


def output_settings(exchange: VectorExchange) -> dict[str, Any]:
    """Returns FBGEMM's settings of tables whose composed vectors are rounded as an exchange says."""
    return {} if exchange.output_dtype == "fp32" else {"output_dtype": DataType(exchange.output_dtype.upper())}


def exchange_of(sharder: ModuleSharder[Any]) -> VectorExchange:
    """Returns the exchange of the modules that a sharder makes; an unknown codec counts as float32."""
    output: Any = (getattr(sharder, "fused_params", None) or {}).get("output_dtype")
    codecs = next(iter((sharder.qcomm_codecs_registry or {}).values()), None)
    forward, backward = (getattr(codecs, way, None) for way in ("forward", "backward"))
    comms = QuantizedCommsConfig(_precision(forward), _precision(backward))
    return VectorExchange("fp32" if output is None else _OUTPUT_DTYPES.get(_torch_dtype(output), "fp32"), comms)


def common_exchange(sharders: Iterable[ModuleSharder[Any]]) -> VectorExchange:
    """Returns one exchange for all collections of a model: that of the first sharder that rounds anything."""
    exchanges = [exchange_of(sharder) for sharder in sharders]
    return next((exchange for exchange in exchanges if exchange != VectorExchange()), VectorExchange())


def _precision(codec: Any) -> CommPrecision:
    return _COMM_DTYPES.get(getattr(codec, "quantized_dtype", None), "fp32")  # type: ignore[arg-type]


def _torch_dtype(data_type: Any) -> torch.dtype:
    """Returns torch's dtype of TorchRec's ``DataType`` or of FBGEMM's ``SparseType``."""
    dtype: torch.dtype = data_type_to_dtype(data_type) if isinstance(data_type, DataType) else data_type.as_dtype()
    return dtype
