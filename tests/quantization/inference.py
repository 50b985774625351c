"""The steps of TorchRec's inference path, as its own predict factory takes them, for models with either collection."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device
from torchrec.distributed.planner import ParameterConstraints
from torchrec.inference.modules import quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.quant.embedding_modules import quant_prep_enable_quant_state_dict_split_scale_bias_for_types

from distembed.serving.quantization import MODULE_MAPPING, QUANTIZATION_MAPPING

MOST_PARTITIONS = 9


@contextmanager
def tables_on_the_cpu() -> Iterator[None]:
    """Lets ``sharding_device`` decide where tables lie; without it TorchRec puts them on CUDA whatever it says."""
    before = get_propogate_device()
    set_propogate_device(True)
    try:
        yield
    finally:
        set_propogate_device(before)


def quantize(model: nn.Module, dtype: torch.dtype = torch.qint8, **chosen: Any) -> Any:
    """Returns a quantised copy whose weights a sharded model takes."""
    model = copy.deepcopy(model)
    kinds = [EmbeddingBagCollection, EmbeddingCollection, *MODULE_MAPPING]
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, kinds)
    return quantize_inference_model(
        model, quantization_mapping=QUANTIZATION_MAPPING, quantization_dtype=dtype, **chosen
    )


def shard(
    quantized: Any, world_size: int, sharding_type: str, tables: Sequence[str] = ("t",), sharders: Any = None
) -> tuple[Any, Any]:
    """Returns a sharded copy without its weights, and the plan; to be called within :func:`tables_on_the_cpu`."""
    names = [*tables, *(f"{table}__p{j}" for table in tables for j in range(MOST_PARTITIONS))]
    constraints = {
        name: ParameterConstraints(sharding_types=[sharding_type], compute_kernels=["quant"], min_partition=4)
        for name in names
    }
    return shard_quant_model(
        copy.deepcopy(quantized),
        world_size=world_size,
        compute_device="cpu",
        sharding_device="cpu",
        sharders=sharders,
        constraints=constraints,
    )


def take_weights(sharded: nn.Module, quantized: nn.Module) -> None:
    """Copies the weights of a quantised model into what was made of it by sharding."""
    state = {key: value for key, value in quantized.state_dict().items() if ".tbes." not in key}
    result = sharded.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    own = [key for key in result.missing_keys if ".tbes." not in key and "_dist" not in key]
    assert not own, own
