"""Models of feature vectors against their papers' equations, in float64, with their gradients."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet

from distembed.base.errors import UserError
from distembed.data.dataset.schema import Label, Schema
from distembed.models import MODELS
from distembed.models.config import FeatureVectorConfig, ModelConfig
from distembed.models.dcnv2_config import DCNv2Config, GDCNConfig
from distembed.models.deepfm_config import DeepFMConfig
from distembed.models.din_config import DINConfig
from distembed.models.esmm import ESMM, logit_of_both
from distembed.models.esmm_config import ESMMConfig
from distembed.models.experts_config import MMoEConfig, PLEConfig
from distembed.models.finalmlp_config import FinalMLPConfig, StreamConfig
from distembed.models.layers import CrossLayersV2
from distembed.models.vectors import FeatureVectorModel
from tests.models.fake_inputs import FakeInputs, ids

DIM, BATCH = 4, 3
NAMES = ["d0", "d1", "a", "b", "c"]


def perceptron(weights: dict[str, Tensor], path: str, inputs: Tensor, last_is_linear: bool = False) -> Tensor:
    """Returns ``relu(W x + b)`` layer by layer, for the weights under a path."""
    layers = sorted({int(name.split(".")[-2]) for name in weights if name.startswith(f"{path}.layers.")})
    for layer in layers:
        inputs = inputs @ weights[f"{path}.layers.{layer}.weight"].T + weights[f"{path}.layers.{layer}.bias"]
        inputs = inputs if last_is_linear and layer == layers[-1] else inputs.clamp(min=0)
    return inputs


def cross(weights: dict[str, Tensor], x: Tensor, gated: bool = False, low_rank: bool = False) -> Tensor:
    crossed = x
    for layer in range(2):
        inner = crossed @ weights[f"cross.down.{layer}.weight"].T if low_rank else crossed
        product = x * (inner @ weights[f"cross.up.{layer}.weight"].T + weights[f"cross.up.{layer}.bias"])
        gate = 1 / (1 + (-(crossed @ weights[f"cross.gates.{layer}.weight"].T)).exp()) if gated else 1
        crossed = product * gate + crossed
    return crossed


def parallel_cross(weights: dict[str, Tensor], vectors: Tensor, **kind: bool) -> Tensor:
    x = vectors.flatten(1)
    hidden = torch.cat([perceptron(weights, "deep", x), cross(weights, x, **kind)], 1)
    return (hidden @ weights["output.weight"].T + weights["output.bias"])[:, 0]


def stacked_cross(weights: dict[str, Tensor], vectors: Tensor) -> Tensor:
    hidden = perceptron(weights, "deep", cross(weights, vectors.flatten(1), low_rank=True))
    return (hidden @ weights["output.weight"].T + weights["output.bias"])[:, 0]


def deep_fm(weights: dict[str, Tensor], vectors: Tensor) -> Tensor:
    logits = weights["bias"] + perceptron(weights, "deep", vectors.flatten(1), last_is_linear=True)[:, 0]
    for vector in vectors.unbind(1):
        logits = logits + vector[:, 0]
    for first, second in itertools.combinations(vectors.unbind(1), 2):
        logits = logits + (first[:, 1:] * second[:, 1:]).sum(1)
    return logits


def final_mlp(weights: dict[str, Tensor], vectors: Tensor) -> Tensor:
    x = vectors.flatten(1)
    contexts = {"first": vectors[:, NAMES.index("b")], "second": weights["second.context"].expand(len(x), DIM)}
    streams = []
    for stream, context in contexts.items():
        gate = 2 / (1 + (-perceptron(weights, f"{stream}.gate", context, last_is_linear=True)).exp())
        streams.append(perceptron(weights, f"{stream}.deep", x * gate))
    h, g = streams
    logits = (torch.cat(streams, 1) @ weights["linear.weight"].T + weights["linear.bias"])[:, 0]
    for head, (own_h, own_g) in enumerate(zip(h.chunk(2, 1), g.chunk(2, 1), strict=True)):
        logits = logits + torch.einsum("bi,ij,bj->b", own_h, weights["bilinear"][head], own_g)
    return logits


def mixture(weights: dict[str, Tensor], gate: str, inputs: Tensor, experts: list[Tensor]) -> Tensor:
    shares = (inputs @ weights[f"{gate}.weight"].T).exp()
    assert shares.shape[1] == len(experts)
    return sum(shares[:, [i]] / shares.sum(1, keepdim=True) * own for i, own in enumerate(experts))


def experts_of(weights: dict[str, Tensor], path: str, number: int, inputs: Tensor) -> list[Tensor]:
    return [perceptron(weights, f"{path}.{i}", inputs) for i in range(number)]


def towers(weights: dict[str, Tensor], path: str, inputs: list[Tensor]) -> list[Tensor]:
    return [perceptron(weights, f"{path}.networks.{i}", own, True)[:, 0] for i, own in enumerate(inputs)]


def mmoe(weights: dict[str, Tensor], vectors: Tensor) -> Tensor:
    x, level = vectors.flatten(1), "network.levels.0"
    experts = experts_of(weights, f"{level}.shared", 3, x)
    mixtures = [mixture(weights, f"{level}.gates.{label}", x, experts) for label in range(2)]
    return torch.stack(towers(weights, "network.towers", mixtures), 1)


def ple(weights: dict[str, Tensor], vectors: Tensor, num_labels: int = 2, num_levels: int = 2) -> Tensor:
    """Of levels with a shared expert and two of each label."""
    both = vectors.flatten(1)
    inputs = [both] * num_labels
    for number in range(num_levels):
        level = f"network.levels.{number}"
        shared = experts_of(weights, f"{level}.shared", 1, both)
        specific = [experts_of(weights, f"{level}.specific.{label}", 2, own) for label, own in enumerate(inputs)]
        if number < num_levels - 1:
            all_experts = [expert for experts in specific for expert in experts] + shared
            both = mixture(weights, f"{level}.gates.{num_labels}", both, all_experts)
        for label, own in enumerate(inputs):
            inputs[label] = mixture(weights, f"{level}.gates.{label}", own, specific[label] + shared)
    return torch.stack(towers(weights, "network.towers", inputs), 1)


def esmm(weights: dict[str, Tensor], vectors: Tensor) -> Tensor:
    """Of labels in the order conversion, click."""
    x = vectors.flatten(1)
    click, conversion = (1 / (1 + (-logit).exp()) for logit in towers(weights, "towers", [x, x]))
    return torch.stack([(p / (1 - p)).log() for p in (click * conversion, click)], 1)


CASES: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "dcnv2": (DCNv2Config(deep=[6, 5], num_cross_layers=2), parallel_cross),
    "dcnv2 low rank, stacked": (
        DCNv2Config(deep=[6], num_cross_layers=2, rank=3, structure="stacked"),
        stacked_cross,
    ),
    "gdcn": (
        GDCNConfig(deep=[6], num_cross_layers=2),
        lambda weights, vectors: parallel_cross(weights, vectors, gated=True),
    ),
    "deepfm": (DeepFMConfig(deep=[6, 5]), deep_fm),
    "finalmlp": (
        FinalMLPConfig(
            first=StreamConfig(sizes=[6, 4], gated_by=["b"]), second=StreamConfig(sizes=[6]), gate=[3], num_heads=2
        ),
        final_mlp,
    ),
    "mmoe": (MMoEConfig(deep=[6, 5], tower=[4], num_experts=3), mmoe),
    "ple": (PLEConfig(deep=[6, 5], tower=[4], num_shared=1, num_specific=2), ple),
    "ple of three labels": (
        PLEConfig(deep=[6, 5], tower=[4], num_shared=1, num_specific=2, num_levels=3),
        functools.partial(ple, num_labels=3, num_levels=3),
    ),
    "esmm": (ESMMConfig(click="second", deep=[6, 5]), esmm),
}


def build(config: ModelConfig, num_labels: int = 2) -> FeatureVectorModel:
    schema = Schema(None, ("d0", "d1"), (), labels=tuple(map(Label, ("first", "second", "third")[:num_labels])))
    model = config.build(FakeInputs({name: torch.randn(BATCH, DIM) for name in "abc"}, schema))
    assert isinstance(model, FeatureVectorModel)
    assert model.vector_names == NAMES
    return model.double()


@pytest.mark.parametrize("case", CASES)
def test_the_model_equals_its_equations(case: str) -> None:
    config, equations = CASES[case]
    model = build(config, num_labels=3 if "three labels" in case else 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = dict(model.named_parameters())
    vectors = torch.randn(BATCH, len(NAMES), DIM, dtype=torch.float64, requires_grad=True)
    leaves = [vectors, *(own for name, own in weights.items() if not name.startswith("soft_one_hot"))]
    found, expected = model.logits(vectors), equations(weights, vectors)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, leaves, upstream)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_model_of_feature_vectors_has_a_case() -> None:
    tested = {type(config) for config, _ in CASES.values()}
    assert tested == {kind for kind in MODELS.values() if issubclass(kind, FeatureVectorConfig)} - {DINConfig}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_of_a_new_model_is_trained(case: str) -> None:
    torch.manual_seed(0)  # with some weights a ReLU is closed for all rows
    model = build(CASES[case][0])
    vectors = torch.randn(64, len(NAMES), DIM, dtype=torch.float64)
    model.logits(vectors).square().sum().backward()
    networks = {name: own for name, own in model.named_parameters() if not name.startswith("soft_one_hot")}
    assert [name for name, own in networks.items() if own.grad is None or not own.grad.any()] == []


@pytest.mark.parametrize("rank", [None, 3])
def test_cross_layers_equal_torchrecs(rank: int | None) -> None:
    theirs = CrossNet(5, 2) if rank is None else LowRankCrossNet(5, 2, rank)
    ours = CrossLayersV2(5, 2, rank)
    for own in theirs.bias:
        nn.init.normal_(own)
    for layer in range(2):
        ours.up[layer].weight.data.copy_(theirs.kernels[layer] if rank is None else theirs.W_kernels[layer])
        ours.up[layer].bias.data.copy_(theirs.bias[layer].flatten())
        if rank is not None:
            ours.down[layer].weight.data.copy_(theirs.V_kernels[layer])
    inputs = torch.randn(4, 5)
    torch.testing.assert_close(ours(inputs), theirs(inputs))


@pytest.mark.parametrize("case", CASES)
def test_a_missing_number_has_a_vector_of_its_own(case: str) -> None:
    model = build(CASES[case][0]).float()
    numbers = torch.tensor([[1.0, float("nan")]] * BATCH)
    before = model(numbers, ids(BATCH))
    assert before.isfinite().all()
    model.soft_one_hot.missing.data[1] += 1
    assert not torch.equal(model(numbers, ids(BATCH)), before)


def test_dropout_drops_in_training_alone() -> None:
    torch.manual_seed(0)
    model = build(DeepFMConfig(deep=[64], dropout=0.5))
    vectors = torch.randn(BATCH, len(NAMES), DIM, dtype=torch.float64)
    assert not torch.equal(model.logits(vectors), model.logits(vectors))
    model.eval()
    assert torch.equal(model.logits(vectors), model.logits(vectors))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3, which does not divide 256, the last of first.sizes"),
        ({"gate": None, "first": StreamConfig(gated_by=["a"])}, "first.gated_by is set and gate is null"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FinalMLPConfig(**settings)


def test_an_unknown_feature_to_gate_by_is_refused() -> None:
    with pytest.raises(UserError, match="feature that gates a stream"):
        build(FinalMLPConfig(first=StreamConfig(gated_by=["z"])))


def test_the_logit_of_both_is_finite_where_probabilities_round_to_0_and_1() -> None:
    logits = torch.tensor([[-200.0, -200.0], [200.0, 200.0], [0.0, -300.0], [300.0, 5.0]], requires_grad=True)
    both = logit_of_both(logits[:, 0], logits[:, 1])
    # p q / (1 - p q): of small p and q it is p q, of large ones 1 / ((1 - p) + (1 - q))
    torch.testing.assert_close(both, torch.tensor([-400.0, 200 - math.log(2), -300 - math.log(2), 5.0]))
    both.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.5, 1.0], [0.0, 1.0]]))


def test_an_expert_alone_is_a_shared_bottom() -> None:
    model = build(MMoEConfig(deep=[6], tower=[4], num_experts=1))
    weights, vectors = dict(model.named_parameters()), torch.randn(BATCH, len(NAMES), DIM, dtype=torch.float64)
    bottom = perceptron(weights, "network.levels.0.shared.0", vectors.flatten(1))
    expected = torch.stack(towers(weights, "network.towers", [bottom, bottom]), 1)
    torch.testing.assert_close(model.logits(vectors), expected)


def test_esmm_combines_logits_of_bf16_in_fp32() -> None:
    schema = Schema(None, (), (), labels=(Label("click"), Label("conversion")))
    model = ESMMConfig(deep=[6]).build(FakeInputs({"a": torch.randn(BATCH, DIM)}, schema))
    assert isinstance(model, ESMM)
    vectors = 3 * torch.randn(BATCH, 1, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.logits(vectors)
        inputs = vectors.flatten(1)
        logits = model.towers([inputs, inputs])
    assert logits.dtype == torch.bfloat16
    click, conversion = (1 / (1 + (-own.double()).exp()) for own in logits.unbind(1))
    expected = torch.stack([(p / (1 - p)).log() for p in (click, click * conversion)], 1)
    torch.testing.assert_close(found, expected.float())


@pytest.mark.parametrize("labels", [("a",), ("a", "b", "c")])
def test_esmm_refuses_other_than_two_labels(labels: tuple[str, ...]) -> None:
    one_or_more = {"label": labels[0]} if len(labels) == 1 else {"label": None, "labels": tuple(map(Label, labels))}
    schema = Schema(**one_or_more, dense=(), categorical=())
    with pytest.raises(UserError, match="two binary labels.*a \\(binary\\)"):
        ESMMConfig().build(FakeInputs({"a": torch.randn(BATCH, DIM)}, schema))


@pytest.mark.parametrize(
    ("kind", "click", "message"),
    [("number", None, r"first \(binary\), second \(number\)"), ("binary", "secnd", "model.click.*'second'")],
)
def test_esmm_refuses_a_number_and_an_unknown_click(kind: Any, click: str | None, message: str) -> None:
    schema = Schema(None, (), (), labels=(Label("first"), Label("second", kind)))
    with pytest.raises(UserError, match=message):
        ESMMConfig(click=click).build(FakeInputs({"a": torch.randn(BATCH, DIM)}, schema))
