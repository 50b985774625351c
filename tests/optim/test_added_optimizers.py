"""Optimizers that a script adds to the table: as tables' and networks' own, planned to the byte, trained and saved."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.optim import OPTIMIZERS, NumberPer, OptimizerKind
from distembed.optim.kinds import torch_optimizer_name
from distembed.training.config import load_config
from tests import layouts
from tests.checkpoints.test_checkpoint import check_load, save_trained
from tests.layouts import build, gather_numbers
from tests.optim.test_optimizers import check_first_state
from tests.planning.test_storage import check as check_storage
from tests.ranks import run_on_ranks


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023: steps by the sign of a moving average, which is all that it keeps."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * average.lerp(p.grad, 0.1).sign())
                average.lerp_(p.grad, 0.01)


ADDED = {
    "lion": OptimizerKind({"exp_avg": NumberPer.WEIGHT}, Lion, counts_steps=False, has_eps=False),
    "rmsprop": OptimizerKind({"square_avg": NumberPer.WEIGHT}, torch.optim.RMSprop, {"momentum": 0, "centered": False}),
    "nadam": OptimizerKind(
        {"mu_product": NumberPer.PARAMETER, "exp_avg": NumberPer.WEIGHT, "exp_avg_sq": NumberPer.WEIGHT},
        torch.optim.NAdam,
        initial_values={"mu_product": 1.0},
        corrects_bias=True,
    ),
}
LAYOUTS = {"row_wise": "column_wise", "table_wise": "data_parallel"}
"""In which checkpoints are saved, and loaded on as many ranks."""
Cases = list[tuple[str, str]]
"""Optimizers, each with the layout of its checkpoint."""
CASES: Cases = list(itertools.product(ADDED, LAYOUTS))


def add() -> None:
    """In a process of its own, as a script of a user's does."""
    OPTIMIZERS.update(ADDED)
    layouts.PLAIN_OPTIMIZERS.update(lion=Lion, rmsprop=torch.optim.RMSprop, nadam=torch.optim.NAdam)
    layouts.WITHOUT_EPS.add("lion")


def train_and_save(rank: int, world_size: int, folder: Path, cases: Cases) -> None:
    add()
    for name, layout in cases:
        check_storage(rank, layout, name, name)
        trained = build(layout, name, dense=name)
        save_trained(folder / f"{layout}-{name}", trained)
        if name != "lion":  # rounding turns signs of what is next to 0
            check_numbers(gather_numbers(trained).weights, train_plain(name))
    load(rank, world_size, folder, cases)


def train_plain(name: str) -> nn.Module:
    plain = build("plain", name, dense=name)
    for number in range(4):
        plain.step(number)
    return plain.model


def check_numbers(found: dict[str, Any], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def load(rank: int, world_size: int, folder: Path, cases: Cases) -> None:
    add()
    for name, saved in cases:
        layout = "plain" if world_size == 1 else LAYOUTS[saved]
        check_load(folder / f"{saved}-{name}", build(layout, name, dense=name))


@pytest.mark.thorough
@pytest.mark.distributed
def test_added_optimizers_are_planned_trained_and_saved_like_any(tmp_path: Path) -> None:
    run_on_ranks(2, train_and_save, tmp_path, CASES)
    run_on_ranks(1, load, tmp_path, CASES)


@pytest.mark.parametrize("name", ADDED)
def test_their_first_state_is_what_they_make_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, name, ADDED[name])
    check_first_state(name, lambda params: ADDED[name].make(params, lr=0.1))


@pytest.mark.parametrize("section", ["dense_optimizer", "sparse_optimizer"])
def test_configs_know_an_optimizer_once_it_is_added(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    override = f"train.{section}.name=lion"
    with pytest.raises(UserError, match=f"train.{section}.name is 'lion', which is not known"):
        load_config(None, [override])
    monkeypatch.setitem(OPTIMIZERS, "lion", ADDED["lion"])
    assert getattr(load_config(None, [override]).train, section).name == "lion"
    with pytest.raises(UserError, match="Did you mean 'lion'"):
        load_config(None, [override.replace("lion", "loin")])


def test_of_two_rows_of_one_class_the_more_particular_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = OptimizerKind(OPTIMIZERS["adam"].states, torch.optim.Adam, {"amsgrad": False, "betas": (0.5, 0.9)})
    monkeypatch.setitem(OPTIMIZERS, "quick_adam", quick)
    weight = [nn.Parameter(torch.zeros(2, 3))]
    assert torch_optimizer_name(quick.make(weight, lr=0.1)) == "quick_adam"
    assert torch_optimizer_name(OPTIMIZERS["adam"].make(weight, lr=0.1)) == "adam"


@pytest.mark.parametrize("name", [*ADDED, *(name for name, kind in OPTIMIZERS.items() if kind.torch_class is not None)])
def test_bytes_of_torchs_states_are_those_of_live_ones(name: str) -> None:
    kind = {**OPTIMIZERS, **ADDED}[name]
    weights = [nn.Parameter(torch.ones(rows, columns)) for rows, columns in ((1, 1), (5, 3), (2, 64))]
    optimizer = kind.make(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in weights:
        live = sum(value.numel() * value.itemsize for value in optimizer.state[weight].values())
        assert live == kind.torch_state_bytes(len(weight), weight.numel())
