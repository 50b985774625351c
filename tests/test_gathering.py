"""Rows that are gathered from all ranks in pieces, against what each rank has."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distembed.base import ranks
from distembed.base.ranks import Ranks
from tests.ranks import run_on_ranks

COUNTS = [(0, 0, 0), (5, 0, 9), (1, 1, 1), (0, 0, 7), (40, 13, 2)]
SHAPES = [(), (3,), (2, 2)]


def rows_of(rank: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(count * int(np.prod(shape, dtype=int))) + 1000 * rank
    return numbers.to(dtype).view(count, *shape)


def check(rank: int, world_size: int) -> None:
    ranks.GATHERED_BYTES = 64 * world_size
    stock = dist.gather

    def gather(own: torch.Tensor, gathered: list[torch.Tensor] | None, dst: int) -> None:
        # one row has up to 32 bytes
        assert own.nbytes <= 64 and sum(part.nbytes for part in gathered or []) <= ranks.GATHERED_BYTES
        stock(own, gathered, dst=dst)

    ranks.dist.gather = gather
    own = Ranks(rank, world_size, world_size, torch.device("cpu"))
    for counts in COUNTS:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.int64):
                expected = [rows_of(i, counts[i], shape, dtype).numpy() for i in range(world_size)]
                parts = own.gather_parts(rows_of(rank, counts[rank], shape, dtype))
                whole = own.gather_rows(rows_of(rank, counts[rank], shape, dtype))
                if rank:
                    assert parts == [] and len(whole) == 0
                    continue
                for part, wanted in zip(parts, expected, strict=True):
                    np.testing.assert_array_equal(part, wanted)
                    assert part.dtype == wanted.dtype
                np.testing.assert_array_equal(whole, np.concatenate(expected))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_0_gets_the_rows_of_all_ranks_in_order(world_size: int) -> None:
    run_on_ranks(world_size, check)
