"""Float16 rows that the CPU's kernels round at random: unbiased, of seed, row and column alone, as computed by hand."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from distembed.kernels.operation import FusedLookup
from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.partitions.base import Digit
from tests.partitions.test_hashing import splitmix64

ROWS, DIM, KEY = 6, 16, 0x1234_5678_9ABC_DEF
START = torch.linspace(-2, 2, ROWS * DIM).view(ROWS, DIM).half()
Halves = npt.NDArray[np.float16]
STEPS = [("sgd", 1e-5, 1.0), ("adagrad", 0.5, 1e-5), ("row_wise_adagrad", 0.5, 1e-5)]


def step(
    start: Tensor,
    gradient: Tensor,
    seed: int | None,
    optimizer: str = "sgd",
    rate: float = 1.0,
    first: tuple[int, int] = (0, 0),
) -> Halves:
    """Updates rows by a step of a lookup that has the rows and columns from ``first`` on."""
    rows, dim = start.shape
    weights, states = start.clone().flatten().requires_grad_(), torch.zeros(rows if "row" in optimizer else rows * dim)
    seeds = None if seed is None else lambda: seed
    storage = Storage([weights], optimizer, None if optimizer == "sgd" else states, rate, 1e-8, rounding_seed=seeds)
    part = TablePart(Digit(1, None), first[0], rows, first_column=first[1], rounding_key=KEY)
    lookup = FusedLookup(Formula([range(dim)], False, True), [[part]], [1], [storage])
    lookup(torch.arange(rows) + first[0], torch.arange(rows + 1), None, [storage]).backward(gradient)
    return weights.detach().view(rows, dim).numpy()


def draw(seed: int, row: int, column: int) -> float:
    """The random number in [0, 1), in steps of 2 ** -13."""
    random = splitmix64((splitmix64(KEY ^ seed) + row) % 2**64) | 1
    hashed = column * 0x9E3779B1 % 2**32 ^ random % 2**32
    hashed = ((hashed ^ hashed >> 16) * 0x85EBCA6B + (random >> 32)) % 2**32
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 % 2**32
    return ((hashed ^ hashed >> 16) >> 19) / 2**13


def rounded(value: float, random: float) -> float:
    """Multiples of the step between float16 numbers, which is 2 ** -24 below 2 ** -14."""
    spacing = 2.0 ** (max(np.frexp(value)[1] - 1, -14) - 10)
    return float(np.sign(value) * np.floor(abs(value) / spacing + random) * spacing)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5, 1e-7])
def test_rows_are_rounded_as_computed_by_hand(scale: float) -> None:
    start = (START * scale).half()
    change = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(1)) * scale
    exact = (start.float() - change).double().tolist()
    found = step(start, change, seed=7)
    expected = [[rounded(value, draw(7, row, column)) for column, value in enumerate(v)] for row, v in enumerate(exact)]
    # float32 cannot tell values below 2 ** -14 apart by less than 2 ** -37 where 2 ** -14 is added to them
    differing = found != np.array(expected, np.float16)
    assert differing.mean() <= (0 if scale == 1 else 0.02)


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "gradient", "rate"), STEPS)
def test_rounding_is_unbiased_where_rounding_to_the_nearest_swallows_updates(
    optimizer: str, gradient: float, rate: float
) -> None:
    """Each step is by 1e-5; from 0.1 on, float16 numbers are at least 6e-5 apart."""
    draws, gradients = 1000, torch.full((ROWS, DIM), gradient)
    is_large, exact = START.abs().numpy() > 0.1, START.double().numpy() - 1e-5
    nearest = step(START, gradients, None, optimizer, rate)
    assert np.array_equal(nearest[is_large], START.numpy()[is_large])
    found = np.stack([step(START, gradients, seed, optimizer, rate) for seed in range(1, draws + 1)]).astype(float)
    # a number drawn from two neighbours has at most half of their distance as standard deviation
    error = (found.mean(0) - exact) / (found.max(0) - found.min(0) + 1e-12) * 2 * np.sqrt(draws)
    assert np.abs(error[is_large]).max() < 4.5
    assert found.mean(0)[is_large].sum() == pytest.approx(exact[is_large].sum(), abs=1e-3)
    assert np.all(found.max(0) - found.min(0) <= np.spacing(np.abs(found).max(0).astype(np.float16)))


def test_a_rank_s_rows_and_columns_are_rounded_as_in_the_whole_table() -> None:
    change = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(2)) / 100
    whole = step(START, change, seed=3)
    for rows in (slice(0, 2), slice(2, ROWS)):
        for columns in (slice(0, 4), slice(4, DIM)):
            own = step(START[rows, columns], change[rows, columns], 3, first=(rows.start, columns.start))
            assert np.array_equal(own, whole[rows, columns])
    assert not np.array_equal(step(START, change, seed=4), whole)
    assert not np.array_equal(step(START, change, seed=None), whole)


def test_infinite_and_undefined_numbers_stay_as_they_are() -> None:
    start = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0]]).half()
    found = step(start, torch.zeros(1, 4), seed=1)
    assert np.array_equal(found, start.numpy(), equal_nan=True)
