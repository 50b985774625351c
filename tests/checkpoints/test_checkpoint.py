"""Checkpoints saved under one layout on some ranks and loaded under another on others: the same numbers come back."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.base.errors import UserError
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.checkpoints.shards import MAX_BLOCK_BYTES
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from tests.layouts import LAYOUTS, OPTIMIZER_NAMES, Trained, Whole, build, gather_numbers, shard
from tests.ranks import run_on_ranks

STEPS = 3


Case = tuple[str, str, str]
"""The layout that saves, the layout that loads, and the optimizer of the tables."""


def cases(steps: Sequence[int], turn: int = 0) -> list[Case]:
    """Each layout saves for the layouts that follow it by these steps, the optimizers taking turns."""
    pairs = [(i, (i + step) % len(LAYOUTS)) for i in range(len(LAYOUTS)) for step in steps]
    return [(LAYOUTS[i], LAYOUTS[j], OPTIMIZER_NAMES[(i + j + turn) % len(OPTIMIZER_NAMES)]) for i, j in pairs]


def save_all(rank: int, world_size: int, folder: Path, cases: list[Case]) -> None:
    for layout, optimizer in dict.fromkeys([("table_wise", "adagrad"), *((case[0], case[2]) for case in cases)]):
        save_trained(folder / f"{layout}-{optimizer}", build(layout, optimizer))


def save_trained(path: Path, trained: Trained) -> None:
    """Some steps, a checkpoint, and beside it what the model held then and a step later; all ranks call it."""
    for number in range(STEPS):
        trained.step(number)
    save_checkpoint(path, trained.model, trained.optimizer, {"step": STEPS, "note": [1, "x"]})
    saved = gather_numbers(trained)
    trained.step(STEPS)
    later = gather_numbers(trained)
    if dist.get_rank() == 0:
        torch.save((saved, later), f"{path}.pt")


def load_all(rank: int, world_size: int, folder: Path, cases: list[Case]) -> None:
    for before, now, optimizer in cases:
        check_load(folder / f"{before}-{optimizer}", build(now, optimizer))
    if world_size > 1:
        check_refusals(folder)


def check_load(path: Path, trained: Trained) -> None:
    """The numbers of the checkpoint, and those of a step after it; all ranks call it."""
    saved, later = torch.load(f"{path}.pt", weights_only=False)
    progress = load_checkpoint(path, trained.model, trained.optimizer)
    assert progress == {"step": STEPS, "note": [1, "x"]}
    loaded = gather_numbers(trained)
    require_equal(loaded, saved, path.name)
    trained.step(STEPS)
    if loaded.slices == saved.slices:
        after = gather_numbers(trained)
        for name, expected in {**later.weights, **later.states}.items():
            found = after.weights.get(name, after.states.get(name))
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6, err_msg=f"{path.name} {name}")


def require_equal(loaded: Whole, saved: Whole, case: str) -> None:
    assert loaded.weights.keys() == saved.weights.keys() and loaded.states.keys() == saved.states.keys()
    for name, expected in saved.weights.items():
        assert np.array_equal(loaded.weights[name], expected), f"{case} {name}"
    for name, expected in saved.states.items():
        if loaded.slices.get(name) == saved.slices.get(name):
            assert np.array_equal(loaded.states[name], expected), f"{case} {name}"
        else:  # a row's number of a new slice is the mean over its columns of what each had before
            for start, stop in loaded.slices[name]:
                mean = expected[:, start:stop].astype(np.float64).mean(axis=1, keepdims=True)
                np.testing.assert_allclose(loaded.states[name][:, start:stop], np.repeat(mean, stop - start, 1), 1e-6)


def check_refusals(folder: Path) -> None:
    """Every rank raises, those too that hold nothing of what differs, and what is live stays as it was."""
    path = folder / "table_wise-adagrad"
    trained = build("table_wise", "adagrad")
    before = gather_numbers(trained)
    for other, message in [
        (build("table_wise", "adagrad", dim=8), r"a__p0.weight: \(26, 16\) float32 in the checkpoint, \(26, 8\)"),
        (build("table_wise", "row_wise_adagrad"), r"optimizer of embeddings.*: adagrad in the .*row_wise_adagrad in"),
        (build("row_wise", "amsgrad"), r"optimizer of embeddings.*: adagrad in the checkpoint, amsgrad in the model"),
        (build("table_wise", "adagrad", dense="adamw"), r"optimizer of linear.bias: adam in the .*, adamw in the"),
    ]:
        with pytest.raises(UserError, match=f"(?s)is of another model; .*{message}.*Use the config"):
            load_checkpoint(path, other.model, other.optimizer)
    saved = load_weights_of_plain(path)
    if dist.get_rank() == 1:
        (path / "index.json").rename(path / "hidden")
    dist.barrier()
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(path, trained.model, trained.optimizer)
    dist.barrier()
    if dist.get_rank() == 1:
        (path / "hidden").rename(path / "index.json")
    require_equal(gather_numbers(trained), before, "refused")
    dist.barrier()
    load_checkpoint(path, trained.model)  # weights alone, as to predict
    after = gather_numbers(trained)
    assert all(np.array_equal(after.states[name], values) for name, values in before.states.items())
    assert np.array_equal(after.weights["embeddings.embedding_bags.d__p0.weight"], saved)
    check_numbers_of_steps(trained, path)


def load_weights_of_plain(path: Path) -> np.ndarray:
    plain = build("plain", "adagrad")
    load_checkpoint(path, plain.model)
    return plain.model.get_parameter("embeddings.embedding_bags.d__p0.weight").detach().numpy()


def check_numbers_of_steps(trained: Trained, path: Path) -> None:
    """Adam's bias correction goes on where it was, however many batches the process has seen before."""
    for number in range(7):
        trained.step(number)
    load_checkpoint(path, trained.model, trained.optimizer)
    assert isinstance(trained.optimizer, CombinedOptimizer)
    fused, dense = (optimizer for _, optimizer in trained.optimizer.optimizers)
    assert isinstance(dense, KeyedOptimizerWrapper)
    assert {float(state["step"]) for state in dense.state.values()} == {STEPS}
    for leaf in fused_leaves(fused):
        assert int(leaf._emb_module.iter) == int(leaf._emb_module.iter_cpu) == STEPS


def fused_leaves(optimizer: object) -> list[EmbeddingFusedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        return [leaf for _, inner in optimizer.optimizers for leaf in fused_leaves(inner)]
    assert isinstance(optimizer, EmbeddingFusedOptimizer)
    return [optimizer]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("steps", "saving", "loading"),
    [
        pytest.param(range(len(LAYOUTS)), 2, [1, 2, 4], marks=pytest.mark.slow, id="all"),
        pytest.param(range(len(LAYOUTS)), 1, [2], marks=pytest.mark.slow, id="all, 1 to 2"),
        pytest.param([1], 2, [1], id="2 to 1"),
        pytest.param([4], 1, [2], id="1 to 2"),
    ],
)
def test_what_one_layout_saved_any_other_loads(
    steps: Sequence[int], saving: int, loading: list[int], tmp_path: Path
) -> None:
    turns = [cases(steps, turn) for turn in range(len(loading))]
    run_on_ranks(saving, save_all, tmp_path, [case for turn in turns for case in turn])
    for world_size, turn in zip(loading, turns, strict=True):
        run_on_ranks(world_size, load_all, tmp_path, turn)


# 128 MiB, of which two ranks have 64 each
BIG = CompositionalEmbeddingBagConfig("big", 2**21, 16, ["big"])
MOST_EXTRA_BYTES = 8 * MAX_BLOCK_BYTES
"""A block, its bytes as they were read, and blocks that the allocator keeps for later."""


def big_model(device: str) -> nn.Module:
    return nn.ModuleDict({"embeddings": CompositionalEmbeddingBagCollection([BIG], device=device)})


def extra_memory_bytes(function: Callable[[], object]) -> int:
    """How much more memory the process held at once than before, while the function ran."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
    before = memory_bytes("VmRSS")
    function()
    return memory_bytes("VmHWM") - before


def memory_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def save_big(rank: int, world_size: int, folder: Path) -> None:
    model = big_model("cpu")
    (weight,) = model.parameters()
    assert weight.nbytes >= 2 * MOST_EXTRA_BYTES
    weight.data[:, 0] = torch.arange(len(weight))
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: RowWiseAdagrad(params))
    optimizer.state[weight]["sum"].fill_(7)
    extra = extra_memory_bytes(lambda: save_checkpoint(folder / "big", model, optimizer, {"step": 1}))
    assert extra < MOST_EXTRA_BYTES


def load_big(rank: int, world_size: int, folder: Path) -> None:
    for layout in ("row_wise", "column_wise"):
        trained = shard(big_model("meta"), layout, "row_wise_adagrad")
        extra = extra_memory_bytes(partial(load_checkpoint, folder / "big", trained.model, trained.optimizer))
        assert extra < MOST_EXTRA_BYTES
        (weight,) = trained.model.state_dict().values()
        for local in weight.local_shards():
            row, column = local.metadata.shard_offsets
            if column == 0:
                assert torch.equal(local.tensor[:, 0], torch.arange(row, row + len(local.tensor)).float())
        (state,) = trained.optimizer.state_dict()["state"].values()
        assert all((shard.tensor == 7).all() for (sums,) in [state.values()] for shard in sums.local_shards())


@pytest.mark.thorough
@pytest.mark.distributed
def test_no_rank_holds_more_than_its_part_and_a_few_blocks(tmp_path: Path) -> None:
    run_on_ranks(1, save_big, tmp_path)
    run_on_ranks(2, load_big, tmp_path)
