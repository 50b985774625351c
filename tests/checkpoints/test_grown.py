"""Checkpoints read into models whose tables have more rows, under every layout: old rows as saved, new ones as made."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints import save_checkpoint
from distembed.checkpoints.checkpoint import load_grown
from distembed.embedding import CompositionalEmbeddingBagCollection
from distembed.optim.kinds import OPTIMIZERS
from tests.layouts import DIM, LAYOUTS, OPTIMIZER_NAMES, SIZES, Head, build, gather_numbers, shard, tables
from tests.ranks import run_on_ranks

STEPS = 3
NOW = {"a": 160, "b": 61, "c": 120, "d": 55, "e": 56}


def grown_head(device: str = "meta", sizes: dict[str, int] = NOW) -> Head:
    """The model with tables of so many ids, each by its scheme's rule."""
    model = Head(device)
    grown = [
        dataclasses.replace(table, num_embeddings=sizes[table.name], partition=table.scheme.grown(sizes[table.name]))
        for table in tables()
    ]
    model.embeddings = CompositionalEmbeddingBagCollection(grown, device=device)
    return model


def save_and_load_all(rank: int, world_size: int, folder: Path) -> None:
    """Saves under each layout and loads under the next one, the optimizers taking turns; all ranks call it."""
    for number, (before, now) in enumerate(zip(LAYOUTS[1:], [*LAYOUTS[2:], LAYOUTS[1]], strict=True)):
        optimizer = OPTIMIZER_NAMES[number % len(OPTIMIZER_NAMES)]
        path = folder / f"{before}-{optimizer}"
        trained = build(before, optimizer)
        for step in range(STEPS):
            trained.step(step)
        save_checkpoint(path, trained.model, trained.optimizer, {"step": STEPS, "steps_before": 4})
        saved = gather_numbers(trained)
        live = shard(grown_head(), now, optimizer)
        made = gather_numbers(live)
        assert load_grown(str(path), Head("meta"), live.model, live.optimizer, Collectives()) == STEPS + 4
        loaded = gather_numbers(live)
        assert loaded.weights.keys() == saved.weights.keys() and loaded.states.keys() == saved.states.keys()
        pairs = [(saved.weights, made.weights, loaded.weights), (saved.states, made.states, loaded.states)]
        same_slices = saved.slices == loaded.slices
        for old, fresh, found in pairs[: 1 + same_slices]:  # of other slices states are blended
            for name, values in found.items():
                rows = len(old[name])
                assert np.array_equal(values[:rows], old[name]), f"{path.name} {now} {name}"
                assert np.array_equal(values[rows:], fresh.get(name, np.zeros_like(values))[rows:]), name
        counts = {float(state["step"]) for state in steps_of(live.optimizer)}
        assert counts <= {float(STEPS + 4)} and (counts or not OPTIMIZERS[optimizer].counts_steps)
        live.step(STEPS)  # the model trains on
    check_refusals(path, optimizer)


def steps_of(optimizer: object) -> list[dict[str, torch.Tensor]]:
    states = optimizer.state_dict()["state"].values()  # type: ignore[attr-defined]
    return [state for state in states if "step" in state]


def check_refusals(path: Path, optimizer: str) -> None:
    """What differs in more than rows is refused on every rank, and what is live stays as it was."""
    live = shard(grown_head(), "table_wise", optimizer)
    before = gather_numbers(live)
    with pytest.raises(UserError, match=r"(?s)is of another model; .*Use the config"):
        load_grown(str(path), Head("meta", dim=8), live.model, live.optimizer, Collectives())
    wider = grown_head()
    wider.linear = torch.nn.Linear(len(SIZES) * DIM, 2)
    other = shard(wider, "table_wise", optimizer)
    with pytest.raises(UserError, match=r"linear.bias: \(1,\) float32 before, \(2,\) float32 now"):
        load_grown(str(path), Head("meta"), other.model, other.optimizer, Collectives())
    after = gather_numbers(live)
    assert all(np.array_equal(after.weights[name], values) for name, values in before.weights.items())


@pytest.mark.thorough
@pytest.mark.distributed
def test_every_layout_reads_what_another_has_saved_into_more_rows(tmp_path: Path) -> None:
    run_on_ranks(2, save_and_load_all, tmp_path)
