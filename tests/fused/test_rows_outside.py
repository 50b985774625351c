"""Rows outside of their tables: the passes raise, and no memory outside of the tables is read or written."""

import importlib.util
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from distembed.kernels.operation import FusedLookup
from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.partitions.base import Digit
from tests.fused.interpreter import InterpretedLookup, interpreter

DIM, MARGIN, CANARY = 8, 3, 7.0
DIGITS = (Digit(1, 25), Digit(25, None))
HERE = ((10, 15), (0, 4))
"""First row and number of rows of each partition that are here."""
NUM_IDS = 70  # more than kernels map at once


def build(lookup: Any, is_product: bool, pools: bool) -> tuple[Any, list[Storage], list[Tensor]]:
    """Two features' one table, between rows that are nobody's."""
    generator = torch.Generator().manual_seed(0)
    whole = []
    for _, number in HERE:
        rows = torch.full((number + 2 * MARGIN, DIM), CANARY)
        rows[MARGIN:-MARGIN] = torch.rand(number, DIM, generator=generator)
        whole.append(rows.flatten().requires_grad_())
    states = [torch.zeros(own.shape) for own in whole]
    storages = [Storage([own], "adagrad", state, 0.1, 1e-2) for own, state in zip(whole, states, strict=True)]
    start = MARGIN * DIM
    parts = [TablePart(digit, *here, start, start) for digit, here in zip(DIGITS, HERE, strict=True)]
    made = lookup(Formula([range(DIM)] * 2, is_product, pools), [parts] * 2, [2], storages)
    return made, storages, [*whole, *states]


def draw(position: int, outside: int) -> tuple[Tensor, Tensor]:
    """Ids of two features whose rows are here, but for one, and offsets of bags of seven."""
    generator = torch.Generator().manual_seed(1)
    remainders = torch.randint(10, 25, (2 * NUM_IDS,), generator=generator)
    ids = 25 * torch.randint(0, 4, (2 * NUM_IDS,), generator=generator) + remainders
    ids[position] = outside
    return ids, torch.arange(0, 2 * NUM_IDS + 1, 7)


OUTSIDE = (3, 25 * 4 + 12, -1, 2**62, -(2**63))
"""Of another rank's rows in the first partition; behind the last row of the second; and of no table at all."""
POSITIONS = (0, 63, 64, NUM_IDS - 1, NUM_IDS, 2 * NUM_IDS - 1)


@pytest.mark.parametrize(("is_product", "pools"), list(itertools.product([True, False], repeat=2)))
def test_a_row_that_is_not_here_is_neither_read_nor_written(is_product: bool, pools: bool) -> None:
    lookup, storages, memory = build(FusedLookup, is_product, pools)
    before = [own.detach().clone() for own in memory]
    counts = None if pools else [NUM_IDS, NUM_IDS]
    for position, outside in itertools.product(POSITIONS, OUTSIDE):
        ids, offsets = draw(position, outside)
        offsets = offsets if pools else torch.arange(len(ids) + 1)
        with pytest.raises(IndexError, match=rf"id {outside} of feature {position // NUM_IDS} .* has row \d+"):
            lookup(ids, offsets, None, storages, counts)
        good, _ = draw(position, 12)
        outputs = lookup(good, offsets, None, storages, counts)
        good.data[position] = outside  # as memory that somebody else writes to
        with pytest.raises(IndexError, match=rf"id {outside} of feature {position // NUM_IDS} .* has row \d+"):
            outputs.sum().backward()
    assert all(torch.equal(own.detach(), one) for own, one in zip(memory, before, strict=True))


def skip_outside_rows(is_product: bool, checks: bool, cases: list[tuple[int, int]]) -> None:
    """In the interpreter's process: nothing around the tables changes, and all other bags are as they should be."""
    os.environ["DISTEMBED_CHECK_ROWS"] = "1" if checks else "0"
    for position, outside in cases:
        lookup, storages, memory = build(InterpretedLookup, is_product, True)
        ids, offsets = draw(position, outside)
        if checks:
            with pytest.raises(IndexError, match=rf"id {outside} at position {position} .* not on this rank"):
                lookup(ids, offsets, None, storages)
            continue
        keys, _ = lookup.lookup.find_keys(ids, offsets, False)
        # the remainder of another rank's id is there, its quotient is not, and the other way round
        missing = [bool(own[position] < 0) for own in keys]
        assert missing == {3: [True, False], 25 * 4 + 12: [False, True]}.get(outside, [True, True])
        expected = [own.detach().clone().view(-1, DIM)[MARGIN:-MARGIN].requires_grad_() for own in memory[:2]]
        good, _ = draw(position, 12)
        first, second = expected[0][good % 25 - 10], expected[1][good // 25]
        bags = (first * second if is_product else first + second).unflatten(0, (-1, 7)).sum(1)
        others = torch.arange(len(bags)) != position // 7
        outputs = lookup(ids, offsets, None, storages).unflatten(1, (2, DIM)).transpose(0, 1).flatten(0, 1)
        torch.testing.assert_close(outputs[others], bags[others])
        outputs[others].square().sum().backward()
        bags[others].square().sum().backward()
        for own, one in zip(memory, expected, strict=False):
            assert one.grad is not None
            changed = one.detach() - 0.1 * one.grad / (one.grad.abs() + 1e-2)
            torch.testing.assert_close(own.detach().view(-1, DIM)[MARGIN:-MARGIN], changed)
        lookup(ids, offsets, None, storages).sum().backward()
        for own, nobodys in zip(memory, (CANARY, CANARY, 0.0, 0.0), strict=True):
            around = own.detach().view(-1, DIM)
            assert (around[:MARGIN] == nobodys).all() and (around[-MARGIN:] == nobodys).all()


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_of_a_gpu_skip_a_row_that_is_not_here_or_raise_where_that_is_asked(is_full: bool) -> None:
    positions = (0, 64, 2 * NUM_IDS - 1)
    cases = list(itertools.product(positions, OUTSIDE) if is_full else zip(itertools.cycle(positions), OUTSIDE))
    with interpreter() as run:
        for is_product, checks in itertools.product([True, False], repeat=2):
            run(skip_outside_rows, is_product, checks, cases)
