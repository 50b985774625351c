"""Dot products of pairs and their gradients against a loop in float64 NumPy, by the CPU's kernels and by torch."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from distembed.base.tracing import as_on_cuda
from distembed.models.layers import MLP
from distembed.models.pairwise_dots import PairwiseDots, dots_beside, has_kernels


def pairs_of(vectors: np.ndarray) -> np.ndarray:
    pairs = itertools.combinations(range(vectors.shape[1]), 2)
    return np.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i, j in pairs], axis=1)


def gradients_of(vectors: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    summed = np.zeros_like(vectors)
    for pair, (i, j) in enumerate(itertools.combinations(range(vectors.shape[1]), 2)):
        summed[:, i] += gradients[:, pair, None] * vectors[:, j]
        summed[:, j] += gradients[:, pair, None] * vectors[:, i]
    return summed


def stackable(vectors: Tensor) -> Tensor:
    return vectors if vectors.dim() == 3 else vectors.unsqueeze(1)


def draw(num_rows: int, num_vectors: int, dim: int, has_dense: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(num_rows, num_vectors - has_dense, dim, generator=generator).requires_grad_()
    return vectors, torch.randn(num_rows, dim, generator=generator).requires_grad_() if has_dense else None


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_dense", [False, True], ids=["", "dense"])
@pytest.mark.parametrize("dim", [1, 4, 16, 17, 64, 128])
@pytest.mark.parametrize("num_vectors", [2, 9, 16, 17, 27, 35])
@pytest.mark.parametrize("num_rows", [0, 130])
def test_kernels_multiply_all_pairs(num_rows: int, num_vectors: int, dim: int, has_dense: bool, bf16: bool) -> None:
    vectors, dense = draw(num_rows, num_vectors, dim, has_dense)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert has_kernels(vectors)
        outputs = dots_beside(dense, vectors)
    assert outputs.dtype == (torch.bfloat16 if bf16 else torch.float32) and outputs.shape[1] % 16 == 0
    given = [own for own in (dense, vectors) if own is not None]
    stacked = torch.cat([stackable(own.detach()) for own in given], dim=1).double().numpy()
    expected = np.hstack([stacked[:, :has_dense].reshape(num_rows, has_dense * dim), pairs_of(stacked)])
    # a dot product is as exact as the sum of its absolute products allows; bf16 outputs have 8 bits
    close = {"rtol": 2**-8, "atol": 0.0} if bf16 else {"rtol": 1e-5, "atol": 1e-6 * dim}
    num_outputs = expected.shape[1]
    found = outputs.detach().double().numpy()
    np.testing.assert_allclose(found[:, :num_outputs], expected, **{**close, "atol": 1e-6 * dim})
    assert not found[:, num_outputs:].any()

    output_gradients = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs.dtype)
    gradients = torch.autograd.grad(outputs, given, output_gradients)
    found = torch.cat([stackable(own) for own in gradients], dim=1).double().numpy()
    expected_dense, expected_pairs, _ = np.split(
        output_gradients.double().numpy(), [dim * has_dense, num_outputs], axis=1
    )
    expected = gradients_of(stacked, expected_pairs)
    expected[:, :has_dense] += expected_dense.reshape(num_rows, int(has_dense), dim)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * num_vectors)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_threads(threads: int) -> None:
    vectors, dense = draw(1000, 5, 8, True)
    before = torch.get_num_threads()
    row_by_row = torch.cat([dots_beside(dense[i : i + 1], vectors[i : i + 1]) for i in range(1000)])
    torch.set_num_threads(threads)
    try:
        assert dots_beside(dense, vectors).equal(row_by_row)
    finally:
        torch.set_num_threads(before)


def test_vectors_need_not_be_contiguous() -> None:
    vectors, dense = draw(20, 4, 6, True)
    expected = dots_beside(dense, vectors)
    apart = vectors.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = dots_beside(dense, apart)
    assert found.equal(expected)
    (wide,) = torch.autograd.grad(found.sum(), apart)
    (narrow,) = torch.autograd.grad(expected.sum(), vectors)
    assert wide.equal(narrow)


def test_torch_multiplies_other_dtypes_and_without_gradients() -> None:
    vectors = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    dots = PairwiseDots(5)
    torch.testing.assert_close(dots(vectors).detach().numpy(), pairs_of(vectors.detach().numpy()))
    assert torch.autograd.gradcheck(dots, (vectors,))
    with torch.no_grad():
        assert not has_kernels(vectors.float())
    assert not has_kernels(vectors)


def test_a_planners_step_on_fake_tensors_allocates_as_the_device_does() -> None:
    with FakeTensorMode():
        vectors, dense = draw(4, 5, 8, True)
        assert has_kernels(vectors)
        outputs = dots_beside(dense, vectors)
        outputs.sum().backward()
        with as_on_cuda():
            assert not has_kernels(vectors)
    assert outputs.shape == (4, 32) and vectors.grad is not None and vectors.grad.shape == vectors.shape


def test_columns_of_zeros_after_the_inputs_change_no_result() -> None:
    network, inputs = MLP(5, [7, 2]), torch.randn(6, 5)
    wide = torch.nn.functional.pad(inputs, (0, 11))
    torch.testing.assert_close(network(wide), network(inputs))
    weight = network.layers[0].weight
    found, expected = (torch.autograd.grad(network(own).square().sum(), weight) for own in (wide, inputs))
    torch.testing.assert_close(found, expected)
