"""Rows that a device caches of tables in host memory: kept while they are needed, brought back before they are read.

A CPU has no cache. What stands for one here is the weight itself, in which rows are out of date until they are flushed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from distembed.base.ranks import Collectives, Ranks, process_group
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.checkpoints.content import CheckpointContent, Progress
from distembed.planning import make_plan
from distembed.planning.request import Workload
from distembed.sharding import default_sharders
from distembed.training import pipeline
from distembed.training.pipeline import StepPipeline
from tests.sharding.test_pipelines import optimizer_of, task

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@contextmanager
def sharded(kernel: str, host_memory: bool = True) -> Iterator[DistributedModelParallel]:
    """A model as training shards it, with all of its tables planned on one kernel."""
    with process_group("cpu") as ranks:
        model, sharders = task("meta", 1), default_sharders(host_memory)
        plan = make_plan(model, sharders, ranks, Workload(8))
        for placed in plan.plan["model.embeddings"].values():
            placed.sharding_type, placed.compute_kernel = "table_wise", kernel
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        yield DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)


def tables_of(model: DistributedModelParallel) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    lookups = model.module.get_submodule("model.embeddings")._lookups
    found = [tbe for lookup in lookups for tbe in lookup.modules() if hasattr(tbe, "split_embedding_weights")]
    return [tbe for tbe in found if isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen)]


@pytest.mark.parametrize(("kernel", "host_memory"), [("fused_uvm_caching", True), ("fused", False)])
def test_what_is_prefetched_is_kept_until_its_backward_pass(kernel: str, host_memory: bool) -> None:
    with sharded(kernel, host_memory) as model:
        assert pipeline._caches_rows(model.plan) == host_memory
        assert tables_of(model)
        assert all(tbe.prefetch_pipeline == host_memory for tbe in tables_of(model))
    for sharder in default_sharders(host_memory):
        assert (sharder.fused_params or {}).get("prefetch_pipeline", False) == host_memory


def test_a_checkpoint_has_what_only_the_caches_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        for weight in tbe.split_embedding_weights():
            weight.fill_(7.0)

    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "flush", flush)
    with sharded("fused_uvm_caching") as model:
        optimizer = optimizer_of(model)
        content = CheckpointContent.collect("", model, optimizer, Progress({"step": 1}), Collectives())
        weights = {name: own for name, own in content.tensors.items() if "embedding_bags" in name}
        assert len(weights) > 3
        for copied in (content, content.copied_to_host()):
            for name in weights:
                assert all(bool((block.tensor == 7.0).all()) for block in copied.tensors[name].shards), name


def test_caches_are_dropped_after_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def drop(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        seen.extend(float(weight.max()) for weight in tbe.split_embedding_weights())

    with sharded("fused_uvm_caching") as model:
        for tbe in tables_of(model):
            for weight in tbe.split_embedding_weights():
                weight.fill_(3.0)
        save_checkpoint(tmp_path / "saved", model, None, {"step": 1})
        for tbe in tables_of(model):
            for weight in tbe.split_embedding_weights():
                weight.zero_()
        monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "reset_cache_states", drop)
        load_checkpoint(tmp_path / "saved", model)
        assert len(seen) >= len(tables_of(model))
        assert set(seen[-len(tables_of(model)) :]) == {3.0}


class EmptyPipeline:
    """A pipeline without batches."""

    def __init__(self, *given: Any, **_: Any) -> None:
        pass

    def progress(self, batches: Any) -> None:
        raise StopIteration


@pytest.mark.parametrize("kernel", ["fused_uvm_caching", "fused"])
def test_rows_that_no_backward_pass_lets_go_are_let_go_between_segments(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"):
        monkeypatch.setattr(pipeline, name, EmptyPipeline)
    with sharded(kernel) as model:
        for tbe in tables_of(model):
            tbe.lxu_cache_locking_counter = torch.ones(4, 32, dtype=torch.int32)
        steps = StepPipeline(model, optimizer_of(model), Ranks(0, 1, 1, CUDA))
        model.eval()
        assert list(steps.outputs(iter([]))) == []
        left = {int(tbe.lxu_cache_locking_counter.sum()) for tbe in tables_of(model)}
        assert left == ({0} if kernel == "fused_uvm_caching" else {128})
