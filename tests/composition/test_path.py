"""Path-based compositions: what a packed function is, how it starts, and ids grouped by function."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.composition import ACTIVATIONS, COMPOSITIONS, PathLinear, PathMLP, grouped
from distembed.composition.layers import second_moment
from distembed.composition.path import PathComposition


def as_module(
    packed: Tensor, dim: int, hidden: tuple[int, ...], activation: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A function of torch's own linear layers with the numbers of ``packed``, read one after another."""
    numbers = iter(packed.tolist())
    sizes = (dim, *hidden, dim)
    layers = []
    for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True):
        layer = nn.Linear(n_in, n_out, dtype=packed.dtype)
        with torch.no_grad():
            for i in range(n_in):
                for o in range(n_out):
                    layer.weight[o, i] = next(numbers)
            for o in range(n_out):
                layer.bias[o] = next(numbers)
        layers.append(layer)

    def evaluate(values: Tensor) -> Tensor:
        for layer in layers[:-1]:
            values = activation(layer(values))
        return layers[-1](values)

    return evaluate


@pytest.mark.parametrize("hidden", [1, 64, 7])
def test_numbers_of_a_function(hidden: int) -> None:
    assert PathMLP(hidden=[hidden]).partition_dims(16, 3) == (16, 33 * hidden + 16, 33 * hidden + 16)
    assert PathLinear().partition_dims(16, 2) == (16, 16 * 16 + 16)


@pytest.mark.parametrize("hidden", [(3,), (4, 2)])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.arctan])
def test_functions_are_mlps_applied_one_after_another(
    activation: str | Callable[[Tensor], Tensor], hidden: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    path = PathMLP(hidden=hidden, activation=activation)
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    vector, *functions = [torch.randn(d, dtype=torch.float64) for d in path.partition_dims(5, 3)]
    second, third = (as_module(packed, 5, hidden, function) for packed in functions)
    assert torch.allclose(path.compose([vector, *functions]), third(second(vector)))


def test_a_linear_function_is_one_linear_layer() -> None:
    torch.manual_seed(0)
    vector, packed = torch.randn(5, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    assert torch.allclose(PathLinear().compose([vector, packed]), as_module(packed, 5, (), torch.relu)(vector))


@pytest.mark.thorough
@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.arctan])
@pytest.mark.parametrize("hidden", [(2,), (3, 2)])
def test_gradients_for_every_activation(activation: str | Callable[[Tensor], Tensor], hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    path = PathMLP(hidden=hidden, activation=activation)
    weights = [
        torch.randn(n, d, dtype=torch.float64, requires_grad=True)
        for n, d in zip((3, 4), path.partition_dims(2, 2), strict=True)
    ]
    rows = torch.tensor([[0, 1, 0, 2, 0], [3, 0, 3, 0, 0]])
    assert torch.autograd.gradcheck(lambda *parts: path.embed(parts, rows), weights)


@pytest.mark.parametrize("name", ["path_linear", "path_mlp"])
@pytest.mark.parametrize("num_ids", [300, pytest.param(40_000, marks=pytest.mark.slow)])
def test_many_ids_of_stacked_tables(name: str, num_ids: int) -> None:
    # more than one block of chunks, and most buckets empty; the reference takes a bucket's ids by comparing
    torch.manual_seed(0)
    path = COMPOSITIONS[name]()
    assert isinstance(path, PathComposition)
    num_buckets = 3000
    functions = torch.randn(num_buckets, path.partition_dims(4, 2)[1], dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(num_ids, 4, dtype=torch.float64, requires_grad=True)
    rows = (torch.rand(num_ids).pow(20) * num_buckets).long()
    outputs = path.apply(inputs, [functions], rows.unsqueeze(0))
    weigh = torch.randn_like(outputs)
    got = torch.autograd.grad((outputs * weigh).sum(), [inputs, functions])
    ids_of_bucket = [(rows == bucket).nonzero().squeeze(1) for bucket in rows.unique().tolist()]
    by_bucket = [path.compose([inputs[ids], functions[rows[ids]]]) for ids in ids_of_bucket]
    reference = torch.cat(by_bucket)[torch.cat(ids_of_bucket).argsort()]
    assert torch.allclose(outputs, reference)
    for gradient, expected in zip(
        got, torch.autograd.grad((reference * weigh).sum(), [inputs, functions]), strict=True
    ):
        assert torch.allclose(gradient, expected)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.arctan])
@pytest.mark.parametrize("hidden", [(6,), (5, 3)])
def test_saved_and_recomputed_hidden_values_give_the_same_gradients(
    activation: str | Callable[[Tensor], Tensor], hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    path = PathMLP(hidden=hidden, activation=activation)
    functions = torch.randn(7, path.partition_dims(4, 2)[1], requires_grad=True)
    inputs = torch.randn(200, 4, requires_grad=True)
    rows = torch.randint(7, (1, 200))
    results = []
    for block_bytes in (2**20, 1):  # one block, and as many as chunks
        monkeypatch.setitem(grouped.BLOCK_BYTES, "cpu", block_bytes)
        outputs = path.apply(inputs, [functions], rows)
        for _ in range(2):  # what the first pass saved must not change
            gradients = torch.autograd.grad(outputs.square().sum(), [inputs, functions], retain_graph=True)
            results.append((outputs, *gradients))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize("is_sorted", [True, False])
def test_groups_hold_each_id_once_in_a_chunk_of_its_bucket(is_sorted: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randint(9, (500,)).pow(2)
    if is_sorted:
        rows = rows.sort().values
    groups = grouped.group(rows, 70)
    own = groups.ids[groups.is_own.squeeze(2)]
    assert own.sort().values.tolist() == list(range(500))
    assert groups.ids.flatten()[groups.slot_of_id].tolist() == list(range(500))
    assert torch.equal(rows[groups.ids], groups.buckets.unsqueeze(1).expand_as(groups.ids))


def test_a_value_that_is_not_finite_stays_in_its_own_bucket() -> None:
    path = PathMLP()
    functions = torch.randn(4, path.partition_dims(4, 2)[1], requires_grad=True)
    inputs = torch.randn(7, 4)
    inputs[0] = math.nan
    inputs[6] = math.inf
    inputs.requires_grad_()
    rows = torch.tensor([[0, 1, 1, 1, 3, 1, 2]])
    outputs = path.apply(inputs, [functions], rows)
    outputs[1:6].sum().backward()
    assert outputs[1:6].isfinite().all()
    assert inputs.grad is not None and inputs.grad[1:6].isfinite().all()
    assert functions.grad is not None and functions.grad[[1, 3]].isfinite().all()


def test_under_autocast_the_result_keeps_the_dtype_of_the_inputs() -> None:
    torch.manual_seed(0)
    path = PathMLP(activation="softplus")
    functions = torch.randn(3, path.partition_dims(8, 2)[1], requires_grad=True)
    inputs = torch.randn(50, 8, requires_grad=True)
    rows = torch.randint(3, (1, 50))
    exact = path.apply(inputs, [functions], rows)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = path.apply(inputs, [functions], rows)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, rtol=0.1, atol=0.5)
    for got, expected in zip(
        torch.autograd.grad(rounded.sum(), [inputs, functions]),
        torch.autograd.grad(exact.sum(), [inputs, functions]),
        strict=True,
    ):
        assert got.dtype == torch.float32
        assert (got - expected).norm() < 0.02 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["path_linear", "path_mlp"])
def test_a_gpu_gives_the_same(name: str) -> None:
    torch.manual_seed(0)
    path = COMPOSITIONS[name]()
    num_rows = (100, 50)
    weights = [torch.randn(n, d) for n, d in zip(num_rows, path.partition_dims(16, 2), strict=True)]
    rows = torch.stack([(torch.rand(20_000).pow(4) * n).long() for n in num_rows])
    results = []
    for device in ("cpu", "cuda"):
        held = [weight.to(device, torch.float64).requires_grad_() for weight in weights]
        embedded = path.embed(held, rows.to(device))
        gradients = torch.autograd.grad(embedded.square().sum(), held)
        results.append([part.cpu() for part in (embedded, *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.allclose(on_cpu, on_gpu)


@pytest.mark.thorough
@pytest.mark.parametrize("variance", [0.01, 1e-8])
@pytest.mark.parametrize("hidden", [(64,), (5,), (32, 8), (16, 16, 16)])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.arctan])
def test_functions_keep_mean_and_variance(
    activation: str | Callable[[Tensor], Tensor], hidden: tuple[int, ...], variance: float
) -> None:
    path = PathMLP(hidden=hidden, activation=activation)
    generator = torch.Generator().manual_seed(0)
    num_buckets, each = 3000, 4
    vectors, functions = path.initial_weights(variance, 2, 16)
    looked_up = vectors.fill(torch.empty(num_buckets * each, 16), generator)
    packed = functions.fill(torch.empty(num_buckets, path.partition_dims(16, 2)[1]), generator)
    rows = torch.arange(num_buckets).repeat(each).unsqueeze(0)
    composed = path.apply(looked_up, [packed], rows).double()
    assert composed.var().item() == pytest.approx(variance, rel=0.06)
    assert composed.mean().item() / variance**0.5 == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ids_of_one_function_start_apart(activation: str) -> None:
    variance = 1 / (3 * 10**7)
    generator = torch.Generator().manual_seed(0)
    path = PathMLP(activation=activation)
    vectors, functions = path.initial_weights(variance, 2, 16)
    looked_up = vectors.fill(torch.empty(4, 1000, 16), generator).flatten(0, 1)
    packed = functions.fill(torch.empty(4, 2128), generator)
    composed = path.apply(looked_up, [packed], torch.arange(4).repeat_interleave(1000).unsqueeze(0)).view(4, 1000, 16)
    assert composed.double().var(1).mean().item() == pytest.approx(variance, rel=0.5)


@pytest.mark.parametrize("variance", [1.0, 0.1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_moment_is_that_of_many_draws(activation: str, variance: float) -> None:
    draws = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * variance**0.5
    expected = ACTIVATIONS[activation](draws).square().mean().item()
    assert second_moment(ACTIVATIONS[activation], variance) == pytest.approx(expected, rel=0.01)


def test_an_unknown_activation_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"activation is 'rellu'.*'relu'"):
        PathMLP(activation="rellu")


@pytest.mark.parametrize("size", [0, -3, 1.5, "64", True])
def test_a_hidden_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(UserError, match=r"hidden\[1\] is"):
        PathMLP(hidden=[8, size])  # type: ignore[list-item]


@pytest.mark.parametrize("hidden", [[], (), 64, "64", None])
def test_no_list_of_hidden_sizes_is_refused_with_the_remedy(hidden: object) -> None:
    with pytest.raises(UserError, match="path_linear"):
        PathMLP(hidden=hidden)  # type: ignore[arg-type]


def test_an_activation_that_gives_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="activation"):
        PathMLP(activation=torch.zeros_like).initial_weights(0.01, 2, 16)
