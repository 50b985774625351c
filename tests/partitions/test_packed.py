"""Rows of ids in the bits that they need, compared with bits that Python's integers hold."""

import numpy as np
import pytest
import torch
import torch.fx
from hypothesis import given
from hypothesis import strategies as st

from distembed.partitions import Explicit
from distembed.partitions.packed import PackedRows


def drawn_rows(bits: int, num_ids: int, seed: int = 0) -> np.ndarray:
    """Draws rows of which one needs all the bits; the last two differ, so that no end of equal rows is left out."""
    rows = np.random.default_rng(seed).integers(0, 2**bits, num_ids, dtype=np.int64)
    rows[0] = 2**bits - 1
    if bits and num_ids > 1:
        rows[-1] = rows[-2] ^ 1
    return rows


def as_one_integer(rows: np.ndarray, bits: int) -> int:
    return sum(int(row) << (place * bits) for place, row in enumerate(rows))


@pytest.mark.parametrize("num_ids", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("bits", range(33))
def test_every_width_comes_back_and_takes_no_more_than_its_bits(bits: int, num_ids: int) -> None:
    rows = drawn_rows(bits, num_ids)
    packed = PackedRows.of(rows)
    assert packed.take(torch.arange(num_ids)).tolist() == rows.tolist()
    assert packed.first(num_ids, torch.int64).tolist() == rows.tolist()
    words = packed.words.numpy().view(np.uint32)
    assert as_one_integer(words, 32) == as_one_integer(rows[: packed.num_codes], bits)
    assert packed.num_bytes <= packed.num_codes * bits / 8 + 8


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=70), st.data())
def test_rows_of_any_size_come_back_in_any_order(rows: list[int], data: st.DataObject) -> None:
    packed = PackedRows.of(np.array(rows, np.int64))
    ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9))
    assert packed.take(torch.tensor(ids, dtype=torch.int64).view(-1, 1)).flatten().tolist() == [rows[i] for i in ids]


def test_pieces_that_are_packed_one_after_another_are_one_stream() -> None:
    rows = drawn_rows(7, (1 << 20) * 2 + 5)
    packed = PackedRows.of(rows)
    ids = np.random.default_rng(1).integers(0, len(rows), 100_000)
    assert (packed.take(torch.from_numpy(ids)).numpy() == rows[ids]).all()
    assert packed.num_bytes == pytest.approx(len(rows) * 7 / 8, abs=8)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_ids_at_the_end_with_one_row_are_one_code(dtype: type) -> None:
    rows = np.array([3, 1, 2, 9, 9, 9], dtype)
    packed = PackedRows.of(rows)
    assert packed.num_codes == 4 and packed.take(torch.arange(6)).tolist() == rows.tolist()
    assert PackedRows.of(np.full(10**6, 7)).num_bytes == 8


def test_sixty_four_rows_take_six_bits_an_id() -> None:
    n = 8000
    partition = Explicit(n, [drawn_rows(6, n), drawn_rows(4, n, 1)], allow_collisions=True)
    assert partition.num_rows == (64, 16)
    assert n * 10 / 8 <= partition.assignment_bytes <= n * 10 / 8 + 16
    same = Explicit(n, partition.assignments, allow_collisions=True)
    assert same == partition and same.rows(torch.arange(n)).equal(partition.rows(torch.arange(n)))
    assert Explicit(n + 1, [*map(lambda a: np.append(a, a[-1]), partition.assignments)], None, True) != partition


def test_a_traced_lookup_unpacks_alike() -> None:
    partition = Explicit(100, [drawn_rows(5, 100)], allow_collisions=True)

    class Lookup(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return partition.rows(ids)

    ids = torch.tensor([[3, 99], [0, 41]])
    assert torch.fx.symbolic_trace(Lookup())(ids).equal(partition.rows(ids))
