"""Optimizers of what every rank has: FBGEMM's settings in torch's form, and updates at the end of backward passes."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec.optim.optimizers import in_backward_optimizer_filter

from distembed.base.errors import UserError
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.replicated import BackwardUpdates, ReplicatedOptimizer, fused_optimizer


@pytest.mark.parametrize(
    ("fused_params", "name", "settings"),
    [
        ({}, "sgd", {"lr": 0.01}),
        ({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, "eps": 1.0}, "sgd", {"lr": 0.5}),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 0.1}, "adagrad", {"lr": 0.01, "eps": 0.1}),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, "row_wise_adagrad", {"lr": 0.01, "eps": 1e-8}),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.5, "weight_decay": 0.0},
            "adam",
            {"lr": 0.01, "eps": 1e-8, "betas": (0.5, 0.999)},
        ),
    ],
)
def test_settings_are_those_that_fbgemm_would_take(fused_params: Any, name: str, settings: Any) -> None:
    assert fused_optimizer(fused_params, "a__p1") == (name, settings)


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"optimizer": EmbOptimType.LAMB}, "lamb is an optimizer that only FBGEMM has, .* such as a__p1; place"),
        ({"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM}, "partial_row_wise_adam is an optimizer that only FBGEMM"),
        ({"weight_decay": 0.1}, r"the optimizer of a__p1 has weight_decay=0.1, which only FBGEMM applies.*leave"),
        ({"max_gradient": 2.0}, r"the optimizer of a__p1 has max_gradient=2.0"),
    ],
)
def test_what_torch_does_not_have_is_refused_by_name(fused_params: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fused_optimizer(fused_params, "a__p1")


def make(name: str = "sgd", **settings: float) -> tuple[nn.ParameterDict, ReplicatedOptimizer]:
    torch.manual_seed(0)
    weights = nn.ParameterDict({"a": nn.Parameter(torch.randn(5, 4)), "b": nn.Parameter(torch.randn(3, 4))})
    named = {f"embedding_bags.{name}.weight": weight for name, weight in weights.items()}
    optimizer = ReplicatedOptimizer(name, named, {"lr": 0.5, **settings})
    BackwardUpdates([optimizer], None)
    return weights, optimizer


def test_each_backward_pass_updates_once_and_leaves_no_gradients() -> None:
    weights, _ = make()
    assert not dict(in_backward_optimizer_filter(weights.named_parameters()))
    expected = {name: weight.detach().clone() for name, weight in weights.items()}
    for _ in range(2):
        # each weight is used twice, so that its gradient comes in two parts
        loss = sum((weight * weight).sum() + weight.sum() for weight in weights.values())
        loss.backward()  # type: ignore[union-attr]
        for name, weight in expected.items():
            expected[name] = weight - 0.5 * (2 * weight + 1)
            torch.testing.assert_close(weights[name].detach(), expected[name])
            assert weights[name].grad is None


@pytest.mark.parametrize(("failing", "other", "by_zero_grad"), [("a", "b", False), ("b", "a", True)])
def test_after_a_backward_pass_that_failed_the_next_one_updates(failing: str, other: str, by_zero_grad: bool) -> None:
    weights, optimizer = make()
    first = weights["a"].detach().clone()

    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    fails = weights[failing] * 1.0
    fails.register_hook(fail)
    loss = fails.sum() + weights[other].sum()  # whose backward comes to the latter first
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    assert weights[other].grad is not None, "the pass failed before it came to the other"
    if by_zero_grad:
        optimizer.zero_grad()
    else:
        weights[other].grad = None
    weights["a"].sum().backward()
    torch.testing.assert_close(weights["a"].detach(), first - 0.5)


def test_a_backward_pass_within_another_updates_what_it_reaches() -> None:
    weights, _ = make()
    expected = {name: weight.detach().clone() - 0.5 for name, weight in weights.items()}
    start = torch.zeros(1, requires_grad=True)
    inner = checkpoint(lambda value: value.sum() + weights["b"].sum(), start, use_reentrant=True)
    (weights["a"].sum() + inner).backward()
    for name in expected:
        torch.testing.assert_close(weights[name].detach(), expected[name])


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
def test_states_have_fbgemms_names_and_shapes_and_come_back(name: str) -> None:
    weights, optimizer = make(name, **({"eps": 1e-2} if OPTIMIZERS[name].has_eps else {}))
    expected = {
        "sgd": {},
        "adagrad": {"momentum1": (5, 4)},
        "row_wise_adagrad": {"momentum1": (5,)},
        "adam": {"momentum1": (5, 4), "exp_avg_sq": (5, 4)},
    }[name]
    weights["a"].square().sum().backward()
    state = optimizer.state_dict()["state"]
    assert {key: tuple(value.shape) for key, value in state["embedding_bags.a.weight"].items()} == {
        f"a.{key}": shape for key, shape in expected.items()
    }
    others, other = make(name, **({"eps": 1e-2} if OPTIMIZERS[name].has_eps else {}))
    others.load_state_dict(weights.state_dict())
    other.load_state_dict(state_dict={"state": state})
    if "adam" in name:
        other.set_optimizer_step(1)
    for own in (weights, others):
        own["a"].square().sum().backward()
    torch.testing.assert_close(others["a"], weights["a"])


def test_learning_rates_are_set_before_a_backward_pass() -> None:
    weights, optimizer = make()
    for set_rate in (optimizer.step, optimizer.zero_grad):
        optimizer.param_groups[0]["lr"] = rate = optimizer.param_groups[0]["lr"] / 4
        set_rate()
        before = weights["b"].detach().clone()
        weights["b"].sum().backward()
        torch.testing.assert_close(weights["b"].detach(), before - rate)
    optimizer.update_hyper_parameters({"lr": 2.0})
    before = weights["b"].detach().clone()
    weights["b"].sum().backward()
    torch.testing.assert_close(weights["b"].detach(), before - 2.0)
    with pytest.raises(NotImplementedError, match="beta1 is not supported"):
        optimizer.update_hyper_parameters({"beta1": 0.5})
