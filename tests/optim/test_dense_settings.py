"""Weight decay of groups and clipping of networks: the same numbers as torch's optimizers by hand, on one rank."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.optim.config import DenseOptimizerConfig, WeightDecayGroupConfig
from distembed.optim.kinds import dense_names
from distembed.optim.optimizers import weight_decays
from distembed.training.config import load_config
from tests.layouts import RATE, ROWS, Head, batch, build, gather_numbers
from tests.ranks import run_on_ranks
from tests.small_runs import call

GROUPS = [
    WeightDecayGroupConfig(pattern="*.bias", weight_decay=0.0),
    WeightDecayGroupConfig(pattern="embeddings.functions.*", weight_decay=0.3),
]
"""Path functions, and biases without a decay; the other weights of networks have ``DECAY``."""
DECAY, NORM, STEPS = 0.1, 0.05, 4
MAKERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda groups, **settings: torch.optim.Adam(groups, amsgrad=True, **settings),
}


def train_by_hand(name: str, grouped: bool, clip_norm: float | None) -> dict[str, Tensor]:
    """Trains the model of one device in float64, tables by SGD; returns its weights."""
    model = Head("cpu").double()
    named = dict(model.named_parameters())
    vectors = [weight for key, weight in named.items() if ".embedding_bags." in key]
    functions = [weight for key, weight in named.items() if ".functions." in key]
    networks = [model.linear.weight, model.linear.bias]
    assert len(vectors) + len(functions) + len(networks) == len(named)
    weights, biases = {"params": [model.linear.weight]}, {"params": [model.linear.bias], "weight_decay": 0.0}
    by_hand = [{"params": functions, "weight_decay": 0.3}, weights, biases]
    groups = by_hand if grouped else [*functions, *networks]
    optimizers = [torch.optim.SGD(vectors, lr=RATE), MAKERS[name](groups, lr=RATE, weight_decay=DECAY)]
    for number in range(STEPS):
        model.zero_grad()
        ((model(batch(number, 0, ROWS)) - 1).square().sum() / ROWS).backward()
        if clip_norm is not None:
            norm = sum(float(weight.grad.square().sum()) for weight in networks if weight.grad is not None) ** 0.5
            assert norm > clip_norm
            for weight in networks:
                assert weight.grad is not None
                weight.grad *= clip_norm / norm
        for optimizer in optimizers:
            optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


def check(rank: int, world_size: int, folder: Path) -> None:
    for name in MAKERS:
        # states are saved without groups, and trained on with groups
        plain = DenseOptimizerConfig(name=name, learning_rate=RATE, weight_decay=DECAY)
        config = DenseOptimizerConfig(name=name, learning_rate=RATE, weight_decay=DECAY, weight_decay_groups=GROUPS)
        for layout in ("table_wise", "row_wise"):
            trained = build(layout, "sgd", dense=config)
            for number in range(STEPS):
                trained.step(number)
            check_equal(gather_numbers(trained).weights, train_by_hand(name, True, None), name)
        before = build("table_wise", "sgd", dense=plain)
        before.step(0)
        save_checkpoint(folder / f"{name}-without", before.model, before.optimizer, {"step": 1})
        save_checkpoint(folder / f"{name}-with", trained.model, trained.optimizer, {"step": STEPS})
        without, with_groups = (SavedCheckpoint.read(str(folder / f"{name}-{end}")) for end in ("without", "with"))
        assert without.tensors.keys() == with_groups.tensors.keys() and without.optimizers == with_groups.optimizers
        load_checkpoint(folder / f"{name}-without", trained.model, trained.optimizer)
        loaded, saved = gather_numbers(trained), gather_numbers(before)
        for found, expected in ((loaded.weights, saved.weights), (loaded.states, saved.states)):
            assert found.keys() == expected.keys() and all((found[key] == expected[key]).all() for key in found)
    clipped = DenseOptimizerConfig(name="sgd", learning_rate=RATE, weight_decay=DECAY, clip_norm=NORM)
    for layout in ("table_wise", "row_wise", "data_parallel"):
        trained = build(layout, "sgd", dense=clipped)
        for number in range(STEPS):
            trained.step(number)
        check_equal(gather_numbers(trained).weights, train_by_hand("sgd", False, NORM), layout)


def check_equal(found: dict[str, Any], expected: dict[str, Tensor], case: str) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        difference = (torch.from_numpy(found[key]) - values).abs()
        assert (difference <= 2e-5 + 2e-4 * values.abs()).all(), (case, key, float(difference.max()))


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_and_clipping_equal_torch_by_hand_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(world_size, check, tmp_path)


def test_every_optimizer_of_networks_is_compared() -> None:
    assert MAKERS.keys() == set(dense_names())


NAMES = ["model.deep.0.weight", "model.deep.0.bias", "model.linear.bias", "task.scale"]


def decays(*groups: tuple[str, float]) -> dict[str, float]:
    described = [WeightDecayGroupConfig(pattern=pattern, weight_decay=decay) for pattern, decay in groups]
    return weight_decays(NAMES, DenseOptimizerConfig(weight_decay=0.5, weight_decay_groups=described))


def test_the_first_group_that_matches_decides() -> None:
    assert decays() == dict.fromkeys(NAMES, 0.5)
    assert list(decays(("*.bias", 0.0), ("deep.*", 0.25)).values()) == [0.25, 0.0, 0.0, 0.5]
    assert list(decays(("deep.*", 0.25), ("*.bias", 0.0)).values()) == [0.25, 0.25, 0.0, 0.5]
    assert list(decays(("task.[s]cale", 0.0)).values()) == [0.5, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [("linaer.bias", 0.0)],
            "[0].pattern is 'linaer.bias', which matches no parameter of the dense optimizer. Did",
        ),
        ([("linaer.bias", 0.0)], "Did you mean 'linear.bias'? Parameters: deep.0.weight, deep.0.bias, linear.bias"),
        ([("*.bias", 0.0), ("Deep.*", 0.0)], "[1].pattern is 'Deep.*', which matches no parameter"),
        ([("*", 0.0), ("*.bias", 0.1)], "[1].pattern is '*.bias', which matches only parameters that earlier groups"),
    ],
)
def test_a_group_without_parameters_is_refused(groups: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        decays(*groups)


@pytest.mark.thorough
def test_groups_of_a_config_are_checked_before_anything_is_written(config: Path, tmp_path: Path) -> None:
    setting = "train.dense_optimizer.weight_decay_groups=[{pattern: '*.bias', weight_decay: 0.0}, %s]"
    with pytest.raises(UserError, match="weight_decay"):
        load_config(config, [setting % "{pattern: 'top.*', weight_decay: -1.0}"])
    with pytest.raises(UserError, match=r"which matches no parameter.*Did you mean 'top.layers.0.weight'"):
        call(
            "train", config, setting % "{pattern: 'top.layer.0.weight', weight_decay: 0.1}", "--run-dir", tmp_path / "a"
        )
    assert not (tmp_path / "a").exists()
    call(
        "train",
        config,
        setting % "{pattern: 'top.*', weight_decay: 0.1}",
        "train.max_steps=2",
        "--run-dir",
        tmp_path / "b",
    )
    assert load_config(tmp_path / "b" / "config.yaml").train.dense_optimizer.weight_decay_groups[1].pattern == "top.*"
