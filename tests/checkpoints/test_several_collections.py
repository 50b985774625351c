"""A model of several collections, TorchRec's own among them: who trains what, and checkpoints on other ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distembed.optim.live_state import optimizer_names
from tests.checkpoints.test_checkpoint import check_load, save_trained
from tests.layouts import SeveralCollections, Trained, shard
from tests.ranks import run_on_ranks

CASES = [
    ("table_wise", "adagrad"),
    ("column_wise", "row_wise_adagrad"),
    ("row_wise", "amsgrad"),
    ("data_parallel", "sgd"),
]
VECTORS = {
    *(f"bags.embedding_bags.{name}.weight" for name in ("a__p0", "a__p1", "c__p0")),
    "sequences.embeddings.d__p0.weight",
    "stock.embedding_bags.e.weight",
}
OTHERS = {
    *(f"sequences.embeddings.{name}.weight" for name in ("b__p0", "b__p1")),  # of a table with gradients in all rows
    *("bags.functions.c__p1", "sequences.functions.d__p1", "linear.weight", "linear.bias"),
}


def make(layout: str, optimizer: str) -> Trained:
    return shard(SeveralCollections("meta"), layout, optimizer, dense="adamw")


def save_all(rank: int, world_size: int, folder: Path) -> None:
    for layout, optimizer in CASES:
        trained = make(layout, optimizer)
        by_rank: list[dict[str, str]] = [{} for _ in range(world_size)]
        dist.all_gather_object(by_rank, optimizer_names(trained.optimizer))
        found = {parameter: name for names in by_rank for parameter, name in names.items()}
        assert found == {**dict.fromkeys(VECTORS, optimizer), **dict.fromkeys(OTHERS, "adamw")}
        before = {name: value.clone() for name, value in trained.model.named_parameters()}
        save_trained(folder / optimizer, trained)
        changed = [name for name, value in trained.model.named_parameters() if not torch.equal(value, before[name])]
        assert set(changed) == {name for name, value in before.items() if value.numel()}


def load_all(rank: int, world_size: int, folder: Path) -> None:
    for i, (_, optimizer) in enumerate(CASES):
        layout, _ = CASES[(i + world_size) % len(CASES)]  # another one
        check_load(folder / optimizer, make(layout, optimizer))


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_vectors_and_networks_have_their_own_optimizers_whose_states_are_saved(
    saving: int, loading: int, tmp_path: Path
) -> None:
    run_on_ranks(saving, save_all, tmp_path)
    run_on_ranks(loading, load_all, tmp_path)
