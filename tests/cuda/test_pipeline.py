"""Which of TorchRec's pipelines steps a model, by its device and by where its tables are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from distembed.base.ranks import Ranks
from distembed.training import pipeline
from distembed.training.pipeline import StepPipeline

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = ("TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist")


def planned(*kernels: str) -> ShardingPlan:
    tables = {f"t{i}": ParameterSharding("table_wise", kernel, [0]) for i, kernel in enumerate(kernels)}
    return ShardingPlan({"embeddings": EmbeddingModuleShardingPlan(tables)})


@pytest.mark.parametrize(
    ("device", "world_size", "kernels", "expected"),
    [
        (CPU, 1, ("fused",), "TrainPipelineBase"),
        (CPU, 2, ("fused",), "TrainPipelineSparseDist"),
        (CUDA, 1, ("fused", "dense"), "TrainPipelineSparseDist"),
        (CUDA, 1, ("fused", "fused_uvm_caching"), "PrefetchTrainPipelineSparseDist"),
        (CUDA, 8, ("fused_uvm_caching",), "PrefetchTrainPipelineSparseDist"),
        (CUDA, 8, ("fused_uvm",), "TrainPipelineSparseDist"),
    ],
)
def test_tables_in_host_memory_are_prefetched(
    device: torch.device, world_size: int, kernels: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Any]] = []
    for name in NAMES:
        monkeypatch.setattr(pipeline, name, lambda *given, name=name, **_: made.append((name, given)))
    model: Any = SimpleNamespace(plan=planned(*kernels))
    optimizer: Any = object()
    StepPipeline(model, optimizer, Ranks(0, world_size, world_size, device))
    assert made == [(expected, (model, optimizer, device))]
