"""Checkpoints by torch and TorchRec alone, without a function of ours: written on one layout, read on another."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.embedding.tables import CompositionalTables
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.composability.stock import AnyTypeSharder
from tests.composability.test_sharding import our_head, stock_head
from tests.layouts import EPS, PLAIN_OPTIMIZERS, RATE, Head, Trained, Whole, build, gather_numbers
from tests.placing import shard_as
from tests.ranks import run_on_ranks
from tests.sharding import test_sequences as sequences

STEPS = 2
WORLDS = (1, 2, 4, 2, 1)
SOME_WORLDS = (1, 4, 2)
"""Ranks of one stage after the other."""
LAYOUTS = {
    "adagrad": ("table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise"),
    # a row has a number for each range of columns, of which TorchRec makes a longer state
    "row_wise_adagrad": ("table_wise", "row_wise", "data_parallel", "table_row_wise"),
}
Chain = tuple[str, int, int]
"""An optimizer, and the layouts of one stage after the other: the first one, and how many further each next one is."""
CHAINS: list[Chain] = [
    (optimizer, first, further)
    for optimizer, layouts in LAYOUTS.items()
    for first in range(len(layouts))
    for further in range(len(layouts))
]
SOME_CHAINS: list[Chain] = [("adagrad", 0, 4), ("adagrad", 2, 4), ("row_wise_adagrad", 2, 1)]
"""Three stages of which have every layout."""


def shard_by_torchrec(model: nn.Module, layout: str, optimizer: str) -> tuple[nn.Module, CombinedOptimizer]:
    """As TorchRec's users do: a fused optimizer of the vectors, and Adam of all that it leaves over."""
    collection: Any = model.get_submodule("embeddings")
    is_ours = isinstance(collection, CompositionalTables)
    sharders: list[Any] = [CompositionalEmbeddingBagCollectionSharder() if is_ours else AnyTypeSharder()]
    apply_optimizer_in_backward(
        PLAIN_OPTIMIZERS[optimizer], collection.embedding_bags.parameters(), {"lr": RATE, "eps": EPS}
    )
    kinds = {config.name: layout for config in collection.embedding_bag_configs()}
    for table in collection.tables() if is_ours else ():
        if table.function_tables() and layout == "column_wise":  # a function needs whole vectors
            kinds[table.name] = "table_wise"
    sharded = shard_as(model, sharders, kinds)
    others = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense = KeyedOptimizerWrapper(others, lambda own: torch.optim.Adam(own, lr=RATE))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def save(path: Path, model: nn.Module, optimizer: CombinedOptimizer) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(path))


def load(path: Path, model: nn.Module, optimizer: CombinedOptimizer) -> None:
    optimizer.optimizers[-1][1].init_state()  # else it has no states that could be read into
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=str(path))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def layout_of(chain: Chain, stage: int) -> str:
    optimizer, first, further = chain
    return LAYOUTS[optimizer][(first + stage * further) % len(LAYOUTS[optimizer])]


def check_stage(rank: int, world_size: int, folder: Path, stage: int, chains: list[Chain]) -> None:
    """Reads what the stage before has written, takes steps, and writes."""
    os.environ["LOCAL_WORLD_SIZE"] = str(min(2, world_size))
    keys: dict[str, set[str]] = {}
    references = {
        optimizer: unsharded_numbers(optimizer, stage) for optimizer in dict.fromkeys(chain[0] for chain in chains)
    }
    for chain in chains:
        case = f"{chain}, stage {stage}, {layout_of(chain, stage)}"
        trained = Trained(*shard_by_torchrec(Head("meta"), layout_of(chain, stage), chain[0]), True, lambda step: None)
        path = folder / "-".join(map(str, chain))
        if stage:
            load(path / f"{stage - 1}", trained.model, trained.optimizer)
            loaded, before = gather_numbers(trained), torch.load(path / f"{stage - 1}.pt", weights_only=False)
            for found, expected in ((loaded.weights, before.weights), (loaded.states, before.states)):
                assert found.keys() == expected.keys(), case
                assert all(np.array_equal(found[name], expected[name]) for name in expected), case
        for step in range(stage * STEPS, (stage + 1) * STEPS):
            trained.step(step)
        numbers = gather_numbers(trained)
        require_close(numbers, references[chain[0]], case)
        keys.setdefault(chain[0], set()).add(str(sorted(all_state_keys(trained.optimizer))))
        save(path / f"{stage}", trained.model, trained.optimizer)
        if rank == 0:
            torch.save(numbers, path / f"{stage}.pt")
    # of one optimizer, on all layouts
    assert all(len(own) == 1 for own in keys.values()), keys


def unsharded_numbers(optimizer: str, stage: int) -> Whole:
    """Weights and states of one module that has taken all steps up to the end of a stage."""
    reference = build("plain", optimizer, "adam")
    for step in range((stage + 1) * STEPS):
        reference.step(step)
    return gather_numbers(reference)


def require_close(found: Whole, expected: Whole, case: str) -> None:
    assert found.weights.keys() == expected.weights.keys() and found.states.keys() == expected.states.keys(), case
    for name, values in {**expected.weights, **expected.states}.items():
        own = found.weights.get(name, found.states.get(name))
        np.testing.assert_allclose(own, values, rtol=2e-4, atol=2e-5, err_msg=f"{case}: {name}")


def all_state_keys(optimizer: CombinedOptimizer) -> set[str]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    states = optimizer.state_dict()["state"]
    dist.all_gather_object(by_rank, [f"{name}: {key}" for name, own in states.items() for key in own])
    return {key for keys in by_rank for key in keys}


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("chains", "worlds"),
    [
        pytest.param(SOME_CHAINS, SOME_WORLDS, id=""),
        pytest.param(CHAINS, WORLDS, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_what_one_layout_has_written_others_go_on_with_on_other_numbers_of_ranks(
    chains: list[Chain], worlds: tuple[int, ...], tmp_path: Path
) -> None:
    for stage, world_size in enumerate(worlds):
        run_on_ranks(world_size, check_stage, tmp_path, stage, chains)


def check_sequences(rank: int, world_size: int, folder: Path) -> None:
    """Sequences: on each layout what the one before has written, and its next step."""
    before: Trained | None = None
    for number, layout in enumerate(("table_wise", "row_wise", "data_parallel", "table_wise")):
        model = sequences.shard(sequences.Head("meta"), RowWiseAdagrad, {"lr": RATE, "eps": EPS}, layout)
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = CombinedOptimizer(
            [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda own: torch.optim.Adam(own, lr=RATE))]
        )
        trained = Trained(model, optimizer, True, lambda step: None)
        if before is not None:
            load(folder / f"{number - 1}", model, optimizer)
            require_close(gather_numbers(trained), gather_numbers(before), f"{layout}, loaded")
        for own in (trained, before) if before is not None else (trained,):
            generator = torch.Generator().manual_seed(2 * number + rank)
            own.optimizer.zero_grad()
            own.model(sequences.draw([1, 3, 0], generator))[0].square().sum().backward()
            own.optimizer.step()
        if before is not None:
            require_close(gather_numbers(trained), gather_numbers(before), f"{layout}, a step later")
        save(folder / f"{number}", model, optimizer)
        before = trained


@pytest.mark.thorough
@pytest.mark.distributed
def test_sequences_go_on_on_other_layouts(tmp_path: Path) -> None:
    run_on_ranks(2, check_sequences, tmp_path)


Pair = tuple[str, str, str]
"""An optimizer, the layout that writes, and the one that reads."""
PAIRS: list[Pair] = [
    (optimizer, before, now)
    for optimizer in LAYOUTS
    for before in LAYOUTS["adagrad"][:4]
    for now in LAYOUTS["adagrad"][:4]
]
SOME_PAIRS: list[Pair] = [
    ("row_wise_adagrad", "table_wise", "row_wise"),
    ("row_wise_adagrad", "table_wise", "data_parallel"),
    ("row_wise_adagrad", "column_wise", "table_wise"),
    ("adagrad", "table_wise", "column_wise"),
    ("adagrad", "data_parallel", "table_wise"),
]


def expected_error(is_ours: bool, optimizer: str, before: str, now: str) -> str | None:
    if not is_ours and (before == "data_parallel") != (now == "data_parallel"):
        # the network's optimizer trains data-parallel tables, whose states have other names
        return "Missing key"
    if optimizer == "row_wise_adagrad" and (before == "column_wise") != (now == "column_wise"):
        return "Size mismatch"
    return None


def check_pairs(rank: int, world_size: int, folder: Path, pairs: list[Pair]) -> None:
    for make in (stock_head, our_head):
        for optimizer, before in dict.fromkeys(pair[:2] for pair in pairs):
            written = shard_by_torchrec(make("meta"), before, optimizer)
            written[1].optimizers[-1][1].init_state()
            save(folder / f"{make.__name__}-{optimizer}-{before}", *written)
        for optimizer, before, now in pairs:
            loaded = shard_by_torchrec(make("meta"), now, optimizer)
            path = folder / f"{make.__name__}-{optimizer}-{before}"
            error = expected_error(make is our_head, optimizer, before, now)
            if error is None:
                load(path, *loaded)
            else:
                with pytest.raises(dcp.api.CheckpointException, match=error):
                    load(path, *loaded)
        # torch's functions of state dicts do not see through DistributedModelParallel
        with pytest.raises(AttributeError, match="'DistributedModelParallel' object has no attribute"):
            get_model_state_dict(loaded[0])
        with pytest.raises(AttributeError, match="'DistributedModelParallel' object has no attribute"):
            get_optimizer_state_dict(*loaded)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("pairs", [SOME_PAIRS, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_stock_reads_ours_reads_and_data_parallel_tables_too(pairs: list[Pair], tmp_path: Path) -> None:
    run_on_ranks(2, check_pairs, tmp_path, pairs)
