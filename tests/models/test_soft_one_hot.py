"""Soft one-hot vectors against a loop in float64, with missing and infinite numbers, and the grid of bins."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.models.config import LARGEST_NUMBER
from distembed.models.soft_one_hot import SoftOneHot, SoftOneHotSum, grid_bins

NAN, INF = math.nan, math.inf


def expected_vector(layer: SoftOneHot, feature: int, number: float) -> list[float]:
    """Returns g = s E for one number, by the formulas of the papers in plain numbers."""
    weights, biases, vectors = (p[feature].tolist() for p in (layer.weights, layer.biases, layer.vectors))
    if math.isnan(number):
        vector = layer.missing[feature].tolist()
    else:
        number = max(-(2.0**40), min(2.0**40, number))
        sums = [number * w + b for w, b in zip(weights, biases, strict=True)]
        powers = [math.exp(each - max(sums)) for each in sums]
        shares = [each / sum(powers) for each in powers]
        vector = [sum(s * row[d] for s, row in zip(shares, vectors, strict=True)) for d in range(len(vectors[0]))]
    if layer.norm is None:
        return vector
    mean = sum(vector) / len(vector)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in vector) / len(vector) + 1e-5)
    scale, shift = layer.norm.weight[feature].tolist(), layer.norm.bias[feature].tolist()
    return [(v - mean) / deviation * a + b for v, a, b in zip(vector, scale, shift, strict=True)]


def make(cls: type[SoftOneHot], features: int, bins: int, dim: int, layer_norm: bool = False) -> SoftOneHot:
    """Returns a layer in float64 whose every parameter is drawn anew, so that none is 0, 1 or alike."""
    layer = cls(features, bins, dim, layer_norm).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def numbers(*shape: int) -> Tensor:
    """Returns numbers of which some are missing, infinite or very large."""
    drawn = torch.randn(*shape, dtype=torch.float64) * 3
    flat = drawn.view(-1)
    for index, value in enumerate((NAN, INF, -INF, 1e300, -1e15, 0.0)):
        flat[index::11] = value
    return drawn


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(
    ("shape", "bins", "dim"), [((7, 13), 10, 16), ((2, 3, 1), 1, 5), ((4,), 3, 2), ((5, 2), 64, 3)]
)
def test_it_equals_a_loop(shape: tuple[int, ...], bins: int, dim: int, layer_norm: bool) -> None:
    given = numbers(*shape)
    rows = given.view(-1, shape[-1]).tolist()
    layer = make(SoftOneHot, shape[-1], bins, dim, layer_norm)
    expected = torch.tensor(
        [[expected_vector(layer, feature, number) for feature, number in enumerate(row)] for row in rows],
        dtype=torch.float64,
    )
    torch.testing.assert_close(layer(given), expected.view(*shape, dim))
    total = make(SoftOneHotSum, shape[-1], bins, dim, layer_norm)
    total.load_state_dict(layer.state_dict())
    torch.testing.assert_close(total(given), expected.sum(1).view(*shape[:-1], dim))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("cls", [SoftOneHot, SoftOneHotSum])
def test_gradients_are_those_of_differences(cls: type[SoftOneHot], layer_norm: bool) -> None:
    layer = make(cls, 3, 4, 2, layer_norm)
    given = torch.randn(5, 3, dtype=torch.float64)
    given[1, 0] = given[2, 2] = NAN
    names = list(dict(layer.named_parameters()))
    present = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def of_parameters(*values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (given,))

    assert torch.autograd.gradcheck(of_parameters, tuple(layer.parameters()))
    assert torch.autograd.gradcheck(layer, (present,))


@pytest.mark.parametrize("cls", [SoftOneHot, SoftOneHotSum])
def test_missing_numbers_train_their_vector_alone(cls: type[SoftOneHot]) -> None:
    layer = cls(2, 4, 3)
    given = torch.tensor([[NAN, 1.0], [NAN, 2.0]], requires_grad=True)
    layer(given).sum().backward()
    assert torch.equal(layer.missing.grad, torch.tensor([[2.0] * 3, [0.0] * 3]))
    for parameter in (layer.weights, layer.biases, layer.vectors):
        assert torch.equal(parameter.grad[0], torch.zeros_like(parameter.grad[0])) and parameter.grad[1].any()
    assert torch.equal(given.grad[:, 0], torch.zeros(2)) and given.grad[:, 1].all()


@pytest.mark.parametrize("cls", [SoftOneHot, SoftOneHotSum])
def test_everything_stays_finite(cls: type[SoftOneHot]) -> None:
    layer = cls(6, 10, 4, value_range=(0.0, 10.0))
    given = torch.tensor([INF, -INF, 3.4e38, -3.4e38, NAN, 1e-45]).expand(3, 6).clone().requires_grad_()
    vectors = layer(given)
    vectors.square().sum().backward()
    assert vectors.isfinite().all() and given.grad.isfinite().all()
    assert all(p.grad.isfinite().all() and p.grad.square().isfinite().all() for p in layer.parameters())


def test_infinity_is_in_the_outermost_bin() -> None:
    layer = SoftOneHot(1, 5, 2, value_range=(-1.0, 4.0))
    torch.testing.assert_close(layer(torch.tensor([[INF], [1e30]])), layer.vectors[0, -1].expand(2, 1, 2))
    torch.testing.assert_close(layer(torch.tensor([[-INF], [-1e30]])), layer.vectors[0, 0].expand(2, 1, 2))


@pytest.mark.parametrize("cls", [SoftOneHot, SoftOneHotSum])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)])
def test_no_rows(cls: type[SoftOneHot], shape: tuple[int, ...]) -> None:
    layer = cls(3, 4, 2)
    vectors = layer(torch.empty(shape))
    assert vectors.shape == (*(shape if cls is SoftOneHot else shape[:-1]), 2)
    vectors.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


@pytest.mark.parametrize("cls", [SoftOneHot, SoftOneHotSum])
def test_autocast_changes_nothing(cls: type[SoftOneHot]) -> None:
    """Sums of large terms that cancel are not computed in 8 bits."""
    layer = cls(3, 10, 4, layer_norm=True, value_range=(0.0, 10.0))
    given = torch.rand(20, 3) * 10

    def results(in_bf16: bool) -> list[Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16):
            vectors = layer(given)
        vectors.square().sum().backward()
        return [vectors, *(parameter.grad.clone() for parameter in layer.parameters())]

    for result, expected in zip(results(in_bf16=True), results(in_bf16=False), strict=True):
        assert result.dtype == torch.float32 and torch.equal(result, expected)


@pytest.mark.parametrize(("bins", "low", "high"), [(2, 0.0, 1.0), (10, 0.0, 10.0), (33, -3.0, 3.0)])
def test_bins_start_as_gaussians_on_a_grid(bins: int, low: float, high: float) -> None:
    """Every bin is the largest at its centre, and shares are those of Gaussians as wide as centres are apart."""
    weights, biases = grid_bins(bins, low, high)
    centres = torch.linspace(low, high, bins)
    shares = torch.softmax(centres.unsqueeze(1) * weights + biases, dim=1)
    assert shares.argmax(1).tolist() == list(range(bins))
    distances = (centres.unsqueeze(1) - centres) * (bins - 1) / (high - low)
    gaussians = torch.distributions.Normal(0.0, 1.0).log_prob(distances).exp()
    torch.testing.assert_close(shares, gaussians / gaussians.sum(1, keepdim=True), atol=1e-4, rtol=1e-3)


def test_one_bin_is_one_vector() -> None:
    layer = SoftOneHot(2, 1, 3)
    torch.testing.assert_close(layer(torch.tensor([[-5.0, 70.0]])), layer.vectors.transpose(0, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SoftOneHot(0, 4, 4), "num_features of SoftOneHot is 0"),
        (lambda: SoftOneHot(4, 0, 4), "num_bins of SoftOneHot is 0"),
        (lambda: SoftOneHot(4, 4, 4, value_range=(1.0, 1.0)), r"value_range is \[1.0, 1.0\]"),
        (lambda: SoftOneHot(4, 4, 4, value_range=(0.0, INF)), "value_range is"),
        (lambda: SoftOneHot(4, 4, 4, value_range=(NAN, 1.0)), "value_range is"),
        (lambda: SoftOneHot(4, 4, 4, value_range=(0.0, 2 * LARGEST_NUMBER)), "value_range is"),
    ],
)
def test_impossible_settings(call: Callable[[], SoftOneHot], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.parametrize("cls", [SoftOneHot, SoftOneHotSum])
def test_numbers_of_other_features(cls: type[SoftOneHot]) -> None:
    with pytest.raises(ValueError, match="numbers of 3 features are given to SoftOneHot of 1"):
        cls(1, 4, 4)(torch.zeros(2, 3))
