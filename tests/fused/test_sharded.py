"""Sharded collections whose tables are looked up in one pass, beside the same by FBGEMM's lookups, on two gloo ranks.

Outputs, weights and states after three steps agree up to the order of sums; names, shapes and files of checkpoints are
the same, and what one has written the other reads to the bit.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.settings import LookupKernel
from distembed.sharding.groups.fused import FusedGroup
from distembed.sharding.lookup import sharded_lookups
from tests.ranks import run_cases
from tests.sharding import test_sequences as sequences
from tests.sharding import test_sharded_equals_unsharded as bags
from tests.sharding.test_sse import with_sse

STEPS = 5
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    "row_wise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
}
Case = tuple[str, str, str]
"""What is looked up (``single``, ``ragged``, ``weighted``, ``half`` or ``sequence``), sharding type and optimizer."""
BAG_TYPES = ["table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard"]
BAG_TYPES += ["data_parallel"]
SEQUENCE_TYPES = ["table_wise", "column_wise", "row_wise", "data_parallel"]
ALL: list[Case] = [
    *(
        (kind, own, name)
        for kind in ("single", "ragged", "weighted", "half")
        for own in BAG_TYPES
        for name in OPTIMIZERS
    ),
    *(("sequence", own, name) for own in SEQUENCE_TYPES for name in OPTIMIZERS),
]
SOME: list[Case] = [
    ("ragged", "table_wise", "adagrad"),
    ("weighted", "row_wise", "row_wise_adagrad"),
    ("single", "column_wise", "row_wise_adagrad"),
    ("sequence", "row_wise", "adagrad"),
    ("half", "grid_shard", "sgd"),
    ("ragged", "data_parallel", "adagrad"),
]


def with_kernel(tables: Sequence[Any], kernel: LookupKernel) -> list[Any]:
    """The same tables, with ids that are replaced; those that cannot be fused are left to ``auto``."""

    def can_be_fused(table: CompositionalEmbeddingConfig) -> bool:
        is_by_column = table.combine.columns(table.embedding_dim, len(table.scheme.num_rows)) is not None
        return is_by_column and table.scheme.digits() is not None and getattr(table, "pooling", None) != "max"

    chosen = [kernel if can_be_fused(table) or kernel == "fbgemm" else "auto" for table in tables]
    own = [dataclasses.replace(table, kernel=one) for table, one in zip(tables, chosen, strict=True)]
    return with_sse(own, p0=0.2)


def build(case: Case, kernel: LookupKernel) -> DistributedModelParallel:
    kind, sharding_type, name = case
    optimizer, settings = OPTIMIZERS[name]
    if kind == "sequence":
        sequence = sequences.Head("meta")
        tables = with_kernel(sequences.tables(), kernel)
        sequence.embeddings = CompositionalEmbeddingCollection(tables, device="meta", need_indices=True)
        return sequences.shard(sequence, optimizer, settings, sharding_type)
    head = bags.Head("meta", kind == "weighted", DataType.FP16 if kind == "half" else DataType.FP32)
    tables = with_kernel(head.embeddings.tables(), kernel)
    head.embeddings = CompositionalEmbeddingBagCollection(tables, device="meta", is_weighted=kind == "weighted")
    return bags.shard(head, optimizer, settings, sharding_type)


def num_fused(model: DistributedModelParallel) -> int:
    return sum(isinstance(group, FusedGroup) for lookup in sharded_lookups(model) for group in lookup._groups)


def step(model: DistributedModelParallel, case: Case, number: int) -> list[Tensor]:
    """Takes a step and returns what was looked up."""
    kind, generator = case[0], torch.Generator().manual_seed(2 * number + dist.get_rank())
    if kind == "sequence":
        lengths = [[3, 0, 4, 1], [], [0, 0], [2]][(number + dist.get_rank()) % 4]
        output, ragged = model(sequences.draw(lengths, generator))
        found = [one.values() for one in ragged.values()]
    else:
        output, values = model(bags.draw(6, kind if kind in ("single", "weighted") else "ragged", generator))
        found = [values]
    model.zero_grad()
    output.square().sum().backward()
    return [output.detach(), *(one.detach() for one in found)]


def all_state(model: DistributedModelParallel, case: Case) -> dict[str, Any]:
    states = model.fused_optimizer.state_dict()
    # torch saves no dictionary without a tensor
    return {"model": model.state_dict()} | ({"optimizer": states} if case[2] != "sgd" else {})


def flat(state: Any, name: str = "") -> dict[str, Tensor]:
    """This rank's tensors of a state dict, by their paths."""
    if hasattr(state, "local_shards"):
        return {
            f"{name}@{shard.metadata.shard_offsets}+{shard.metadata.shard_sizes}/{tuple(state.size())}": shard.tensor
            for shard in state.local_shards()
        }
    if isinstance(state, Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {key: one for own, value in items for key, one in flat(value, f"{name}/{own}").items()}


def check_case(rank: int, world_size: int, folder: Path, case: Case) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    close = {"rtol": 1e-5, "atol": 1e-6} if case[0] != "half" else {"rtol": 4e-3, "atol": 4e-3}
    fused, unfused = build(case, "fused"), build(case, "fbgemm")
    assert num_fused(fused) and not num_fused(unfused)
    for number in range(STEPS):
        for own, expected in zip(step(fused, case, number), step(unfused, case, number), strict=True):
            torch.testing.assert_close(own, expected, **close)
    assert fused.fused_optimizer.state_dict()["state"].keys() == unfused.fused_optimizer.state_dict()["state"].keys()
    own, others = flat(all_state(fused, case)), flat(all_state(unfused, case))
    assert own.keys() == others.keys()
    for key, value in own.items():
        assert value.shape == others[key].shape and value.dtype == others[key].dtype, key
        torch.testing.assert_close(value, others[key], **close, msg=lambda text, key=key: f"{key}: {text}")
    check_checkpoints(folder / "-".join(case), case, fused, unfused)


def check_checkpoints(
    folder: Path, case: Case, fused: DistributedModelParallel, unfused: DistributedModelParallel
) -> None:
    """Files have the same names and sizes, and each kernel goes on with what the other has written."""
    for kernel, model in (("fused", fused), ("fbgemm", unfused)):
        dcp.save(all_state(model, case), checkpoint_id=str(folder / kernel))
    sizes = [
        {path.name: path.stat().st_size for path in (folder / kernel).iterdir() if path.suffix == ".distcp"}
        for kernel in ("fused", "fbgemm")
    ]
    assert sizes[0] == sizes[1] and sizes[0]
    readers: list[tuple[LookupKernel, str, DistributedModelParallel]] = [
        ("fused", "fbgemm", unfused),
        ("fbgemm", "fused", fused),
    ]
    for kernel, written_by, writer in readers:
        reader = build(case, kernel)
        state = all_state(reader, case)
        dcp.load(state, checkpoint_id=str(folder / written_by))
        reader.load_state_dict(state["model"])
        if "optimizer" in state:
            reader.fused_optimizer.load_state_dict(state["optimizer"])
        found, expected = flat(all_state(reader, case)), flat(all_state(writer, case))
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert torch.equal(value, expected[key]), key


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["some", "all"]
)
def test_one_pass_gives_what_fbgemms_lookups_give(cases: list[Case], tmp_path: Path) -> None:
    run_cases(2, check_case, [(tmp_path, case) for case in cases])
